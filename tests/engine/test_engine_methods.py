"""Every policy in a lane: in company it writes what it writes alone, and what ``generate`` writes."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
import tiny
from tiny import quick_compiles  # noqa: F401

import kvjax
from kvjax import catalogue
from kvjax.algebra import Observation
from kvjax.engine import Engine, Request
from kvjax.engine._check import Learned, Shelf
from kvjax.engine._dials import by_rows, stack

EVERY = [p for method in catalogue.methods() for p in method.examples]
TIES = ("knorm", "keydiff", "conf_kv")  # equal tokens have equal scores up to rounding, which decides


@pytest.mark.slow
@pytest.mark.parametrize("policy", EVERY, ids=repr)
def test_company_changes_nothing_under_any_policy(policy, monkeypatch):
    jax.clear_caches()  # programs hold memory maps; those of all policies are more than a process may have
    monkeypatch.setattr(Shelf, "get", lambda self, policy, given: Learned(tiny.weights(policy), "random"))
    requests = [
        Request(prompt=tiny.prompt(length, length), max_new_tokens=many, logprobs=0)
        for length, many in ((37, 20), (12, 30), (50, 9), (28, 25))
    ]
    with Engine(
        tiny.model(), policy=policy, max_rows=3, context=96, chunk=16, segment=4, page=tiny.PAGE
    ) as engine:
        together = [ticket.result() for ticket in [engine.submit(request) for request in requests]]
        alone = [engine.submit(request).result() for request in requests]
        assert engine.metrics().lanes[0].pages_used == 0
    assert together == alone
    if any(name in repr(policy) for name in TIES):
        return
    for request, tokens in zip(requests[:2], alone):
        how = {"chunk_size": 16, "page": tiny.PAGE, "weights": tiny.weights(policy)}
        want = kvjax.generate(
            tiny.model(), policy, [request.prompt], max_new_tokens=request.max_new_tokens, **how
        )
        assert tokens == want.tokens[0]


def test_weights_that_a_dial_decides_about_are_a_rows_own():
    """Of each row, its own share of DuoAttention's heads; what ``admit`` says is that of the row alone."""
    policies = [kvjax.policy(f"duo({share}, window=24)") for share in (0.25, 0.5, 1.0)]
    weights = tiny.weights(policies[0])["admission"]
    pos = np.arange(6, dtype=np.int32).reshape(3, 2)
    seen = Observation(pos=pos, total=np.full(3, 2, np.int32), layer=1, layers=len(weights), values={})
    together = by_rows(stack(policies)).admission
    got = np.asarray(together.admit(together.at_layer(weights, 1), seen))
    for row, policy in enumerate(policies):
        one = dataclasses.replace(seen, pos=pos[row : row + 1], total=seen.total[:1])
        alone = policy.admission.admit(policy.admission.at_layer(weights, 1), one)
        np.testing.assert_array_equal(got[row : row + 1], alone)
    assert len({row.tobytes() for row in got}) > 1


def test_the_engine_needs_no_web_library():
    import subprocess
    import sys

    web = ("fastapi", "uvicorn", "starlette", "pydantic")
    code = f"import sys, kvjax.engine; print([x for x in {web} if x in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
