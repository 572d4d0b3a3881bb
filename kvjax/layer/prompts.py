"""A prompt judged as a whole: attend, score, and only then keep what the budget allows."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax.numpy as jnp

from kvjax.cache import ring as rings
from kvjax.cache.pages import Slots
from kvjax.cache.ring import Entry
from kvjax.cache.state import LayerCache
from kvjax.layer.door import through_door
from kvjax.layer.mass import told, weights_of
from kvjax.layer.reading import mixed, together
from kvjax.layer.site import Site, arriving, major, observe
from kvjax.policy import AdmitAll, Nothing, Observation
from kvjax.types import EMPTY, Heads
from pallas_kernels.blockwise.api import column_mass

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int


def prompt(site: Site, x: Heads, pos: Int[Array, "B T"]) -> tuple[Float[Array, "B T N H"], Entry]:
    """The whole prompt at one layer: attend under the admission mask, then judge every token.

    Returns:
      The mixed values, and the tokens with their verdicts as admission bits (``pack`` stores them).
    """
    policy = site.policy
    seen = observe(site, x, pos)
    new = arriving(site, x, pos, seen)
    own = site.window is not None  # the model's sliding layers take no policy beyond their window
    hides = policy.admission != AdmitAll() and policy.admission.prefill and policy.completion == Nothing()
    window, bits = (policy.admission.window, new.admit) if hides and not own else (site.window, None)
    out = together(major(x.q), new, site.total, window, bits, x.softcap)
    if policy.budget.limited and policy.eviction.needs_mass and not own:
        mass = column_mass(
            major(x.q),
            new.k,
            out[1],
            weights_of(site, pos),
            q_pos=pos,
            k_pos=pos,
            window=window,
            admit=bits,
            softcap=x.softcap,
        )
        seen = dataclasses.replace(seen, values=seen.values | {"mass": mass})
        if policy.tracks_mass:
            new = dataclasses.replace(new, meta=told(site, pos[:, None], new.meta, mass, site.total))
    keep = new.admit if own or not policy.budget.limited else new.admit & verdict(site, new, seen)
    return mixed([out], x), dataclasses.replace(new, admit=keep)


def verdict(site: Site, new: Entry, seen: Observation) -> Bool[Array, "B K T"]:
    """Who stays: the protected, then the best scores, up to the target; ties to the lowest position."""
    policy, shape = site.policy, new.admit.shape
    # Where the budget acts later too, the ring is live whatever it scores.
    newest = policy.ring_tokens if policy.decides_later else policy.protects
    pos = seen.pos[:, None, :]
    safe = (pos >= 0) & ((pos < policy.sinks) | (pos >= (site.total - newest)[:, None, None]))
    free = (pos >= 0) & new.admit & ~safe
    if policy.tracks_mass:  # as at any later step
        mine = {name: new.meta[f"eviction.{name}"] for name in policy.eviction.keeps}
        slots = Slots(pos=jnp.broadcast_to(pos, shape), live=free, meta=mine)
        score = policy.eviction.score(site.weights("eviction"), slots)
    else:
        score = policy.eviction.score_prompt(site.weights("eviction"), seen)
    score = jnp.where(free, jnp.broadcast_to(score, shape), jnp.where(safe, jnp.inf, -jnp.inf))
    scores = score if policy.budget.from_scores else None
    target = policy.budget.targets(site.frame(new.k), site.total, scores)
    target = jnp.maximum(target, safe.sum(axis=-1))
    order = jnp.argsort(jnp.argsort(-score, axis=-1, stable=True), axis=-1)
    return (order < target[..., None]) & (score > -jnp.inf)


def pack(site: Site, cache: LayerCache, new: Entry, count: Int[Array, " B"]) -> LayerCache:
    """Store a judged prompt: the newest W tokens in the ring, survivors in GLOBAL, the rest in φ or nowhere.

    Args:
      site: where.
      cache: an empty cache whose pool holds the survivors.
      new: the prompt, verdicts in ``admit``.
      count: prompt length of each row.
    """
    left = new.pos < (count - cache.ring.window)[:, None]
    out = dataclasses.replace(new, pos=jnp.where(left, new.pos, EMPTY))
    cache = through_door(site, cache, out, judged=True)
    return dataclasses.replace(cache, ring=rings.put(cache.ring, new, jnp.zeros_like(count), count))


def survivors(new: Entry, count: Int[Array, " B"], window: int) -> Int[Array, "B K"]:
    """How many tokens of each stream ``pack`` will put into GLOBAL."""
    leaves = (new.pos >= 0) & (new.pos < (count - window)[:, None])
    return (new.admit & leaves[:, None, :]).sum(axis=-1)
