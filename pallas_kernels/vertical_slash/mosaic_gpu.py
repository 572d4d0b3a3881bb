"""vertical_slash on Hopper (H100, H200), in Pallas' Mosaic GPU: what is left when Pallas' Triton is gone.

The kernel is ``hopper_prefill``'s, of two parts of keys: the packed ones, and the row's own as a band. Tiles
come in ranges, which are computed for each block of queries.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from pallas_kernels import hopper_operands, hopper_prefill, tuning
from pallas_kernels.hopper_operands import FAR, Keys, KeyTile, Program, Queries
from pallas_kernels.padding import pad_to_multiple
from pallas_kernels.tuning import Blocks, Tuned
from pallas_kernels.vertical_slash import compact
from pallas_kernels.vertical_slash.compact import Inputs, Rows
from pallas_kernels.vertical_slash.tiles import Reach, Rule, reach

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

BLOCKS = Blocks(k=128, stages=4)
"""Keys of a tile, and buffers of keys if so many fit."""

PACKED, BAND = 0, 1
"""The parts of the keys."""


class Ranged:
    """The order of ``ranges``."""

    def counts(self, refs: list[Any], program: Program) -> tuple[Array, Array]:
        packed_whole, packed, first, whole, end_of_whole, end, *_ = self._numbers(refs, program)
        return packed_whole + end_of_whole - whole, packed + end - first

    def tile(self, refs: list[Any], program: Program, c: Array) -> KeyTile:
        """Packed tiles seen whole, those of the band, packed edges, the band's two ends."""
        packed_whole, packed, first, whole, end_of_whole, _, unclean, *_ = self._numbers(refs, program)
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
        return KeyTile(part, tile, jnp.where((part == BAND) & (tile >= unclean), 1, 0))

    def lost(self, refs: list[Any], program: Program) -> Array | None:
        return self._numbers(refs, program)[7] > 0 if refs[0].shape[3] > 7 else None

    def _numbers(self, refs: list[Any], program: Program) -> list[Array]:
        (numbers,) = refs
        block = jax.lax.rem(program.block, jnp.int32(numbers.shape[2]))
        return [numbers[program.row, program.head, block, n] for n in range(numbers.shape[3])]


def ranges(
    upto: Int[Array, "B K S"], rows: Rows, blocks: int, size: int, block: int, rule: Rule
) -> Int[Array, "B K I X"]:
    """Which tiles of ``block`` keys each of ``blocks`` blocks of ``size`` queries reads.

    Numbers of tiles: packed ones up to [1], of which those up to [0] are seen whole; of the band from [2] to
    [5], of which those from [3] to [4] are; in those from [6] on values may hold anything. If a KV head may
    admit more than fits, [7] is 1 where it does.
    """
    window, packed = rule.window, compact.older(upto, rows, blocks, size, rule.window, rule.capacity)
    start = rows.start[:, None] + jnp.arange(blocks, dtype=jnp.int32) * size
    length, last = rows.end[:, None], start + size - 1
    first = jnp.maximum(start - window + 1, 0) // block
    end = jnp.where(start < length, -(-jnp.minimum(start + size, length) // block), first)
    end = jnp.maximum(end, first) if window else first
    whole = jnp.clip((last - window) // block + 1, first, end)
    end_of_whole = jnp.clip((start + 1) // block, whole, end)
    end_of_whole = jnp.where(start + size <= length, end_of_whole, whole)
    each = [packed.whole // block, -(-packed.some // block)]
    each += [x[:, None] for x in (first, whole, end_of_whole, end, length // block)]
    full = compact.lost(upto, rule.capacity)
    each += [] if full is None else [full[..., None].astype(jnp.int32)]
    return jnp.stack([jnp.broadcast_to(x, packed.some.shape) for x in each], axis=-1)


def _sees(visible: Reach, groups: int) -> Int[Array, "B 2 2 R"]:
    """As ``Queries`` has it: of packed keys those older than the window are seen, of the band the rest."""
    older, newest = visible
    both = jnp.stack([jnp.stack([older, jnp.full_like(older, -1)], 1), jnp.stack([newest, older], 1)], 1)
    return jnp.tile(both, (1, 1, 1, groups))


@functools.partial(jax.jit, static_argnames=("rule", "blocks", "interpret"))
def vertical_slash(
    x: Inputs, *, rule: Rule, blocks: Tuned | tuple[int, int] = (), interpret: Any = False
) -> tuple[Float[Array, "B N T H"], Float[Array, "B N T"], Int[Array, "B K"]]:
    """See ``api.vertical_slash``."""
    q, k, v, admit, *_ = x
    hopper_operands.refuse("vertical_slash", k, interpret)
    (b, n, t, h), heads = q.shape, k.shape[1]
    chosen, rows = tuning.pick(blocks, "forward", k.dtype, h, BLOCKS), compact.rows_of(x)
    sizes = hopper_operands.PrefillSizes(
        "vertical_slash", h, chosen.k, chosen.stages, 2,
        rule.scale, rule.softcap, True, rule.dtype, interpret or None,
    )  # fmt: skip
    sizes = sizes._replace(stages=hopper_operands.buffers(sizes))
    upto = compact.admitted_upto(admit, rows.end)
    packed = compact.compact(k, v, upto, rule.capacity)
    q = pad_to_multiple(q.astype(k.dtype), 2, sizes.queries)
    k, v = (pad_to_multiple(x, 2, sizes.block) for x in (k, v))
    end, at = rows.end[:, None], jnp.arange(k.shape[2], dtype=jnp.int32)
    pos = pad_to_multiple(packed.pos, 2, sizes.block, compact.FAR)
    parts = [
        Keys(
            pad_to_multiple(packed.k, 2, sizes.block),
            pad_to_multiple(packed.v, 2, sizes.block),
            pos,
            None,
        ),
        Keys(k, v, jnp.where(at < end, at, FAR)[:, None], None),
    ]
    i = rows.start[:, None] + jnp.arange(q.shape[2], dtype=jnp.int32)
    queries = Queries(q.reshape(b, heads, -1, h), _sees(reach(i, end, rule), n // heads))
    order = ranges(upto, rows, q.shape[2] // sizes.queries, sizes.queries, sizes.block, rule)
    out, lse = hopper_prefill.read(sizes, Ranged(), queries, parts, [order])
    out, lse = out.reshape(b, n, -1, h)[:, :, :t], lse.reshape(b, n, -1)[:, :, :t]
    return out, lse, upto[..., -1]
