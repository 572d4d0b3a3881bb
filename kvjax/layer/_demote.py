"""Pages in two precisions: the newest retained tokens exact, older ones demoted to codes.

With a budget that acts while decoding, tokens between the window W and the newest F of a KV head may be
evicted, so no ring can hold those F: a pool in the model's own dtype does, and what it can no longer hold is
demoted to a second pool, of codes.

  ring       newest W tokens          exact
  pages      retained, at most F - W  exact
  demoted    retained, older          codes

A token is quantised once, when F newer ones are retained, and stays so: an eviction among the newest leaves
fewer than F exact ones until others arrive.

Why: kvjax/DESIGN.md, 6.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from kvjax.algebra import Native, Policy, Storage
from kvjax.cache import pages as paging
from kvjax.cache.pages import Pages
from kvjax.cache.state import LayerCache
from kvjax.cache.write import along, split, there
from kvjax.types import EMPTY

if TYPE_CHECKING:
    from jaxtyping import Array, Int


EXACT = Native()


def codecs(policy: Policy, cache: LayerCache) -> tuple[Storage, ...]:
    """How each of the layer's pools holds a slot."""
    return (policy.storage,) if cache.demoted is None else (EXACT, policy.storage)


def exact_slots(policy: Policy, cache: LayerCache) -> int:
    """Paged slots of a KV head that stay in the model's own dtype."""
    return policy.exact_slots(cache.ring.window)


def split_by_age(policy: Policy, cache: LayerCache, list_id: Int[Array, "B K T"]) -> tuple[Array, ...]:
    """``list_id``, of tokens in the order of their positions, for each of the layer's (empty) pools."""
    if cache.demoted is None:
        return (list_id,)
    stored = list_id >= 0
    after = stored.sum(axis=-1, keepdims=True) - jnp.cumsum(stored, axis=-1)
    old = after >= exact_slots(policy, cache)
    return jnp.where(old, EMPTY, list_id), jnp.where(old, list_id, EMPTY)


def demote(policy: Policy, cache: LayerCache, arrived: int) -> LayerCache:
    """Moves what the exact pages hold beyond their limit to the codes, oldest first.

    Args:
      policy: whose storage.
      cache: after eviction.
      arrived: most tokens of a KV head that have come since the last time, so most that can be too many.
    """
    if cache.demoted is None:
        return cache
    pages, demoted = cache.pools
    excess = jnp.maximum(pages.length.sum(axis=-1) - exact_slots(policy, cache), 0)
    # XLA works in place in the carry of a loop, and keeps no order but that of data: pages that are read and
    # written in one loop would be copied. So there are two, and the second does what the first is seen to
    # have done.
    copied = _if_any(excess, lambda codes: _copied(policy, pages, codes, excess, arrived), demoted)
    moved = copied.length.sum(axis=-1) - demoted.length.sum(axis=-1)
    left = _if_any(moved, lambda exact: _without(policy, exact, moved, arrived), pages)
    return cache.with_pools((left, copied))


def _if_any(excess: Int[Array, "B K"], act: Callable[[Pages], Pages], pages: Pages) -> Pages:
    """``act(pages)`` where some KV head has too many: a loop of one turn."""
    some = jnp.any(excess > 0)
    return jax.lax.while_loop(lambda x: x[0], lambda x: (jnp.zeros_like(some), act(x[1])), (some, pages))[1]


def _copied(policy: Policy, pages: Pages, codes: Pages, excess: Int[Array, "B K"], most: int) -> Pages:
    """The codes with the oldest exact slots among them."""
    at = _oldest(pages, excess, most)
    near = jnp.maximum(at, 0)
    entry, slot = split(near, pages.size)
    page = jnp.maximum(along(pages.table[:, :, 0], entry, axis=-1), 0)
    k, v = EXACT.read(pages, page, slot)
    pos, meta = jax.tree.map(lambda x: there(x, page, slot), (pages.pos, pages.meta))
    list_id = jnp.where(at >= 0, 0, EMPTY)
    return paging.store(codes, policy.storage, policy.selection, list_id, k, v, pos, meta)


def _without(policy: Policy, pages: Pages, excess: Int[Array, "B K"], most: int) -> Pages:
    """The exact pages without their oldest slots."""
    at = _oldest(pages, excess, most)
    if most == 1:
        return paging.remove(pages, EXACT, policy.selection, at[..., 0])
    index = jnp.arange(pages.table.shape[3] * pages.size)
    return paging.retain(pages, EXACT, policy.selection, (index != at[..., None]).all(axis=-2))


def _oldest(pages: Pages, excess: Int[Array, "B K"], most: int) -> Int[Array, "B K T"]:
    """Indices of the ``excess`` oldest slots of each KV head, oldest first; then EMPTY."""
    slots = paging.slots(pages)
    late = jnp.where(slots.live, slots.pos, jnp.iinfo(jnp.int32).max)
    if most == 1:
        at = jnp.argmin(late, axis=-1)[..., None]
    else:
        at = jnp.argsort(late, axis=-1)[..., :most]
    return jnp.where(jnp.arange(at.shape[-1]) < excess[..., None], at, EMPTY)
