"""vertical_slash on Hopper (H100, H200), in Pallas' Mosaic GPU: what is left when Pallas' Triton is gone.

The kernel is ``hopper_prefill``'s, of two parts of keys: the packed ones, and the row's own as a band. Tiles
come in ranges, which are computed for each block of queries.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from pallas_kernels import hopper_plan, hopper_prefill, tuning
from pallas_kernels.blockwise.plan import padded
from pallas_kernels.hopper_plan import FAR, Keys, Place, Queries, Visit
from pallas_kernels.tuning import Blocks
from pallas_kernels.vertical_slash import compact
from pallas_kernels.vertical_slash.tiles import Reach, Rule, reach

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

    from pallas_kernels.tuning import Tuned

BLOCKS = Blocks(k=128, stages=4)
"""Keys of a tile, and buffers of keys if so many fit."""

PACKED, BAND = 0, 1
"""The parts of the keys."""


class Ranged:
    """The course of ``ranges``."""

    def counts(self, refs: list[Any], place: Place) -> tuple[Array, Array]:
        """See ``Course``."""
        packed_whole, packed, first, whole, end_of_whole, end, _ = self._mine(refs, place)
        return packed_whole + end_of_whole - whole, packed + end - first

    def visit(self, refs: list[Any], place: Place, c: Array) -> Visit:
        """See ``Course``: packed tiles seen whole, those of the band, packed edges, the band's two ends."""
        packed_whole, packed, first, whole, end_of_whole, _, unclean = self._mine(refs, place)
        inner = end_of_whole - whole
        edge = c - inner  # of packed tiles alone
        band = c - packed + first  # of the band's edges, as if all of it were edges
        in_whole = (c >= packed_whole) & (c < packed_whole + inner)
        in_packed = (c < packed_whole) | ((edge >= packed_whole) & (edge < packed))
        outer = band - inner
        tile = jnp.where(outer < whole, outer, band)
        tile = jnp.where(in_whole, c - packed_whole + whole, tile)
        tile = jnp.where(in_packed, jnp.where(c < packed_whole, c, edge), tile)
        part = jnp.where(in_packed, PACKED, BAND)
        return Visit(part, tile, jnp.where((part == BAND) & (tile >= unclean), 1, 0))

    def _mine(self, refs: list[Any], place: Place) -> list[Array]:
        (found,) = refs
        block = jax.lax.rem(place.block, jnp.int32(found.shape[2]))
        return [found[place.row, place.head, block, n] for n in range(7)]


def ranges(
    pos: Int[Array, "B K C"], ends: Int[Array, " B"], blocks: int, size: int, block: int, window: int
) -> Int[Array, "B K I 7"]:
    """Which tiles of ``block`` keys each of ``blocks`` blocks of ``size`` queries reads.

    Numbers of tiles: packed ones up to [1], of which those up to [0] are seen whole; of the band from [2] to
    [5], of which those from [3] to [4] are; in those from [6] on values may hold anything.
    """
    found = compact.older(pos, ends, blocks, size, window)
    start, length = jnp.arange(blocks, dtype=jnp.int32) * size, ends[:, None]
    last = start + size - 1
    first = jnp.maximum(start - window + 1, 0) // block
    end = jnp.where(start < length, -(-jnp.minimum(start + size, length) // block), first)
    end = jnp.maximum(end, first) if window else jnp.broadcast_to(first, end.shape)
    whole = jnp.clip((last - window) // block + 1, first, end)
    end_of_whole = jnp.clip((start + 1) // block, whole, end)
    end_of_whole = jnp.where(start + size <= length, end_of_whole, whole)
    band = [
        jnp.broadcast_to(x, end.shape)[:, None] for x in (first, whole, end_of_whole, end, length // block)
    ]
    packed = [found.whole // block, -(-found.some // block)]
    return jnp.stack([*packed, *(jnp.broadcast_to(x, found.some.shape) for x in band)], axis=-1)


def _sees(found: Reach, groups: int) -> Int[Array, "B 2 2 R"]:
    """As ``Queries`` has it: of packed keys those older than the window are seen, of the band the rest."""
    older, newest = found
    both = jnp.stack([jnp.stack([older, jnp.full_like(older, -1)], 1), jnp.stack([newest, older], 1)], 1)
    return jnp.tile(both, (1, 1, 1, groups))


@functools.partial(jax.jit, static_argnames=("rule", "blocks", "interpret"))
def vertical_slash(
    q: Array,
    k: Array,
    v: Array,
    admit: Array,
    lengths: Array | None,
    *,
    rule: Rule,
    blocks: Tuned | tuple[int, int] = (),
    interpret: Any = False,
) -> tuple[Float[Array, "B N T H"], Float[Array, "B N T"], Int[Array, "B K"]]:
    """See ``api.vertical_slash``."""
    hopper_plan.refuse("vertical_slash", k, interpret)
    (b, n, t, h), heads = q.shape, k.shape[1]
    found = tuning.pick(blocks, "forward", k.dtype, h, BLOCKS)
    plan = hopper_plan.Plan(
        "vertical_slash", h, found.k, found.stages, 2, rule.scale, rule.softcap, True, interpret or None
    )
    plan = plan._replace(stages=hopper_plan.buffers(plan))
    packed = compact.compact(k, v, admit, capacity=rule.capacity, lengths=lengths)
    ends = jnp.full(b, t, jnp.int32) if lengths is None else lengths.astype(jnp.int32)
    size = max(plan.queries, plan.block)
    q, k, v = (padded(x, 2, size) for x in (q.astype(k.dtype), k, v))
    i = jnp.arange(q.shape[2], dtype=jnp.int32)
    own = jnp.where(i < ends[:, None], i, FAR)
    pos = padded(packed.pos, 2, plan.block, compact.FAR)
    parts = [
        Keys(padded(packed.k, 2, plan.block), padded(packed.v, 2, plan.block), pos, None),
        Keys(k, v, own[:, None], None),
    ]
    rows = q.reshape(b, heads, -1, h)
    queries = Queries(rows, _sees(reach(i, ends[:, None], rule), n // heads))
    course = ranges(pos, ends, q.shape[2] // plan.queries, plan.queries, plan.block, rule.window)
    out, lse = hopper_prefill.read(plan, Ranged(), queries, parts, [course])
    out, lse = out.reshape(b, n, -1, h)[:, :, :t], lse.reshape(b, n, -1)[:, :, :t]
    return compact.loudly(out, lse, packed.admitted, rule.capacity)
