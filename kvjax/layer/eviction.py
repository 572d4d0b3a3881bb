"""Who leaves GLOBAL while tokens come: streams over their target lose their lowest slots."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from kvjax import ageing
from kvjax.cache import line as lines
from kvjax.cache import ring as rings
from kvjax.cache.pages import Slots
from kvjax.cache.ring import Entry
from kvjax.cache.state import LayerCache
from kvjax.layer.site import Site, absorb
from kvjax.policy import Every, Nothing, Policy, SelectAll
from kvjax.types import EMPTY

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int


def due(policy: Policy, length: Int[Array, " B"], count: Int[Array, " B"]) -> Bool[Array, " B"]:
    """Rows for which a budget that acts while decoding acts now: ``count`` tokens came, ``length`` in all."""
    came = count > 0
    if isinstance(policy.budget.when, Every):
        k = policy.budget.when.k
        return came & (length // k > (length - count) // k)
    return came


def evict(site: Site, cache: LayerCache, length: Int[Array, " B"], crossed: Bool[Array, " B"]) -> LayerCache:
    """Streams over their target lose their lowest slots, ranked once; mostly none or one each.

    Args:
      site: where.
      cache: after the newest tokens were written.
      length: tokens each row has seen, these included.
      crossed: rows for which the budget acts; the others are left alone.
    """
    if cache.pages is None or not site.policy.decides_later:
        return cache
    over = _over(site, cache, lines.held(cache.rooms), length, crossed)
    most = over.max()
    cache = _if(most == 1, lambda cache: _drop_one(site, cache, over), cache)
    return _if(most > 1, lambda cache: _drop(site, cache, over), cache)


def replaced(
    site: Site,
    cache: LayerCache,
    out: Entry,
    which: Int[Array, "B K 1"],
    length: Int[Array, " B"],
    count: Int[Array, " B"],
) -> Int[Array, "B K 1"] | None:
    """The slot that each token at the door takes from one that goes at this step, because of it alone.

    What ``evict`` would leave after it entered, without moving anything twice.

    Args:
      site: where.
      cache: before the token enters.
      out: at the door.
      which: its page list; EMPTY where it does not enter.
      length: tokens each row has seen, the newest included.
      count: tokens that came.

    Returns:
      Index along the line of the stream's slots; one beyond the last where it would go itself; EMPTY where
      nobody goes, or more than one has to. None where the policy never does so: GLOBAL is not a single list,
      or what goes has to be read first.
    """
    policy, pages = site.policy, cache.pages
    assert pages is not None  # noqa: S101
    single = cache.history is None and pages.table.shape[2] == 1
    if not (policy.decides_later and single and policy.completion == Nothing()):
        return None
    enters = which[..., 0] >= 0
    held = lines.held(cache.rooms) + enters
    full = enters & (_over(site, cache, held, length, due(policy, length, count)) == 1)

    def lowest() -> Int[Array, "B K 1"]:
        victim = _first(*ranked(site, _with(lines.slots(cache.rooms), out)))
        return jnp.where(full, victim, EMPTY)[..., None]

    return jax.lax.cond(jnp.any(full), lowest, lambda: jnp.full(which.shape, EMPTY))


def _with(slots: Slots, out: Entry) -> Slots:
    """The line of slots, and the token at the door as one more."""
    shape = (*slots.pos.shape[:2], 1)
    pos = jnp.broadcast_to(out.pos[:, None], shape)
    return Slots(
        pos=jnp.concatenate([slots.pos, pos], axis=-1),
        live=jnp.concatenate([slots.live, pos >= 0], axis=-1),
        meta={name: jnp.concatenate([x, out.meta[name]], axis=-1) for name, x in slots.meta.items()},
    )


def _over(
    site: Site, cache: LayerCache, held: Int[Array, "B K"], length: Int[Array, " B"], crossed: Array
) -> Int[Array, "B K"]:
    """How many of the ``held`` slots of GLOBAL are too many."""
    target = site.policy.budget.targets(site.frame(cache.ring.k), length, None)
    room = jnp.maximum(target - rings.live(length, cache.ring.window)[:, None], 0)
    return jnp.where(crossed[:, None], jnp.maximum(held - room, 0), 0)


def _if(so: Bool[Array, ""], do: Callable[[LayerCache], LayerCache], cache: LayerCache) -> LayerCache:
    """``do(cache)`` if so. A loop of one turn: XLA works in its carry; a branch would copy the pools."""

    def turn(carry: tuple[Array, LayerCache]) -> tuple[Array, LayerCache]:
        return jnp.zeros_like(so), do(carry[1])

    return jax.lax.while_loop(lambda carry: carry[0], turn, (so, cache))[1]


def _drop_one(site: Site, cache: LayerCache, over: Int[Array, "B K"]) -> LayerCache:
    """``over`` is 0 or 1: the cheap way."""
    policy = site.policy
    victim = _first(*ranked(site, lines.slots(cache.rooms)))
    victim = jnp.where(over > 0, victim, EMPTY)
    if policy.completion != Nothing():
        at = jnp.maximum(victim, 0)[..., None]
        cache = _absorb_evicted(site, cache, at, (victim >= 0)[..., None])
    codecs = ageing.codecs(policy, cache)
    return cache.with_rooms(lines.remove(cache.rooms, codecs, policy.selection, victim))


def _first(score: Float[Array, "B K C"], slots: Slots) -> Int[Array, "B K"]:
    """The first of ``victims``; EMPTY where nobody may go."""
    lowest = slots.live & (score == score.min(axis=-1, keepdims=True))
    victim = jnp.argmax(jnp.where(lowest, slots.pos, EMPTY), axis=-1)
    return jnp.where(slots.live.any(axis=-1), victim, EMPTY)


def _drop(site: Site, cache: LayerCache, over: Int[Array, "B K"]) -> LayerCache:
    """Any number of victims, at once."""
    policy = site.policy
    gone = victims(*ranked(site, lines.slots(cache.rooms)), over)
    if policy.completion != Nothing():
        at = jnp.broadcast_to(jnp.arange(gone.shape[-1]), gone.shape)
        cache = _absorb_evicted(site, cache, at, gone)
    codecs = ageing.codecs(policy, cache)
    return cache.with_rooms(lines.retain(cache.rooms, codecs, policy.selection, ~gone))


def ranked(site: Site, slots: Slots) -> tuple[Float[Array, "B K C"], Slots]:
    """Scores of the slots, inf where none may go; and the slots, ``live`` where one may."""
    mine = {n.removeprefix("eviction."): x for n, x in slots.meta.items() if n.startswith("eviction.")}
    may_go = slots.live & (slots.pos >= site.policy.sinks)
    slots = dataclasses.replace(slots, live=may_go, meta=mine)
    return jnp.where(may_go, site.policy.eviction.score(site.weights("eviction"), slots), jnp.inf), slots


def victims(score: Float[Array, "B K C"], slots: Slots, over: Int[Array, "B K"]) -> Bool[Array, "B K C"]:
    """The ``over`` live slots of each stream with the lowest scores, the highest positions among equals."""
    back = -slots.pos
    ranked = jax.lax.sort((score, back), num_keys=2)
    at = jnp.clip(over - 1, 0, score.shape[-1] - 1)[..., None]
    last, where = (jnp.take_along_axis(x, at, axis=-1) for x in ranked)
    low = (score < last) | ((score == last) & (back <= where))
    return slots.live & low & (over > 0)[..., None]


def _absorb_evicted(site: Site, cache: LayerCache, at: Int[Array, "B K T"], gone: Array) -> LayerCache:
    """Fold evicted slots into φ, except those it took at the door already: the selectable ones."""
    pages = cache.pages
    assert pages is not None  # noqa: S101
    if site.policy.selection != SelectAll():
        always = (pages.table.shape[2] - 1) * pages.table.shape[3] * pages.size  # the last list is selectable
        gone = gone & (at < always)
    k, v, pos = lines.read(cache.rooms, ageing.codecs(site.policy, cache), at)
    return absorb(site, cache, k, v, pos, gone)
