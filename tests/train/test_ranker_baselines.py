"""Baselines of the rankers' check against attention written out in NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from train.ranker import baselines

LAYERS, KV, GROUPS, TOKENS, DIM, SIZE = 2, 2, 3, 96, 8, 80
AGENTS = LAYERS * KV


@pytest.fixture(scope="module")
def drawn():
    rng = np.random.default_rng(4)
    k, v = (rng.normal(size=(1, AGENTS, TOKENS, DIM)).astype(np.float32) for _ in range(2))
    seen = rng.normal(size=(1, AGENTS, GROUPS, baselines.WINDOW, DIM)).astype(np.float32)
    k[:, :, SIZE:] = v[:, :, SIZE:] = 1e4  # the future, which no ranking may see
    return {"k": k, "v": v, "size": np.asarray([SIZE]), "seen": seen}


def weights(batch) -> np.ndarray:
    """[A, G, W, SIZE]: causal attention of the cache's last queries."""
    q, k = batch["seen"][0].astype(float), batch["k"][0, :, :SIZE].astype(float)
    s = np.einsum("agwh,ath->agwt", q, k) / np.sqrt(DIM)
    at = SIZE - baselines.WINDOW + np.arange(baselines.WINDOW)
    s = np.where(np.arange(SIZE) <= at[:, None], s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


@pytest.mark.slow
def test_tova_is_the_last_querys_attention_averaged_over_a_layer(drawn):
    scores = np.asarray(baselines.scores(drawn, LAYERS, None)["tova"])[0, :, :SIZE]
    last = weights(drawn)[:, :, -1].reshape(LAYERS, KV * GROUPS, SIZE).mean(1)
    np.testing.assert_allclose(scores, np.repeat(last, KV, axis=0), atol=1e-6)


def test_snapkv_smooths_the_windows_votes_and_keeps_the_window(drawn):
    scores = np.asarray(baselines.scores(drawn, LAYERS, None)["snapkv"])[0]
    old = SIZE - baselines.WINDOW
    votes = np.pad(weights(drawn).mean(2)[:, :, :old], ((0, 0), (0, 0), (2, 2)))
    smooth = np.stack([votes[..., i : i + old] for i in range(5)]).mean(0).mean(1)
    np.testing.assert_allclose(scores[:, :old], smooth, atol=1e-6)
    assert np.isinf(scores[:, old:SIZE]).all()


def test_keydiff_sees_the_cache_alone(drawn):
    scores = np.asarray(baselines.scores(drawn, LAYERS, None)["keydiff"])[0, :, :SIZE]
    k = drawn["k"][0, :, :SIZE].astype(float)
    unit = k / np.linalg.norm(k, axis=-1, keepdims=True)
    anchor = unit.sum(1, keepdims=True)
    want = -(unit * anchor / np.linalg.norm(anchor, axis=-1, keepdims=True)).sum(-1)
    np.testing.assert_allclose(scores, want, atol=1e-5)


def test_without_the_last_queries_the_privileged_are_left_out(drawn):
    scores = baselines.scores({name: drawn[name] for name in ("k", "v", "size")}, LAYERS, None)
    assert set(scores) == {"recency", "knorm", "keydiff", "lagkv"}
