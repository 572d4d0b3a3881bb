"""GLOBAL in two precisions: the newest retained tokens as they came, older ones in codes.

With a budget that acts while decoding, tokens between the window W and the newest F of a stream may be
evicted, so no ring can stand for F: pages in the model's own dtype do, and what they can no longer hold moves
on to the pages of codes.

  ring       newest W tokens         exact
  pages      retained, at most F - W  exact
  history    retained, older          codes

A token is quantised once, when F newer ones are retained, and stays so: an eviction among the newest leaves
less than F exact ones until others arrive.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache import pages as paging
from kvjax.cache.pages import Pages
from kvjax.cache.state import LayerCache
from kvjax.policy import Native, Policy, Storage
from kvjax.types import EMPTY

if TYPE_CHECKING:
    from jaxtyping import Array, Int


def codecs(policy: Policy, cache: LayerCache) -> tuple[Storage, ...]:
    """How each of the layer's rooms holds a slot."""
    return (policy.storage,) if cache.history is None else (Native(), policy.storage)


def spare(policy: Policy, cache: LayerCache) -> int:
    """Slots of GLOBAL that stay in the model's own dtype."""
    return policy.exact_slots(cache.ring.window)


def divided(policy: Policy, cache: LayerCache, which: Int[Array, "B K T"]) -> tuple[Array, ...]:
    """``which``, of tokens in the order of their positions, for each of the layer's (empty) rooms."""
    if cache.history is None:
        return (which,)
    stored = which >= 0
    after = stored.sum(axis=-1, keepdims=True) - jnp.cumsum(stored, axis=-1)
    old = after >= spare(policy, cache)
    return jnp.where(old, EMPTY, which), jnp.where(old, which, EMPTY)


def pages_for(policy: Policy, cache: LayerCache, kept: Int[np.ndarray, "B K"]) -> tuple[int, ...]:
    """Pages that suffice for each of the layer's rooms, when ``kept`` tokens a stream outlive a prompt.

    Every list may end in a page of its own; how heads share a fixed sum does not change the size.
    """
    exact = np.minimum(kept, spare(policy, cache)) if cache.history is not None else kept
    held = (exact, kept - exact)
    return tuple(
        int(slots.sum()) // room.size + slots.size * room.table.shape[2]
        for room, slots in zip(cache.rooms, held)
    )


def age(policy: Policy, cache: LayerCache, most: int) -> LayerCache:
    """What the exact pages hold beyond their share moves to the codes, oldest first.

    Args:
      policy: whose storage.
      cache: after eviction.
      most: tokens a stream that can be too many: those that have come since the last time.
    """
    if cache.history is None:
        return cache
    over = jnp.maximum(cache.rooms[0].length.sum(axis=-1) - spare(policy, cache), 0)

    # A loop of one turn: XLA works in its carry, where a branch would copy the pools.
    def turn(carry: tuple[Array, LayerCache]) -> tuple[Array, LayerCache]:
        return jnp.zeros_like(carry[0]), _moved(policy, carry[1], over, most)

    return jax.lax.while_loop(lambda carry: carry[0], turn, (jnp.any(over > 0), cache))[1]


def _moved(policy: Policy, cache: LayerCache, over: Int[Array, "B K"], most: int) -> LayerCache:
    pages, history = cache.rooms
    (exact, coded), chooser = codecs(policy, cache), policy.selection
    at = _oldest(pages, over, most)
    there = at >= 0
    near = jnp.maximum(at, 0)
    page = jnp.maximum(jnp.take_along_axis(pages.table[:, :, 0], near // pages.size, axis=-1), 0)
    slot = near % pages.size
    k, v = exact.read(pages, page, slot)
    meta = {name: x[page, slot] for name, x in pages.meta.items()}
    which = jnp.where(there, 0, EMPTY)
    history = paging.store(history, coded, chooser, which, k, v, pages.pos[page, slot], meta)
    if most == 1:
        pages = paging.remove(pages, exact, chooser, at[..., 0])
    else:
        line = jnp.arange(pages.table.shape[3] * pages.size)
        gone = (line == jnp.where(there, at, EMPTY)[..., None]).any(axis=-2)
        pages = paging.retain(pages, exact, chooser, ~gone)
    return cache.with_rooms((pages, history))


def _oldest(pages: Pages, over: Int[Array, "B K"], most: int) -> Int[Array, "B K T"]:
    """The ``over`` oldest slots of each stream along the line of its slots, oldest first; then EMPTY."""
    slots = paging.slots(pages)
    late = jnp.where(slots.live, slots.pos, jnp.iinfo(jnp.int32).max)
    if most == 1:
        at = jnp.argmin(late, axis=-1)[..., None]
    else:
        at = jnp.argsort(late, axis=-1)[..., :most]
    return jnp.where(jnp.arange(at.shape[-1]) < over[..., None], at, EMPTY)
