"""Pools of a state, and the same pools with slots in another order or with poison where no token is."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.pages import Pages
from kvjax.cache.state import KVState

POISON = 1e4


def paged(state: KVState) -> list[Pages]:
    return [pages for layer in state.layers for pages in layer.pools]


def with_pages(state: KVState, pages: list[Pages]) -> KVState:
    """The state with its paged layers' pages replaced, in order."""
    new = iter(pages)
    layers = tuple(layer.with_pools([next(new) for _ in layer.pools]) for layer in state.layers)
    return dataclasses.replace(state, layers=layers)


def shuffled(pages: Pages, random: np.random.Generator, group: int, together: bool) -> Pages:
    """The same room with other page ids, full pages in another order, and slots permuted inside groups.

    ``together``: in the same way for all heads of a row, whose lists hold the same tokens in the same order.
    """
    p: Pages = jax.device_get(pages)
    seeds = random.integers(2**32, size=p.length.shape)
    seeds = np.broadcast_to(seeds[:, :1], seeds.shape) if together else seeds
    ids = random.permutation(p.count)
    table = np.where(p.table >= 0, ids[np.maximum(p.table, 0)], -1).astype(np.int32)
    slot = np.tile(np.arange(p.size), (p.count, 1))
    for at, length in np.ndenumerate(p.length):
        full, generator = length // p.size, np.random.default_rng(seeds[at])
        table[at][:full] = generator.permutation(table[at][:full])
        for i, page in enumerate(table[at]):
            for begin in range(0, min(p.size, length - i * p.size), group):
                end = min(begin + group, length - i * p.size)
                slot[page, begin:end] = generator.permutation(np.arange(begin, end))
    back = np.argsort(ids)

    def move(x: np.ndarray) -> np.ndarray:
        return np.asarray(x)[back]

    def mix(x: np.ndarray) -> np.ndarray:
        return move(x)[np.arange(p.count)[:, None], slot]

    free = p.free.copy()
    free[: int(p.n_free)] = random.permutation(ids[p.free[: int(p.n_free)]])
    moved = dataclasses.replace(
        p,
        k=mix(p.k),
        v=mix(p.v),
        scales=jax.tree.map(lambda x: mix(x) if x.shape[1] == p.size else move(x), p.scales),
        pos=mix(p.pos),
        meta={n: mix(x) for n, x in p.meta.items()},
        summary={n: move(x) for n, x in p.summary.items()},
        table=table,
        refs=move(p.refs),
        free=free,
    )
    return jax.tree.map(jnp.array, moved)


def order(pages: Pages) -> list[int]:
    """Positions of all lists as they stand."""
    p: Pages = jax.device_get(pages)
    return [int(p.pos[at]) for stream, n in np.ndenumerate(p.length) for at in slots(p, stream, n)]


def slots(p: Pages, stream: tuple[int, ...], length: int) -> list[tuple[int, int]]:
    """Where the tokens of a list are: (page, slot)."""
    return [(p.table[stream][i // p.size], i % p.size) for i in range(length)]


def dead(pages: Pages) -> np.ndarray:
    """Slots of the pool that hold no token, [P, S]."""
    p: Pages = jax.device_get(pages)
    free = np.ones((p.count, p.size), bool)
    for stream, n in np.ndenumerate(p.length):
        for at in slots(p, stream, n):
            free[at] = False
    return free


def spoil(x: jax.Array, where: np.ndarray, value: float = POISON) -> jax.Array:
    """``value`` (codes: 127) where it says so; NumPy's, for which nothing is compiled."""
    value = 127 if x.dtype.itemsize == 1 else value
    where = where.reshape(*where.shape, *[1] * (x.ndim - where.ndim))
    return jnp.array(np.where(where, value, np.asarray(x)).astype(x.dtype))


def poisoned(pages: Pages) -> Pages:
    """1e4 (codes: 127, positions: 1) in every dead slot, and in all a free page owns."""
    slot, free = dead(pages), np.asarray(pages.refs) == 0
    return dataclasses.replace(
        pages,
        k=spoil(pages.k, slot),
        v=spoil(pages.v, slot),
        pos=spoil(pages.pos, slot, 1),
        meta={n: spoil(x, slot, sign * POISON) for sign, (n, x) in zip((1, -1), pages.meta.items())},
        scales=jax.tree.map(lambda x: spoil(x, slot if x.shape[1] == pages.size else free), pages.scales),
        summary={n: spoil(x, free) for n, x in pages.summary.items()},
    )
