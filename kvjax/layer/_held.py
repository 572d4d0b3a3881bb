"""All that a KV head holds, ranked as a prompt of its own, by the queries that were asked last.

Why: kvjax/DESIGN.md, 29.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from kvjax.algebra import Every, Eviction, Observation
from kvjax.cache import per_head
from kvjax.cache import ring as rings
from kvjax.cache.state import LayerCache
from kvjax.layer._demote import codecs
from kvjax.layer._info import LayerInfo, OfRows
from kvjax.layer._rows import has_rows, row_by_row
from kvjax.types import EMPTY, Heads, Params

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int


def held_scores(
    info: LayerInfo, x: Heads, cache: LayerCache, length: Int[Array, " B"], acts: Bool[Array, " B"]
) -> Float[Array, "B K C"]:
    """Scores of all paged slots by ``Eviction.score_prompt``; of dead slots and idle rows any number.

    Every KV head is a row with one head for it: its tokens, of pages and ring, in order of position. Rows
    whose turn comes every few tokens are ranked one by one: mostly few of a batch are due at a time, and no
    more than one row's keys and values are gathered.

    Args:
      info: which layer.
      x: heads of the newest tokens, for the layer's RoPE and bound on scores.
      cache: after the newest tokens were written, their queries too.
      length: tokens each row has seen, these included.
      acts: rows whose scores are asked for.
    """
    later, weights = info.policy.eviction.later, info.weights("eviction")
    if len(length) == 1 or not isinstance(info.policy.budget.when, Every):
        return _scores(info, later, weights, x, cache, length)

    def once(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        waits, scores = carry
        row = jnp.argmax(waits)

        def own(tree: Any) -> Any:
            return jax.tree.map(lambda of_rows: jax.lax.dynamic_slice_in_dim(of_rows, row, 1), tree)

        pools = [
            dataclasses.replace(pages, table=own(pages.table), length=own(pages.length))
            for pages in cache.pools
        ]
        held = dataclasses.replace(cache, ring=own(cache.ring), summary=None).with_pools(pools)
        part = own(later) if has_rows(later) else later
        learned = own(weights) if isinstance(weights, OfRows) else weights
        score = _scores(info, part, learned, x, held, own(length))
        scores = jax.lax.dynamic_update_slice_in_dim(scores, score.astype(scores.dtype), row, 0)
        return waits.at[row].set(False), scores

    nothing = jnp.zeros(per_head.slots(cache.pools).pos.shape, jnp.float32)
    return jax.lax.while_loop(lambda carry: carry[0].any(), once, (acts, nothing))[1]


def _scores(
    info: LayerInfo, eviction: Eviction, weights: Any, x: Heads, cache: LayerCache, length: Int[Array, " B"]
) -> Float[Array, "B K C"]:
    """``held_scores`` of all rows of a cache at once."""
    ring, paged = cache.ring, per_head.slots(cache.pools)
    rows, heads, slots = paged.pos.shape
    every = jnp.broadcast_to(jnp.arange(slots), paged.pos.shape)
    k, v, _ = per_head.read(cache.pools, codecs(info.policy, cache), every)
    recent = rings.positions(length, ring.window)
    recent = jnp.broadcast_to(recent[:, None], (rows, heads, ring.window))
    pos = jnp.concatenate([jnp.where(paged.live, paged.pos, EMPTY), recent], axis=-1)
    order = jnp.argsort(jnp.where(pos >= 0, pos, jnp.iinfo(pos.dtype).max), axis=-1)

    def in_order(of_pages: Array, of_ring: Array) -> Array:
        """[B, K, ...] tokens of both, in order, as [B, K, 1, ...]."""
        both = jnp.concatenate([of_pages.astype(of_ring.dtype), of_ring], axis=2)
        return jnp.take_along_axis(both, order[..., None], axis=2)[:, :, None]

    values: dict[str, Any] = {"k": in_order(k, ring.k), "v": in_order(v, ring.v)}
    asked = None
    for name, q in ring.queries.items():
        kept = q.shape[2]
        asked = length[:, None] - kept + jnp.arange(kept)[None, :]  # the oldest first
        q = jnp.take_along_axis(q, (asked % kept)[:, None, :, None], axis=2)
        values[name] = q.reshape(rows, heads, -1, *q.shape[2:])
        asked = jnp.broadcast_to(jnp.maximum(asked, EMPTY)[:, None], (rows, heads, kept))
    arrays = {
        "pos": jnp.take_along_axis(pos, order, axis=-1),
        "total": jnp.broadcast_to(length[:, None], (rows, heads)),
        "values": values,
        "sinks": None if x.sinks is None else jnp.tile(x.sinks.reshape(1, heads, -1), (rows, 1, 1)),
        "asked": asked,
    }

    def ranked(eviction: Eviction, weights: Any, arrays: dict[str, Any]) -> Float[Array, "B K T"]:
        where = {"layer": info.layer, "layers": info.layers, "softcap": x.softcap, "rotate": x.rotate}
        return _of_each_head(eviction, weights, Observation(**where, **arrays))

    score = row_by_row(eviction, ranked, weights, arrays)
    return jnp.take_along_axis(score, jnp.argsort(order, axis=-1), axis=-1)[..., :slots]


def _of_each_head(eviction: Eviction, weights: Any, seen: Observation) -> Float[Array, "B K T"]:
    """``score_prompt`` of every KV head as a row with one head; the arrays of ``seen`` begin with [B, K]."""
    rows, heads, t = seen.pos.shape
    arrays = {name: getattr(seen, name) for name in ("pos", "total", "values", "sinks", "asked")}
    if not eviction.learns:
        merged = jax.tree.map(lambda x: x.reshape(rows * heads, *x.shape[2:]), arrays)
        return eviction.score_prompt(None, dataclasses.replace(seen, **merged)).reshape(rows, heads, t)
    axes = {name: None if name in eviction.shared else 0 for name in weights}
    own = {
        name: weight if axes[name] is None else weight.reshape(heads, -1, *weight.shape[1:])
        for name, weight in weights.items()
    }

    def of_head(weights: Params, arrays: dict[str, Any]) -> Float[Array, "B 1 T"]:
        return eviction.score_prompt(weights, dataclasses.replace(seen, **arrays))

    return jax.vmap(of_head, in_axes=(axes, 1), out_axes=1)(own, arrays)[:, :, 0]
