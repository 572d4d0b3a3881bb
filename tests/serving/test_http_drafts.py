"""kv_draft over HTTP: the same text, what was drafted in usage and in /metrics, and what is refused."""

from __future__ import annotations

import re

import pytest
from serving_client import running

DRAFT = "quest(chunks=1, chunk=4, dense=0, recent=8)"
PROMPT = "The road goes on and on, and the road goes on and on. " * 3


def counted(server, name: str) -> float:
    text = server.ask.get("/metrics").text
    return float(re.search(rf"(?m)^kvjax_{name}_total{{[^}}]*}} (\S+)$", text).group(1))


def test_a_draft_changes_what_it_takes_and_not_the_text(server):
    fields = {"max_tokens": 24, "temperature": 0.8, "seed": 3, "ignore_eos": True}
    plain = server.complete(PROMPT, **fields)
    before = counted(server, "drafted_tokens")
    drafted = server.complete(PROMPT, kv_draft=DRAFT, **fields)
    assert drafted["choices"] == plain["choices"]
    kv = drafted["usage"]["kv"]
    assert kv["policy"].startswith("draft(quest(1")
    assert 0 <= kv["accepted_tokens"] <= kv["drafted_tokens"]
    assert counted(server, "drafted_tokens") - before == kv["drafted_tokens"] > 0
    assert counted(server, "accepted_tokens") <= counted(server, "drafted_tokens")
    assert "drafted_tokens" not in plain["usage"]["kv"]
    chat = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 8, "temperature": 0}
    both = [server.ask.post("/v1/chat/completions", json=chat | more) for more in ({}, {"kv_draft": DRAFT})]
    assert len({answer.json()["choices"][0]["message"]["content"] for answer in both}) == 1


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"kv_draft": "int8"}, "not a selection alone"),
        ({"kv_draft": "no_such(3)"}, "no_such"),
        ({"kv_draft": DRAFT, "kv_policy": "topk"}, "stands where the draft would"),
        ({"kv_draft": DRAFT, "kv_policy": "tova + uniform(24, every_step)"}, "one read could not verify"),
    ],
)
def test_what_is_no_draft_is_named(server, fields, says):
    status, error = server.refusal("/v1/completions", {"prompt": "a", **fields})
    assert (status, error["param"], error["code"]) == (400, "kv_draft", "invalid_policy")
    assert says in error["message"]


@pytest.mark.slow
def test_a_draft_is_allowed_where_its_policy_is(tiny_folder):
    """The whole structure is, of which what the draft reads is a part."""
    allowed = f"snapkv; draft({DRAFT})"
    with running(tiny_folder, "--allow-policies", allowed) as server:
        assert "drafted_tokens" in server.complete(PROMPT, max_tokens=8, kv_draft=DRAFT)["usage"]["kv"]
        wider = DRAFT.replace("chunks=1", "chunks=2")
        for fields in ({"kv_draft": wider}, {"kv_draft": DRAFT, "kv_policy": "snapkv + uniform(0.5)"}):
            status, error = server.refusal("/v1/completions", {"prompt": "a", **fields})
            assert (status, error["param"], error["code"]) == (403, "kv_draft", "policy_not_allowed")
            assert error["message"].startswith("kv_draft ")
