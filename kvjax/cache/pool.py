"""Sizes of pools: how many pages to allocate, and moving pages into a pool of another size.

Static shapes and real memory meet here. What a prompt leaves behind is held in size classes of a quarter
octave (1, 1.25, 1.5 and 1.75 times powers of two), so that at most a quarter is wasted; a pool that must
grow takes a class by the tokens still to come, because each size is a compiled program.

Why: kvjax/DESIGN.md, 4.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.pages import Pages
from kvjax.cache.write import DROP
from kvjax.cache.zeros import of_slots, zeros
from kvjax.types import EMPTY


def size_class(need: int) -> int:
    """The smallest size class that holds ``need``: 1 … 8, 10, 12, 14, 16, 20, 24, 28, 32, 40 …"""
    if need <= 8:
        return max(1, need)
    quarter = 1 << ((need - 1).bit_length() - 3)
    return -(-need // quarter) * quarter


def coarse_class(need: int) -> int:
    """The smallest power of two, or 1.5 times one, that holds ``need``: 1, 2, 3, 4, 6, 8, 12 …"""
    size = 1
    while size < need:
        size = max(size + 1, size * 3 // 2) if size & (size - 1) == 0 else size * 4 // 3
    return size


def class_for(need: int, coming: int) -> int:
    """The class of a pool that must hold ``need`` pages, ``coming`` of them for tokens still to come.

    Of an eighth and a quarter of an octave the finer whose next class is as far away as these tokens
    reach, so that growth is as rare as the caller asked for; else the coarse class.
    """
    octave = 1 << max(0, (need - 1).bit_length() - 1)
    for step in (octave // 8, octave // 4):
        if step >= max(coming, 1):
            return -(-need // step) * step
    return coarse_class(need)


def grown_sizes(
    pools: Sequence[Pages],
    live: Sequence[int],
    tokens: int,
    most: int | None,
    *,
    ahead: int,
    doubling: bool,
    uneven: bool = False,
) -> list[int]:
    """Pages for each of the pools of one kind, one a layer, so that ``tokens`` more a row fit.

    Args:
      pools: as they are.
      live: slots in use in each of them.
      tokens: tokens a row about to come.
      most: the most slots a KV head can ever own, or None.
      ahead, doubling, uneven: as in ``state.reserve``.
    """
    needs = [_pages_for(pages, n, tokens, most) for pages, n in zip(pools, live)]
    if all(need <= pages.count for need, pages in zip(needs, pools)):
        return [pages.count for pages in pools]
    wants = [_pages_for(pages, n, max(tokens, ahead), most) for pages, n in zip(pools, live)]
    if doubling:
        wants = [max(want, min(2 * pages.count, 2 * want)) for want, pages in zip(wants, pools)]
    if uneven:
        sizes = familiar(tuple((p.table.shape, p.k.shape[1:], p.k.dtype) for p in pools), wants)
        return [max(size, pages.count) for size, pages in zip(sizes, pools)]
    # Layers within one class of the fullest take its class: which layer is a page fuller than its neighbour
    # depends on the text, and every combination of sizes would be a program of its own.
    lists = max(math.prod(pages.table.shape[:3]) for pages in pools)
    coming = lists * -(-max(tokens, ahead) // min(pages.size for pages in pools))
    shared = class_for(max(wants), coming)
    own = [class_for(want, coming) for want in wants]
    grown = [shared if 2 * shared <= 3 * size else size for size in own]
    # A bound that is known is taken exactly.
    bounds = [_most_pages(pages, most) for pages in pools]
    grown = [size if bound is None else min(size, bound) for size, bound in zip(grown, bounds)]
    return [max(size, pages.count) for size, pages in zip(grown, pools)]


_FAMILIAR: dict[Hashable, list[tuple[int, ...]]] = {}
"""Combinations of sizes that programs were compiled for, by the shapes of a page and its tables; the key that
was used last comes last."""

MOST_FAMILIAR = 256
"""Most keys of these, and most combinations of a key."""


def familiar(key: Hashable, wants: Sequence[int]) -> tuple[int, ...]:
    """Sizes for pools that want so many pages: a combination met before, where one holds them and fits well.

    Where each prompt says how much every layer keeps, hardly two agree, and every combination is a program
    of seconds. So layers take the fullest one's coarse class or that halved a few times; and a combination
    met before is taken again while it has at most a quarter more pages than these need, a tenth more for
    each that is known: the more programs there are, the more a further one has to save.
    """
    known, need = _FAMILIAR.pop(key, []), sum(wants)
    _FAMILIAR[key] = known
    while len(_FAMILIAR) > MOST_FAMILIAR:
        del _FAMILIAR[next(iter(_FAMILIAR))]
    most = (1.25 + 0.1 * len(known)) * need
    fitting = [one for one in known if sum(one) <= most and all(a >= b for a, b in zip(one, wants))]
    if fitting:
        return min(fitting, key=sum)
    fullest = coarse_class(max(wants))
    halved = [[fullest >> times for times in range(fullest.bit_length())] for _ in wants]
    sizes = tuple(min(x for x in ladder if x >= want) for ladder, want in zip(halved, wants))
    if sizes not in known:
        known.append(sizes)
        del known[:-MOST_FAMILIAR]
    return sizes


def _pages_for(pages: Pages, live: int, tokens: int, most: int | None) -> int:
    """Pages that suffice for ``live`` slots and ``tokens`` more a row, however they lie in the lists.

    Counted from slots, not from owned pages: how a ragged budget spreads a fixed number of slots over its
    heads depends on the text, and the size must not.
    """
    rows, heads, lists, _ = pages.table.shape
    need = live // pages.size + rows * heads * lists * (-(-tokens // pages.size) + 1)
    bound = _most_pages(pages, most)
    return need if bound is None else min(need, bound)


def _most_pages(pages: Pages, most: int | None) -> int | None:
    """Pages that suffice when no KV head can ever own more than ``most`` slots."""
    if most is None:
        return None
    rows, heads, lists, _ = pages.table.shape
    # Two lists split one head's slots and may each end in a page of their own.
    return rows * heads * (-(-most // pages.size) + lists - 1)


def empty(
    *,
    pages: int,
    size: int,
    rows: int,
    heads: int,
    lists: int,
    entries: int,
    width: int,
    dtype: jnp.dtype,
    scales: Any,
    meta: tuple[str, ...],
    summary: dict[str, tuple[int, ...]],
    arrays: Mapping[str, tuple[tuple[int, ...], str]] = {},
    summary_dtype: Any = jnp.float32,
    turned: bool = False,
) -> Pages:
    """A pool with all its pages free.

    Args:
      pages, size: P pages of S slots.
      rows, heads, lists, entries: B, K, R and M, the shape of the page table.
      width, dtype: elements that hold a key.
      scales, turned: see ``Storage``.
      meta: names of per-slot values.
      summary: shape of each per-page value.
      arrays: those of ``meta`` that are not one float32 a slot: shape and dtype.
      summary_dtype: of per-page values.
    """
    slot, put = (pages, size), jax.device_put  # what is small and no zero is made by NumPy
    leaves, tree = jax.tree.flatten(scales)
    of_scales = {f"scale {at}": ((pages, *leaf.shape), leaf.dtype) for at, leaf in enumerate(leaves)}
    of_parts = of_slots(slot, meta, arrays)
    of_pages = {f"page {name}": ((pages, *shape), summary_dtype) for name, shape in summary.items()}
    made = zeros(k=((*slot, width), dtype), v=((*slot, width), dtype), **of_scales, **of_parts, **of_pages)
    return Pages(
        k=made["k"],
        v=made["v"],
        scales=jax.tree.unflatten(tree, [made[name] for name in of_scales]),
        pos=put(np.full(slot, EMPTY, np.int32)),
        meta={name: made[name] for name in meta},
        summary={name: made[f"page {name}"] for name in summary},
        table=put(np.full((rows, heads, lists, entries), EMPTY, np.int32)),
        length=put(np.zeros((rows, heads, lists), np.int32)),
        refs=put(np.zeros(pages, np.int32)),
        free=put(np.arange(pages, dtype=np.int32)[::-1]),
        n_free=put(np.int32(pages)),
        overflow=put(np.False_),
        turned=turned,
    )


def resize(pages: Pages, count: int) -> Pages:
    """The same pages in a pool of ``count`` pages, renumbered list by list, as a prompt's lie.

    ``count`` must be at least the number of owned pages (the caller has read it).
    """
    owner = jnp.where(pages.refs > 0, pages.table.size, pages.table.size + 1)
    listed = jnp.where(pages.table >= 0, pages.table, pages.count).reshape(-1)
    owner = owner.at[listed].min(jnp.arange(pages.table.size), **DROP)
    order = jnp.argsort(owner, stable=True)  # those in a list, those held elsewhere, free ones
    where = jnp.argsort(order)  # old id -> new id
    kept = jnp.arange(count)
    source = order[jnp.minimum(kept, pages.count - 1)]
    owned = kept < jnp.sum(pages.refs > 0)

    def carry(x: jnp.ndarray) -> jnp.ndarray:
        mask = owned.reshape(-1, *([1] * (x.ndim - 1)))
        return jnp.where(mask, x[source], jnp.zeros((), x.dtype))

    n_free = count - jnp.sum(owned)
    return dataclasses.replace(
        pages,
        k=carry(pages.k),
        v=carry(pages.v),
        scales=jax.tree.map(carry, pages.scales),
        pos=carry(pages.pos),
        meta={name: carry(x) for name, x in pages.meta.items()},
        summary={name: carry(x) for name, x in pages.summary.items()},
        table=jnp.where(pages.table >= 0, where[jnp.maximum(pages.table, 0)], EMPTY),
        refs=carry(pages.refs),
        # The stack hands out low ids first: its top is the lowest free id.
        free=jnp.where(kept < n_free, count - 1 - kept, 0),
        n_free=n_free,
    )


def pick_rows(pages: Pages, index: jnp.ndarray, count: int) -> Pages:
    """The chosen rows in that order, each with pages of its own, in a pool of ``count`` pages.

    Rows are copied, not shared: every page of the result has exactly one owner.
    """
    table, length = pages.table[index], pages.length[index]
    entries = table.shape[-1]
    used = jnp.arange(entries) < (-(-length // pages.size))[..., None]
    flat = used.reshape(-1)
    rank = jnp.cumsum(flat) - 1
    total = flat.sum()
    fresh = jnp.where(flat, rank, count)
    origin = jnp.zeros(count, jnp.int32).at[fresh].set(jnp.maximum(table, 0).reshape(-1), **DROP)
    owned = jnp.arange(count) < total
    n_free = count - total
    return dataclasses.replace(
        pages,
        k=pages.k[origin],
        v=pages.v[origin],
        scales=jax.tree.map(lambda x: x[origin], pages.scales),
        pos=pages.pos[origin],
        meta={name: x[origin] for name, x in pages.meta.items()},
        summary={name: x[origin] for name, x in pages.summary.items()},
        table=jnp.where(used, rank.reshape(table.shape), EMPTY).astype(jnp.int32),
        length=length,
        refs=owned.astype(jnp.int32),
        free=jnp.where(jnp.arange(count) < n_free, count - 1 - jnp.arange(count), 0),
        n_free=n_free,
        overflow=pages.overflow | (total > count),
        shared=False,
    )
