"""What is held while decoding equals what kvpress holds, step by step (``tests/make_decoding_golden.py``)."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from policy_oracle import room

import kvjax
from kvjax import layer
from kvjax.cache import per_head
from kvjax.cache import ring as rings
from kvjax.cache.state import LayerCache
from kvjax.types import Heads

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "decoding.npz")

CASES = {
    "knorm": "knorm + uniform(30, every(12))",
    "keydiff": "keydiff + uniform(30, every(12))",
    "tova": "tova + uniform(31, every(12)) + recent(2)",
    "knorm_ratio": "knorm + uniform(0.5, every(12))",
    "keydiff_then_knorm": "keydiff + then(knorm) + uniform(18, every(12))",
}
LATER = {"tova"}
"""What a read measures decides at the next step (DESIGN 9), when one more token is held: ours one step on is
theirs, and that token."""


def held_at_each_step(spec: str, heads: dict[str, np.ndarray], prompt: int) -> np.ndarray:
    """[S, L, K, T] by the layer's own loop over recorded tokens; every layer is a row."""
    policy = kvjax.policy(spec)
    layers, kv_heads, t, h = heads["k"].shape
    ring = rings.empty(layers, kv_heads, policy.window(t), h, jnp.dtype(jnp.float32), policy.keeps)
    pages = room(layers, kv_heads, h, entries=13, size=8, meta=policy.keeps)
    cache = LayerCache(ring=ring, pages=pages, summary=None)
    total = jnp.full(layers, prompt)
    site = layer.LayerInfo(policy, {}, 0, 1, None, total)

    def tokens(at: slice) -> Heads:
        q, k, v = (jnp.asarray(np.swapaxes(heads[name][:, :, at], 1, 2)) for name in "qkv")
        return Heads(q=q, k=k, v=v, q_pre=q, k_pre=k, hidden=q[..., 0, :])

    @jax.jit
    def begin(cache, x):
        pos = jnp.broadcast_to(jnp.arange(prompt), (layers, prompt))
        _, new = layer.prompt(site, Heads(**x), pos)
        return layer.store(site, cache, new, total)

    @jax.jit
    def step(cache, x, length):
        return layer.step(site, Heads(**x), cache, length, jnp.ones(layers, bool))[1][0]

    cache = begin(cache, vars(tokens(slice(prompt))))
    held = np.zeros((t - prompt, layers, kv_heads, t), bool)
    for i, at in enumerate(range(prompt, t)):
        cache = step(cache, vars(tokens(slice(at, at + 1))), jnp.full(layers, at))
        slots = per_head.slots(cache.pools)
        where = np.nonzero(np.asarray(slots.live))
        held[i, where[0], where[1], np.asarray(slots.pos)[where]] = True
        held[i, :, :, at + 1 - policy.window(t) : at + 1] = True
    return held


@pytest.mark.parametrize("name", CASES)
def test_kept_sets_are_those_of_kvpress_at_every_step(name: str) -> None:
    heads = {part: GOLDEN[f"{name}.{part}"] for part in "qkv"}
    layers, kv_heads, t, _ = heads["k"].shape
    steps = 69
    theirs = np.unpackbits(GOLDEN[f"{name}.kept"])[: steps * layers * kv_heads * t]
    theirs = theirs.reshape(steps, layers, kv_heads, t).astype(bool)
    ours = held_at_each_step(CASES[name], heads, t - steps)
    if name in LATER:
        ours, theirs = ours[1:], theirs[:-1].copy()
        for i in range(steps - 1):
            theirs[i, :, :, t - steps + i + 1] = True
    np.testing.assert_array_equal(ours, theirs)
    assert len(np.unique(theirs.sum(axis=-1))) > 10  # it grows and is cut
