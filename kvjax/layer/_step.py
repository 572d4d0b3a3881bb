"""Tokens that come one per row (``step``), or in chunks of a prompt (``chunk``)."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from kvjax.cache import ring as rings
from kvjax.cache.ring import Entry
from kvjax.cache.state import LayerCache
from kvjax.layer._admit import admit, admit_or_replace, following, seen_keys
from kvjax.layer._demote import demote
from kvjax.layer._evict import due, evict
from kvjax.layer._info import LayerInfo, arriving, major, observe
from kvjax.layer._mass import accumulate_mass, accumulate_paged_mass, query_weights, tracks_mass
from kvjax.layer._one_kernel import fits, step_in_one_kernel
from kvjax.layer._read import Partial, Read, attend_among, attend_since, loaded, merged, read_pages
from kvjax.types import EMPTY, Heads
from pallas_kernels.blockwise.api import blockwise, column_mass

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int


def step(
    info: LayerInfo, x: Heads, cache: LayerCache, length: Int[Array, " B"], active: Bool[Array, " B"]
) -> tuple[Float[Array, "B 1 N H"], tuple[LayerCache, Read]]:
    """One new token for every active row. Order: window exit, write, evict, demote, read.

    Where one kernel does all of that, it is called (``_one_kernel``).

    Args:
      info: which layer.
      x: the new token's heads (T = 1).
      cache: after ``length`` tokens.
      length: position of the new token.
      active: rows that really have one; the others leave no trace and read garbage.

    Returns:
      The attention output; the cache after the token, and what was read.
    """
    count = active.astype(jnp.int32)
    pos = jnp.where(active, length, EMPTY)[:, None]
    new = arriving(info, x, pos, observe(info, x, pos))
    if fits(info, cache, x):
        read, cache = step_in_one_kernel(info, cache, new, x, length, count)
        return read.out, (cache, read)
    cache = admit_or_replace(info, cache, new, length, count)
    cache = evict(info, cache, length + count, due(info.policy, length + count, count), x)
    cache = demote(info.policy, cache, 1)
    q, track = major(x.q), tracks_mass(info, cache)
    positions = rings.positions(length + count, cache.ring.window)
    recent = blockwise(
        q, cache.ring.k, cache.ring.v, q_pos=length[:, None], k_pos=positions, softcap=x.softcap
    )
    paged = read_pages(info, cache, q, by=info.policy.selection, softcap=x.softcap, with_mass=track)
    cache = dataclasses.replace(cache, hosted=paged.hosted)
    out, lse = merged((recent, *paged.partials), x.v.dtype, x.sinks)
    size = loaded(info, cache, paged, rings.live(length + count, cache.ring.window))
    if track:  # what is learned now decides at the next step
        weights = query_weights(info.policy.eviction.later, pos)
        mass = column_mass(q, cache.ring.k, lse, weights, q_pos=pos, k_pos=positions, softcap=x.softcap)
        meta = accumulate_mass(info, positions[:, None], cache.ring.meta, mass, count)
        ring = dataclasses.replace(cache.ring, meta=meta)
        cache = accumulate_paged_mass(info, cache, paged, lse, weights, count)
        cache = dataclasses.replace(cache, ring=ring)
    return out, (cache, Read(out=out, lse=lse, mass=paged.mass, loaded=size))


def chunk(
    info: LayerInfo, x: Heads, cache: LayerCache, length: Int[Array, " B"], count: Int[Array, " B"]
) -> tuple[Float[Array, "B T N H"], LayerCache]:
    """``count`` of T new tokens a row, a prompt in pieces. Order: read, window exit, write, evict, demote.

    Key j is visible to query i iff j <= i and (i - j < W or j was admitted). The pages hold only admitted
    tokens older than any query's window, so they need no mask. W = 3, keys 0, 1 and 4 admitted, chunk 5 6 7:

      key        0  1 | 2  3  4 | 5  6  7
      held in    pages| ring    | chunk
      query 5    x  x | .  x  x | x
      query 6    x  x | .  .  x | x  x       3 left the window and was rejected
      query 7    x  x | .  .  x | x  x  x    4 left the window and was admitted

    With a completion part, the ring and the chunk are read exactly and φ stands for what is gone.

    Args:
      info: which layer.
      x: the chunk's heads.
      cache: after ``length`` tokens.
      length: position of each row's first new token.
      count: real tokens of each row, 0 .. T; the others leave no trace and read garbage.
    """
    policy, t = info.policy, x.q.shape[1]
    ahead = jnp.arange(t)[None, :]
    pos = jnp.where(ahead < count[:, None], length[:, None] + ahead, EMPTY)
    new = arriving(info, x, pos, observe(info, x, pos))
    q, ring, track = major(x.q), cache.ring, tracks_mass(info, cache)
    positions = rings.positions(length, ring.window)
    rejects = not policy.admission.idle

    def hidden(bits: Array, some: bool) -> tuple[int | None, Array | None]:
        """Window and bits under which exact tokens are read; ``some`` of them may be rejected."""
        if cache.pages is None:  # such a layer forgets for good: no completion stands behind it
            return ring.window, None
        return (ring.window, bits) if some and policy.completion.idle else (None, None)

    # A prompt that was ranked whole leaves rejected tokens in the ring.
    old_window, old_bits = hidden(ring.admit, rejects or policy.whole_prompt)
    new_window, new_bits = hidden(new.admit, rejects)
    if new_bits is not None and ring.window < t:  # then the ring's tokens may be hidden likewise
        exact: tuple[Partial, ...] = (attend_since(q, ring, new, length, count, x.softcap),)
    else:
        recent = blockwise(
            q,
            ring.k,
            ring.v,
            q_pos=pos,
            k_pos=positions,
            window=old_window,
            admit=old_bits,
            softcap=x.softcap,
        )
        exact = (recent, attend_among(q, new, count, new_window, new_bits, x.softcap))
    paged = read_pages(info, cache, q, by=None, softcap=x.softcap, with_mass=track)
    out, lse = merged((*exact, *paged.partials), x.v.dtype, x.sinks)
    if track:
        weights = query_weights(info.policy.eviction.later, pos)
        mass = functools.partial(column_mass, q, lse=lse, weights=weights, q_pos=pos, softcap=x.softcap)
        of_ring = mass(ring.k, k_pos=positions, window=old_window, admit=old_bits)
        of_chunk = mass(new.k, k_pos=pos, window=new_window, admit=new_bits)
        meta = accumulate_mass(info, positions[:, None], ring.meta, of_ring, count)
        ring = dataclasses.replace(ring, meta=meta)
        new = dataclasses.replace(new, meta=accumulate_mass(info, pos[:, None], new.meta, of_chunk, count))
        cache = accumulate_paged_mass(info, cache, paged, lse, weights, count)
        cache = dataclasses.replace(cache, ring=ring)
    never = (lse > jnp.inf).any(axis=(1, 2))
    if cache.pages is not None:
        leaving = rings.leaving(ring, new, length, count)
        next_out = following(info, cache, new, length, count)
        read = dataclasses.replace(leaving, k=seen_keys(leaving, next_out))
        new, leaving = _exchanged(never, new, read), _exchanged(never, leaving, new)
        cache = admit(info, cache, leaving, next_out)
    else:
        new = _exchanged(never, new, jax.tree.map(jnp.zeros_like, new))
    cache = dataclasses.replace(cache, ring=rings.put(ring, new, length, count))
    cache = evict(info, cache, length + count, due(policy, length + count, count), x)
    cache = demote(policy, cache, t)
    return out, cache


def _exchanged(never: Bool[Array, " B"], kept: Entry, other: Entry) -> Entry:
    """``kept``, seemingly ``other`` for some result of the read and of the ring.

    XLA on CPU keeps no order but that of data: without it what is read would be copied, to be written beside.
    """
    k, v = (jnp.where(never[:, None, None, None], y, x) for x, y in ((kept.k, other.k), (kept.v, other.v)))
    return dataclasses.replace(kept, k=k, v=v)
