"""One reading of whole prompts serves every policy that cuts afterwards, as its own prefill would."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import tiny

import kvjax
from kvjax import decode, metrics

LENGTHS = (44, 27, 3)
SIZES = {"context": tiny.CONTEXT, "page": tiny.PAGE}
AFTER = (
    "gvote(0.7, samples=2, ahead=8)",
    "h2o(4) + uniform(16, after_prompt) + sinks(2)",
    "conf_kv(recent=6) + confidence(14, loose=24) + int8(10)",
)


@pytest.fixture(scope="module")
def reading():
    return decode.read_full(tiny.model(), [tiny.prompt(n, n) for n in LENGTHS], context=tiny.CONTEXT)


@pytest.mark.parametrize("spec", AFTER)
def test_a_cut_is_the_prefill(spec, reading):
    policy = kvjax.policy(spec)
    assert decode.cuts_after(policy)
    state, logits = decode.cut(tiny.model(), policy, reading, page=tiny.PAGE, seeds=[1, 2, 3])
    prompts = [tiny.prompt(n, n) for n in LENGTHS]
    right, also = kvjax.prefill(tiny.model(), policy, prompts, **SIZES, seeds=[1, 2, 3])
    np.testing.assert_allclose(logits, also, atol=1e-4)
    np.testing.assert_array_equal(metrics.present(state), metrics.present(right))
    assert jax.tree.structure(state) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(right)):
        assert a.shape == b.shape
        if a.dtype == np.float32:
            np.testing.assert_allclose(a, b, atol=2e-3)


def test_what_decides_while_it_reads_is_refused(reading):
    for spec in ("full", "window(8)", "write_gate(window=8)", "knorm + uniform(20, every_step)"):
        assert not decode.cuts_after(kvjax.policy(spec))
    with pytest.raises(decode.RequestError, match="decides while a prompt is read"):
        decode.cut(tiny.model(), "window(8)", reading)
