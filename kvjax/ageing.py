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

from collections.abc import Callable
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


EXACT = Native()


def codecs(policy: Policy, cache: LayerCache) -> tuple[Storage, ...]:
    """How each of the layer's rooms holds a slot."""
    return (policy.storage,) if cache.history is None else (EXACT, policy.storage)


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
    pages, history = cache.rooms
    over = jnp.maximum(pages.length.sum(axis=-1) - spare(policy, cache), 0)
    # XLA works in place in the carry of a loop, and keeps no order but that of data: pages that are read and
    # written in one loop would be copied. So there are two, and the second does what the first is seen to
    # have done.
    copied = _if_any(over, lambda h: _copied(policy, pages, h, over, most), history)
    moved = copied.length.sum(axis=-1) - history.length.sum(axis=-1)
    left = _if_any(moved, lambda p: _without(policy, p, moved, most), pages)
    return cache.with_rooms((left, copied))


def _if_any(over: Int[Array, "B K"], act: Callable[[Pages], Pages], room: Pages) -> Pages:
    """``act(room)`` where some stream has too many: a loop of one turn."""
    some = jnp.any(over > 0)
    return jax.lax.while_loop(lambda x: x[0], lambda x: (jnp.zeros_like(some), act(x[1])), (some, room))[1]


def _copied(policy: Policy, pages: Pages, history: Pages, over: Int[Array, "B K"], most: int) -> Pages:
    """The codes with the oldest exact slots among them."""
    at = _oldest(pages, over, most)
    near = jnp.maximum(at, 0)
    page = jnp.maximum(jnp.take_along_axis(pages.table[:, :, 0], near // pages.size, axis=-1), 0)
    slot = near % pages.size
    k, v = EXACT.read(pages, page, slot)
    meta = {name: x[page, slot] for name, x in pages.meta.items()}
    which = jnp.where(at >= 0, 0, EMPTY)
    return paging.store(history, policy.storage, policy.selection, which, k, v, pages.pos[page, slot], meta)


def _without(policy: Policy, pages: Pages, over: Int[Array, "B K"], most: int) -> Pages:
    """The exact pages without their oldest slots."""
    at = _oldest(pages, over, most)
    if most == 1:
        return paging.remove(pages, EXACT, policy.selection, at[..., 0])
    line = jnp.arange(pages.table.shape[3] * pages.size)
    return paging.retain(pages, EXACT, policy.selection, (line != at[..., None]).all(axis=-2))


def _oldest(pages: Pages, over: Int[Array, "B K"], most: int) -> Int[Array, "B K T"]:
    """The ``over`` oldest slots of each stream along the line of its slots, oldest first; then EMPTY."""
    slots = paging.slots(pages)
    late = jnp.where(slots.live, slots.pos, jnp.iinfo(jnp.int32).max)
    if most == 1:
        at = jnp.argmin(late, axis=-1)[..., None]
    else:
        at = jnp.argsort(late, axis=-1)[..., :most]
    return jnp.where(jnp.arange(at.shape[-1]) < over[..., None], at, EMPTY)
