"""The admitted keys of every stream, packed and in order of position."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int

FAR = 2**30
"""The position of no token: later than any query, whatever the window."""


class Compact(NamedTuple):
    """Up to C admitted keys a stream.

    Attributes:
      k: keys; what lies past ``admitted`` is meaningless.
      v: values, 0 past ``admitted``.
      pos: ascending positions, ``FAR`` past ``admitted``.
      admitted: how many the stream admits. Where that exceeds C the latest ones are missing.
    """

    k: Float[Array, "B K C H"]
    v: Float[Array, "B K C H"]
    pos: Int[Array, "B K C"]
    admitted: Int[Array, "B K"]


def compact(
    k: Float[Array, "B K T H"],
    v: Float[Array, "B K T H"],
    admit: Bool[Array, "B K T"],
    *,
    capacity: int,
    lengths: Int[Array, " B"] | None = None,
) -> Compact:
    """Gather the admitted keys of each stream once, so that every later read of them is contiguous.

    Args:
      k, v: keys and values of right-padded rows.
      admit: which keys each KV head admits.
      capacity: C, static.
      lengths: tokens of each row; nothing past them is admitted. None: all.
    """
    at = jnp.arange(k.shape[2], dtype=jnp.int32)
    if lengths is not None:
        admit = admit & (at < lengths[:, None])[:, None]
    # Sorting positions is the one way to pack them that every platform runs well: TPUs scatter slowly.
    pos = jnp.sort(jnp.where(admit, at, FAR), axis=-1)[..., :capacity]
    index = jnp.minimum(pos, k.shape[2] - 1)[..., None]
    v = jnp.where((pos < FAR)[..., None], jnp.take_along_axis(v, index, axis=2), jnp.zeros((), v.dtype))
    return Compact(jnp.take_along_axis(k, index, axis=2), v, pos, jnp.sum(admit, axis=-1, dtype=jnp.int32))


def compact_and_clean(
    k: Float[Array, "B K T H"],
    v: Float[Array, "B K T H"],
    admit: Bool[Array, "B K T"],
    *,
    capacity: int,
    lengths: Int[Array, " B"] | None,
) -> tuple[Compact, Float[Array, "B K T H"], Int[Array, " B"]]:
    """What the bodies read: (``compact``'s result, v with zeros past each row's end, the ends)."""
    (b, _, t, _), packed = v.shape, compact(k, v, admit, capacity=capacity, lengths=lengths)
    if lengths is None:
        return packed, v, jnp.full(b, t, jnp.int32)
    ends = lengths.astype(jnp.int32)
    there = (jnp.arange(t) < ends[:, None])[:, None, :, None]
    return packed, jnp.where(there, v, jnp.zeros((), v.dtype)), ends


class Older(NamedTuple):
    """How many packed keys the queries of a block see beyond their windows: any of them, and all of them.

    Where a block has queries past its row's end, no key is seen by all.
    """

    some: Int[Array, "B K I"]
    whole: Int[Array, "B K I"]


def older(pos: Int[Array, "B K C"], ends: Int[Array, " B"], blocks: int, size: int, window: int) -> Older:
    """Of blocks of ``size`` queries."""
    start = jnp.arange(blocks, dtype=jnp.int32) * size
    last = jnp.minimum(start + size, ends[:, None]) - 1
    both = jnp.concatenate([last, jnp.broadcast_to(start, last.shape)], axis=1)
    found = jax.vmap(jax.vmap(_upto, in_axes=(0, None)))(pos, both - window).astype(jnp.int32)
    some, whole = jnp.split(found, 2, axis=2)
    begun, full = ((start + n <= ends[:, None])[:, None] for n in (1, size))
    return Older(jnp.where(begun, some, 0), jnp.where(full, whole, 0))


def _upto(pos: Int[Array, " C"], last: Int[Array, " I"]) -> Int[Array, " I"]:
    return jnp.searchsorted(pos, last, side="right")


def loudly(
    out: Float[Array, "B N T H"], lse: Float[Array, "B N T"], admitted: Int[Array, "B K"], capacity: int
) -> tuple[Float[Array, "B N T H"], Float[Array, "B N T"], Int[Array, "B K"]]:
    """The answer of a read of compacted keys, NaN with its gradient where a query head's keys did not fit."""
    if capacity < out.shape[2]:
        lost = jnp.repeat(admitted > capacity, out.shape[1] // admitted.shape[1], axis=1)[..., None]
        factor = jnp.where(lost, jnp.nan, 1.0)  # in a gradient, too
        out, lse = out * factor[..., None], lse * factor
    return out, lse, admitted
