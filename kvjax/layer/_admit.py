"""Admission: each token that leaves the window meets its one decision."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from kvjax.cache import pages as paging
from kvjax.cache import ring as rings
from kvjax.cache.pages import Pages
from kvjax.cache.ring import Entry
from kvjax.cache.state import LayerCache
from kvjax.layer._demote import codecs, split_by_age
from kvjax.layer._evict import slot_to_replace
from kvjax.layer._info import LayerInfo, absorb
from kvjax.types import EMPTY

if TYPE_CHECKING:
    from jaxtyping import Array, Int


def admit(
    info: LayerInfo, cache: LayerCache, leaving: Entry, following: Entry | None = None, final: bool = False
) -> LayerCache:
    """Leaving tokens go to the pages, to φ, or are dropped.

    Args:
      info: which layer.
      cache: whose ring they leave.
      leaving: T tokens, ``admit`` decides.
      following: the tokens that leave next (``following``).
      final: a whole prompt was ranked and nothing is evicted after it: tokens go where they will stay,
        old ones straight to the demoted pages.
    """
    if cache.pages is None:
        return cache
    policy, list_id = info.policy, destination(info, leaving)
    stored = [
        paging.append(pages, codec, policy.selection, leaving, ids, coming=_coming(info, following))
        for pages, codec, ids in zip(
            cache.pools,
            codecs(policy, cache),
            split_by_age(policy, cache, list_id) if final else (list_id,),
        )
    ]
    return absorb_leaving(info, cache.with_pools(stored), leaving)


def admit_or_replace(
    info: LayerInfo, cache: LayerCache, new: Entry, length: Int[Array, " B"], count: Int[Array, " B"]
) -> LayerCache:
    """``admit`` for a decode step: the oldest token out, the new one in; touches no page where none enters.

    Where a KV head is full, the token that enters takes the slot of the one that is evicted for it.

    Args:
      info: which layer.
      cache: after ``length`` tokens.
      new: one token a row.
      length: tokens each row has seen.
      count: 1 for rows that have a new token, else 0.
    """
    if cache.pages is None:
        return dataclasses.replace(cache, ring=rings.put(cache.ring, new, length, count))
    storage, selection = codecs(info.policy, cache)[0], info.policy.selection
    leaving = rings.leaving(cache.ring, new, length, count)
    next_out = following(info, cache, new, length, count)
    list_id = destination(info, leaving)
    hole = slot_to_replace(info, cache, leaving, list_id, length + count, count)
    if hole is not None:
        list_id = jnp.where(hole < cache.pages.span, list_id, EMPTY)  # beyond: the token itself is evicted

    # XLA on CPU keeps no order but that of data, and would copy the ring to write it beside a read. So what
    # is written comes out of the branches that use what was read, in one of them seemingly changed.
    def enter(pages: Pages, k: Array, v: Array) -> tuple[Pages, Array, Array]:
        pages = paging.append(pages, storage, selection, leaving, list_id, hole, _coming(info, next_out))
        never = (leaving.pos < EMPTY)[:, None, :, None]
        return pages, jnp.where(never, seen_keys(leaving, next_out), k), jnp.where(never, leaving.v, v)

    def if_any(*same: Any) -> tuple[Pages, Array, Array]:
        return jax.lax.cond(jnp.any(list_id >= 0), enter, lambda *same: same, *same)

    # XLA on GPU copies both pools, K and V, in either branch; there, tokens that do not enter are dropped.
    pages, k, v = jax.lax.platform_dependent(
        cache.pages, new.k, new.v, cuda=enter, rocm=enter, default=if_any
    )
    new = dataclasses.replace(new, k=k, v=v)
    ring = rings.put(cache.ring, new, length, count)
    return absorb_leaving(info, dataclasses.replace(cache, pages=pages, ring=ring), leaving)


def following(
    info: LayerInfo, cache: LayerCache, new: Entry, length: Int[Array, " B"], count: Int[Array, " B"]
) -> Entry | None:
    """The tokens that leave the window next, where the storage part looks at them; else None.

    Not where a budget acts while decoding: it may evict them before.
    """
    policy = info.policy
    most = min(policy.storage.foresees, cache.ring.window)
    if not most or policy.decides_later or cache.pages is None:
        return None
    return rings.following(cache.ring, new, length, count, most)


def _coming(info: LayerInfo, entry: Entry | None) -> tuple[Array, Array] | None:
    return None if entry is None else (destination(info, entry), entry.k)


def seen_keys(leaving: Entry, next_out: Entry | None) -> Array:
    """Keys that depend on all that was read of the ring's."""
    return leaving.k if next_out is None else leaving.k + next_out.k.sum(axis=2, keepdims=True)


def destination(info: LayerInfo, leaving: Entry) -> Int[Array, "B K T"]:
    """The page list each leaving token goes to; EMPTY for those that are not stored."""
    selection, real = info.policy.selection, (leaving.pos >= 0)[:, None, :]
    list_id = jnp.zeros(leaving.pos.shape, jnp.int32)
    if selection.splits:
        list_id = selection.selectable(leaving.pos, info.total).astype(jnp.int32)
    return jnp.where(leaving.admit & real, list_id[:, None, :], EMPTY)


def absorb_leaving(info: LayerInfo, cache: LayerCache, leaving: Entry) -> LayerCache:
    """The cache after φ absorbed its part of the leaving tokens."""
    policy = info.policy
    if policy.completion.idle:
        return cache
    # Without selection φ absorbs the rejected; with selection every selectable token too, stored or not.
    take = ~leaving.admit
    if policy.selection.acts:
        take = take | policy.selection.selectable(leaving.pos, info.total)[:, None, :]
    take = take & (leaving.pos >= 0)[:, None, :]
    pos = jnp.broadcast_to(leaving.pos[:, None], leaving.admit.shape)
    return absorb(info, cache, leaving.k, leaving.v, pos, take)
