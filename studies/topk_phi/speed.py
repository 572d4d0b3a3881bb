"""A layer's decode read at a long context, part by part: what a selection and φ cost beside the full read.

One layer of the benchmarks' random model (two KV heads of 64, six query heads) holds drawn keys and values.
The full read is the dense ring's; a selective one reads the ring's few tokens, the anchors and what was
chosen, and merges. Sides take turns; figures are medians of processor time, in which waiting for others does
not count.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import kvjax
from benchmarks import random_model
from benchmarks.fill import filled, untrained
from kvjax import layer
from kvjax.algebra import Nothing, Policy
from kvjax.cache import ring as rings
from kvjax.cache import state as states
from kvjax.cache.state import LayerCache
from kvjax.layer._read import merged
from kvjax.models.decoder import Decoder
from pallas_kernels.blockwise.api import blockwise

POLICIES = (
    "quest",
    "quest(sinks=4, tail=16)",
    "topk(0.01)",
    "topk_pages(0.01)",
    "quest(sinks=4, tail=16) + phi(64)",
    "topk(0.01) + phi(64)",
)

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Model:
    """What ``Part.untrained`` asks for; no weights."""

    network: Decoder
    params: dict[str, Any] = dataclasses.field(default_factory=dict)


def measure(context: int, batches: Sequence[int], dtype: str, rounds: int) -> list[Row]:
    """Milliseconds of each part of each policy's read, and of the full read beside it."""
    spec = dataclasses.replace(random_model.BASE, num_layers=3, windows=(), max_positions=2 * context)
    model, entries = Model(Decoder(spec)), []
    for batch in batches:
        sides: dict[str, Callable[[], Any]] = {
            "full": _side(model, kvjax.policy("full"), context, batch, dtype)
        }
        for words in POLICIES:
            policy = kvjax.policy(words)
            sides[words] = _side(model, policy, context, batch, dtype)
            sides[f"{words}: choosing"] = _side(model, policy, context, batch, dtype, choosing=True)
        times = in_turns(sides, rounds)
        full = times["full"]
        entries.append({"batch": batch, "policy": "full", "read_ms": full, "of_full": 1.0})
        for words in POLICIES:
            row: Row = {
                "batch": batch,
                "policy": words,
                "read_ms": times[words],
                "of_full": times[words] / full,
            }
            row |= {"choosing_ms": times[f"{words}: choosing"]}
            plain = repr(dataclasses.replace(kvjax.policy(words), completion=Nothing()))
            if plain != repr(kvjax.policy(words)):
                alone = next(times[w] for w in POLICIES if repr(kvjax.policy(w)) == plain)
                row |= {"phi_ms": times[words] - alone, "phi_of_full": (times[words] - alone) / full}
            entries.append(row)
    return entries


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    lines = ["| batch | policy | read, ms | of the full read | choosing, ms | φ, ms | φ of the full read |"]
    lines += ["|" + "---|" * 7]
    for row in rows:
        cells = [
            "" if row.get(name) is None else f"{row[name]:.3f}"
            for name in ("read_ms", "of_full", "choosing_ms", "phi_ms", "phi_of_full")
        ]
        lines.append(f"| {row['batch']} | `{row['policy']}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def _side(
    model: Model, policy: Policy, context: int, batch: int, dtype: str, *, choosing: bool = False
) -> Callable[[], Any]:
    """A call that reads the last layer of a filled cache once, or only chooses what to read."""
    network = model.network
    weights = untrained(model, policy, seed=0)
    state = filled(network, policy, weights, context - 64, context, jnp.dtype(dtype), 0, 64)
    state = states.fork(state, 0, batch)
    at = network.num_layers - 1
    learned = {part.place: part.at_layer(weights[part.place], at) for part in policy.learned}
    site = layer.LayerInfo(policy, learned, at, network.num_layers, None, state.total)
    q = jax.random.normal(jax.random.key(1), (batch, network.num_heads, 1, network.head_dim)).astype(dtype)
    cache, length = state.layers[at], state.length

    def choose(cache: LayerCache, q: jax.Array) -> Any:
        pages = cache.pages
        assert pages is not None
        last = pages.table.shape[2] - 1
        return policy.selection.select(None, q[:, :, 0], pages, last, state.total, pages.span)

    def read(cache: LayerCache, q: jax.Array) -> Any:
        pos = rings.positions(length, cache.ring.window)
        recent = blockwise(q, cache.ring.k, cache.ring.v, q_pos=length[:, None], k_pos=pos)
        paged = layer.read_pages(site, cache, q, by=site.policy.selection)
        return merged((recent, *paged.partials), cache.ring.v.dtype)

    run = jax.jit(choose if choosing else read)
    jax.block_until_ready(run(cache, q))
    return functools.partial(run, cache, q)


def in_turns(sides: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median milliseconds of processor time of each side."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, run in sides.items():
            start = time.process_time()
            jax.block_until_ready(run())
            times[name].append(1e3 * (time.process_time() - start))
    return {name: round(statistics.median(samples), 4) for name, samples in times.items()}
