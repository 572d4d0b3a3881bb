"""The ring: the last W tokens of every row, exact, in the model's own dtype.

Slot j of a row that has seen n tokens holds the newest position p < n with p mod W = j, so neither
cursor nor positions are stored. W = 4, n = 6 (tokens 0 .. 5 seen):

  slot       0  1  2  3
  position   4  5  2  3      the next token (6) lands in slot 2; token 2 leaves the window first

Why: kvjax/DESIGN.md, 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from kvjax.cache.write import along, one_slot, scattered, split
from kvjax.cache.zeros import of_slots, zeros
from kvjax.sharding.specs import HEADS, ROWS
from kvjax.types import EMPTY, pytree

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int


@pytree()
@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """T tokens on their way into a ring or pages, or out.

    Attributes:
      k, v: keys after RoPE, and values.
      pos: true position of each token, or EMPTY where there is none.
      admit: may the token outlive the window? One bit per KV head.
      meta: values a policy part keeps with every token, by name; they move wherever the token moves.
      queries: the tokens' queries, by name, where an eviction looks at them later; of a whole prompt only the
        newest, laid as in a ring (``newest``).
    """

    k: Float[Array, "B K T H"]
    v: Float[Array, "B K T H"]
    pos: Int[Array, "B T"]
    admit: Bool[Array, "B K T"]
    meta: dict[str, Float[Array, "B K T"]]
    queries: dict[str, Float[Array, "B N T H"]] = dataclasses.field(default_factory=dict)

    def specs(self) -> Any:
        """How it is cut over devices."""
        return dataclasses.replace(jax.tree.map(lambda _: HEADS, self), pos=ROWS)


ENTRY: Any = Entry(k=HEADS, v=HEADS, pos=ROWS, admit=HEADS, meta=HEADS, queries=HEADS)  # type: ignore[arg-type]
"""``Entry.specs`` of an entry that is not made yet."""


@pytree()
@dataclasses.dataclass(frozen=True, kw_only=True)
class Ring:
    """The recent tokens of one layer.

    Attributes:
      k, v: keys after RoPE, and values; slots never written hold zeros.
      admit: the verdict that acts when the token leaves.
      meta: per-slot values of policy parts.
      queries: the newest Q queries of every head, by name (``q`` after RoPE, ``q_pre`` before), where an
        eviction ranks by them while decoding; a ring like the keys', of its own length.
    """

    k: Float[Array, "B K W H"]
    v: Float[Array, "B K W H"]
    admit: Bool[Array, "B K W"]
    meta: dict[str, Float[Array, "B K W"]]
    queries: dict[str, Float[Array, "B N Q H"]] = dataclasses.field(default_factory=dict)

    @property
    def window(self) -> int:
        """W, the number of slots."""
        return self.k.shape[2]


def empty(
    rows: int,
    heads: int,
    window: int,
    head_dim: int,
    dtype: jnp.dtype,
    meta: tuple[str, ...] = (),
    arrays: Mapping[str, tuple[tuple[int, ...], str]] = {},
    queries: Mapping[str, tuple[int, int]] = {},
) -> Ring:
    """A ring that has seen nothing.

    Args:
      rows, heads, window, head_dim: its sizes.
      dtype: of keys, values and queries.
      meta: names of the values that are kept with every slot.
      arrays: those of ``meta`` that are not one float32 a slot.
      queries: N and Q of each kind of queries it holds.
    """
    shape = (rows, heads, window)
    of_parts = of_slots(shape, meta, arrays)
    asked = {f"queries {name}": ((rows, *sizes, head_dim), dtype) for name, sizes in queries.items()}
    made = zeros(
        k=((*shape, head_dim), dtype), v=((*shape, head_dim), dtype), admit=(shape, bool), **of_parts, **asked
    )
    return Ring(
        k=made["k"],
        v=made["v"],
        admit=made["admit"],
        meta={name: made[name] for name in meta},
        queries={name: made[f"queries {name}"] for name in queries},
    )


def positions(length: Int[Array, " B"], window: int) -> Int[Array, "B W"]:
    """The position each slot holds after ``length`` tokens, EMPTY where none was written yet."""
    last = length[:, None] - 1
    pos = last - split(last - jnp.arange(window)[None, :] + window, window)[1]
    return jnp.where((pos >= 0) & (last >= 0), pos, EMPTY)


def put(ring: Ring, new: Entry, length: Int[Array, " B"], count: Int[Array, " B"]) -> Ring:
    """Write the newest min(count, W) of ``count`` arriving tokens; rows write nothing past their count.

    Args:
      ring: the ring after ``length`` tokens.
      new: T arriving tokens at positions length .. length + T - 1, of which ``count`` are real.
      length: tokens each row had seen.
      count: real tokens of each row, 0 .. T.
    """
    rows, _, t, _ = new.k.shape
    step = jnp.arange(t)[None, :]

    def write(old: Array, value: Array) -> Array:
        heads, slots = old.shape[1:3]
        stays = (step < count[:, None]) & (step >= count[:, None] - slots)
        # Out-of-range slots are dropped by the scatter; two tokens of one call never share a slot.
        slot = jnp.where(stays, split(length[:, None] + step, slots)[1], slots)
        if t == 1:
            return one_slot(old, slot[:, 0], value)
        # Every index is given: a scatter over a sliced axis makes XLA on CPU copy the ring twice a step.
        row, head = jnp.arange(rows)[:, None, None], jnp.arange(heads)[None, :, None]
        return scattered(old, (row, head, slot[:, None, :]), value)

    return dataclasses.replace(
        ring,
        k=write(ring.k, new.k),
        v=write(ring.v, new.v),
        admit=write(ring.admit, new.admit),
        meta={name: write(old, new.meta[name]) for name, old in ring.meta.items()},
        queries={name: write(old, new.queries[name]) for name, old in ring.queries.items()},
    )


def newest(q: Float[Array, "B N T H"], count: Int[Array, " B"], slots: int) -> Float[Array, "B N Q H"]:
    """A whole prompt's newest queries as a ring of so many slots holds them.

    Args:
      q: queries of positions 0 .. T - 1, of which ``count`` are real.
      count: prompt length of each row.
      slots: Q.
    """
    at = jnp.maximum(positions(count, slots), 0)
    return along(q, at[:, None, :, None], axis=2)


def leaving(ring: Ring, new: Entry, length: Int[Array, " B"], count: Int[Array, " B"]) -> Entry:
    """The tokens that step out of the window while ``count`` new ones step in, oldest first.

    With W = 4, length = 6 and T = count = 6, candidates c = 0 .. 5 are the positions length - W + c:

      position   2  3  4  5 | 6  7        2 .. 5 come from the ring,
      source     ring slots | chunk 0 1   6 and 7 pass straight through the chunk

    Returns:
      T candidates; ``pos`` is EMPTY where a candidate does not exist.
    """
    t, w = new.k.shape[2], ring.window
    pos = length[:, None] - w + jnp.arange(t)[None, :]
    pos = jnp.where((pos >= 0) & (jnp.arange(t)[None, :] < count[:, None]), pos, EMPTY)
    from_ring, from_chunk = min(t, w), max(0, t - w)
    slot = split(length[:, None] + jnp.arange(from_ring)[None, :], w)[1]  # (length - W + c) mod W

    def gather(old: Array, value: Array) -> Array:
        index = slot.reshape(slot.shape[0], 1, from_ring, *([1] * (old.ndim - 3)))
        out = along(old, index, axis=2)
        return jnp.concatenate([out, value[:, :, :from_chunk]], axis=2) if from_chunk else out

    return Entry(
        k=gather(ring.k, new.k),
        v=gather(ring.v, new.v),
        pos=pos,
        admit=gather(ring.admit, new.admit),
        meta={name: gather(old, new.meta[name]) for name, old in ring.meta.items()},
    )


def following(ring: Ring, new: Entry, length: Int[Array, " B"], count: Int[Array, " B"], most: int) -> Entry:
    """The ``most`` tokens that leave the window after those of ``leaving``, oldest first; without metadata.

    Args:
      ring, new, length, count: as for ``leaving``.
      most: how many; beyond the newest token ``pos`` is EMPTY.
    """
    t, w = new.k.shape[2], ring.window
    pos = (length + count - w)[:, None] + jnp.arange(most)[None, :]
    pos = jnp.where((pos >= 0) & (pos < (length + count)[:, None]), pos, EMPTY)
    old = (pos < length[:, None])[:, None]
    slot, at = split(jnp.maximum(pos, 0), w)[1][:, None], jnp.clip(pos - length[:, None], 0, t - 1)[:, None]

    def gather(held: Array, arriving: Array) -> Array:
        more = [1] * (held.ndim - 3)
        first, then = (
            along(x, index.reshape(*index.shape, *more), axis=2)
            for x, index in ((held, slot), (arriving, at))
        )
        return jnp.where(old.reshape(*old.shape, *more), first, then.astype(first.dtype))

    k, v, admit = gather(ring.k, new.k), gather(ring.v, new.v), gather(ring.admit, new.admit)
    return Entry(k=k, v=v, pos=pos, admit=admit, meta={})


def live(length: Int[Array, " B"], window: int) -> Int[Array, " B"]:
    """Tokens a row holds in a ring of ``window`` slots."""
    return jnp.minimum(length, window)


def rows(ring: Ring, index: Int[Array, " B2"]) -> Ring:
    """The ring of the chosen rows, in that order (repeats copy)."""
    return jax.tree.map(lambda x: x[index], ring)
