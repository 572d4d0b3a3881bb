"""TRIM-KV against float64 NumPy: the gate, what is left of a token, who goes at each step."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
import tiny
from policy_oracle import best, observe, positions

import kvjax
from kvjax import decode
from kvjax.algebra import PolicyError
from kvjax.policies.trim_kv import TrimKV, initial, log_retention

LENGTHS, T, K, D = (40, 25, 9), 40, 2, 12
HIDDEN = np.random.default_rng(3).normal(0, 2, (len(LENGTHS), T, D))
GATE = initial(jax.random.key(0), D, K, 1, hidden=7, bias=1.5)[0]


def numpy_log_retention(params: dict, hidden: np.ndarray) -> np.ndarray:
    """[K, T] for [T, D]."""
    p = {name: np.asarray(x, np.float64) for name, x in params.items()}
    x = hidden @ p["w1"] + p["b1"]
    z = (x / (1 + np.exp(-x))) @ p["w2"].T + p["b2"]
    return -np.log1p(np.exp(-z)).T


def test_the_gate_is_numpys():
    actual = log_retention(GATE, np.float32(HIDDEN))
    for row in range(len(LENGTHS)):
        np.testing.assert_allclose(actual[row], numpy_log_retention(GATE, HIDDEN[row]), rtol=2e-5)
    assert actual.min() < -0.5
    assert actual.max() > -0.1


def test_what_is_left_of_a_prompt_is_seen_from_behind_it():
    hidden = np.where((positions(LENGTHS, T) >= 0)[..., None], HIDDEN, np.nan)
    actual = jax.jit(TrimKV().score_prompt)(GATE, observe(LENGTHS, T, hidden=hidden))
    for row, length in enumerate(LENGTHS):
        right = numpy_log_retention(GATE, HIDDEN[row, :length]) * (length - np.arange(length))
        np.testing.assert_allclose(actual[row, :, :length], right, rtol=2e-5)


def test_retention_near_one_does_not_round_to_one():
    params = GATE | {"b2": np.float32([18.0, 20.0]), "w2": 0 * GATE["w2"]}
    actual = np.asarray(log_retention(params, np.float32(HIDDEN)))
    np.testing.assert_allclose(actual[0, :, 0], [-1.523e-8, -2.061e-9], rtol=1e-3)


# --- while tokens come ---------------------------------------------------------------------------

TEXT, PROMPT, TARGET, RECENT = tiny.prompt(60, 5), 48, 20, 4


@functools.cache
def first_layer() -> np.ndarray:
    """log beta [K, T] of the text at the first layer, whose input no eviction changes."""
    model, seen = tiny.model(), []

    def attend(_, heads, carry):
        seen.append(np.asarray(heads.hidden[0], np.float64))
        return heads.q, carry

    ids = np.asarray([TEXT])
    x = model.network.embed(model.params, ids, np.arange(len(TEXT))[None])
    model.network.layer(model.params["layers"][0], 0, x, np.arange(len(TEXT))[None], attend, None)
    policy = kvjax.policy("trim_kv + uniform(8)")
    return numpy_log_retention(tiny.weights(policy)["eviction"][0], seen[0])


def test_every_step_evicts_what_is_least_left_of():
    policy = kvjax.policy(f"trim_kv + uniform({TARGET}, every_step) + recent({RECENT})")
    sizes = {"context": tiny.CONTEXT, "page": tiny.PAGE, "chunk_size": PROMPT}
    state, _ = kvjax.prefill(tiny.model(), policy, [TEXT[:PROMPT]], **sizes, weights=tiny.weights(policy))
    state = decode.reserve(policy, state, len(TEXT) - PROMPT, 1)
    window = state.layers[0].ring.window
    held = [set(range(PROMPT)) for _ in range(K)]
    flipped = False
    for seen in range(PROMPT, len(TEXT) + 1):
        if seen > PROMPT:
            state, _ = tiny.feed(policy, state, np.asarray([[TEXT[seen - 1]]]))
        for head in range(K):
            left = first_layer()[head, :seen] * (seen - np.arange(seen))
            score = np.where([p in held[head] or p == seen - 1 for p in range(seen)], left, -np.inf)
            held[head] = set(best(score, seen, TARGET, newest=window))
            paged = set(tiny.held(state.layers[0].pages)[0, head])
            assert paged == {p for p in held[head] if p < seen - window}
            flipped |= paged != set(best(first_layer()[head, :seen], seen - window, len(paged)))
    assert flipped, "the age of a token decided nothing"


def test_weights_of_other_heads_and_no_weights_are_refused():
    network = tiny.model().network
    with pytest.raises(PolicyError, match=r"needs \{'w1': \(12, 7\), 'b1': \(7,\), 'w2': \(2, 7\)"):
        TrimKV().check_weights([GATE | {"w2": np.zeros((3, 7))}], network)
    with pytest.raises(PolicyError, match="has no gates"):
        TrimKV().arrive(None, observe((2,), 2, hidden=np.zeros((1, 2, D))))
