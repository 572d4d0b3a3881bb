"""Fast KVzip against float64 NumPy and against kvpress 0.5.5: the gate, what is protected, who is kept."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from policy_oracle import observe
from zap_golden import FOLDER, PROMPT, RATIOS, answers, check_same, keeps, model

import kvjax
from kvjax.algebra import FIRST, PolicyError
from kvjax.decode import Remark
from kvjax.policies.fast_kvzip import FastKVzip, FastKVzipGate, initial, scores
from kvjax.weights.published import fast_kvzip_layers
from kvjax.weights.torch_file import read_saved

LENGTHS, T, D, K, G = (140, 55, 9), 140, 12, 2, 3
HIDDEN = np.random.default_rng(3).normal(0, 2, (len(LENGTHS), T, D))


@functools.cache
def gate() -> dict:
    """Every leaf drawn."""
    random = np.random.default_rng(5)
    layer = initial(jax.random.key(0), D, K, G, 1, dim=4, sinks=3)[0]
    return {name: x + np.float32(random.normal(0, 0.5, x.shape)) for name, x in sorted(layer.items())}


def numpy_scores(params: dict, hidden: np.ndarray) -> np.ndarray:
    """[K, T] for [T, D], token by token and query by query."""
    p = {name: np.asarray(x, np.float64) for name, x in params.items()}
    heads, group, dim, _ = p["w_q"].shape
    result = np.zeros((heads, len(hidden)))

    def normed(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean() + 1e-6) * scale

    for (head, at), _ in np.ndenumerate(result):
        k = normed(p["w_k"][head] @ hidden[at], p["scale_k"])
        for g in range(group):
            q = normed(p["w_q"][head, g] @ hidden[at] + p["b_q"][head, g], p["scale_q"])
            own = np.exp(q @ k / np.sqrt(dim) + p["b"][head, g])
            result[head, at] += own / (own + np.exp(p["sinks"][head] @ q / np.sqrt(dim)).sum()) / group
    return result


def test_scores_are_numpys():
    actual = scores(gate(), np.float32(HIDDEN))
    for row in range(len(LENGTHS)):
        np.testing.assert_allclose(actual[row], numpy_scores(gate(), HIDDEN[row]), rtol=3e-5, atol=1e-6)
    assert actual.min() < 0.2
    assert actual.max() > 0.5


def test_first_and_newest_tokens_go_last():
    actual = np.asarray(FastKVzip(sinks=3).score_prompt(gate(), observe(LENGTHS, T, hidden=HIDDEN)))
    for row, length in enumerate(LENGTHS):
        newest = max(1, int(0.02 * length))
        right = numpy_scores(gate(), HIDDEN[row, :length])
        right[:, :3], right[:, length - newest :] = FIRST, FIRST
        np.testing.assert_allclose(actual[row, :, :length], right, rtol=3e-5, atol=1e-6)
    assert [max(1, int(0.02 * n)) for n in LENGTHS] == [2, 1, 1]


def test_of_a_long_text_more_is_protected():
    lengths = (31_999, 32_000)
    seen = observe(lengths, 32_000, hidden=np.zeros((2, 32_000, D)))
    actual = np.asarray(FastKVzip(sinks=0).score_prompt(gate(), seen))
    assert [(actual[row, 0, :n] == np.float32(FIRST)).sum() for row, n in enumerate(lengths)] == [639, 4096]


def test_a_gate_admits_what_scores_enough():
    bits = FastKVzipGate(0.3).admit(gate(), observe(LENGTHS, T, hidden=HIDDEN))
    for row in range(len(LENGTHS)):
        np.testing.assert_array_equal(bits[row], numpy_scores(gate(), HIDDEN[row]) >= 0.3)


# --- kvpress -------------------------------------------------------------------------------------


@functools.cache
def published() -> list[dict]:
    saved = read_saved(FOLDER / "fast-kvzip.pt", beside=True)
    return fast_kvzip_layers(saved["module"], model().network, "fast-kvzip.pt")


@pytest.mark.parametrize("ratio", RATIOS)
def test_an_eviction_keeps_what_kvpress_keeps_layer_by_layer(ratio):
    policy = kvjax.policy(f"fast_kvzip + ada({int(PROMPT * (1 - ratio))}, floor=0)")
    theirs = answers()[f"fast_{ratio}"]
    ours = keeps(policy, published())
    assert (theirs.sum(-1) != theirs.sum(-1).mean()).any(), "the heads are not ragged"
    # Heads compete: a layer is one list.
    check_same(*(x.reshape(2, 1, -1) for x in (ours, theirs, answers()["fast_scores"])))


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize("threshold", [0, 1, -3, 1.5])
def test_thresholds_outside_the_gates_range_are_refused(threshold):
    with pytest.raises(PolicyError, match="above 0 and below 1"):
        FastKVzipGate(threshold)


def test_a_threshold_that_admits_nothing_here_is_said():
    tokens, weights = answers()["tokens"].tolist()[:PROMPT], {"admission": published()}
    with pytest.warns(Remark, match=r"admits none of the 144 tokens of row 0"):
        kvjax.prefill(
            model(), "fast_kvzip_gate(0.99999, window=16)", [tokens], weights=weights, chunk_size=64
        )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"w_k": np.zeros((3, 8, 32))}, r"4 query and 2 KV heads of 16 channels needs"),
        ({"w_q": np.zeros((2, 2, 8, 33))}, r"'w_q': \(2, 2, 8, 32\)"),
        ({"b": np.zeros((2, 3))}, r"'b': \(2, 2\)"),
    ],
)
def test_gates_of_another_model_are_refused(changes, says):
    with pytest.raises(PolicyError, match=says):
        FastKVzip().check_weights([published()[0] | changes], model().network)


def test_no_gates_are_refused():
    with pytest.raises(PolicyError, match="has no gates"):
        FastKVzip().arrive(None, observe((2,), 2, hidden=np.zeros((1, 2, D))))
