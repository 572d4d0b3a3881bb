"""Causal attention for training: RoPE, scores and softmax in tiles that stay in a core's cache.

One KV head of one row, with its G query heads, at a time. Nothing of size T x T is kept: the backward pass
recomputes the weights from their log-sum-exp. Products are bfloat16 in and float32 out (``products``).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from train.embedded.products import HALF, rows_by_columns, rows_by_rows, transposed

if TYPE_CHECKING:
    from jaxtyping import Array, Float

TILE = 1 << 17
"""Largest number of scores of a tile: half a megabyte."""


def _block(groups: int, length: int) -> int:
    """Queries of a head in a tile: a power of two, or the whole row."""
    most = max(16, TILE // (groups * length))
    block = min(length, 1 << (most.bit_length() - 1))
    if length % block:
        raise ValueError(
            f"attention over rows of {length} tokens takes {block} queries at a time, which do not divide "
            f"them. Take rows of a multiple of {block} tokens."
        )
    return block


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def attention(
    y: Float[Array, "B T K (G+2)H"], groups: int, frequencies: tuple[float, ...]
) -> Float[Array, "B T K GH"]:
    """Each KV head's G query heads over its keys and values, scores over sqrt(H).

    Args:
      y: per KV head its G queries, key and value behind each other, before RoPE; float32.
      groups: G.
      frequencies: angles per position, H / 2 of them (half-split layout).

    Returns:
      float32.

    Raises:
      ValueError: when tiles do not divide the rows; powers of two always fit.
    """
    return _forward(y, groups, frequencies)[0]


def _turns(frequencies: tuple[float, ...], length: int) -> tuple[Array, Array]:
    """cos and sin for both halves of a head, [T, H]."""
    angle = jnp.arange(length, dtype=jnp.float32)[:, None] * jnp.asarray(frequencies * 2)
    return jnp.cos(angle), jnp.sin(angle)


def _quarter(size: int) -> np.ndarray:
    """[H, H]; x times it is x turned by a quarter: (a, b) becomes (-b, a)."""
    half = size // 2
    matrix = np.zeros((size, size), np.float32)
    matrix[np.arange(half) + half, np.arange(half)] = -1.0
    matrix[np.arange(half), np.arange(half) + half] = 1.0
    return matrix


def _head_inputs(
    y: Array, index: Array, groups: int, turns: tuple[Array, Array]
) -> tuple[list[Array], Array, Array]:
    """Scaled queries of each head, keys, values of (row, KV head) ``index`` after RoPE, [T, H] bfloat16."""
    _, t, heads, width = y.shape
    size = width // (groups + 2)
    columns = jax.lax.dynamic_slice(y, (index // heads, 0, index % heads, 0), (1, t, 1, width))
    columns = columns.reshape(t, width)
    quarter = jnp.asarray(_quarter(size), HALF)
    parts = [columns[:, i * size : (i + 1) * size] for i in range(groups + 2)]
    cos, sin = turns

    def turned(x: Array, gain: float) -> Array:
        half = x.astype(HALF)
        return ((half.astype(jnp.float32) * cos + rows_by_columns(half, quarter) * sin) * gain).astype(HALF)

    queries = [turned(x, size**-0.5) for x in parts[:groups]]
    return queries, turned(parts[-2], 1.0), parts[-1].astype(HALF)


def _visible(first: int, block: int, groups: int) -> Array:
    """[G block, first + block]: the keys that each query of a block from ``first`` on may read."""
    queries = jnp.tile(jnp.arange(first, first + block), groups)
    return queries[:, None] >= jnp.arange(first + block)[None, :]


def _forward(
    y: Array, groups: int, frequencies: tuple[float, ...]
) -> tuple[Array, tuple[Array, Array, Array]]:
    b, t, heads, width = y.shape
    size, block = width // (groups + 2), _block(groups, t)
    turns = _turns(frequencies, t)

    def one(index: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        queries, k, v = _head_inputs(y, index, groups, turns)
        out, norms = [], []
        for first in range(0, t, block):
            end = first + block
            block_queries = jnp.concatenate([q[first:end] for q in queries])
            scores = jnp.where(_visible(first, block, groups), rows_by_rows(block_queries, k[:end]), -jnp.inf)
            most = jnp.max(scores, axis=-1, keepdims=True)
            weight = jnp.exp(scores - most)
            total = jnp.sum(weight, axis=-1, keepdims=True)
            mixed = rows_by_columns(weight.astype(HALF), v[:end]) / total
            out.append(jnp.concatenate([mixed[g * block : (g + 1) * block] for g in range(groups)], axis=1))
            norms.append((most + jnp.log(total)).reshape(groups, block))
        row_out, sums = jnp.concatenate(out), jnp.concatenate(norms, axis=1)
        at = (index // heads, 0, index % heads, 0)
        return (
            jax.lax.dynamic_update_slice(carry[0], row_out.reshape(1, t, 1, -1), at),
            jax.lax.dynamic_update_slice(carry[1], sums[None], (index, 0, 0)),
        )

    empty = jnp.zeros((b, t, heads, groups * size)), jnp.zeros((b * heads, groups, t))
    out, norms = jax.lax.fori_loop(0, b * heads, one, empty)
    return out, (y, out, norms)


def _backward(
    groups: int, frequencies: tuple[float, ...], saved: tuple[Array, Array, Array], dy: Array
) -> tuple[Array]:
    y, out, norms = saved
    b, t, heads, width = y.shape
    size, block = width // (groups + 2), _block(groups, t)
    turns = _turns(frequencies, t)
    cos, sin = turns
    back_quarter = jnp.asarray(_quarter(size).T, HALF)

    def back(x: Array, gain: float) -> Array:
        return gain * (x * cos + rows_by_columns((x * sin).astype(HALF), back_quarter))

    def one(index: Array, dx: Array) -> Array:
        queries, k, v = _head_inputs(y, index, groups, turns)
        at = (index // heads, 0, index % heads, 0)

        def part(x: Array) -> Array:
            return jax.lax.dynamic_slice(x, at, (1, t, 1, groups * size)).reshape(t, groups, size)

        d_out, head_out = part(dy), part(out)
        dots = jnp.sum(d_out * head_out, axis=-1)
        d_out = d_out.astype(HALF)
        sums = jax.lax.dynamic_slice(norms, (index, 0, 0), (1, groups, t))[0]
        dq, dk, dv = [], jnp.zeros((t, size)), jnp.zeros((t, size))
        # Scores lie as [keys, queries] here: keys and values get plain products, only queries need a
        # transpose.
        for first in range(0, t, block):
            end = first + block
            block_queries = jnp.concatenate([q[first:end] for q in queries])
            block_d_out = jnp.concatenate([d_out[first:end, g] for g in range(groups)])
            dot = jnp.concatenate([dots[first:end, g] for g in range(groups)])
            norm = sums[:, first:end].reshape(-1)
            scores = rows_by_rows(k[:end], block_queries)
            weight = jnp.exp(jnp.where(_visible(first, block, groups).T, scores - norm, -jnp.inf))
            change = (weight * (rows_by_rows(v[:end], block_d_out) - dot)).astype(HALF)
            dv = dv.at[:end].add(rows_by_columns(weight.astype(HALF), block_d_out))
            dk = dk.at[:end].add(rows_by_columns(change, block_queries))
            mixed = rows_by_columns(transposed(change), k[:end])
            dq.append([mixed[g * block : (g + 1) * block] for g in range(groups)])
        heads_dq = [back(jnp.concatenate([piece[g] for piece in dq]), size**-0.5) for g in range(groups)]
        whole = jnp.concatenate([*heads_dq, back(dk, 1.0), dv], axis=1)
        return jax.lax.dynamic_update_slice(dx, whole.reshape(1, t, 1, width), at)

    return (jax.lax.fori_loop(0, b * heads, one, jnp.zeros(y.shape)),)


attention.defvjp(_forward, _backward)
