"""When φ pays: what it costs a step beside the tokens it spares, on a CPU as measured and on paper for chips.

A read of K tokens beside φ costs as much as a read of K' > K tokens without it; φ pays where selection alone
would have to read more than these K' for the same answers. On paper a step costs the bytes it moves and the
products it computes, one after the other:

  tokens    K and V of 16 bits, over the link on which they lie
  φ         its maps (float32, once for all rows), each stream's summary, the maps' products of G queries and
            of K visited keys, subtraction and evaluation
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.algebra import Visited
from kvjax.layer._read import merged
from kvjax.policies.phi import Absorbed, Phi, log_features, random_maps
from kvjax.types import Network
from pallas_kernels.blockwise.api import blockwise
from pallas_kernels.phi.api import phi_build
from studies.topk_phi.speed import in_turns

READ = (16, 64, 256, 1024)
"""Tokens visited beside φ."""

MOST = 8192
"""Tokens of the longest read that is timed."""

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """What a step is computed with.

    Attributes:
      memory, link: bytes a second of the device's memory, and of where the tokens lie.
      products: float32 operations a second.
    """

    memory: float
    link: float
    products: float


CHIPS = {
    "v5e, tokens in HBM": Chip(memory=0.82e12, link=0.82e12, products=33e12),
    "v5e, tokens in host memory": Chip(memory=0.82e12, link=16e9, products=33e12),
    "H200, tokens in HBM": Chip(memory=4.08e12, link=4.08e12, products=67e12),
    "H200, tokens in host memory": Chip(memory=4.08e12, link=54e9, products=67e12),
}
"""v5e: 820 GB/s, 197 TFLOP/s in bfloat16, six passes a float32 product; a host link of 16 GB/s is assumed.
H200: 85 % of 4.8 TB/s, 67 TFLOP/s outside the tensor cores; 85 % of PCIe 5.0 x 16's 64 GB/s is assumed."""

SHAPES = {
    "Llama-3.2-1B": {"head_dim": 64, "groups": 4, "features": 64, "hidden": 32},
    "Llama-3.1-8B": {"head_dim": 128, "groups": 4, "features": 128, "hidden": 64},
}


def on_paper(
    chip: Chip, tokens: int, rows: int, *, head_dim: int, groups: int, features: int, hidden: int
) -> float:
    """K': tokens that a stream reads in the time in which it reads ``tokens`` and φ."""
    h, f = head_dim, features
    a_map = h * f + h * hidden + hidden * f + hidden + f
    moved = 4 * a_map * (1 + groups) / rows + 4 * f * (h + 2)
    products = 2 * (a_map * (tokens + groups) + f * h * (tokens + groups))
    seconds = moved / chip.memory + products / chip.products
    return tokens + seconds * chip.link / (4 * h)


def paper_rows(batches: Sequence[int] = (1, 8, 64)) -> list[Row]:
    """``on_paper`` for every chip, model and batch."""
    return [
        {
            "chip": name,
            "model": model,
            "rows": rows,
            "beside": [on_paper(chip, k, rows, **shape) for k in READ],
        }
        for model, shape in SHAPES.items()
        for name, chip in CHIPS.items()
        for rows in batches
    ]


def measured(network: Network, rounds: int, features: int = 64) -> Row:
    """Milliseconds of processor time of a layer's reads, and K' of those beside φ: where they cross the line
    of reads without it, found by least squares."""
    maps = random_maps(jax.random.key(0), network, features)[0]
    sides: dict[str, Callable[[], Any]] = {}
    lengths = [*READ, MOST // 2, MOST]
    for count in lengths:
        sides[f"read {count}"] = functools.partial(_read, *_drawn(network, count))
    for count in READ:
        q, k, v = _drawn(network, count)
        middle = _drawn(network, 1024)[1:]
        sums = phi_build(
            log_features(maps, "k", middle[0]), middle[1], there=jnp.ones(middle[0].shape[:3], bool)
        )
        held = Absorbed(sums=sums, count=jnp.full(k.shape[:2], 1024 + count))
        sides[f"both {count}"] = functools.partial(_both(features), maps, held, q, k, v)
    times = in_turns(sides, rounds)
    slope, start = np.polyfit(lengths, [times[f"read {n}"] for n in lengths], 1)
    beside = [float((times[f"both {n}"] - start) / slope) for n in READ]
    return {
        "heads": [network.num_kv_heads, network.num_heads, network.head_dim],
        "features": features,
        "ms": times,
        "ms_a_token": float(slope),
        "ms_at_zero": float(start),
        "beside": beside,
    }


def _drawn(network: Network, count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(count), 3)
    q = jax.random.normal(keys[0], (1, network.num_heads, 1, network.head_dim))
    k, v = (jax.random.normal(key, (1, network.num_kv_heads, count, network.head_dim)) for key in keys[1:])
    return q, k, v


@jax.jit
def _read(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
    count = k.shape[2]
    return blockwise(q, k, v, q_pos=jnp.full((1, 1), count), k_pos=jnp.arange(count)[None])


def _both(features: int) -> Any:
    @jax.jit
    def run(maps: Any, held: Absorbed, q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        at = jnp.broadcast_to(jnp.arange(k.shape[2]), k.shape[:3])
        rest = Phi(features).read(maps, held, q, Visited(k=k, v=v, pos=at, live=at >= 0))
        return merged((_read(q, k, v), rest), v.dtype)

    return run


def table(rows: Sequence[Row], cpu: Row | None) -> str:
    """Markdown: K' by K."""
    lines = ["| where | model | rows | " + " | ".join(f"K = {k}" for k in READ) + " |"]
    lines += ["|" + "---|" * (3 + len(READ))]
    if cpu is not None:
        sizes = ", ".join(f"{n} {what}" for n, what in zip(cpu["heads"], ("KV heads", "query heads", "wide")))
        cells = " | ".join(f"{x:.0f}" for x in cpu["beside"])
        lines.append(f"| one CPU, measured | {sizes} | 1 | {cells} |")
    for row in rows:
        cells = " | ".join(f"{x:.0f}" if x - k >= 1 else f"{x:.1f}" for x, k in zip(row["beside"], READ))
        lines.append(f"| {row['chip']} | {row['model']} | {row['rows']} | {cells} |")
    return "\n".join(lines)
