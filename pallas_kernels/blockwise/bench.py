"""``python -m pallas_kernels.blockwise.bench``: against dense attention over the same keys and values.

"dense" is one einsum, softmax, einsum; "dense in blocks" the same for blocks of queries, each over the keys
up to its end, which is what a prompt is held against.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import timing
from pallas_kernels.blockwise.api import blockwise, column_mass
from pallas_kernels.blockwise.shapes import BENCH, Shape

REPEATS = 15
BLOCK = 256
MOST = 1.3
"""The most a prompt may take, in times of the dense one in blocks."""


def _dense(q: jax.Array, k: jax.Array, v: jax.Array, q_pos: jax.Array, k_pos: jax.Array) -> jax.Array:
    b, n, t, h = q.shape
    q = q.reshape(b, k.shape[1], -1, t, h)
    s = jnp.einsum("bkgth,bksh->bkgts", q, k, preferred_element_type=jnp.float32) * h**-0.5
    s = jnp.where((k_pos[:, None, :] <= q_pos[:, :, None])[:, None, None], s, -jnp.inf)
    p = jax.nn.softmax(s, axis=-1).astype(v.dtype)
    return jnp.einsum("bkgts,bksh->bkgth", p, v, preferred_element_type=jnp.float32)


def _in_blocks(q: jax.Array, k: jax.Array, v: jax.Array, q_pos: jax.Array, k_pos: jax.Array) -> jax.Array:
    """Queries are the last T of S positions."""
    t, s = q.shape[2], k.shape[2]
    parts = []
    for at in range(0, t, BLOCK):
        end = min(at + BLOCK, t)
        mine, seen = slice(at, end), slice(0, s - t + end)
        parts.append(_dense(q[:, :, mine], k[:, :, seen], v[:, :, seen], q_pos[:, mine], k_pos[:, seen]))
    return jnp.concatenate(parts, axis=3)


def _times(shape: Shape, dtype: str) -> dict[str, float]:
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.normal(size=(shape.B, shape.N, shape.T, shape.H)), dtype)
    k, v = (jnp.asarray(rng.normal(size=(shape.B, shape.K, shape.S, shape.H)), dtype) for _ in range(2))
    k_pos = jnp.broadcast_to(jnp.arange(shape.S, dtype=jnp.int32), (shape.B, shape.S))
    q_pos = k_pos[:, shape.S - shape.T :]
    ones = jnp.ones(q_pos.shape, jnp.float32)
    lse = jax.jit(blockwise)(q, k, v, q_pos=q_pos, k_pos=k_pos)[1]
    runs = {
        "dense": _dense,
        "dense in blocks": _in_blocks,
        "blockwise": lambda q, k, v, i, j: blockwise(q, k, v, q_pos=i, k_pos=j),
        "window S/8": lambda q, k, v, i, j: blockwise(q, k, v, q_pos=i, k_pos=j, window=shape.S // 8),
        "column_mass": lambda q, k, v, i, j: column_mass(q, k, lse, ones, q_pos=i, k_pos=j),
    }
    if shape.N * shape.T * shape.S > 1 << 26:
        del runs["dense"]  # a quarter of a gigabyte of scores, and as much again
    return timing.in_turns(runs, dict.fromkeys(runs, (q, k, v, q_pos, k_pos)), REPEATS)


def main() -> None:
    """Print one line a shape and dtype."""
    for name, shape in BENCH.items():
        for dtype in ("float32", "bfloat16"):
            times, prompt = _times(shape, dtype), shape.T > BLOCK
            base, most = ("dense in blocks", {"blockwise": MOST}) if prompt else ("dense", {})
            print(timing.report("blockwise", name, dtype, times, base, most), flush=True)


if __name__ == "__main__":
    main()
