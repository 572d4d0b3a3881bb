"""What happens to a token at one layer: in through the window, past the door, read, gone.

Three callbacks for the model's seam share the same few verbs:

  step    one token a row: door (the oldest token out), write, evict, read
  chunk   C tokens a row, for policies that decide on arrival: read, door, write, evict
  prompt  the whole prompt: attend, score, and only then keep what the budget allows (``pack``)

Arrays are heads major inside ([B, K, T, H]); the seam's layout is turned once on the way in and out.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from kvjax.cache import pages as paging
from kvjax.cache import ring as rings
from kvjax.cache.pages import Pages, Slots
from kvjax.cache.ring import Entry
from kvjax.cache.state import LayerCache
from kvjax.policy import (
    OBSERVABLE,
    AdmitAll,
    Every,
    Frame,
    Nothing,
    Observation,
    Policy,
    SelectAll,
    Visited,
)
from kvjax.types import EMPTY, Heads, Params
from pallas_kernels.blockwise.api import blockwise, column_mass
from pallas_kernels.merge.api import merge
from pallas_kernels.ragged_decode.api import ragged_decode
from pallas_kernels.vertical_slash.api import vertical_slash

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int

Partial = tuple["Float[Array, 'B N T H']", "Float[Array, 'B N T']"]


@dataclasses.dataclass(frozen=True)
class Site:
    """Where we are: everything about a layer that is not the layer's cache.

    Attributes:
      policy: what decides.
      params: learned weights of its parts at this layer, by place.
      layer, layers: this layer (may be traced in ``prompt``) and how many there are.
      window: the model's own sliding window here, or None.
      total: prompt length of each row.
    """

    policy: Policy
    params: Params
    layer: Any
    layers: int
    window: int | None
    total: Int[Array, " B"]

    def weights(self, place: str) -> Any:
        """Learned weights of the part in ``place``, or None."""
        return self.params.get(place)

    def frame(self, k: Float[Array, "B K T H"]) -> Frame:
        """Where a budget's target is asked for."""
        held = self.policy.storage.dtype(k.dtype)
        return Frame(self.layer, self.layers, k.shape[1], 2 * k.shape[-1] * held.itemsize)


# --- in ------------------------------------------------------------------------------------------


def _major(x: Float[Array, "B T N H"]) -> Float[Array, "B N T H"]:
    return jnp.swapaxes(x, 1, 2)


def observe(site: Site, x: Heads, pos: Int[Array, "B T"]) -> Observation:
    """What the policy's parts declared they look at, and nothing else."""
    values = {
        name: getattr(x, name) if name == "hidden" else _major(getattr(x, name))
        for name in OBSERVABLE
        if name in site.policy.needs
    }
    where = {"pos": pos, "total": site.total, "layer": site.layer, "layers": site.layers}
    return Observation(**where, values=values, softcap=x.softcap, turn=x.turn)


def arriving(site: Site, x: Heads, pos: Int[Array, "B T"], seen: Observation) -> Entry:
    """The tokens with their admission bits and everything the parts keep with them."""
    policy = site.policy
    k, v = _major(x.k), _major(x.v)
    admit = policy.admission.admit(site.weights("admission"), seen)
    sink = (pos >= 0) & (pos < policy.sinks)
    meta: dict[str, Array] = {}
    for part in policy.parts:
        values = part.arrive(site.weights(part.place), seen)
        named = {f"{part.place}.{name}": values[name] for name in part.keeps}
        meta |= {name: x for name, x in named.items() if name in policy.keeps}
    return Entry(k=k, v=v, pos=pos, admit=jnp.broadcast_to(admit | sink[:, None, :], k.shape[:3]), meta=meta)


# --- the door ------------------------------------------------------------------------------------


def through_door(site: Site, cache: LayerCache, out: Entry) -> LayerCache:
    """Each leaving token meets its one decision: GLOBAL, or φ, or nothing."""
    pages, policy = cache.pages, site.policy
    if pages is None:
        return cache
    real = (out.pos >= 0)[:, None, :]
    choice = policy.selection.selectable(out.pos, site.total)
    number = choice.astype(jnp.int32) if policy.selection.splits else jnp.zeros(out.pos.shape, jnp.int32)
    which = jnp.where(out.admit & real, number[:, None, :], EMPTY)
    pages = paging.append(pages, policy.storage, policy.selection, out, which)
    cache = dataclasses.replace(cache, pages=pages)
    if policy.completion == Nothing():
        return cache
    # Without selection φ takes the rejected; with selection every selectable token too, kept or not.
    selective = policy.selection != SelectAll()
    take = real & (~out.admit | (choice[:, None, :] & selective))
    return absorb(site, cache, out.k, out.v, jnp.broadcast_to(out.pos[:, None], out.admit.shape), take)


def absorb(site: Site, cache: LayerCache, k: Array, v: Array, pos: Array, take: Array) -> LayerCache:
    """Fold tokens into φ, in float32."""
    k, v = k.astype(jnp.float32), v.astype(jnp.float32)
    take = jnp.broadcast_to(take, k.shape[:3])
    summary = site.policy.completion.absorb(site.weights("completion"), cache.summary, k, v, pos, take)
    return dataclasses.replace(cache, summary=summary)


# --- evict ---------------------------------------------------------------------------------------


def evict(site: Site, cache: LayerCache, length: Int[Array, " B"], crossed: Bool[Array, " B"]) -> LayerCache:
    """While a stream is over its target, its lowest slot goes.

    Args:
      site: where.
      cache: after the newest tokens were written.
      length: tokens each row has seen, these included.
      crossed: rows that wrote something; the others are left alone.
    """
    policy = site.policy
    if cache.pages is None or not policy.budget.limited or policy.budget.when == "after_prompt":
        return cache
    target = policy.budget.targets(site.frame(cache.ring.k), length, None)
    room = jnp.maximum(target - rings.live(length, cache.ring.window)[:, None], 0)

    def next_victim(pages: Pages) -> Int[Array, "B K"]:
        over = (pages.length.sum(axis=-1) > room) & crossed[:, None]
        return jnp.where(over, victims(site, pages), EMPTY)

    def drop(carry: tuple[LayerCache, Array]) -> tuple[LayerCache, Array]:
        cache, victim = carry
        if policy.completion != Nothing():
            cache = _absorb_victims(site, cache, victim)
        assert cache.pages is not None  # noqa: S101  (checked above)
        pages = paging.remove(cache.pages, policy.storage, policy.selection, victim)
        return dataclasses.replace(cache, pages=pages), next_victim(pages)

    start = (cache, next_victim(cache.pages))
    return jax.lax.while_loop(lambda carry: jnp.any(carry[1] >= 0), drop, start)[0]


def victims(site: Site, pages: Pages) -> Int[Array, "B K"]:
    """Along the lines of ``pages.slots``: the unprotected slot with the lowest score, the highest position
    among equals; EMPTY where every slot is protected."""
    slots = paging.slots(pages)
    mine = {n.removeprefix("eviction."): x for n, x in slots.meta.items() if n.startswith("eviction.")}
    score = site.policy.eviction.score(site.weights("eviction"), dataclasses.replace(slots, meta=mine))
    may_go = slots.live & (slots.pos >= site.policy.sinks)
    score = jnp.where(may_go, score, jnp.inf)
    lowest = may_go & (score == score.min(axis=-1, keepdims=True))
    choice = jnp.argmax(jnp.where(lowest, slots.pos, EMPTY), axis=-1)
    return jnp.where(may_go.any(axis=-1), choice, EMPTY)


def _absorb_victims(site: Site, cache: LayerCache, victim: Int[Array, "B K"]) -> LayerCache:
    """Fold evicted tokens into φ, except those it took at the door already: the selectable ones."""
    pages = cache.pages
    assert pages is not None  # noqa: S101
    if site.policy.selection != SelectAll():
        always = (pages.table.shape[2] - 1) * pages.table.shape[3] * pages.size  # the last list is selectable
        victim = jnp.where(victim < always, victim, EMPTY)
    at = jnp.maximum(victim, 0)[..., None]
    lists = pages.table.reshape(*victim.shape, -1)  # the lists of a stream, one after the other
    page = jnp.maximum(jnp.take_along_axis(lists, at // pages.size, axis=-1), 0)
    k, v = site.policy.storage.read(pages, page, at % pages.size)
    return absorb(site, cache, k, v, pages.pos[page, at % pages.size], (victim >= 0)[..., None])


# --- read ----------------------------------------------------------------------------------------


def read_pages(
    site: Site,
    cache: LayerCache,
    q: Float[Array, "B N T H"],
    decoding: bool,
    softcap: float | None = None,
    masses: list[Array] | None = None,
) -> list[Partial]:
    """Partials of GLOBAL and φ; a selection part acts on decode reads only.

    ``masses`` takes what each query gave a list's slots, [B, N, T, M, S], under the list's own lse.
    """
    pages, policy = cache.pages, site.policy
    if pages is None:
        return []
    lists = pages.table.shape[2]
    selective = decoding and policy.selection != SelectAll() and policy.selection.applies(site.layer)
    parts: list[Partial] = []
    visited = None
    for which in range(lists):
        picked = None
        if selective and which == lists - 1:
            picked = policy.selection.select(site.weights("selection"), q[:, :, 0], pages, which)
            visited = _visited(policy, pages, which, picked.pages, picked.slots)
        # Asked for mass, every query is a head of its own: it is scaled query by query before it is added up.
        found = ragged_decode(
            q if masses is None else q.reshape(q.shape[0], -1, 1, q.shape[-1]),
            pages.k,
            pages.v,
            pages.table[:, :, which],
            pages.length[:, :, which],
            scales=pages.scales,
            pages=None if picked is None else picked.pages,
            slots=None if picked is None else picked.slots,
            mass=masses is not None,
            softcap=softcap,
        )
        if masses is None:
            parts.append(found[:2])
        else:
            parts.append((found[0].reshape(q.shape), found[1].reshape(q.shape[:3])))
            masses.append(found[2].reshape(*q.shape[:3], *found[2].shape[2:]))
    if policy.completion != Nothing():
        parts += _completed(site, cache, q, visited, lists)
    return parts


def _completed(site: Site, cache: LayerCache, q: Array, visited: Visited | None, lists: int) -> list[Partial]:
    """φ of what this read leaves out; nothing where nothing can be left out."""
    policy, pages = site.policy, cache.pages
    assert pages is not None  # noqa: S101
    if policy.selection == SelectAll():  # φ holds the rejected and evicted, none of which is read
        return [policy.completion.read(site.weights("completion"), cache.summary, q, None)]
    if visited is None:  # a dense read under a selective policy visits every selectable slot that is left
        if policy.admission == AdmitAll() and not policy.budget.limited:
            return []
        every = jnp.arange(pages.table.shape[-1])
        every = jnp.broadcast_to(every, (*pages.table.shape[:2], len(every)))
        visited = _visited(policy, pages, lists - 1, every, None)
    return [policy.completion.read(site.weights("completion"), cache.summary, q, visited)]


def _visited(
    policy: Policy, pages: Pages, which: int, picked: Int[Array, "B K J"], mask: Array | None
) -> Visited | None:
    """The slots of the picked pages as they are stored; None when no completion part will look."""
    if policy.completion == Nothing():
        return None
    entry = jnp.maximum(picked, 0)
    page = jnp.maximum(jnp.take_along_axis(pages.table[:, :, which], entry, axis=-1), 0)
    slot = jnp.arange(pages.size)
    k, v = policy.storage.read(pages, page[..., None], slot)
    live = entry[..., None] * pages.size + slot < pages.length[:, :, which, None, None]
    live = live & (picked >= 0)[..., None] & (True if mask is None else mask)
    line = (*picked.shape[:2], -1)
    return Visited(
        k=k.astype(jnp.float32).reshape(*line, k.shape[-1]),
        v=v.astype(jnp.float32).reshape(*line, v.shape[-1]),
        pos=pages.pos[page].reshape(line),
        live=live.reshape(line),
    )


def _mixed(parts: list[Partial], x: Heads) -> Float[Array, "B T N H"]:
    """One merge of all rooms, back in the seam's layout."""
    out = parts[0][0] if len(parts) == 1 else merge(parts)[0]
    return _major(out).astype(x.v.dtype)


# --- the three callbacks -------------------------------------------------------------------------


def step(
    site: Site, cache: LayerCache, x: Heads, length: Int[Array, " B"], active: Bool[Array, " B"]
) -> tuple[Float[Array, "B 1 N H"], LayerCache]:
    """One new token for every active row. Order: door, write, evict, read.

    Args:
      site: where.
      cache: after ``length`` tokens.
      x: the new token's heads (T = 1).
      length: position of the new token.
      active: rows that really have one; the others leave no trace and read garbage.
    """
    count = active.astype(jnp.int32)
    pos = jnp.where(active, length, EMPTY)[:, None]
    new = arriving(site, x, pos, observe(site, x, pos))
    if cache.pages is not None:
        cache = through_door(site, cache, rings.leaving(cache.ring, new, length, count))
    cache = dataclasses.replace(cache, ring=rings.put(cache.ring, new, length, count))
    cache = evict(site, cache, length + count, active & _due(site.policy, length + count, count))
    q = _major(x.q)
    held = rings.positions(length + count, cache.ring.window)
    recent = blockwise(q, cache.ring.k, cache.ring.v, q_pos=length[:, None], k_pos=held, softcap=x.softcap)
    masses: list[Array] | None = [] if _tracks(site, cache) else None
    parts = [recent, *read_pages(site, cache, q, decoding=True, softcap=x.softcap, masses=masses)]
    if masses is not None:  # what is learned now decides at the next step
        total = merge(parts)[1]
        weights = _weights(site, pos)
        hand = column_mass(q, cache.ring.k, total, weights, q_pos=pos, k_pos=held, softcap=x.softcap)
        ring = dataclasses.replace(cache.ring, meta=told(site, held[:, None], cache.ring.meta, hand, count))
        pages = _told_pages(site, cache, parts, masses, total, weights, count)
        cache = dataclasses.replace(cache, ring=ring, pages=pages)
    return _mixed(parts, x), cache


# --- what a read tells -------------------------------------------------------------------------


def _tracks(site: Site, cache: LayerCache) -> bool:
    return site.policy.tracks_mass and cache.pages is not None


def _weights(site: Site, pos: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """What each query of a read counts; 0 for padding."""
    age = pos.max(axis=1, keepdims=True) - pos
    return jnp.where(pos >= 0, site.policy.eviction.weigh(age), 0.0)


def told(
    site: Site, pos: Int[Array, "B K C"], meta: dict[str, Array], mass: Float[Array, "B N C"], count: Array
) -> dict[str, Array]:
    """Per-slot values after a read of ``count`` queries a row; rows without a query keep theirs."""
    eviction, at = site.policy.eviction, count[:, None, None]
    kept = {name: meta[f"eviction.{name}"] for name in eviction.keeps}
    pos = jnp.broadcast_to(pos, (*meta[f"eviction.{eviction.keeps[0]}"].shape,))
    new = eviction.receive(Slots(pos=pos, live=pos >= 0, meta=kept), mass, jnp.maximum(at, 1))
    return meta | {f"eviction.{name}": jnp.where(at > 0, new[name], kept[name]) for name in kept}


def _told_pages(
    site: Site,
    cache: LayerCache,
    parts: list[Partial],
    masses: list[Float[Array, "B N T M S"]],
    total: Float[Array, "B N T"],
    weights: Float[Array, "B T"],
    count: Int[Array, " B"],
) -> Pages:
    """GLOBAL's values after a read: a list's mass is under its own lse, so it is scaled by its share.

    ``parts`` are what is in hand, the lists, and what completes them.
    """
    pages = cache.pages
    assert pages is not None  # noqa: S101  (the caller has looked)
    rows, n, _ = total.shape
    lists = parts[len(parts) - len(masses) - (site.policy.completion != Nothing()) :]
    line = []
    for (_, lse), mass in zip(lists, masses):
        share = jnp.exp(lse - total) * weights[:, None]
        line.append(jnp.einsum("bnt,bntms->bnms", share, mass, precision=jax.lax.Precision.HIGHEST))
    slots = paging.slots(pages)
    mass = jnp.stack(line, axis=2).reshape(rows, n, -1)
    return paging.with_meta(pages, told(site, slots.pos, slots.meta, mass, count))


def chunk(
    site: Site, cache: LayerCache, x: Heads, length: Int[Array, " B"], count: Int[Array, " B"]
) -> tuple[Float[Array, "B T N H"], LayerCache]:
    """``count`` of T new tokens a row, prompt in pieces. Order: read, door, write, evict.

    Key j is visible to query i iff j <= i and (i - j < W or j was admitted); GLOBAL holds only admitted
    tokens older than any query's window, so it needs no mask. With a completion part, what is still in
    hand is read exactly and φ stands for what is gone.
    """
    policy, t = site.policy, x.q.shape[1]
    step_ = jnp.arange(t)[None, :]
    pos = jnp.where(step_ < count[:, None], length[:, None] + step_, EMPTY)
    new = arriving(site, x, pos, observe(site, x, pos))
    q, ring = _major(x.q), cache.ring
    held = rings.positions(length, ring.window)
    judged = policy.admission != AdmitAll()

    def hidden(bits: Array, some: bool) -> tuple[int | None, Array | None]:
        """Window and bits under which tokens in hand are read; ``some`` of them may be rejected."""
        if cache.pages is None:  # such a layer forgets for good: no completion stands behind it
            return ring.window, None
        return (ring.window, bits) if some and policy.completion == Nothing() else (None, None)

    # A prompt that was judged whole leaves rejected tokens in the ring.
    w, old = hidden(ring.admit, judged or policy.whole_prompt)
    recent = blockwise(q, ring.k, ring.v, q_pos=pos, k_pos=held, window=w, admit=old, softcap=x.softcap)
    parts = [recent, _together(q, new, count, *hidden(new.admit, judged), x.softcap)]
    masses: list[Array] | None = [] if _tracks(site, cache) else None
    parts += read_pages(site, cache, q, decoding=False, softcap=x.softcap, masses=masses)
    if masses is not None:
        total, weights = merge(parts)[1], _weights(site, pos)
        hand = functools.partial(column_mass, q, lse=total, weights=weights, q_pos=pos, softcap=x.softcap)
        was = hand(ring.k, k_pos=held, window=w, admit=old)
        window, bits = hidden(new.admit, judged)
        now = hand(new.k, k_pos=pos, window=window, admit=bits)
        ring = dataclasses.replace(ring, meta=told(site, held[:, None], ring.meta, was, count))
        new = dataclasses.replace(new, meta=told(site, pos[:, None], new.meta, now, count))
        pages = _told_pages(site, cache, parts, masses, total, weights, count)
        cache = dataclasses.replace(cache, ring=ring, pages=pages)
    if cache.pages is not None:
        cache = through_door(site, cache, rings.leaving(ring, new, length, count))
    cache = dataclasses.replace(cache, ring=rings.put(ring, new, length, count))
    cache = evict(site, cache, length + count, (count > 0) & _due(site.policy, length + count, count))
    return _mixed(parts, x), cache


def _together(
    q: Float[Array, "B N T H"],
    new: Entry,
    count: Int[Array, " B"],
    window: int | None,
    bits: Bool[Array, "B K T"] | None,
    softcap: float | None,
) -> Partial:
    """Attention among tokens that arrive together; beyond the window its cost follows the admitted ones."""
    if bits is None or window is None or window >= q.shape[2]:
        k, v, at = new.k, new.v, new.pos
        return blockwise(q, k, v, q_pos=at, k_pos=at, window=window, admit=bits, softcap=softcap)
    return vertical_slash(q, new.k, new.v, bits, window=window, lengths=count, softcap=softcap)[:2]


def _due(policy: Policy, length: Int[Array, " B"], count: Int[Array, " B"]) -> Bool[Array, " B"]:
    """Rows for which a budget that acts while decoding acts now."""
    if isinstance(policy.budget.when, Every):
        k = policy.budget.when.k
        return length // k > (length - count) // k
    return jnp.ones(length.shape, bool)


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
    out = _together(_major(x.q), new, site.total, window, bits, x.softcap)
    if policy.tracks_mass and not own:
        q, weights = _major(x.q), _weights(site, pos)
        sight = {"q_pos": pos, "k_pos": pos, "window": window, "admit": bits, "softcap": x.softcap}
        new = dataclasses.replace(
            new,
            meta=told(
                site, pos[:, None], new.meta, column_mass(q, new.k, out[1], weights, **sight), site.total
            ),
        )
    keep = new.admit if own or not policy.budget.limited else new.admit & verdict(site, new, seen)
    return _mixed([out], x), dataclasses.replace(new, admit=keep)


def verdict(site: Site, new: Entry, seen: Observation) -> Bool[Array, "B K T"]:
    """Who stays: the protected, then the best scores, up to the target; ties to the lowest position."""
    policy = site.policy
    if policy.tracks_mass:  # as at any later step
        pos = jnp.broadcast_to(seen.pos[:, None, :], new.admit.shape)
        mine = {name: new.meta[f"eviction.{name}"] for name in policy.eviction.keeps}
        score = policy.eviction.score(site.weights("eviction"), Slots(pos=pos, live=pos >= 0, meta=mine))
    else:
        score = policy.eviction.score_prompt(site.weights("eviction"), seen)
    score = jnp.broadcast_to(score, new.admit.shape)
    # Where the budget acts later too, the ring is live whatever it scores.
    newest = policy.ring_tokens if policy.decides_later else policy.protects
    pos = seen.pos[:, None, :]
    safe = (pos >= 0) & ((pos < policy.sinks) | (pos >= (site.total - newest)[:, None, None]))
    score = jnp.where((pos >= 0) & new.admit, score, -jnp.inf)
    score = jnp.where(safe, jnp.inf, score)
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
    cache = through_door(site, cache, dataclasses.replace(new, pos=jnp.where(left, new.pos, EMPTY)))
    return dataclasses.replace(cache, ring=rings.put(cache.ring, new, jnp.zeros_like(count), count))


def survivors(new: Entry, count: Int[Array, " B"], window: int) -> Int[Array, "B K"]:
    """How many tokens of each stream ``pack`` will put into GLOBAL."""
    leaves = (new.pos >= 0) & (new.pos < (count - window)[:, None])
    return (new.admit & leaves[:, None, :]).sum(axis=-1)
