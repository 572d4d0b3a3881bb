"""The paged slots of a KV head, numbered through, whatever pool they are in.

Where demoted pages in codes follow pages in the model's own dtype, a layer has two pools with page tables
each; which slot is evicted, and what a slot received, is asked of all slots of a KV head at once.

  pools   pages [list 0 | list 1]   demoted [list 0]
  slots   0 ........... C1 - 1      C1 ....... C - 1
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax.numpy as jnp

from kvjax.cache import pages as paging
from kvjax.cache.pages import Codec, Pages, Slots, Summariser
from kvjax.cache.write import along, split, there
from kvjax.types import EMPTY

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int

Pools = tuple[Pages, ...]
"""One or two pools of a layer, in the order of a KV head's slots."""

Codecs = Sequence[Codec]
"""How each of them holds a slot."""


def _span(pages: Pages) -> int:
    """Slots that all lists of a KV head can point to."""
    return pages.table.shape[2] * pages.span


def _starts(pools: Pools) -> list[int]:
    """The first slot of each pool."""
    return [sum(_span(before) for before in pools[:at]) for at in range(len(pools))]


def live(pools: Pools) -> Int[Array, "B K"]:
    """Live slots of each KV head."""
    return jnp.stack([pages.length.sum(axis=-1) for pages in pools]).sum(axis=0)


def slots(pools: Pools) -> Slots:
    """As ``pages.slots``, of all pools."""
    if len(pools) == 1:
        return paging.slots(pools[0])
    parts = [paging.slots(pages) for pages in pools]
    return Slots(
        pos=jnp.concatenate([x.pos for x in parts], axis=-1),
        live=jnp.concatenate([x.live for x in parts], axis=-1),
        meta={n: jnp.concatenate([x.meta[n] for x in parts], axis=2) for n in parts[0].meta},
    )


def with_meta(pools: Pools, values: dict[str, Float[Array, "B K C"]]) -> Pools:
    """As ``pages.with_meta``, of all pools."""
    return tuple(
        paging.with_meta(pages, {n: x[..., start : start + _span(pages)] for n, x in values.items()})
        for pages, start in zip(pools, _starts(pools))
    )


def remove(pools: Pools, codecs: Codecs, chooser: Summariser, victim: Int[Array, "B K"]) -> Pools:
    """As ``pages.remove``: one slot of each KV head, from whichever pool it is in; EMPTY frees nothing."""
    after = []
    for pages, codec, start in zip(pools, codecs, _starts(pools)):
        inside = (victim >= start) & (victim < start + _span(pages))
        after.append(paging.remove(pages, codec, chooser, jnp.where(inside, victim - start, EMPTY)))
    return tuple(after)


def retain(pools: Pools, codecs: Codecs, chooser: Summariser, keep: Bool[Array, "B K C"]) -> Pools:
    """As ``pages.retain``, of all pools."""
    return tuple(
        paging.retain(pages, codec, chooser, keep[..., start : start + _span(pages)])
        for pages, codec, start in zip(pools, codecs, _starts(pools))
    )


def read(pools: Pools, codecs: Codecs, at: Int[Array, "B K T"]) -> tuple[Array, Array, Int[Array, "B K T"]]:
    """Keys and values [B, K, T, H] as a read would see them, and positions; of dead slots anything."""
    starts = _starts(pools)
    (k, v, pos), *others = (_read(pages, how, at - start) for pages, how, start in zip(pools, codecs, starts))
    for start, (more_k, more_v, more_pos) in zip(starts[1:], others):
        later = at >= start
        k, v = jnp.where(later[..., None], more_k, k), jnp.where(later[..., None], more_v, v)
        pos = jnp.where(later, more_pos, pos)
    return k, v, pos


def _read(pages: Pages, codec: Codec, at: Int[Array, "B K T"]) -> tuple[Array, Array, Array]:
    at = jnp.clip(at, 0, _span(pages) - 1)
    lists = pages.table.reshape(*at.shape[:2], -1)  # the lists of a KV head, one after the other
    entry, slot = split(at, pages.size)
    page = jnp.maximum(along(lists, entry, axis=-1), 0)
    return *codec.read(pages, page, slot), there(pages.pos, page, slot)
