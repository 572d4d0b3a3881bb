"""The door: each token that steps out of the window meets its one decision."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from kvjax import ageing
from kvjax.cache import pages as paging
from kvjax.cache import ring as rings
from kvjax.cache.pages import Pages
from kvjax.cache.ring import Entry
from kvjax.cache.state import LayerCache
from kvjax.layer.eviction import replaced
from kvjax.layer.site import Site, absorb
from kvjax.policy import Nothing, SelectAll
from kvjax.types import EMPTY

if TYPE_CHECKING:
    from jaxtyping import Array, Int


def through_door(site: Site, cache: LayerCache, out: Entry, judged: bool = False) -> LayerCache:
    """Each leaving token meets its one decision: GLOBAL, or φ, or nothing.

    Tokens that a verdict has chosen already (``judged``) go to the room where they will stay.
    """
    if cache.pages is None:
        return cache
    policy, which = site.policy, _destination(site, out)
    stored = [
        paging.append(pages, codec, policy.selection, out, mine)
        for pages, codec, mine in zip(
            cache.rooms,
            ageing.codecs(policy, cache),
            ageing.divided(policy, cache, which) if judged else (which,),
        )
    ]
    return _completing(site, cache.with_rooms(stored), out)


def exchange(
    site: Site, cache: LayerCache, new: Entry, length: Int[Array, " B"], count: Int[Array, " B"]
) -> LayerCache:
    """``through_door`` for a decode step: oldest token out, new one in; GLOBAL rests when none enters.

    Where a stream is full, the token that enters takes the slot of the one that has to go for it.
    """
    if cache.pages is None:
        return dataclasses.replace(cache, ring=rings.put(cache.ring, new, length, count))
    storage, selection = ageing.codecs(site.policy, cache)[0], site.policy.selection
    out = rings.leaving(cache.ring, new, length, count)
    which = _destination(site, out)
    hole = replaced(site, cache, out, which, length + count, count)
    if hole is not None:
        which = jnp.where(hole < cache.pages.span, which, EMPTY)  # else it is the one that goes

    # XLA on CPU keeps no order but that of data, and would copy the ring to write it beside a read. So what
    # is written comes out of the branches that use what was read, in one of them seemingly changed.
    def enter(pages: Pages, k: Array, v: Array) -> tuple[Pages, Array, Array]:
        pages = paging.append(pages, storage, selection, out, which, hole)
        never = (out.pos < EMPTY)[:, None, :, None]
        return pages, jnp.where(never, out.k, k), jnp.where(never, out.v, v)

    pages, k, v = jax.lax.cond(jnp.any(which >= 0), enter, lambda *same: same, cache.pages, new.k, new.v)
    new = dataclasses.replace(new, k=k, v=v)
    ring = rings.put(cache.ring, new, length, count)
    return _completing(site, dataclasses.replace(cache, pages=pages, ring=ring), out)


def _destination(site: Site, out: Entry) -> Int[Array, "B K T"]:
    """The page list each leaving token goes to; EMPTY for those that are not stored."""
    selection, real = site.policy.selection, (out.pos >= 0)[:, None, :]
    number = jnp.zeros(out.pos.shape, jnp.int32)
    if selection.splits:
        number = selection.selectable(out.pos, site.total).astype(jnp.int32)
    return jnp.where(out.admit & real, number[:, None, :], EMPTY)


def _completing(site: Site, cache: LayerCache, out: Entry) -> LayerCache:
    """φ takes its part of the leaving tokens."""
    policy = site.policy
    if policy.completion == Nothing():
        return cache
    # Without selection φ takes the rejected; with selection every selectable token too, kept or not.
    take = ~out.admit
    if policy.selection != SelectAll():
        take = take | policy.selection.selectable(out.pos, site.total)[:, None, :]
    take = take & (out.pos >= 0)[:, None, :]
    return absorb(site, cache, out.k, out.v, jnp.broadcast_to(out.pos[:, None], out.admit.shape), take)
