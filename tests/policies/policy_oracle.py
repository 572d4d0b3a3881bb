"""What the oracles of the methods share: hand-made rows, the top-b rule in plain Python, hand-made pages."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import layer
from kvjax.algebra import Eviction, Frame, Native, Observation, Policy, SelectAll
from kvjax.cache import pages as paging
from kvjax.cache import pool
from kvjax.cache.pages import Pages
from kvjax.cache.ring import Entry
from kvjax.types import EMPTY
from pallas_kernels.blockwise.api import blockwise, column_mass


def positions(lengths: tuple[int, ...], t: int) -> np.ndarray:
    """Right-padded rows: [B, T] true positions, EMPTY behind each row's end."""
    at = np.arange(t)[None, :]
    return np.where(at < np.asarray(lengths)[:, None], at, EMPTY).astype(np.int32)


def observe(lengths: tuple[int, ...], t: int, *, index: Any = 0, layers: int = 1, **values) -> Observation:
    return Observation(
        pos=jnp.asarray(positions(lengths, t)),
        total=jnp.asarray(lengths, jnp.int32),
        layer=index,
        layers=layers,
        values={name: jnp.asarray(x, jnp.float32) for name, x in values.items()},
    )


def frame(index: int = 0, layers: int = 1, kv_heads: int = 2, slot_bytes: float = 64) -> Frame:
    return Frame(index, layers, kv_heads, slot_bytes)


def with_mass(eviction: Eviction, seen: Observation) -> Observation:
    """What the layer shows an eviction that needs the prompt's mass."""
    if not eviction.needs_mass:
        return seen
    q, k, v = (seen.values[name] for name in ("q", "k", "v"))
    age = seen.total[:, None] - 1 - seen.pos
    sight = {"q_pos": seen.pos, "k_pos": seen.pos, "softcap": seen.softcap}
    weights = jnp.where(seen.pos >= 0, eviction.query_weights(age), 0.0)
    mass = column_mass(q, k, blockwise(q, k, v, **sight)[1], weights, **sight)
    return dataclasses.replace(seen, values=seen.values | {"mass": mass})


def judge(policy: Policy, seen: Observation, admit: np.ndarray | None = None) -> np.ndarray:
    """Bits [B, K, T]: what the layer keeps of these prompts."""
    seen = with_mass(policy.eviction, seen)
    k = seen.values["k"]
    site = layer.LayerInfo(policy, {}, seen.layer, seen.layers, None, seen.total)
    bits = jnp.ones(k.shape[:3], bool) if admit is None else jnp.asarray(admit)
    return np.asarray(_verdict(site.policy, seen, k, bits))


@functools.partial(jax.jit, static_argnums=0)
def _verdict(policy: Policy, seen: Observation, k: jax.Array, admit: jax.Array) -> jax.Array:
    site = layer.LayerInfo(policy, {}, seen.layer, seen.layers, None, seen.total)
    return layer.retained(site, Entry(k=k, v=k, pos=seen.pos, admit=admit, meta={}), seen)


def best(score: np.ndarray, length: int, target: int, *, sinks: int = 0, newest: int = 0) -> list[int]:
    """Positions of one KV head that stay: the protected first, then high scores, then low positions."""
    safe = {p for p in range(length) if p < sinks or p >= length - newest}
    order = sorted(range(length), key=lambda p: (p not in safe, -float(score[p]), p))
    return sorted(order[: max(target, len(safe))])


def kept(bits: np.ndarray) -> list[int]:
    return np.flatnonzero(bits).tolist()


NATIVE, ALL = Native(), SelectAll()


# --- pages ---------------------------------------------------------------------------------------

append = jax.jit(paging.append, static_argnums=(1, 2))
remove = jax.jit(paging.remove, static_argnums=(1, 2))


def room(
    rows: int,
    heads: int,
    head_dim: int,
    *,
    entries: int,
    size: int = 8,
    codec=NATIVE,
    chooser=ALL,
    meta=(),
) -> Pages:
    """Empty pages, one list per KV head, and one page more than all lists can own."""
    return pool.empty(
        pages=rows * heads * entries + 1,
        size=size,
        rows=rows,
        heads=heads,
        lists=1,
        entries=entries,
        **codec.layout(size, head_dim, jnp.dtype(jnp.float32)),
        meta=meta,
        summary=chooser.summary_shapes(size, head_dim),
    )


def entry(k: np.ndarray, v: np.ndarray | None = None, *, first: int = 0, meta=None) -> Entry:
    """T tokens [B, K, T, H] at positions first, first + 1 ... of every row."""
    rows, _, t, _ = k.shape
    fields: dict[str, Any] = dict(
        k=np.asarray(k, np.float32),
        v=np.asarray(k if v is None else v, np.float32),
        pos=np.broadcast_to(first + np.arange(t, dtype=np.int32), (rows, t)),
        admit=np.ones(k.shape[:3], bool),
        meta={name: np.asarray(x, np.float32) for name, x in (meta or {}).items()},
    )
    return Entry(**fields)


def contents(pages: Pages, row: int, head: int, codec=NATIVE) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(pos [C], k [C, H], v [C, H]) of one KV head's live slots in list order, as a read would see them."""
    held: Any = jax.device_get(pages)
    at = np.arange(held.length[row, head, 0])
    page = held.table[row, head, 0][at // held.size]
    k, v = codec.read(held, page, at % held.size)
    return held.pos[page, at % held.size], np.asarray(k), np.asarray(v)
