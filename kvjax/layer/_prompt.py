"""A whole prompt at once: attend, rank every token, and only then store what the budget retains."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from kvjax.algebra import Eviction, Observation
from kvjax.cache import ring as rings
from kvjax.cache.pages import Slots
from kvjax.cache.ring import Entry
from kvjax.cache.state import LayerCache
from kvjax.layer._admit import admit, following
from kvjax.layer._info import LayerInfo, arriving, major, observe
from kvjax.layer._mass import accumulate_mass, query_weights
from kvjax.layer._read import attend_among, merged
from kvjax.types import EMPTY, Heads
from pallas_kernels.blockwise.api import blockwise, column_mass

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int


def prompt(info: LayerInfo, x: Heads, pos: Int[Array, "B T"]) -> tuple[Float[Array, "B T N H"], Entry]:
    """The whole prompt at one layer: attend under the admission mask, then rank every token.

    Args:
      info: which layer; ``info.total`` are the prompts' lengths.
      x: the prompt's heads.
      pos: positions, EMPTY for padding.

    Returns:
      Attention output in the model's layout, and the tokens with ``admit`` set where they are retained
      (``store`` stores them).
    """
    observed = observe(info, x, pos)
    new = arriving(info, x, pos, observed)
    window, bits = _sight(info, new)
    out, lse = _attended(x, new, info.total, window, bits)
    return out, judged(info, x, observed, new, lse)


def attend_prompt(
    x: Heads, pos: Int[Array, "B T"], total: Int[Array, " B"], window: int | None
) -> tuple[Float[Array, "B T N H"], Float[Array, "B N T"]]:
    """The prompt's attention alone, under the model's own window, and its lse."""
    new = Entry(k=major(x.k), v=major(x.v), pos=pos, admit=jnp.ones((1, 1, 1), bool), meta={})
    return _attended(x, new, total, window, None)


def _attended(
    x: Heads, new: Entry, count: Int[Array, " B"], window: int | None, bits: Bool[Array, "B K T"] | None
) -> tuple[Float[Array, "B T N H"], Float[Array, "B N T"]]:
    """Output, which is all in the model's dtype unless a sink is merged with it, and lse."""
    dtype = x.v.dtype if x.sinks is None else jnp.float32
    partial = attend_among(major(x.q), new, count, window, bits, x.softcap, dtype)
    return merged((partial,), x.v.dtype, x.sinks)


def scores_of_prompt(
    info: LayerInfo, x: Heads, pos: Int[Array, "B T"], lse: Float[Array, "B N T"]
) -> Float[Array, "B K T"]:
    """``scores`` of a whole prompt whose attention was computed."""
    observed = observe(info, x, pos)
    new = arriving(info, x, pos, observed)
    if info.policy.eviction.needs_mass:
        mass = _mass(info, x, new, lse, info.policy.eviction)
        observed = dataclasses.replace(observed, values=observed.values | {"mass": mass})
    return scores(info, new, observed)


def judge(info: LayerInfo, x: Heads, pos: Int[Array, "B T"], lse: Float[Array, "B N T"]) -> Entry:
    """``prompt`` without its attention, of which only the lse is needed: for policies that hide nothing."""
    observed = observe(info, x, pos)
    return judged(info, x, observed, arriving(info, x, pos, observed), lse)


def prompt_behind(
    info: LayerInfo,
    x: Heads,
    k: Float[Array, "B K T H"],
    v: Float[Array, "B K T H"],
    begin: Int[Array, ""],
    pos: Int[Array, "B T"],
) -> tuple[Float[Array, "B I N H"], Entry]:
    """``prompt`` where keys and values of a beginning are known, for policies that hide nothing.

    Args:
      info: which layer; ``info.total`` are the prompts' lengths.
      x: heads of the I tokens behind the beginning.
      k, v: keys and values of the beginning; from ``begin`` on anything.
      begin: its tokens, at most T - I.
      pos: positions of all tokens, EMPTY for padding.

    Returns:
      The attention output of the tokens behind it, and all tokens with ``admit`` set where they are retained.
    """

    def placed(known: Array, new: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(known, major(new).astype(known.dtype), begin, axis=2)

    k, v = placed(k, x.k), placed(v, x.v)
    rows, heads, own = len(pos), x.q.shape[2], begin + jnp.arange(x.q.shape[1])[None]
    asked = jnp.where(own < info.total[:, None], own, EMPTY)
    partial = blockwise(major(x.q), k, v, q_pos=asked, k_pos=pos, window=info.window, softcap=x.softcap)
    out, _ = merged((partial,), x.v.dtype, x.sinks)
    # No part reads the queries of the beginning.
    q = placed(jnp.zeros((rows, heads, *k.shape[2:]), x.q.dtype), x.q)
    q, k, v = (jnp.swapaxes(y, 1, 2) for y in (q, k, v))
    whole = dataclasses.replace(x, q=q, k=k, v=v)
    observed = observe(info, whole, pos)
    return out, judged(info, whole, observed, arriving(info, whole, pos, observed), None)


def _sight(info: LayerInfo, new: Entry) -> tuple[int | None, Array | None]:
    """Window and admission bits under which the prompt's own queries see."""
    policy = info.policy
    sliding = info.window is not None  # the model's sliding layers take no policy beyond their window
    hides = not policy.admission.idle and policy.admission.prefill and policy.completion.idle
    return (policy.admission.window, new.admit) if hides and not sliding else (info.window, None)


def judged(
    info: LayerInfo, x: Heads, observed: Observation, new: Entry, lse: Float[Array, "B N T"] | None
) -> Entry:
    """The tokens with ``admit`` set where they are retained; ``lse`` is read where an eviction needs mass."""
    policy, pos, sliding = info.policy, observed.pos, info.window is not None
    limited, ranks, later = policy.budget.limited and not sliding, policy.eviction, policy.eviction.later
    mass = _mass(info, x, new, lse, ranks) if limited and ranks.needs_mass else None
    if mass is not None:
        observed = dataclasses.replace(observed, values=observed.values | {"mass": mass})
    if limited and policy.tracks_mass:
        mass = mass if later is ranks and mass is not None else _mass(info, x, new, lse, later)
        new = dataclasses.replace(new, meta=accumulate_mass(info, pos[:, None], new.meta, mass, info.total))
    keep = new.admit
    if policy.budget.limited and not sliding:
        keep = keep & retained(info, new, observed)
    kept = {name: rings.newest(q, info.total, policy.queries[name]) for name, q in new.queries.items()}
    return dataclasses.replace(new, admit=keep, queries=kept)


def _mass(
    info: LayerInfo, x: Heads, new: Entry, lse: Float[Array, "B N T"] | None, eviction: Eviction
) -> Float[Array, "B N T"]:
    """The attention that each token received, as the eviction counts it."""
    assert lse is not None
    window, bits = _sight(info, new)
    weights, pos = query_weights(eviction, new.pos), new.pos
    sight: dict[str, Any] = {"window": window, "admit": bits, "softcap": x.softcap}
    return column_mass(major(x.q), new.k, lse, weights, q_pos=pos, k_pos=pos, **sight)


def retained(
    info: LayerInfo,
    new: Entry,
    observed: Observation,
    score: Float[Array, "B K T"] | None = None,
    target: Int[Array, "B K"] | None = None,
) -> Bool[Array, "B K T"]:
    """Which tokens stay: the protected, then those that the eviction chooses, up to the target.

    ``score`` and ``target`` are given where all layers had to be scored before (``Budget.over_layers``).
    """
    policy = info.policy
    safe, free = _candidates(info, new)
    observed = dataclasses.replace(observed, admitted=free | safe)
    if score is None:
        score = _scored(info, new, observed, safe, free)
    frame = info.frame(new.k, observed)
    if target is None:
        scores = score if policy.budget.from_scores else None
        target = policy.budget.targets(frame, info.total, scores)
    target = jnp.maximum(target, safe.sum(axis=-1))
    if not policy.eviction.runs:
        score = policy.budget.secured(frame, info.total, score)
    return policy.eviction.choose(observed, score, target) & (score > -jnp.inf)


def scores(info: LayerInfo, new: Entry, observed: Observation) -> Float[Array, "B K T"]:
    """What the eviction makes of a prompt's tokens: inf for the protected, -inf where one may not stay."""
    safe, free = _candidates(info, new)
    return _scored(info, new, dataclasses.replace(observed, admitted=free | safe), safe, free)


def _candidates(info: LayerInfo, new: Entry) -> tuple[Bool[Array, "B 1 T"], Bool[Array, "B K T"]]:
    """Tokens that are protected, and others that may stay."""
    policy, pos = info.policy, new.pos[:, None, :]
    # Where the budget acts later too, the ring is live whatever it scores.
    newest = policy.ring_tokens if policy.decides_later else policy.protects
    safe = (pos >= 0) & ((pos < policy.sinks) | (pos >= (info.total - newest)[:, None, None]))
    return safe, (pos >= 0) & new.admit & ~safe


def _scored(info: LayerInfo, new: Entry, observed: Observation, safe: Array, free: Array) -> Array:
    policy, shape, pos = info.policy, new.admit.shape, observed.pos[:, None, :]
    if policy.tracks_mass and policy.eviction.later is policy.eviction:  # as at any later step
        values = {name: new.meta[f"eviction.{name}"] for name in policy.eviction.keeps}
        slots = Slots(
            pos=jnp.broadcast_to(pos, shape), live=free, meta=values, seen=info.total[:, None, None]
        )
        score = policy.eviction.score(info.weights("eviction"), slots)
    else:
        score = policy.eviction.score_prompt(info.weights("eviction"), observed)
    return jnp.where(free, jnp.broadcast_to(score, shape), jnp.where(safe, jnp.inf, -jnp.inf))


def store(info: LayerInfo, cache: LayerCache, new: Entry, count: Int[Array, " B"]) -> LayerCache:
    """Store a ranked prompt: the newest W tokens in the ring, other retained ones in pages, the rest in φ.

    Args:
      info: which layer.
      cache: an empty cache whose pools hold the retained tokens.
      new: the prompt, retained where ``admit``.
      count: prompt length of each row.
    """
    left = new.pos < (count - cache.ring.window)[:, None]
    leaving = dataclasses.replace(new, pos=jnp.where(left, new.pos, EMPTY))
    before = jnp.zeros_like(count)
    cache = admit(info, cache, leaving, following(info, cache, new, before, count), final=True)
    # Queries are already laid as the ring holds them.
    queries = {name: new.queries[name] for name in cache.ring.queries}
    ring = rings.put(dataclasses.replace(cache.ring, queries={}), new, before, count)
    return dataclasses.replace(cache, ring=dataclasses.replace(ring, queries=queries))


def count_stored(new: Entry, count: Int[Array, " B"], window: int) -> Int[Array, "B K"]:
    """How many tokens of each KV head ``store`` will put into pages."""
    leaves = (new.pos >= 0) & (new.pos < (count - window)[:, None])
    return (new.admit & leaves[:, None, :]).sum(axis=-1)
