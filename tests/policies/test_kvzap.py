"""KVzap against float64 NumPy and against kvpress 0.5.5: scores, who is kept, who outlives the window."""

from __future__ import annotations

import functools
import math

import jax
import numpy as np
import pytest
import tiny
from policy_oracle import best, observe
from zap_golden import FED, FOLDER, PROMPT, RATIOS, THRESHOLD, WINDOW, answers, check_same, keeps, model

import kvjax
from kvjax import decode
from kvjax.algebra import PolicyError
from kvjax.decode import Remark
from kvjax.policies.kvzap import KVzap, KVzapScores, initial, scores
from kvjax.weights.published import _read_safetensors, kvzap_layers

LENGTHS, T, D = (40, 25, 9), 40, 12
HIDDEN = np.random.default_rng(3).normal(0, 2, (len(LENGTHS), T, D))
MAPS = {
    kind: initial(jax.random.key(0), D, 2, 1, hidden=hidden, bias=-4.0)[0]
    for kind, hidden in (("linear", None), ("mlp", 7))
}


def numpy_scores(params: dict, hidden: np.ndarray) -> np.ndarray:
    """[K, T] for [T, D]."""
    p = {name: np.asarray(x, np.float64) for name, x in params.items()}
    x = np.asarray(hidden, np.float64)
    if "w1" in p:
        x = x @ p["w1"] + p["b1"]
        x = 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    return p["w2"] @ x.T + p["b2"][:, None]


@pytest.mark.parametrize("kind", MAPS)
def test_scores_are_numpys(kind):
    actual = scores(MAPS[kind], np.float32(HIDDEN))
    for row in range(len(LENGTHS)):
        np.testing.assert_allclose(actual[row], numpy_scores(MAPS[kind], HIDDEN[row]), rtol=2e-5, atol=2e-5)


def test_the_same_scores_admit_and_rank():
    seen = observe(LENGTHS, T, hidden=HIDDEN)
    bits = KVzap(-4.5).admit(MAPS["mlp"], seen)
    ranked = KVzapScores().score_prompt(MAPS["mlp"], seen)
    for row, length in enumerate(LENGTHS):
        right = numpy_scores(MAPS["mlp"], HIDDEN[row, :length])
        np.testing.assert_allclose(ranked[row, :, :length], right, rtol=2e-5, atol=2e-5)
        np.testing.assert_array_equal(bits[row, :, :length], right >= -4.5)


# --- the whole model -----------------------------------------------------------------------------

TEXT, W, SINKS = tiny.prompt(60, 5), 8, 1


@pytest.mark.parametrize("chunk", [3, 40])
def test_chunked_prompts_hold_what_scores_high_whatever_the_chunk(chunk):
    policy = kvjax.policy(f"kvzap(-5, window={W}, prefill=True) + sinks({SINKS})")
    state, _ = tiny.read(policy, [TEXT[:40]], chunk)
    held = [tiny.held(room.pages) for room in state.layers]
    layer = tiny.weights(policy)["admission"][0]
    right = numpy_scores(layer, first_hidden()[:40])
    assert np.abs(right + 5).min() > 1e-4
    for head in range(2):
        stays = {p for p in range(40 - W) if right[head, p] >= -5 or p < SINKS}
        assert set(held[0][0, head]) == stays
        assert 2 < len(stays) < 30
    if chunk == 3:
        whole, _ = tiny.read(policy, [TEXT[:40]], 40)
        assert [{k: set(v) for k, v in room.items()} for room in held] == [
            {k: set(v) for k, v in tiny.held(room.pages).items()} for room in whole.layers
        ]


def first_hidden() -> np.ndarray:
    """The input of the first layer's attention, [T, D]."""
    tree, seen = tiny.model(), []

    def attend(_, heads, carry):
        seen.append(np.asarray(heads.hidden[0], np.float64))
        return heads.q, carry

    at = np.arange(len(TEXT))[None]
    x = tree.network.embed(tree.params, np.asarray([TEXT]), at)
    tree.network.layer(tree.params["layers"][0], 0, x, at, attend, None)
    return seen[0]


# --- kvpress -------------------------------------------------------------------------------------


@functools.cache
def published(kind: str) -> list[dict]:
    file = FOLDER / f"kvzap-{kind}.safetensors"
    return kvzap_layers(_read_safetensors(file), model().network, file.name)


@pytest.mark.parametrize("kind", MAPS)
@pytest.mark.parametrize("ratio", RATIOS)
def test_an_eviction_keeps_what_kvpress_keeps(kind, ratio):
    policy = kvjax.policy(f"kvzap_scores + uniform({int(PROMPT * (1 - ratio))})")
    score = answers()[f"scores_{kind}"][..., :PROMPT]
    check_same(keeps(policy, published(kind)), answers()[f"kept_{kind}_{ratio}"], score)


@pytest.mark.parametrize("kind", MAPS)
def test_a_dense_prompt_and_what_follows_hold_what_kvpress_holds(kind):
    policy = kvjax.policy(f"kvzap({THRESHOLD}, window={WINDOW})")
    tokens, dropped = answers()["tokens"].tolist(), answers()[f"dropped_{kind}"]
    margin = np.abs(answers()[f"scores_{kind}"] - THRESHOLD).min()
    assert margin > 1e-5, "a score at the threshold: rounding would decide"
    weights = {"admission": published(kind)}
    options = {"context": PROMPT + FED, "chunk_size": 64, "weights": weights}
    state, _ = kvjax.prefill(model(), policy, [tokens[:PROMPT]], **options)
    for seen in (PROMPT, PROMPT + FED):
        if seen > PROMPT:
            state, _ = kvjax.extend(model(), policy, state, [tokens[PROMPT:]], weights=weights)
        for layer, room in enumerate(state.layers):
            for head in range(2):
                stays = set(np.flatnonzero(~dropped[layer, head, : seen - WINDOW]).tolist())
                assert set(tiny.held(room.pages)[0, head]) == stays
    assert 0.1 < dropped[:, :, : PROMPT - WINDOW].mean() < 0.9


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize("threshold", [0.1, 0.5, -31, "low", float("nan")])
def test_thresholds_that_admit_nothing_or_everything_are_refused(threshold):
    with pytest.raises(PolicyError, match="a number from -30 to 0"):
        KVzap(threshold)


@pytest.mark.parametrize("prefill", [False, True])
def test_a_threshold_that_admits_nothing_here_is_said(prefill):
    shut = [layer | {"w2": 0 * layer["w2"]} for layer in published("linear")]  # all scores are -5
    tokens = answers()["tokens"].tolist()[:PROMPT]
    options = {"weights": {"admission": shut}, "chunk_size": 64}
    policy = f"kvzap(-4.9, window=16, prefill={prefill}) + sinks(2)"
    with pytest.warns(Remark, match=r"admits none of the 144 tokens of row 0 .* Lower threshold\."):
        kvjax.prefill(model(), policy, [tokens], **options)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"w2": np.zeros((3, 32))}, r"needs \{'w2': \(2, 32\), 'b2': \(2,\)\}"),
        ({"w2": np.zeros((2, 33))}, r"needs \{'w2': \(2, 32\)"),
        ({"w1": np.zeros((33, 5))}, r"needs \{'w1': \(32, 5\), 'b1': \(5,\), 'w2': \(2, 5\)"),
    ],
)
def test_weights_of_another_model_are_refused(changes, says):
    with pytest.raises(PolicyError, match=says):
        KVzap().check_weights([published("linear")[0] | changes], model().network)


def test_no_weights_are_refused():
    with pytest.raises(PolicyError, match="has no weights"):
        KVzap().admit(None, observe((2,), 2, hidden=np.zeros((1, 2, D))))


def test_lowest_scores_go_at_every_step():
    policy = kvjax.policy("kvzap_scores + uniform(20, every_step) + recent(4)")
    sizes = {"context": tiny.CONTEXT, "page": tiny.PAGE, "chunk_size": 48}
    state, _ = kvjax.prefill(tiny.model(), policy, [TEXT[:48]], **sizes, weights=tiny.weights(policy))
    state = decode.reserve(policy, state, 12, 1)
    state, _ = tiny.feed(policy, state, np.asarray([TEXT[48:]]))
    right, window = (
        numpy_scores(tiny.weights(policy)["eviction"][0], first_hidden()),
        state.layers[0].ring.window,
    )
    for head in range(2):
        stays = set(best(right[head], 60, 20, newest=window))
        assert set(tiny.held(state.layers[0].pages)[0, head]) == {p for p in stays if p < 60 - window}
