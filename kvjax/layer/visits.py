"""Tokens that come one a row, or in pieces of a prompt."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import jax.numpy as jnp

from kvjax import ageing
from kvjax.cache import ring as rings
from kvjax.cache.state import LayerCache
from kvjax.layer.door import exchange, through_door
from kvjax.layer.eviction import due, evict
from kvjax.layer.mass import told, told_rooms, tracks, weights_of
from kvjax.layer.reading import mixed, read_pages, together
from kvjax.layer.site import Site, arriving, major, observe
from kvjax.policy import AdmitAll, Nothing
from kvjax.types import EMPTY, Heads
from pallas_kernels.blockwise.api import blockwise, column_mass
from pallas_kernels.merge.api import merge

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int


def step(
    site: Site, cache: LayerCache, x: Heads, length: Int[Array, " B"], active: Bool[Array, " B"]
) -> tuple[Float[Array, "B 1 N H"], LayerCache]:
    """One new token for every active row. Order: door, write, evict, age, read.

    Args:
      site: where.
      cache: after ``length`` tokens.
      x: the new token's heads (T = 1).
      length: position of the new token.
      active: rows that really have one; the others leave no trace and read garbage.
    """
    count = active.astype(jnp.int32)
    pos = jnp.where(active, length, EMPTY)[:, None]
    new = arriving(site, x, pos, observe(site, x, pos))
    cache = exchange(site, cache, new, length, count)
    cache = evict(site, cache, length + count, due(site.policy, length + count, count))
    cache = ageing.age(site.policy, cache, 1)
    q = major(x.q)
    held = rings.positions(length + count, cache.ring.window)
    recent = blockwise(q, cache.ring.k, cache.ring.v, q_pos=length[:, None], k_pos=held, softcap=x.softcap)
    masses: list[Array] | None = [] if tracks(site, cache) else None
    parts = [recent, *read_pages(site, cache, q, decoding=True, softcap=x.softcap, masses=masses)]
    if masses is not None:  # what is learned now decides at the next step
        total = merge(parts)[1]
        weights = weights_of(site, pos)
        hand = column_mass(q, cache.ring.k, total, weights, q_pos=pos, k_pos=held, softcap=x.softcap)
        ring = dataclasses.replace(cache.ring, meta=told(site, held[:, None], cache.ring.meta, hand, count))
        cache = told_rooms(site, cache, parts, masses, total, weights, count)
        cache = dataclasses.replace(cache, ring=ring)
    return mixed(parts, x), cache


def chunk(
    site: Site, cache: LayerCache, x: Heads, length: Int[Array, " B"], count: Int[Array, " B"]
) -> tuple[Float[Array, "B T N H"], LayerCache]:
    """``count`` of T new tokens a row, prompt in pieces. Order: read, door, write, evict, age.

    Key j is visible to query i iff j <= i and (i - j < W or j was admitted); GLOBAL holds only admitted
    tokens older than any query's window, so it needs no mask. With a completion part, what is still in
    hand is read exactly and φ stands for what is gone.
    """
    policy, t = site.policy, x.q.shape[1]
    step_ = jnp.arange(t)[None, :]
    pos = jnp.where(step_ < count[:, None], length[:, None] + step_, EMPTY)
    new = arriving(site, x, pos, observe(site, x, pos))
    q, ring = major(x.q), cache.ring
    held = rings.positions(length, ring.window)
    judged = policy.admission != AdmitAll()

    def hidden(bits: Array, some: bool) -> tuple[int | None, Array | None]:
        """Window and bits under which tokens in hand are read; ``some`` of them may be rejected."""
        if cache.pages is None:  # such a layer forgets for good: no completion stands behind it
            return ring.window, None
        return (ring.window, bits) if some and policy.completion == Nothing() else (None, None)

    # A prompt that was judged whole leaves rejected tokens in the ring.
    w, old = hidden(ring.admit, judged or policy.whole_prompt)
    recent = blockwise(q, ring.k, ring.v, q_pos=pos, k_pos=held, window=w, admit=old, softcap=x.softcap)
    parts = [recent, together(q, new, count, *hidden(new.admit, judged), x.softcap)]
    masses: list[Array] | None = [] if tracks(site, cache) else None
    parts += read_pages(site, cache, q, decoding=False, softcap=x.softcap, masses=masses)
    if masses is not None:
        total, weights = merge(parts)[1], weights_of(site, pos)
        hand = functools.partial(column_mass, q, lse=total, weights=weights, q_pos=pos, softcap=x.softcap)
        was = hand(ring.k, k_pos=held, window=w, admit=old)
        window, bits = hidden(new.admit, judged)
        now = hand(new.k, k_pos=pos, window=window, admit=bits)
        ring = dataclasses.replace(ring, meta=told(site, held[:, None], ring.meta, was, count))
        new = dataclasses.replace(new, meta=told(site, pos[:, None], new.meta, now, count))
        cache = told_rooms(site, cache, parts, masses, total, weights, count)
        cache = dataclasses.replace(cache, ring=ring)
    if cache.pages is not None:
        cache = through_door(site, cache, rings.leaving(ring, new, length, count))
    cache = dataclasses.replace(cache, ring=rings.put(ring, new, length, count))
    cache = evict(site, cache, length + count, due(site.policy, length + count, count))
    cache = ageing.age(policy, cache, t)
    return mixed(parts, x), cache
