"""The engine under every policy: a request writes the same in company, alone, and in ``generate``."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import kvjax
from kvjax import catalogue
from kvjax.algebra import Frame, Number, Observation, Picked, Policy, Selection
from kvjax.decode import DraftLength
from kvjax.engine import Engine, Request
from kvjax.engine.request import LearnedWeights, WeightCache
from kvjax.layer import by_rows, stack_policies
from kvjax.policies.draft import Draft
from kvjax.types import EMPTY
from pallas_kernels.ragged_decode.api import largest_scores

EVERY = [policy for method in catalogue.methods() for policy in method.examples if not policy.storage.hosted]
TIES = (
    "knorm",
    "keydiff",
    "leverage",
    "conf_kv",
)  # equal tokens have equal scores up to rounding, which decides


@dataclasses.dataclass(frozen=True, repr=False)
class NearestPages(Selection):
    """A selection with a traced number, as CONTRIBUTING says one is written: pages that reach a score."""

    name = "nearest_pages"
    arguments = {"share": Number(low=0, high=1)}
    traced = ("share",)
    share: float = 0.5

    def select(self, params, q, pages, list_id, total, longest):
        """Pages whose largest score is at least ``share`` of the way from the lowest to the highest."""
        score = largest_scores(q, pages.k, pages.table[:, :, list_id], pages.length[:, :, list_id]).max(-1)
        high = score.max(-1, keepdims=True)
        low = jnp.where(score > -jnp.inf, score, jnp.inf).min(-1, keepdims=True)
        entries = jnp.broadcast_to(jnp.arange(score.shape[-1]), score.shape)
        return Picked(entries=jnp.where(score >= low + self.share * (high - low), entries, EMPTY))


ONE_PER_PLACE = (
    kvjax.policy("write_gate(0.5, window=16) + h2o(recent=8) + uniform(24, every_step)"),
    kvjax.policy("topk(5, sinks=2, tail=6) + phi(4)"),
    kvjax.policy("snapkv(8) + ada(0.5) + int8(16)"),
    kvjax.policy("snapkv(8) + uniform(24, every(4))"),
    kvjax.policy("snapkv(8) + then(r_kv(0.3, window=4, kernel=3)) + uniform(24, every(4))"),
    kvjax.policy("expected_attention(16) + critical + ada(0.5)"),
    kvjax.policy("kvzip(20, sinks=2, output=True, instruction=(5, 7)) + overall(0.5)"),
    Policy(selection=NearestPages(0.5)),
)
"""All six places, a wrapper, a second pass, and a selection whose number is traced."""


@pytest.mark.parametrize("policy", ONE_PER_PLACE, ids=repr)
def test_the_engine_writes_what_generate_writes(policy, monkeypatch):
    check_engine_equals_generate(policy, monkeypatch, ((37, 8), (28, 5)))


@pytest.mark.slow
@pytest.mark.parametrize("policy", EVERY, ids=repr)
def test_the_engine_writes_what_generate_writes_under_every_policy(policy, monkeypatch):
    jax.clear_caches()  # programs hold memory maps; those of all policies are more than a process may have
    check_engine_equals_generate(policy, monkeypatch, ((37, 20), (12, 30), (50, 9), (28, 25)))


def test_rows_rank_what_they_hold_by_their_own_numbers():
    policies = [f"r_kv({share}, window=4, kernel=3) + uniform(24, every(4))" for share in (0.0, 0.5, 1.0)]
    sizes = {"max_rows": 3, "context": 96, "chunk": 16, "segment": 4, "page": tiny.PAGE}
    requests = [Request(prompt=tiny.prompt(37, 1), max_new_tokens=20, policy=x) for x in policies]
    with Engine(tiny.model(), **sizes) as engine:
        got = [[event.token for event in ticket] for ticket in engine.submit_all(requests)]
        assert len(engine.metrics().batches) == 1
    how = {"chunk_size": 16, "page": tiny.PAGE, "max_new_tokens": 20}
    assert got == [kvjax.generate(tiny.model(), x, [tiny.prompt(37, 1)], **how).tokens[0] for x in policies]
    assert len(set(map(tuple, got))) == 3, "the numbers decide nothing: the test says little"


def check_engine_equals_generate(policy, monkeypatch, sizes):
    """Rows (prompt length, new tokens) write the same together, alone, and in ``generate``."""
    random = LearnedWeights(tiny.weights(policy), "random")
    monkeypatch.setattr(WeightCache, "get", lambda self, policy, named: random)
    requests = [
        Request(prompt=tiny.prompt(length, length), max_new_tokens=count, logprobs=0)
        for length, count in sizes
    ]
    with Engine(
        tiny.model(), policy=policy, max_rows=3, context=96, chunk=16, segment=4, page=tiny.PAGE
    ) as engine:
        together = [ticket.result() for ticket in [engine.submit(request) for request in requests]]
        alone = [engine.submit(request).result() for request in requests]
        assert all(event.logprob < 0 for event in engine.submit(requests[0]) if event.token is not None)
        assert engine.metrics().batches[0].pages_used == 0
    assert together == alone
    if any(name in repr(policy) for name in TIES):
        return
    for request, tokens in zip(requests[:2], alone):
        how = {"chunk_size": 16, "page": tiny.PAGE, "weights": tiny.weights(policy)}
        want = kvjax.generate(
            tiny.model(), policy, [request.prompt], max_new_tokens=request.max_new_tokens, **how
        )
        assert tokens == want.tokens[0]


def test_methods_that_cut_the_prompt_run_in_one_batch(monkeypatch):
    """Each writes what it writes alone, with learned weights of its own where it has any."""

    def learned(cache, policy, named):
        return LearnedWeights(tiny.weights(policy), "random" if policy.learned else "")

    monkeypatch.setattr(WeightCache, "get", learned)
    specs = ("snapkv(8) + uniform(0.5)", "tova + uniform(0.4) + recent(8)", "snapkv(8) + ada(0.5) + sinks(2)")
    policies = [kvjax.policy(spec) for spec in (*specs, "kvp(2, recent=8) + uniform(0.5)")]
    prompts = [tiny.prompt(40, seed) for seed in range(len(policies))]
    with Engine(tiny.model(), max_rows=4, context=96, chunk=16, segment=4, page=tiny.PAGE) as engine:
        tickets = [
            engine.submit(Request(prompt=prompt, max_new_tokens=9, policy=policy))
            for prompt, policy in zip(prompts, policies)
        ]
        written = [ticket.result() for ticket in tickets]
        (batch,) = engine.metrics().batches
        assert batch.weights == ""  # steps read none
    for prompt, policy, tokens in zip(prompts, policies, written):
        how = {"chunk_size": 16, "page": tiny.PAGE, "weights": tiny.weights(policy)}
        assert tokens == kvjax.generate(tiny.model(), policy, [prompt], max_new_tokens=9, **how).tokens[0]


def test_weights_that_a_hyperparameter_decides_about_are_a_rows_own():
    """Of each row, its own share of DuoAttention's heads; what ``admit`` says is that of the row alone."""
    policies = [kvjax.policy(f"duo({share}, window=24)") for share in (0.25, 0.5, 1.0)]
    weights = tiny.weights(policies[0])["admission"]
    pos = np.arange(6, dtype=np.int32).reshape(3, 2)
    seen = Observation(pos=pos, total=np.full(3, 2, np.int32), layer=1, layers=len(weights), values={})
    together = by_rows(stack_policies(policies)).admission
    got = np.asarray(together.admit(together.at_layer(weights, 1), seen))
    for row, policy in enumerate(policies):
        one = dataclasses.replace(seen, pos=pos[row : row + 1], total=seen.total[:1])
        alone = policy.admission.admit(policy.admission.at_layer(weights, 1), one)
        np.testing.assert_array_equal(got[row : row + 1], alone)
    assert len({row.tobytes() for row in got}) > 1


@pytest.mark.slow
def test_a_draft_is_a_rows_own(monkeypatch):
    """Two rows whose drafts differ in a number share a batch; texts are those of full reads."""
    monkeypatch.setattr(DraftLength, "saw", lambda self, *seen: None)
    policies = [Policy(selection=Draft(NearestPages(share), most=2)) for share in (0.1, 0.9)]
    with Engine(tiny.model(), max_rows=2, context=96, chunk=16, segment=4, page=tiny.PAGE) as engine:
        requests = [Request(prompt=tiny.prompt(40, 3), max_new_tokens=12, policy=p) for p in policies]
        tickets = engine.submit_all(requests)
        texts = [ticket.result() for ticket in tickets]
        assert len(engine.metrics().batches) == 1
    want = kvjax.generate(
        tiny.model(), "full", [tiny.prompt(40, 3)], max_new_tokens=12, chunk_size=16, page=tiny.PAGE
    )
    assert texts == 2 * want.tokens
    nearest, all_ = (ticket.usage for ticket in reversed(tickets))
    assert nearest.drafted_tokens > 0 < all_.drafted_tokens
    assert nearest.accepted_tokens < all_.accepted_tokens  # who reads more drafts better


def test_a_budget_reads_the_confidence_of_its_own_row():
    sure = np.asarray([0.9, 0.1, 0.5], np.float32)
    spec = "conf_kv(recent=8) + confidence(20, loose=31, threshold={})"
    policies = [kvjax.policy(spec.format(threshold)) for threshold in (0.7, 0.7, 0.4)]
    frame = Frame(layer=0, layers=2, kv_heads=2, slot_bytes=64.0, confidence=sure)
    targets = by_rows(stack_policies(policies)).budget.targets(frame, np.full(3, 50, np.int32), None)
    np.testing.assert_array_equal(targets, [[20], [31], [20]])


@pytest.mark.slow
def test_the_engine_needs_no_web_library():
    import subprocess
    import sys

    web = ("fastapi", "uvicorn", "starlette", "pydantic")
    code = f"import sys, kvjax.engine; print([x for x in {web} if x in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
