"""Q-Filters against float64 NumPy: the product with the filter, after a prompt and while tokens come."""

from __future__ import annotations

import jax
import numpy as np
import prompt_rows as rows
import pytest
import tiny
from policy_oracle import best, kept

import kvjax
from kvjax import decode
from kvjax.policies.qfilter import QFilter

FILTER = np.random.default_rng(6).standard_normal((rows.K, rows.H))


def test_score_is_the_product_of_key_and_filter():
    actual = jax.jit(QFilter().score_prompt)({"filter": np.float32(FILTER)}, rows.prompts())
    for row, length in enumerate(rows.LENGTHS):
        right = np.einsum("kth,kh->kt", rows.KEYS[row, :, :length], FILTER)
        np.testing.assert_allclose(actual[row, :, :length], right, rtol=1e-4, atol=1e-4)


def keys_of(layer: int, count: int, state) -> dict:
    """Score by (head, position) of all that a state holds."""
    params = tiny.weights(kvjax.policy("qfilter"))["eviction"][layer]["filter"]
    held = tiny.held(state.layers[layer].pages)
    return {
        (head, pos): float(np.dot(k, params[head]))
        for head in range(2)
        for pos, (k, *_) in held[0, head].items()
    }


@pytest.mark.parametrize("chunk", [16, 64])
def test_every_step_evicts_the_lowest_product(chunk):
    text, policy = tiny.prompt(40, 3), kvjax.policy("qfilter + uniform(20, every_step) + recent(4)")
    sizes = {"context": tiny.CONTEXT, "page": tiny.PAGE, "chunk_size": chunk}
    whole, _ = kvjax.prefill(tiny.model(), kvjax.policy("qfilter + uniform(40) + recent(1)"), [text],
                             **sizes, weights=tiny.weights(policy))  # fmt: skip
    state, _ = kvjax.prefill(tiny.model(), policy, [text], **sizes, weights=tiny.weights(policy))
    room, first = state.layers[0], keys_of(0, 40, whole)
    window = room.ring.window
    for head in range(2):
        # In the first layer keys do not depend on what was evicted.
        ranked = np.asarray([first[head, pos] for pos in range(40 - window)])
        right = best(ranked, 40 - window, 20 - window)
        assert sorted(tiny.held(room.pages)[0, head]) == right
    later = decode.reserve(policy, state, 3, 1)
    later, _ = tiny.feed(policy, later, np.asarray([tiny.prompt(3, 9)]))
    assert [len(kept(x)) for x in np.asarray(kvjax.metrics.present(later))[0, 0]] == [20, 20]


def test_weights_of_other_heads_are_refused():
    with pytest.raises(kvjax.UserError, match=r"needs \{'filter': \(2, 8\)\}"):
        QFilter().check_weights([{"filter": np.zeros((3, 8))}], tiny.model().network)
