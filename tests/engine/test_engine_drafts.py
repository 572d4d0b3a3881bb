"""Drafts in the engine: texts, log-probabilities and ends are those of rows without, in any company."""

from __future__ import annotations

import numpy as np
import pytest
import tiny

import kvjax
from kvjax.algebra import PolicyError
from kvjax.decode import DraftLength
from kvjax.engine import Engine, Request
from kvjax.engine.drafted import DraftedBatch

QUEST, OTHER = (f"quest(chunks={chunks}, chunk=4, dense=0, recent=8)" for chunks in (1, 3))
SIZES = {"max_rows": 3, "context": 96, "chunk": 16, "segment": 4, "page": tiny.PAGE}


@pytest.fixture
def always(monkeypatch):
    """Drafts are as long as they may be; no clock decides."""
    monkeypatch.setattr(DraftLength, "saw", lambda self, *seen: None)


def asked(length: int, count: int, **more) -> Request:
    return Request(prompt=tiny.prompt(length, length), max_new_tokens=count, **more)


def written(engine: Engine, requests: list[Request]) -> tuple[list[list], list]:
    """Events of each text, and what each took; all are under way together."""
    tickets = engine.submit_all(requests)
    events = [[event for event in ticket] for ticket in tickets]
    return events, [ticket.usage for ticket in tickets]


def same(one: list, other: list) -> None:
    """Tokens and ends are equal; log-probabilities up to what many tokens at once round otherwise."""
    assert [(event.token, event.finish_reason) for event in one] == [
        (e.token, e.finish_reason) for e in other
    ]
    for a, b in zip(one, other):
        if a.logprob is not None:
            assert a.logprob == pytest.approx(b.logprob, abs=2e-4)
            np.testing.assert_allclose(
                [x for _, x in a.top_logprobs], [x for _, x in b.top_logprobs], atol=2e-4
            )


def test_rows_with_a_draft_write_what_rows_without_write(always):
    """Greedy and drawn, shaped and ranked, one that stops inside a draft; drafts of two sizes."""
    plain = [
        asked(37, 13, logprobs=2),
        asked(28, 9, temperature=0.9, seed=4, top_p=0.95),
        asked(20, 15, temperature=0.7, seed=7, repetition_penalty=1.3, presence_penalty=0.4, logprobs=0),
        asked(12, 10, temperature=0.9, seed=5),
        asked(33, 6, temperature=1.2, seed=2, min_tokens=3),
    ]
    with Engine(tiny.model(), **SIZES) as engine:
        stop = written(engine, plain[:1])[0][0][6].token
        plain[0] = asked(37, 13, logprobs=2, stop_tokens=(stop,))
        right, usages = written(engine, plain)
        assert all(usage.drafted_tokens == usage.accepted_tokens == 0 for usage in usages)
    drafts = [QUEST, OTHER, QUEST, OTHER, QUEST]
    own = [
        Request(**{**vars(request), "draft": f"draft({draft}, most=3)"})
        for request, draft in zip(plain, drafts)
    ]
    with Engine(tiny.model(), **SIZES) as engine:
        got, usages = written(engine, own)
        now = engine.metrics()
        assert len(now.batches) == 2  # how many chunks a draft reads is part of its structure
        assert all(batch.pages_used == 0 for batch in now.batches)
    for one, other in zip(got, right):
        same(one, other)
    assert got[0][-1].finish_reason == "stop"
    assert all(0 <= usage.accepted_tokens <= usage.drafted_tokens for usage in usages)
    counts = np.sum([(usage.drafted_tokens, usage.accepted_tokens) for usage in usages], axis=0).tolist()
    assert counts == [now.drafted_tokens, now.accepted_tokens]
    assert 0 < counts[1] < counts[0], "all or none was accepted: the test says little"
    assert now.completion_tokens == sum(usage.completion_tokens for usage in usages)


@pytest.mark.slow
def test_drafts_that_gain_nothing_end_and_the_text_goes_on(monkeypatch):
    """By a clock that says drafts are slow: plain steps of the same batch, and again a draft now and then."""
    lengths: list[int] = []

    def told(self, length, rounds, judged, accepted, seconds):
        lengths.append(length)
        assert rounds > 0
        self.next = 0 if length else self.most

    monkeypatch.setattr(DraftLength, "saw", told)
    with Engine(tiny.model(), **SIZES) as engine:
        (right,), _ = written(engine, [asked(30, 24)])
    with Engine(tiny.model(), **SIZES) as engine:
        (got,), (usage,) = written(engine, [asked(30, 24, draft=QUEST)])
    same(got, right)
    assert lengths[:3] == [4, 0, 4]
    assert usage.drafted_tokens > 0


@pytest.mark.slow
def test_a_batch_of_drafts_has_rows_of_one_structure(always):
    """A row without one has another batch; a guide is asked token by token, without drafts."""

    class Even:
        """Even tokens may come."""

        done, error = False, ""

        def allowed(self):
            return np.full(-(-tiny.VOCAB // 32), 0x55555555, np.uint32)

        def take(self, token):
            assert token % 2 == 0

    with Engine(tiny.model(), **SIZES) as engine:
        tickets = engine.submit_all(
            [asked(20, 8, draft=QUEST), asked(20, 8), asked(24, 6, draft=QUEST, guide=Even)]
        )
        texts = [ticket.result() for ticket in tickets]
        kinds = [type(batch) for batch in engine._scheduler.memory.batches]
    assert texts[0] == texts[1]
    assert all(token % 2 == 0 for token in texts[2])
    assert len(kinds) == 3
    assert kinds.count(DraftedBatch) == 1
    assert tickets[2].usage.drafted_tokens == 0


def test_what_cannot_draft_is_refused():
    with Engine(tiny.model(), **SIZES) as engine:
        with pytest.raises(PolicyError, match="not a selection alone"):
            engine.submit(asked(20, 4, draft="int8"))
        with pytest.raises(PolicyError, match="stands where the draft would"):
            engine.submit(asked(20, 4, policy="topk", draft=QUEST))
        with pytest.raises(PolicyError, match="one read could not verify"):
            engine.submit(asked(20, 4, policy="tova + uniform(24, every_step)", draft=QUEST))


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy", ["snapkv(8) + uniform(24) + sinks(2)", "write_gate(0.5, window=16) + phi(4)"]
)
def test_a_row_that_makes_room_is_read_again_and_says_the_same(policy, always, monkeypatch):
    """Pages for one row and a half: the younger one makes room while it drafts."""
    from kvjax.engine.request import LearnedWeights, WeightCache

    random = LearnedWeights(tiny.weights(kvjax.policy(policy)), "random")
    monkeypatch.setattr(WeightCache, "get", lambda self, policy, named: random)
    requests = [asked(40, 40, policy=policy), asked(44, 40, policy=policy)]
    with Engine(tiny.model(), **SIZES) as engine:
        right, _ = written(engine, requests)
        size = engine.metrics().kv_allocated
    own = [Request(**{**vars(request), "draft": QUEST}) for request in requests]
    with Engine(tiny.model(), kv_memory=int(1.1 * size), share=0.0, **SIZES) as engine:
        got, _ = written(engine, own)
    for one, other in zip(got, right):
        same(one, other)
