"""Packing admitted keys on TPU: in one pass over keys and values, without a sort and without a gather.

128 tokens at a time meet a matrix that has a 1 where a token (column) goes to a place (row). Products with
such a matrix copy: a byte is exact in bfloat16, so arrays go through it as bytes, NaN as well as numbers, and
nothing spreads from one token to another. Places are those after what is staged already, which leaves in
whole blocks:

  staged        0 ............ n | next 128 tokens: k admitted     block = 512
  place of them                    n .. n + k - 1                  out[c] <- staged[0:512] once n + k >= 512
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import compat, tiles
from pallas_kernels.vertical_slash.compact import FAR, Compact, slots

if TYPE_CHECKING:
    from jaxtyping import Array, Int

LANES = 128
PLACES = 2 * LANES
"""Rows that 128 tokens may go to: their first place lies anywhere in the first 128."""


class Staged(NamedTuple):
    """What was packed and has not left.

    Attributes:
      bits: of keys and of values as float32, int32 [2, block + 128, H]; 0 where nothing is yet.
      pos: [1, block + 128], ``FAR`` where nothing is yet.
      leaving: keys and values in their own dtype, [2, block, H].
      count: how many keys are staged, and how many blocks have left.
      sem: of what leaves.
    """

    bits: Any
    pos: Any
    leaving: Any
    count: Any
    sem: Any


def _start(staged: Staged, first: int) -> None:
    """Nothing is staged from row ``first`` on."""
    for n in range(2):
        staged.bits[n, first:] = jnp.zeros_like(staged.bits[n, first:])
    staged.pos[:, first:] = jnp.full_like(staged.pos[:, first:], FAR)


def _leave(staged: Staged, out: tuple[Any, Any, Any], block: int, blocks: int) -> None:
    """The first block leaves, what lies behind it moves up. Blocks that nobody has room for are dropped."""
    b, kv, c = pl.program_id(0), pl.program_id(1), staged.count[1]

    @pl.when(c < blocks)
    def _() -> None:
        at = pl.ds(pl.multiple_of(c * block, block), block)
        for n in range(2):
            exact = jax.lax.bitcast_convert_type(staged.bits[n, :block], jnp.float32)
            staged.leaving[n] = exact.astype(staged.leaving.dtype)
        pos = pltpu.make_async_copy(staged.pos.at[:, pl.ds(0, block)], out[2].at[b, kv, :, at], staged.sem)
        copies = [
            pltpu.make_async_copy(staged.leaving.at[n], out[n].at[b, kv, at], staged.sem) for n in range(2)
        ]
        for copy in (*copies, pos):
            copy.start()
        for copy in (*copies, pos):
            copy.wait()

    for n in range(2):
        staged.bits[n, :LANES] = staged.bits[n, block:]
    staged.pos[:, :LANES] = staged.pos[:, block:]
    _start(staged, LANES)
    staged.count[0] -= block
    staged.count[1] = c + 1


def _stage(staged: Staged, place: Array, arrays: list[Array], token: Array, block: int) -> None:
    """128 more tokens, of which those with a place among the packed ones go there."""
    n = staged.count[0]
    base = pl.multiple_of(n // LANES * LANES, LANES)
    row = jax.lax.broadcasted_iota(jnp.int32, (PLACES, LANES), 0)
    goes = (place - staged.count[1] * block - base == row).astype(jnp.bfloat16)
    where = pl.ds(base, PLACES)
    for which, x in enumerate(arrays):
        bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
        for shift in (24, 16) if x.dtype == jnp.bfloat16 else (24, 16, 8, 0):
            byte = ((bits >> shift) & 255).astype(jnp.float32).astype(jnp.bfloat16)
            staged.bits[which, where] += tiles.product_nn(goes, byte).astype(jnp.int32) << shift
    # In one product: which of the 128 tokens went to a place, and whether any did.
    kind = jax.lax.broadcasted_iota(jnp.int32, (8, LANES), 0)
    lane = jax.lax.broadcasted_iota(jnp.int32, (8, LANES), 1)
    marks = jnp.where(kind == 0, lane, 1).astype(jnp.float32).astype(jnp.bfloat16)
    marked = tiles.product_nt(marks, goes)
    staged.pos[:, where] = jnp.where(
        marked[1:2] > 0, token + marked[:1].astype(jnp.int32), staged.pos[:, where]
    )
    staged.count[0] = n + jnp.sum((place >= 0).astype(jnp.float32)).astype(jnp.int32)


def _body(block: int, blocks: int) -> Any:
    def body(place: Any, k: Any, v: Any, *refs: Any) -> None:
        out, staged, step = refs[:3], Staged(*refs[3:]), pl.program_id(2)

        @pl.when(step == 0)
        def _() -> None:
            _start(staged, 0)
            staged.count[0] = 0
            staged.count[1] = 0

        def tokens(c: Array, carry: Array) -> Array:
            at = pl.ds(pl.multiple_of(c * LANES, LANES), LANES)
            _stage(staged, place[:, at], [k[at], v[at]], step * block + c * LANES, block)
            pl.when(staged.count[0] >= block)(lambda: _leave(staged, out, block, blocks))
            return carry

        jax.lax.fori_loop(0, block // LANES, tokens, jnp.int32(0))
        last = step == pl.num_programs(2) - 1
        pl.when(last & (staged.count[0] > 0))(lambda: _leave(staged, out, block, blocks))

    return body


def compact(
    k: Array, v: Array, upto: Int[Array, "B K S"], *, capacity: int, block: int, interpret: Any
) -> Compact:
    """``compact.compact`` in whole blocks, as far as they hold a key; what lies past them was never written.

    S and the capacity C are multiples of ``block``, which is a multiple of 128; ``upto`` is padded with its
    last number. Positions are [B, K, 1, C].
    """
    b, heads, s, h = k.shape
    wide = pl.BlockSpec((None, None, block, h), lambda b, k, i: (b, k, i, 0))
    row = pl.BlockSpec((None, None, 1, block), lambda b, k, i: (b, k, 0, i))
    elsewhere = pl.BlockSpec(memory_space=pl.ANY)
    shape = (b, heads, capacity, h)
    moved = 2 * k.dtype.itemsize * h * b * heads * (s + capacity)
    packed = pl.pallas_call(
        _body(block, capacity // block),
        grid=(b, heads, s // block),
        in_specs=[row, wide, wide],
        out_specs=[elsewhere] * 3,
        scratch_shapes=[
            pltpu.VMEM((2, block + LANES, h), jnp.int32),
            pltpu.VMEM((1, block + LANES), jnp.int32),
            pltpu.VMEM((2, block, h), k.dtype),
            pltpu.SMEM((2,), jnp.int32),
            pltpu.SemaphoreType.DMA,
        ],
        out_shape=[
            jax.ShapeDtypeStruct(shape, k.dtype),
            jax.ShapeDtypeStruct(shape, v.dtype),
            jax.ShapeDtypeStruct((b, heads, 1, capacity), jnp.int32),
        ],
        compiler_params=compat.tpu_params(("parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=4 * PLACES * h * k.dtype.itemsize * b * heads * s, transcendentals=0, bytes_accessed=moved
        ),
        interpret=interpret,
        name="vertical_pack",
    )(slots(upto)[:, :, None], k, v)
    return Compact(*packed)
