"""Which blocks of queries and keys meet, for the Pallas bodies of blockwise.

A body works on rows of queries: the G heads of a KV head one after another, so that every key block
is read once for all of them. Positions are data, so blocks that do not see each other are found
here, on the device, and listed; a body reads what each list names and nothing else.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp

from pallas_kernels import softmax
from pallas_kernels.blockwise.sight import Above, Where
from pallas_kernels.padding import pad_to_multiple

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int


class Rows(NamedTuple):
    """Operands of a body, padded to whole blocks.

    A is the number of query heads a body sees: K when the heads of a KV head are folded into rows, N
    when each is its own.
    """

    q: Float[Array, "B A R H"]
    k: Float[Array, "B K S H"]
    q_pos: Int[Array, "B R"]
    k_pos: Int[Array, "B S"]
    admit: Int[Array, "B K S"] | None


def rows(
    q: Array, k: Array, where: Where, window: int | None, block_q: int, block_k: int, *, folded: bool
) -> Rows:
    """The operands as a body takes them. Products run in the dtype of the keys."""
    (b, n, t, h), heads = q.shape, k.shape[1]
    (q_pos, k_pos, admit), q = where.within_reach(window), q.astype(k.dtype)
    if folded:
        q = q.reshape(b, heads, n // heads * t, h)
        q_pos = jnp.tile(q_pos, (1, n // heads))
    return Rows(
        pad_to_multiple(q, 2, block_q),
        pad_to_multiple(k, 2, block_k),
        pad_to_multiple(q_pos, 1, block_q, softmax.EMPTY),
        pad_to_multiple(k_pos, 1, block_k, softmax.EMPTY),
        None if admit is None else pad_to_multiple(admit.astype(jnp.int32), 2, block_k),
    )


def weighed(where: Where, weights: Float[Array, "B T"]) -> Where:
    """A query of weight 0 is the same as padding: blocks of them are skipped."""
    return where._replace(q_pos=jnp.where(weights != 0, where.q_pos, softmax.EMPTY))


def folded(above: Above, k: Float[Array, "B K S H"], block_q: int) -> Above:
    """``above`` of rows as ``rows`` folds them; gradients of out in the dtype of the keys."""
    (b, heads), up = k.shape[:2], above.up.astype(k.dtype)
    up = up.reshape(b, heads, -1, up.shape[3])
    return Above(
        *(pad_to_multiple(x, 2, block_q) for x in (up, *(y.reshape(b, heads, -1) for y in above[1:])))
    )


def any_visible(x: Rows, window: int | None, block_q: int, block_k: int) -> Bool[Array, "Z K I J"]:
    """Whether any query of block i may see any key of block j; one K for all heads without admission."""
    b = x.q_pos.shape[0]
    far = jnp.iinfo(jnp.int32).max // 2
    q_pos, k_pos = x.q_pos.reshape(b, 1, -1, 1, block_q), x.k_pos.reshape(b, 1, 1, -1, block_k)
    q_hi, k_hi = jnp.max(q_pos, axis=-1), jnp.max(k_pos, axis=-1)
    q_lo = jnp.min(jnp.where(q_pos >= 0, q_pos, far), axis=-1)
    k_lo = jnp.min(jnp.where(k_pos >= 0, k_pos, far), axis=-1)
    see = (k_lo <= q_hi) & (k_hi >= 0) & (q_hi >= 0)
    if window is None:
        return see
    near = q_lo - k_hi < window
    if x.admit is not None:
        admitted = (x.admit > 0).reshape(b, -1, 1, k_pos.shape[3], block_k)
        near = near | jnp.any(admitted & (k_pos >= 0), axis=-1)
    return see & near


def all_visible(x: Rows, window: int | None, block_q: int, block_k: int) -> Bool[Array, "Z K I J"]:
    """Whether every query of block i sees every key of block j, so that nothing has to be hidden.

    False errs on the safe side. One K as in ``any_visible``.
    """
    b = x.q_pos.shape[0]
    q_pos, k_pos = x.q_pos.reshape(b, 1, -1, 1, block_q), x.k_pos.reshape(b, 1, 1, -1, block_k)
    q_lo, k_lo = jnp.min(q_pos, axis=-1), jnp.min(k_pos, axis=-1)
    see = (k_lo >= 0) & (jnp.max(k_pos, axis=-1) <= q_lo)
    if window is None:
        return see
    near = jnp.max(q_pos, axis=-1) - k_lo < window
    if x.admit is not None:
        near = near | jnp.all((x.admit > 0).reshape(b, -1, 1, k_pos.shape[3], block_k), axis=-1)
    return see & near


class BlockLists(NamedTuple):
    """For each block of one side the blocks of the other it meets, those first, and how many they are.

    Attributes:
      order: numbers of blocks, those seen whole first, if ``whole`` is given.
      length: how many are met.
      whole: how many of them are seen whole; None: unknown.
    """

    order: Int[Array, "Z K I J"]
    length: Int[Array, "Z K I"]
    whole: Int[Array, "Z K I"] | None = None

    @property
    def heads(self) -> int:
        """1 when all heads share the lists."""
        return self.order.shape[1]


def lists_of(pairs: Bool[Array, "Z K I J"], whole: Bool[Array, "Z K I J"] | None = None) -> BlockLists:
    """Lists of each i's any_visible; ``whole`` pairs are any_visible too."""
    last = ~pairs if whole is None else 2 - pairs.astype(jnp.int32) - whole
    order = jnp.argsort(last, axis=-1, stable=True).astype(jnp.int32)
    count = functools.partial(jnp.sum, axis=-1, dtype=jnp.int32)
    return BlockLists(order, count(pairs), None if whole is None else count(whole))


FEW = 1024
"""Keys that one block of queries reads without lists."""


def of_read(x: Rows, window: int | None, block_q: int, block_k: int) -> BlockLists:
    """The lists of a read.

    One block of queries reads all of a few key blocks, as edges: in a decode step with its ring, finding
    blocks to leave out would start ten operations and find none once the ring is full.
    """
    b, (rows, keys) = len(x.q), (x.q.shape[2], x.k.shape[2])
    if rows > block_q or keys > FEW:
        return lists_of(any_visible(x, window, block_q, block_k), all_visible(x, window, block_q, block_k))
    every = jnp.broadcast_to(jnp.arange(keys // block_k, dtype=jnp.int32), (b, 1, 1, keys // block_k))
    return BlockLists(every, jnp.full((b, 1, 1), keys // block_k, jnp.int32), jnp.zeros((b, 1, 1), jnp.int32))
