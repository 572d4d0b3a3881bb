"""Reads of the tokens whose full pages lie in host memory: those that a selection chose, or all, in blocks.

Why: kvjax/DESIGN.md, 39.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from kvjax.algebra import Selection, Storage, Visited
from kvjax.cache import brought
from kvjax.cache.hosted import Hosted
from kvjax.cache.state import LayerCache
from pallas_kernels.merge.api import merge
from pallas_kernels.ragged_decode.api import gathered_decode, ragged_decode

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

Partial = tuple["Float[Array, 'B N T H']", "Float[Array, 'B N T']"]
"""Attention output over some of the tokens, and its log-sum-exp."""

BLOCK = 8192
"""Tokens of a KV head that a prompt's piece reads at a time: what it holds of them on the device."""


def read_hosted(
    storage: Storage,
    by: Selection | None,
    cache: LayerCache,
    q: Float[Array, "B N T H"],
    total: Int[Array, " B"],
    longest: int,
    softcap: float | None,
) -> tuple[Partial, Visited | None, Hosted | None]:
    """The read of the list whose full pages lie in host memory.

    Args:
      storage: how a slot is stored.
      by: what chooses among its tokens, for one query a head; None: all are visited, in blocks.
      cache: whose pages go on from the hosted ones.
      q: queries.
      total, longest: as in ``Selection.select``.
      softcap: of the scores.

    Returns:
      The partial; what was chosen; and the hosted pages with what was brought in the device's cache.
    """
    if by is None:
        return _read_in_blocks(cache, q, softcap), None, cache.hosted
    return _read_chosen(storage, by, cache, q, total, longest, softcap)


def _read_chosen(
    storage: Storage,
    by: Selection,
    cache: LayerCache,
    q: Float[Array, "B N 1 H"],
    total: Int[Array, " B"],
    longest: int,
    softcap: float | None,
) -> tuple[Partial, Visited, Hosted]:
    """Choose among the hosted pages and those that are filled, bring, and read once."""
    pages, hosted = cache.pools[-1], cache.hosted
    assert hosted is not None
    far = by.worth(q[:, :, 0], brought.as_pages(hosted, pages), 0)
    near = by.worth(q[:, :, 0], pages, pages.table.shape[2] - 1)
    picked = by.best(jnp.concatenate([far, near], axis=-1), total, longest)
    # A list has no more units than its table has room for: the others are EMPTY.
    entries = picked.entries[..., : far.shape[-1]]
    units, live, hosted = brought.units(hosted, pages, entries)
    if storage.scaled:
        k, v = storage.read(units, jnp.arange(len(units.pos))[:, None], jnp.arange(units.pos.shape[1]))
    else:
        k, v = units.k, units.v
    flat = (*entries.shape[:2], -1)
    visited = Visited(
        k=k.reshape(*flat, k.shape[-1]),
        v=v.reshape(*flat, v.shape[-1]),
        pos=units.pos.reshape(flat),
        live=live.reshape(flat),
    )
    out, lse, *_ = gathered_decode(q, visited.k, visited.v, visited.live, softcap=softcap)
    return (out, lse), visited, hosted


def _read_in_blocks(cache: LayerCache, q: Float[Array, "B N T H"], softcap: float | None) -> Partial:
    """All of the list, ``BLOCK`` tokens of each KV head at a time: every page is brought once."""
    pages, hosted = cache.pools[-1], cache.hosted
    assert hosted is not None
    rows, heads, entries = hosted.table.shape
    count = min(max(BLOCK // pages.size, 1), entries)
    # The hosted pages are counted with those that go on from them: together no more than a table holds.
    table = jnp.arange(rows * heads * count).reshape(rows, heads, count)

    def of_block(begin: Int[Array, ""]) -> Partial:
        pool, length = brought.block(hosted, pages, begin, count)
        out, lse, *_ = ragged_decode(
            q,
            pool.k,
            pool.v,
            table,
            length,
            scales=pool.scales,
            softcap=softcap,
            turn=pages.turned,
        )
        return out, lse

    length = hosted.owned * pages.size + pages.length[:, :, -1]
    blocks = -(-length.max() // (count * pages.size))

    def more(at: Int[Array, ""], so_far: Partial) -> Partial:
        return merge([so_far, of_block(at * count)])

    first = of_block(jnp.zeros((), jnp.int32))
    if count == entries:
        return first
    return jax.lax.fori_loop(1, jnp.maximum(blocks, 1), more, first)
