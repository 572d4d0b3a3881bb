"""The copies of ragged_decode on TPU: an item's pages while the one before is read, its numbers before that.

item i - 2    asks for the numbers of item i, where SMEM has not all lists
item i - 1    waits for them, asks for the pages of item i
item i        waits for those, and reads
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import compat
from pallas_kernels.ragged_decode import worklist
from pallas_kernels.ragged_decode.worklist import ReadSizes

if TYPE_CHECKING:
    from jaxtyping import Array

LANES = 128
TURN = 4
"""Pages whose copies one turn of the loop starts."""

AHEAD = 4
"""Items whose numbers are in SMEM where they come by DMA: read, fetched, requested; and a power of 2."""


class Entries(NamedTuple):
    """The numbers of an item's pages: all lists in SMEM, flat; or in HBM, [W, 1, LANES], and a ring in SMEM.

    A row of LANES holds whole items. Of the ring each place has a semaphore.
    """

    lists: Any
    place: Any
    ring: Any = None
    sem: Any = None

    def of(self, item: Array, *, held: bool = False) -> Callable[[Array | int], Array]:
        """The number of each page of an item; ``held``: p is always a page that the item holds."""
        place = self.place[item]
        if self.ring is None:
            last = self.lists.shape[0] - 1
            return lambda p: self.lists[place + p if held else jnp.minimum(place + p, last)]
        row, first = item & (AHEAD - 1), place & (LANES - 1)
        return lambda p: self.ring[row, 0, first + p]

    def _copy(self, item: Array) -> Any:
        to, row = item & (AHEAD - 1), jax.lax.div(self.place[item], jnp.int32(LANES))
        return pltpu.make_async_copy(self.lists.at[row], self.ring.at[to], self.sem.at[to])

    def begin(self, item: Array) -> None:
        """Ask for an item's numbers."""
        if self.ring is not None:
            self._copy(item).start()

    def end(self, item: Array) -> None:
        if self.ring is not None:
            self._copy(item).wait()


class Fetch(NamedTuple):
    """The pages of an item: which pools, into which buffers, by way of which semaphores."""

    pools: tuple[Any, ...]
    buffers: tuple[Any, ...]
    sem: Any
    entries: Entries
    held: Any
    shift: int

    def begin(self, item: Array, side: Array) -> None:
        """Start all copies of an item, several pages a turn: turns of a loop cost time as well."""
        numbers, held = self.entries.of(item, held=True), self.held[item]

        def page(p: Array | int) -> None:
            at = numbers(p) >> self.shift
            for pool, buffer in zip(self.pools, self.buffers):
                pltpu.make_async_copy(pool.at[at], buffer.at[side, p], self.sem.at[side]).start()

        def turn(first: Array, carry: Array) -> Array:
            for p in range(TURN):
                page(first * TURN + p)
            return carry

        def rest(p: Array, carry: Array) -> Array:
            page(p)
            return carry

        whole = held // TURN
        jax.lax.fori_loop(0, whole, turn, jnp.int32(0))
        jax.lax.fori_loop(whole * TURN, held, rest, jnp.int32(0))

    def end(self, item: Array, side: Array) -> None:
        """Wait for all copies of an item: for the bytes of a full one at once."""
        held, most = self.held[item], self.buffers[0].shape[1]

        @pl.when(held == most)
        def _() -> None:
            for buffer in self.buffers:
                pltpu.make_async_copy(buffer.at[side], buffer.at[side], self.sem.at[side]).wait()

        @pl.when(held < most)
        def _() -> None:
            def page(p: Array, carry: Array) -> Array:
                for buffer in self.buffers:
                    pltpu.make_async_copy(buffer.at[side, p], buffer.at[side, p], self.sem.at[side]).wait()
                return carry

            jax.lax.fori_loop(0, held, page, jnp.int32(0))


def advance(fetch: Fetch, count: Any) -> tuple[Array, Array]:
    """Fetch the next item's pages and wait for this one's: (item, side of the buffers)."""
    item, entries = pl.program_id(0), fetch.entries
    side = jax.lax.rem(item, 2)

    @pl.when(item == 0)
    def _() -> None:
        entries.begin(item)

        @pl.when(count > 1)
        def _() -> None:
            entries.begin(item + 1)

        entries.end(item)
        fetch.begin(item, side)

    @pl.when(item + 2 < count)
    def _() -> None:
        entries.begin(item + 2)

    @pl.when(item + 1 < count)
    def _() -> None:
        entries.end(item + 1)
        fetch.begin(item + 1, 1 - side)

    fetch.end(item, side)
    return item, side


def listed(sizes: ReadSizes, packed: worklist.Packed) -> tuple[worklist.Items, Array, Array]:
    """Items, how many are real, and the numbers of their pages as ``Entries`` has them."""
    if not sizes.streamed:
        return *worklist.items(packed, sizes.blocks, sizes.per_item, sizes.slots), packed.entry.reshape(-1)
    entry = jnp.pad(packed.entry, ((0, 0), (0, -packed.entry.shape[1] % sizes.per_item)))
    items, count = worklist.items(packed._replace(entry=entry), sizes.blocks, sizes.per_item, sizes.slots)
    flat = jnp.pad(entry.reshape(-1), (0, -entry.size % LANES)).reshape(-1, 1, LANES)
    return items, count, flat if sizes.interpret is not False else compat.in_hbm(flat)
