"""The admitted keys of every KV head, packed and in order of position."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int

FAR = 2**30
"""The position of no token: later than any query, whatever the window."""


class Compact(NamedTuple):
    """Up to C admitted keys a KV head.

    Attributes:
      k: keys; what lies past ``admitted`` is meaningless.
      v: values, 0 past ``admitted``.
      pos: ascending positions, ``FAR`` past ``admitted``.
    """

    k: Float[Array, "B K C H"]
    v: Float[Array, "B K C H"]
    pos: Int[Array, "B K C"]


class Rows(NamedTuple):
    """Where the queries and keys of each row are.

    Attributes:
      start: position of each row's first query.
      end: tokens of each row.
    """

    start: Int[Array, " B"]
    end: Int[Array, " B"]


class Inputs(NamedTuple):
    """Arrays of a call, as in ``api.vertical_slash``."""

    q: Float[Array, "B N T H"]
    k: Float[Array, "B K S H"]
    v: Float[Array, "B K S H"]
    admit: Bool[Array, "B K S"]
    lengths: Int[Array, " B"] | None
    offset: Int[Array, " B"] | None = None


def rows_of(x: Inputs) -> Rows:
    """All keys are there where ``lengths`` is None; the first query is the row's first token by default."""
    (b, _, s, _), none = x.k.shape, jnp.zeros(len(x.k), jnp.int32)
    end = jnp.full(b, s, jnp.int32) if x.lengths is None else x.lengths.astype(jnp.int32)
    return Rows(none if x.offset is None else x.offset.astype(jnp.int32), end)


def admitted_upto(admit: Bool[Array, "B K S"], end: Int[Array, " B"]) -> Int[Array, "B K S"]:
    """How many keys each KV head admits up to each position, that position's own included."""
    there = jnp.arange(admit.shape[2], dtype=jnp.int32) < end[:, None]
    return jnp.cumsum(admit & there[:, None], axis=-1, dtype=jnp.int32)


def slots(upto: Int[Array, "B K S"]) -> Int[Array, "B K S"]:
    """The place of each admitted key among those of its KV head, -1 of others."""
    before = jnp.pad(upto[..., :-1], ((0, 0), (0, 0), (1, 0)))
    return jnp.where(upto > before, before, -1)


def compact(
    k: Float[Array, "B K S H"], v: Float[Array, "B K S H"], upto: Int[Array, "B K S"], capacity: int
) -> Compact:
    """Gather the admitted keys of each KV head once, so that every later read of them is contiguous.

    Args:
      k, v: keys and values of right-padded rows.
      upto: see ``admitted_upto``.
      capacity: C, static. If a KV head admits more, the latest are missing.
    """
    b, heads, s = upto.shape
    row, head = jnp.arange(b)[:, None, None], jnp.arange(heads)[:, None]
    at = jnp.broadcast_to(jnp.arange(s, dtype=jnp.int32), upto.shape)
    place = slots(upto)
    place = jnp.where(place >= 0, place, capacity + at)  # out of range: dropped
    pos = jnp.full((b, heads, capacity), FAR, jnp.int32)
    pos = pos.at[row, head, place].set(at, mode="drop", unique_indices=True)
    index = jnp.minimum(pos, s - 1)[..., None]
    v = jnp.where((pos < FAR)[..., None], jnp.take_along_axis(v, index, axis=2), jnp.zeros((), v.dtype))
    return Compact(jnp.take_along_axis(k, index, axis=2), v, pos)


def cleaned(v: Float[Array, "B K S H"], end: Int[Array, " B"]) -> Float[Array, "B K S H"]:
    """With zeros past each row's end, since a weight of 0 times NaN is NaN."""
    there = (jnp.arange(v.shape[2]) < end[:, None])[:, None, :, None]
    return jnp.where(there, v, jnp.zeros((), v.dtype))


class Older(NamedTuple):
    """How many packed keys the queries of a block see beyond their windows: any of them, and all of them.

    Where a block has queries past its row's end, no key is seen by all.
    """

    some: Int[Array, "B K I"]
    whole: Int[Array, "B K I"]


def older(upto: Int[Array, "B K S"], rows: Rows, blocks: int, size: int, window: int, capacity: int) -> Older:
    """Of blocks of ``size`` queries."""
    start = rows.start[:, None] + jnp.arange(blocks, dtype=jnp.int32) * size
    end = rows.end[:, None]
    some = seen(upto, jnp.minimum(start + size, end) - 1 - window, capacity)
    whole = seen(upto, start - window, capacity)
    begun, full = (start < end)[:, None], (start + size <= end)[:, None]
    return Older(jnp.where(begun, some, 0), jnp.where(full, whole, 0))


def seen(upto: Int[Array, "B K S"], last: Int[Array, "B I"], capacity: int) -> Int[Array, "B K I"]:
    """How many packed keys lie at positions up to ``last``, which may be negative or past the end."""
    index = jnp.clip(last, 0, upto.shape[2] - 1)[:, None]
    count = jnp.take_along_axis(upto, jnp.broadcast_to(index, (*upto.shape[:2], last.shape[1])), axis=2)
    return jnp.where((last >= 0)[:, None], jnp.minimum(count, capacity), 0)


def lost(upto: Int[Array, "B K S"], capacity: int) -> Bool[Array, "B K"] | None:
    """Which KV heads admit more than fits; None where none can."""
    return upto[..., -1] > capacity if capacity < upto.shape[2] else None


def expected(queries: int, keys: int, window: int, capacity: int) -> int:
    """Keys that a query sees, of packed ones that lie evenly, if queries are the last; for cost estimates."""
    return min(keys, window + capacity - capacity * queries // (2 * keys))


def loudly(
    out: Float[Array, "B N T H"], lse: Float[Array, "B N T"], lost: Bool[Array, "B K"] | None
) -> tuple[Float[Array, "B N T H"], Float[Array, "B N T"]]:
    """The answer of a read of packed keys, NaN with its gradient where a query head's keys did not fit."""
    if lost is None:
        return out, lse
    factor = jnp.where(jnp.repeat(lost, out.shape[1] // lost.shape[1], axis=1), jnp.nan, 1.0)[..., None]
    return out * factor[..., None].astype(out.dtype), lse * factor  # in a gradient, too
