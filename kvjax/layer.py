"""What happens to a token at one layer: in through the window, past the door, read, gone.

Three callbacks for the model's seam share the same few verbs:

  step    one token a row: door (the oldest token out), write, evict, age, read
  chunk   C tokens a row, for policies that decide on arrival: read, door, write, evict, age
  prompt  the whole prompt: attend, score, and only then keep what the budget allows (``pack``)

Arrays are heads major inside ([B, K, T, H]); the seam's layout is turned once on the way in and out.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from kvjax import ageing
from kvjax.cache import line as lines
from kvjax.cache import pages as paging
from kvjax.cache import ring as rings
from kvjax.cache.line import Rooms
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
      confidence: see ``kvjax.policy.Frame``.
    """

    policy: Policy
    params: Params
    layer: Any
    layers: int
    window: int | None
    total: Int[Array, " B"]
    confidence: Float[Array, " B"] | None = None

    def weights(self, place: str) -> Any:
        """Learned weights of the part in ``place``, or None."""
        return self.params.get(place)

    def frame(self, k: Float[Array, "B K T H"]) -> Frame:
        """Where a budget's target is asked for."""
        storage = self.policy.storage
        slot = 2 * storage.width(k.shape[-1]) * storage.dtype(k.dtype).itemsize
        return Frame(self.layer, self.layers, k.shape[1], slot, self.confidence)


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


def through_door(site: Site, cache: LayerCache, out: Entry, judged: bool = False) -> LayerCache:
    """Each leaving token meets its one decision: GLOBAL, or φ, or nothing.

    Tokens that a verdict has chosen already (``judged``) go to the room where they will stay.
    """
    if cache.pages is None:
        return cache
    policy, which = site.policy, _destination(site, out)
    stored = [
        paging.append(pages, codec, policy.selection, out, mine)
        for pages, codec, mine in zip(
            cache.rooms,
            ageing.codecs(policy, cache),
            ageing.divided(policy, cache, which) if judged else (which,),
        )
    ]
    return _completing(site, cache.with_rooms(stored), out)


def exchange(
    site: Site, cache: LayerCache, new: Entry, length: Int[Array, " B"], count: Int[Array, " B"]
) -> LayerCache:
    """``through_door`` for a decode step: oldest token out, new one in; GLOBAL rests when none enters."""
    if cache.pages is None:
        return dataclasses.replace(cache, ring=rings.put(cache.ring, new, length, count))
    storage, selection = ageing.codecs(site.policy, cache)[0], site.policy.selection
    out = rings.leaving(cache.ring, new, length, count)
    which = _destination(site, out)

    # XLA on CPU keeps no order but that of data, and would copy the ring to write it beside a read. So what
    # is written comes out of the branches that use what was read, in one of them seemingly changed.
    def enter(pages: Pages, k: Array, v: Array) -> tuple[Pages, Array, Array]:
        pages = paging.append(pages, storage, selection, out, which)
        never = (out.pos < EMPTY)[:, None, :, None]
        return pages, jnp.where(never, out.k, k), jnp.where(never, out.v, v)

    pages, k, v = jax.lax.cond(jnp.any(which >= 0), enter, lambda *same: same, cache.pages, new.k, new.v)
    new = dataclasses.replace(new, k=k, v=v)
    ring = rings.put(cache.ring, new, length, count)
    return _completing(site, dataclasses.replace(cache, pages=pages, ring=ring), out)


def _destination(site: Site, out: Entry) -> Int[Array, "B K T"]:
    """The page list each leaving token goes to; EMPTY for those that are not stored."""
    selection, real = site.policy.selection, (out.pos >= 0)[:, None, :]
    number = jnp.zeros(out.pos.shape, jnp.int32)
    if selection.splits:
        number = selection.selectable(out.pos, site.total).astype(jnp.int32)
    return jnp.where(out.admit & real, number[:, None, :], EMPTY)


def _completing(site: Site, cache: LayerCache, out: Entry) -> LayerCache:
    """φ takes its part of the leaving tokens."""
    policy = site.policy
    if policy.completion == Nothing():
        return cache
    # Without selection φ takes the rejected; with selection every selectable token too, kept or not.
    take = ~out.admit
    if policy.selection != SelectAll():
        take = take | policy.selection.selectable(out.pos, site.total)[:, None, :]
    take = take & (out.pos >= 0)[:, None, :]
    return absorb(site, cache, out.k, out.v, jnp.broadcast_to(out.pos[:, None], out.admit.shape), take)


def absorb(site: Site, cache: LayerCache, k: Array, v: Array, pos: Array, take: Array) -> LayerCache:
    """Fold tokens into φ, in float32."""
    k, v = k.astype(jnp.float32), v.astype(jnp.float32)
    take = jnp.broadcast_to(take, k.shape[:3])
    summary = site.policy.completion.absorb(site.weights("completion"), cache.summary, k, v, pos, take)
    return dataclasses.replace(cache, summary=summary)


# --- evict ---------------------------------------------------------------------------------------


def evict(site: Site, cache: LayerCache, length: Int[Array, " B"], crossed: Bool[Array, " B"]) -> LayerCache:
    """Streams over their target lose their lowest slots, ranked once; mostly none or one each.

    Args:
      site: where.
      cache: after the newest tokens were written.
      length: tokens each row has seen, these included.
      crossed: rows that wrote something; the others are left alone.
    """
    policy = site.policy
    if cache.pages is None or not policy.decides_later:
        return cache
    target = policy.budget.targets(site.frame(cache.ring.k), length, None)
    room = jnp.maximum(target - rings.live(length, cache.ring.window)[:, None], 0)
    over = jnp.where(crossed[:, None], jnp.maximum(lines.held(cache.rooms) - room, 0), 0)
    most = over.max()
    cache = _if(most == 1, lambda cache: _drop_one(site, cache, over), cache)
    return _if(most > 1, lambda cache: _drop(site, cache, over), cache)


def _if(so: Bool[Array, ""], do: Callable[[LayerCache], LayerCache], cache: LayerCache) -> LayerCache:
    """``do(cache)`` if so. A loop of one turn: XLA works in its carry; a branch would copy the pools."""

    def turn(carry: tuple[Array, LayerCache]) -> tuple[Array, LayerCache]:
        return jnp.zeros_like(so), do(carry[1])

    return jax.lax.while_loop(lambda carry: carry[0], turn, (so, cache))[1]


def _drop_one(site: Site, cache: LayerCache, over: Int[Array, "B K"]) -> LayerCache:
    """``over`` is 0 or 1: the cheap way."""
    policy = site.policy
    score, slots = ranked(site, cache.rooms)
    lowest = slots.live & (score == score.min(axis=-1, keepdims=True))
    victim = jnp.argmax(jnp.where(lowest, slots.pos, EMPTY), axis=-1)
    victim = jnp.where((over > 0) & slots.live.any(axis=-1), victim, EMPTY)
    if policy.completion != Nothing():
        at = jnp.maximum(victim, 0)[..., None]
        cache = _absorb_evicted(site, cache, at, (victim >= 0)[..., None])
    codecs = ageing.codecs(policy, cache)
    return cache.with_rooms(lines.remove(cache.rooms, codecs, policy.selection, victim))


def _drop(site: Site, cache: LayerCache, over: Int[Array, "B K"]) -> LayerCache:
    """Any number of victims, at once."""
    policy = site.policy
    gone = victims(*ranked(site, cache.rooms), over)
    if policy.completion != Nothing():
        at = jnp.broadcast_to(jnp.arange(gone.shape[-1]), gone.shape)
        cache = _absorb_evicted(site, cache, at, gone)
    codecs = ageing.codecs(policy, cache)
    return cache.with_rooms(lines.retain(cache.rooms, codecs, policy.selection, ~gone))


def ranked(site: Site, rooms: Rooms) -> tuple[Float[Array, "B K C"], Slots]:
    """Scores along the line of a stream's slots, and the slots, ``live`` where one may go; inf elsewhere."""
    slots = lines.slots(rooms)
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
    policy = site.policy
    if cache.pages is None:
        return []
    selective = decoding and policy.selection != SelectAll() and policy.selection.applies(site.layer)
    parts: list[Partial] = []
    visited = None
    lists = [(pages, which) for pages in cache.rooms for which in range(pages.table.shape[2])]
    for pages, which in lists:
        picked = None
        if selective and which == len(lists) - 1:
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
            parts.append((found[0], found[1]))
        else:
            parts.append((found[0].reshape(q.shape), found[1].reshape(q.shape[:3])))
            masses.append(found[2].reshape(*q.shape[:3], *found[2].shape[2:]))
    if policy.completion != Nothing():
        parts += _completed(site, cache, q, visited)
    return parts


def _completed(site: Site, cache: LayerCache, q: Array, visited: Visited | None) -> list[Partial]:
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
        visited = _visited(policy, pages, pages.table.shape[2] - 1, every, None)
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
    """One new token for every active row. Order: door, write, evict, age, read.

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
    cache = exchange(site, cache, new, length, count)
    cache = evict(site, cache, length + count, active & _due(site.policy, length + count, count))
    cache = ageing.age(site.policy, cache, 1)
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
        cache = _told_rooms(site, cache, parts, masses, total, weights, count)
        cache = dataclasses.replace(cache, ring=ring)
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


def _told_rooms(
    site: Site,
    cache: LayerCache,
    parts: list[Partial],
    masses: list[Float[Array, "B N T M S"]],
    total: Float[Array, "B N T"],
    weights: Float[Array, "B T"],
    count: Int[Array, " B"],
) -> LayerCache:
    """GLOBAL's values after a read: a list's mass is under its own lse, so it is scaled by its share.

    ``parts`` are what is in hand, the lists, and what completes them.
    """
    lists = parts[len(parts) - len(masses) - (site.policy.completion != Nothing()) :]
    line = []
    for (_, lse), mass in zip(lists, masses):
        share = jnp.exp(lse - total) * weights[:, None]
        found = jnp.einsum("bnt,bntms->bnms", share, mass, precision=jax.lax.Precision.HIGHEST)
        line.append(found.reshape(*found.shape[:2], -1))
    slots = lines.slots(cache.rooms)
    values = told(site, slots.pos, slots.meta, jnp.concatenate(line, axis=-1), count)
    return cache.with_rooms(lines.with_meta(cache.rooms, values))


def chunk(
    site: Site, cache: LayerCache, x: Heads, length: Int[Array, " B"], count: Int[Array, " B"]
) -> tuple[Float[Array, "B T N H"], LayerCache]:
    """``count`` of T new tokens a row, prompt in pieces. Order: read, door, write, evict, age.

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
        cache = _told_rooms(site, cache, parts, masses, total, weights, count)
        cache = dataclasses.replace(cache, ring=ring)
    if cache.pages is not None:
        cache = through_door(site, cache, rings.leaving(ring, new, length, count))
    cache = dataclasses.replace(cache, ring=rings.put(ring, new, length, count))
    cache = evict(site, cache, length + count, (count > 0) & _due(site.policy, length + count, count))
    cache = ageing.age(policy, cache, t)
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
    if policy.budget.limited and policy.eviction.needs_mass and not own:
        mass = column_mass(
            _major(x.q),
            new.k,
            out[1],
            _weights(site, pos),
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
    return _mixed([out], x), dataclasses.replace(new, admit=keep)


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
