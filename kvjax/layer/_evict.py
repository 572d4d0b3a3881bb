"""Eviction while tokens come: KV heads over their target lose their lowest-ranked slots."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from kvjax.algebra import Every, Policy
from kvjax.cache import per_head
from kvjax.cache import ring as rings
from kvjax.cache.pages import Slots
from kvjax.cache.ring import Entry
from kvjax.cache.state import LayerCache
from kvjax.layer._demote import codecs
from kvjax.layer._held import held_scores
from kvjax.layer._info import LayerInfo, absorb, by_row
from kvjax.types import EMPTY, Heads

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int


def due(policy: Policy, length: Int[Array, " B"], count: Int[Array, " B"]) -> Bool[Array, " B"]:
    """Rows for which a budget that acts while decoding acts now: ``count`` tokens came, ``length`` in all."""
    came = count > 0
    if isinstance(policy.budget.when, Every):
        k = policy.budget.when.k
        return came & (length // k > (length - count) // k)
    return came


def evict(
    info: LayerInfo,
    cache: LayerCache,
    length: Int[Array, " B"],
    acts: Bool[Array, " B"],
    x: Heads | None = None,
) -> LayerCache:
    """KV heads over their target lose their lowest slots, ranked once; mostly at most one each.

    Args:
      info: which layer.
      cache: after the newest tokens were written.
      length: tokens each row has seen, these included.
      acts: rows for which the budget acts (``due``); the others are left alone.
      x: heads of the newest tokens, where all that is held is ranked (``Policy.ranks_held``).
    """
    if cache.pages is None or not info.policy.decides_later:
        return cache
    if info.policy.ranks_held or info.policy.budget.from_scores:
        return _if(acts.any(), lambda cache: _evict_by_held(info, cache, length, acts, x), cache)
    excess = _excess(info, cache, per_head.live(cache.pools), length, acts)
    most = excess.max()
    cache = _if(most == 1, lambda cache: _evict_one(info, cache, length, excess), cache)
    return _if(most > 1, lambda cache: _evict_many(info, cache, length, excess), cache)


def slot_to_replace(
    info: LayerInfo,
    cache: LayerCache,
    leaving: Entry,
    list_id: Int[Array, "B K 1"],
    length: Int[Array, " B"],
    count: Int[Array, " B"],
) -> Int[Array, "B K 1"] | None:
    """The slot that each token leaving the window takes over from the token that is evicted for it.

    What ``evict`` would leave after it entered, without moving anything twice.

    Args:
      info: which layer.
      cache: before the token enters.
      leaving: the token that leaves the window.
      list_id: its page list; EMPTY where it does not enter.
      length: tokens each row has seen, the newest included.
      count: tokens that came.

    Returns:
      Index among the KV head's slots; one beyond the last where the token itself would be evicted; EMPTY
      where nothing is evicted, or more than one. None where the policy never does so: the pages are not a
      single list, or the evicted token has to be read first.
    """
    policy, pages = info.policy, cache.pages
    assert pages is not None
    single = cache.demoted is None and pages.table.shape[2] == 1
    by_held = policy.ranks_held or policy.budget.from_scores
    if by_held or not (policy.decides_later and single and policy.completion.idle):
        return None
    enters = list_id[..., 0] >= 0
    live = per_head.live(cache.pools) + enters
    full = enters & (_excess(info, cache, live, length, due(policy, length, count)) == 1)

    def lowest() -> Int[Array, "B K 1"]:
        victim = _first(*ranked(info, _with(per_head.slots(cache.pools), leaving), length))
        return jnp.where(full, victim, EMPTY)[..., None]

    return jax.lax.cond(jnp.any(full), lowest, lambda: jnp.full(list_id.shape, EMPTY))


def _with(slots: Slots, leaving: Entry) -> Slots:
    """The slots of each KV head, and the leaving token as one more."""
    shape = (*slots.pos.shape[:2], 1)
    pos = jnp.broadcast_to(leaving.pos[:, None], shape)
    return Slots(
        pos=jnp.concatenate([slots.pos, pos], axis=-1),
        live=jnp.concatenate([slots.live, pos >= 0], axis=-1),
        meta={name: jnp.concatenate([x, leaving.meta[name]], axis=2) for name, x in slots.meta.items()},
    )


def _excess(
    info: LayerInfo,
    cache: LayerCache,
    live: Int[Array, "B K"],
    length: Int[Array, " B"],
    acts: Array,
    scores: Float[Array, "B K T"] | None = None,
) -> Int[Array, "B K"]:
    """How many of the ``live`` paged slots are over the target."""
    target = info.policy.budget.targets(info.frame(cache.ring.k), length, scores)
    space = jnp.maximum(target - rings.live(length, cache.ring.window)[:, None], 0)
    return jnp.where(acts[:, None], jnp.maximum(live - space, 0), 0)


def _if(so: Bool[Array, ""], do: Callable[[LayerCache], LayerCache], cache: LayerCache) -> LayerCache:
    """``do(cache)`` if so. A loop of one turn: XLA works in its carry; a branch would copy the pools."""

    def turn(carry: tuple[Array, LayerCache]) -> tuple[Array, LayerCache]:
        return jnp.zeros_like(so), do(carry[1])

    return jax.lax.while_loop(lambda carry: carry[0], turn, (so, cache))[1]


def _evict_one(
    info: LayerInfo, cache: LayerCache, length: Int[Array, " B"], excess: Int[Array, "B K"]
) -> LayerCache:
    """``excess`` is 0 or 1: the cheap way."""
    policy = info.policy
    victim = _first(*ranked(info, per_head.slots(cache.pools), length))
    victim = jnp.where(excess > 0, victim, EMPTY)
    if not policy.completion.idle:
        at = jnp.maximum(victim, 0)[..., None]
        cache = _absorb_evicted(info, cache, at, (victim >= 0)[..., None])
    return cache.with_pools(per_head.remove(cache.pools, codecs(policy, cache), policy.selection, victim))


def _first(score: Float[Array, "B K C"], slots: Slots) -> Int[Array, "B K"]:
    """The first of ``victims``; EMPTY where no slot may be evicted."""
    lowest = slots.live & (score == score.min(axis=-1, keepdims=True))
    victim = jnp.argmax(jnp.where(lowest, slots.pos, EMPTY), axis=-1)
    return jnp.where(slots.live.any(axis=-1), victim, EMPTY)


def _evict_many(
    info: LayerInfo, cache: LayerCache, length: Int[Array, " B"], excess: Int[Array, "B K"]
) -> LayerCache:
    """Any number of victims, at once."""
    return _without(info, cache, victims(*ranked(info, per_head.slots(cache.pools), length), excess))


def _evict_by_held(
    info: LayerInfo,
    cache: LayerCache,
    length: Int[Array, " B"],
    acts: Bool[Array, " B"],
    x: Heads | None,
) -> LayerCache:
    """Where all that a KV head holds decides: which tokens go, or how the heads divide a layer's slots."""
    policy, slots = info.policy, per_head.slots(cache.pools)
    if policy.ranks_held:
        assert x is not None
        score, slots = held_scores(info, x, cache, length, acts), _candidates(info, slots, length)
        score = jnp.where(slots.live, score, jnp.inf)
    else:
        score, slots = ranked(info, slots, length)
    live, scores = per_head.live(cache.pools), None
    if policy.budget.from_scores:  # among them the ring's tokens and the sinks, which stay
        recent = rings.positions(length, cache.ring.window) >= 0
        recent = jnp.broadcast_to(recent[:, None], (*live.shape, recent.shape[-1]))
        held = jnp.concatenate([per_head.slots(cache.pools).live, recent], axis=-1)
        stays = jnp.full(recent.shape, jnp.inf, score.dtype)
        scores = jnp.where(held, jnp.concatenate([score, stays], axis=-1), -jnp.inf)
    excess = _excess(info, cache, live, length, acts, scores)
    return _without(info, cache, victims(score, slots, jnp.minimum(excess, slots.live.sum(axis=-1))))


def _without(info: LayerInfo, cache: LayerCache, gone: Bool[Array, "B K C"]) -> LayerCache:
    """The cache without these slots."""
    policy = info.policy
    if not policy.completion.idle:
        at = jnp.broadcast_to(jnp.arange(gone.shape[-1]), gone.shape)
        cache = _absorb_evicted(info, cache, at, gone)
    return cache.with_pools(per_head.retain(cache.pools, codecs(policy, cache), policy.selection, ~gone))


def ranked(info: LayerInfo, slots: Slots, length: Int[Array, " B"]) -> tuple[Float[Array, "B K C"], Slots]:
    """Scores of the slots, inf where a slot may not be evicted; and the slots, ``live`` where it may."""
    slots = _candidates(info, slots, length)
    score = info.policy.eviction.later.score(info.weights("eviction"), slots)
    return jnp.where(slots.live, score, jnp.inf), slots


def _candidates(info: LayerInfo, slots: Slots, length: Int[Array, " B"]) -> Slots:
    """The slots, ``live`` where one may be evicted, with what the eviction keeps."""
    own = {n.removeprefix("eviction."): x for n, x in slots.meta.items() if n.startswith("eviction.")}
    policy = info.policy
    first = by_row(info.total, 3) if policy.budget.spares_prompt else by_row(policy.sinks, 3)
    candidate = slots.live & (slots.pos >= first)
    return dataclasses.replace(slots, live=candidate, meta=own, seen=length[:, None, None])


def victims(score: Float[Array, "B K C"], slots: Slots, excess: Int[Array, "B K"]) -> Bool[Array, "B K C"]:
    """The ``excess`` live slots of each KV head with the lowest scores; of equals the highest positions."""
    back = -slots.pos
    order = jax.lax.sort((score, back), num_keys=2)
    at = jnp.clip(excess - 1, 0, score.shape[-1] - 1)[..., None]
    last, where = (jnp.take_along_axis(x, at, axis=-1) for x in order)
    low = (score < last) | ((score == last) & (back <= where))
    return slots.live & low & (excess > 0)[..., None]


def _absorb_evicted(info: LayerInfo, cache: LayerCache, at: Int[Array, "B K T"], gone: Array) -> LayerCache:
    """Fold evicted slots into φ, except those it absorbed at the window exit: the selectable ones."""
    pages = cache.pages
    assert pages is not None
    if info.policy.selection.acts:
        always = (pages.table.shape[2] - 1) * pages.table.shape[3] * pages.size  # the last list is selectable
        gone = gone & (at < always)
    k, v, pos = per_head.read(cache.pools, codecs(info.policy, cache), at)
    return absorb(info, cache, k, v, pos, gone)
