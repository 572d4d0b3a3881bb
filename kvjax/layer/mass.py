"""Attention that slots receive, as each read tells it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from kvjax.cache import line as lines
from kvjax.cache.pages import Slots
from kvjax.cache.state import LayerCache
from kvjax.layer.reading import Partial
from kvjax.layer.site import Site
from kvjax.policy import Nothing

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


def tracks(site: Site, cache: LayerCache) -> bool:
    """Does this layer remember attention from read to read?"""
    return site.policy.tracks_mass and cache.pages is not None


def weights_of(site: Site, pos: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """What each query of a read counts; 0 for padding."""
    age = pos.max(axis=1, keepdims=True) - pos
    return jnp.where(pos >= 0, site.policy.eviction.weigh(age), 0.0)


def told(
    site: Site, pos: Int[Array, "B K C"], meta: dict[str, Array], mass: Float[Array, "B N C"], count: Array
) -> dict[str, Array]:
    """Per-slot values after a read of ``count`` queries a row; rows without a query keep theirs."""
    eviction, at = site.policy.eviction, count[:, None, None]
    kept = {name: meta[f"eviction.{name}"] for name in eviction.keeps}
    pos = jnp.broadcast_to(pos, (*meta[f"eviction.{eviction.keeps[0]}"].shape,))
    new = eviction.receive(Slots(pos=pos, live=pos >= 0, meta=kept), mass, jnp.maximum(at, 1))
    return meta | {f"eviction.{name}": jnp.where(at > 0, new[name], kept[name]) for name in kept}


def told_rooms(
    site: Site,
    cache: LayerCache,
    parts: list[Partial],
    masses: list[Float[Array, "B N T M S"]],
    total: Float[Array, "B N T"],
    weights: Float[Array, "B T"],
    count: Int[Array, " B"],
) -> LayerCache:
    """GLOBAL's values after a read: a list's mass is under its own lse, so it is scaled by its share.

    ``parts`` are what is in hand, the lists, and what completes them.
    """
    lists = parts[len(parts) - len(masses) - (site.policy.completion != Nothing()) :]
    line = []
    for (_, lse), mass in zip(lists, masses):
        share = jnp.exp(lse - total) * weights[:, None]
        found = jnp.einsum("bnt,bntms->bnms", share, mass, precision=jax.lax.Precision.HIGHEST)
        line.append(found.reshape(*found.shape[:2], -1))
    slots = lines.slots(cache.rooms)
    values = told(site, slots.pos, slots.meta, jnp.concatenate(line, axis=-1), count)
    return cache.with_rooms(lines.with_meta(cache.rooms, values))
