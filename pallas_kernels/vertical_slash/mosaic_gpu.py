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
from pallas_kernels.vertical_slash.compact import Rows
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
        packed_whole, packed, first, whole, end_of_whole, end, *_ = self._mine(refs, place)
        return packed_whole + end_of_whole - whole, packed + end - first

    def visit(self, refs: list[Any], place: Place, c: Array) -> Visit:
        """See ``Course``: packed tiles seen whole, those of the band, packed edges, the band's two ends."""
        packed_whole, packed, first, whole, end_of_whole, _, unclean, *_ = self._mine(refs, place)
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

    def lost(self, refs: list[Any], place: Place) -> Array | None:
        """See ``Course``."""
        return self._mine(refs, place)[7] > 0 if refs[0].shape[3] > 7 else None

    def _mine(self, refs: list[Any], place: Place) -> list[Array]:
        (found,) = refs
        block = jax.lax.rem(place.block, jnp.int32(found.shape[2]))
        return [found[place.row, place.head, block, n] for n in range(found.shape[3])]


def ranges(
    upto: Int[Array, "B K S"], rows: Rows, blocks: int, size: int, block: int, rule: Rule
) -> Int[Array, "B K I X"]:
    """Which tiles of ``block`` keys each of ``blocks`` blocks of ``size`` queries reads.

    Numbers of tiles: packed ones up to [1], of which those up to [0] are seen whole; of the band from [2] to
    [5], of which those from [3] to [4] are; in those from [6] on values may hold anything. Where a stream may
    admit more than fits, [7] is 1 where it does.
    """
    window, found = rule.window, compact.older(upto, rows, blocks, size, rule.window, rule.capacity)
    start = rows.start[:, None] + jnp.arange(blocks, dtype=jnp.int32) * size
    length, last = rows.end[:, None], start + size - 1
    first = jnp.maximum(start - window + 1, 0) // block
    end = jnp.where(start < length, -(-jnp.minimum(start + size, length) // block), first)
    end = jnp.maximum(end, first) if window else first
    whole = jnp.clip((last - window) // block + 1, first, end)
    end_of_whole = jnp.clip((start + 1) // block, whole, end)
    end_of_whole = jnp.where(start + size <= length, end_of_whole, whole)
    each = [found.whole // block, -(-found.some // block)]
    each += [x[:, None] for x in (first, whole, end_of_whole, end, length // block)]
    full = compact.lost(upto, rule.capacity)
    each += [] if full is None else [full[..., None].astype(jnp.int32)]
    return jnp.stack([jnp.broadcast_to(x, found.some.shape) for x in each], axis=-1)


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
    offset: Array | None = None,
    *,
    rule: Rule,
    blocks: Tuned | tuple[int, int] = (),
    interpret: Any = False,
) -> tuple[Float[Array, "B N T H"], Float[Array, "B N T"], Int[Array, "B K"]]:
    """See ``api.vertical_slash``."""
    hopper_plan.refuse("vertical_slash", k, interpret)
    (b, n, t, h), heads = q.shape, k.shape[1]
    found, rows = tuning.pick(blocks, "forward", k.dtype, h, BLOCKS), compact.rows_of(k, lengths, offset)
    plan = hopper_plan.Plan(
        "vertical_slash", h, found.k, found.stages, 2,
        rule.scale, rule.softcap, True, rule.dtype, interpret or None,
    )  # fmt: skip
    plan = plan._replace(stages=hopper_plan.buffers(plan))
    upto = compact.admitted_upto(admit, rows.end)
    packed = compact.compact(k, v, upto, rule.capacity)
    q = padded(q.astype(k.dtype), 2, plan.queries)
    k, v = (padded(x, 2, plan.block) for x in (k, v))
    end, at = rows.end[:, None], jnp.arange(k.shape[2], dtype=jnp.int32)
    pos = padded(packed.pos, 2, plan.block, compact.FAR)
    parts = [
        Keys(padded(packed.k, 2, plan.block), padded(packed.v, 2, plan.block), pos, None),
        Keys(k, v, jnp.where(at < end, at, FAR)[:, None], None),
    ]
    i = rows.start[:, None] + jnp.arange(q.shape[2], dtype=jnp.int32)
    queries = Queries(q.reshape(b, heads, -1, h), _sees(reach(i, end, rule), n // heads))
    course = ranges(upto, rows, q.shape[2] // plan.queries, plan.queries, plan.block, rule)
    out, lse = hopper_prefill.read(plan, Ranged(), queries, parts, [course])
    out, lse = out.reshape(b, n, -1, h)[:, :, :t], lse.reshape(b, n, -1)[:, :, :t]
    return out, lse, upto[..., -1]
