"""What policies make of a model's attention sinks, against NumPy."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from kvjax.algebra import Observation
from kvjax.budgets.gvote import nucleus
from kvjax.policies.snapkv import SnapKV

N, K, T, H, WINDOW = 4, 2, 12, 8, 3
SINKS = np.array([2.0, -1.0, 0.5, 3.0])


def test_votes_of_snapkv_are_shares_of_the_sum_with_the_sink():
    rng = np.random.default_rng(0)
    q, k, v = (1.5 * rng.standard_normal((1, n, T, H)) for n in (N, K, K))
    values = {name: jnp.asarray(x, jnp.float32) for name, x in (("q", q), ("k", k), ("v", v))}
    total = jnp.asarray([T])
    seen = Observation(
        pos=jnp.arange(T)[None],
        total=total,
        layer=0,
        layers=1,
        values=values,
        sinks=jnp.asarray(SINKS, jnp.float32),
    )
    votes = np.zeros((K, T))
    for n in range(N):
        for i in range(T - WINDOW, T):
            e = np.exp(k[0, n // (N // K), : i + 1] @ q[0, n, i] / np.sqrt(H))
            votes[n // (N // K), : i + 1] += e / (e.sum() + np.exp(SINKS[n])) / WINDOW / (N // K)
    votes[:, T - WINDOW :] = 0
    score = SnapKV(window=WINDOW, kernel=1).score_prompt(None, seen)
    np.testing.assert_allclose(score[0], votes, atol=1e-6)


def test_a_sink_takes_its_share_of_gvote_s_nucleus():
    s = 2 * np.random.default_rng(1).standard_normal((K, N // K, T))
    e = np.exp(s)
    for p in (0.3, 0.8, 0.95, 1.0):
        counts = nucleus(jnp.asarray(s, jnp.float32), p, jnp.asarray(SINKS.reshape(K, -1), jnp.float32))
        for at in np.ndindex(counts.shape):
            sink = np.exp(SINKS.reshape(K, -1)[at])
            share = np.sort(e[at])[::-1] / (e[at].sum() + sink)
            held = sink / (e[at].sum() + sink) + np.cumsum(share)
            want = T if p == 1 else 1 + int((held < p).sum())
            assert counts[at] == want, (p, at)
