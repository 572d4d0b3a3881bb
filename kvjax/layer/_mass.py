"""Attention mass: what each held token received from a read, for evictions that rank by it.

Why: kvjax/DESIGN.md, 9.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from kvjax.algebra import Eviction
from kvjax.cache import per_head
from kvjax.cache.pages import Slots
from kvjax.cache.state import LayerCache
from kvjax.layer._info import LayerInfo
from kvjax.layer._read import PagedRead

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


def tracks_mass(info: LayerInfo, cache: LayerCache) -> bool:
    """Does this layer remember attention mass from read to read?"""
    return info.policy.tracks_mass and cache.pages is not None


def query_weights(eviction: Eviction, pos: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """What the attention of each query of a read counts; 0 for padding."""
    age = pos.max(axis=1, keepdims=True) - pos
    return jnp.where(pos >= 0, eviction.query_weights(age), 0.0)


def accumulate_mass(
    info: LayerInfo,
    pos: Int[Array, "B K C"],
    meta: dict[str, Array],
    mass: Float[Array, "B N C"],
    count: Int[Array, " B"],
) -> dict[str, Array]:
    """Per-slot values after a read of ``count`` queries a row; rows without a query keep theirs."""
    eviction, at = info.policy.eviction.later, count[:, None, None]
    old = {name: meta[f"eviction.{name}"] for name in eviction.keeps}
    pos = jnp.broadcast_to(pos, (*meta[f"eviction.{eviction.keeps[0]}"].shape,))
    mass = info.heads.mean(mass) if eviction.shared_ranking else mass
    new = eviction.accumulate(Slots(pos=pos, live=pos >= 0, meta=old), mass, jnp.maximum(at, 1))
    return meta | {f"eviction.{name}": jnp.where(at > 0, new[name], old[name]) for name in old}


def accumulate_paged_mass(
    info: LayerInfo,
    cache: LayerCache,
    paged: PagedRead,
    lse: Float[Array, "B N T"],
    weights: Float[Array, "B T"],
    count: Int[Array, " B"],
) -> LayerCache:
    """The pages' values after a read: mass of a list is under its own lse, so it is scaled to the whole read.

    Args:
      info: which layer.
      cache: before.
      paged: what the pages gave, with mass.
      lse: of everything that was read.
      weights: ``query_weights``.
      count: queries of each row.
    """
    assert paged.mass is not None
    lists = []
    for (_, of_list), mass in zip(paged.lists, paged.mass):
        share = jnp.exp(of_list - lse) * weights[:, None]
        received = jnp.einsum("bnt,bntms->bnms", share, mass, precision=jax.lax.Precision.HIGHEST)
        lists.append(received.reshape(*received.shape[:2], -1))
    slots = per_head.slots(cache.pools)
    values = accumulate_mass(info, slots.pos, slots.meta, jnp.concatenate(lists, axis=-1), count)
    return cache.with_pools(per_head.with_meta(cache.pools, values))
