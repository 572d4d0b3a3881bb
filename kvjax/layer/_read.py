"""Reads: a partial of the ring, of every page list and of φ, merged once; and a record of what was loaded.

Why: kvjax/DESIGN.md, 10.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import jax.numpy as jnp

from kvjax.algebra import Picked, Policy, Selection, Visited
from kvjax.cache import ring as rings
from kvjax.cache.hosted import Hosted
from kvjax.cache.pages import Pages
from kvjax.cache.ring import Entry, Ring
from kvjax.cache.state import LayerCache
from kvjax.cache.write import along, blocks, split, there
from kvjax.layer._hosted import Partial, read_hosted
from kvjax.layer._info import LayerInfo, major
from kvjax.types import pytree
from pallas_kernels.blockwise.api import blockwise
from pallas_kernels.merge.api import merge
from pallas_kernels.ragged_decode.api import gathered_decode, ragged_decode
from pallas_kernels.vertical_slash.api import vertical_slash

if TYPE_CHECKING:
    from jax.typing import DTypeLike
    from jaxtyping import Array, Bool, Float, Int


@pytree()
@dataclasses.dataclass(frozen=True, kw_only=True)
class Loaded:
    """What one decode read loads at a layer; counted in the program only where somebody uses it.

    Attributes:
      ring: ring slots.
      pages: paged slots, of each KV head.
      selector: what the selection loads to choose, in tokens (K and V of one position in the model's dtype):
        its per-page values, or every key of the list.
      summary: is φ read too?
    """

    ring: Int[Array, " B"]
    pages: Int[Array, "B K"]
    selector: Float[Array, "B K"]
    summary: Bool[Array, ""]


@pytree()
@dataclasses.dataclass(frozen=True, kw_only=True)
class Read:
    """Result of a decode read.

    Attributes:
      out: attention output, in the model's layout and dtype.
      lse: log-sum-exp of all scores that were read, per query head.
      mass: what the query gave each paged slot, [B, N, 1, M, S] a list, under the list's own lse; None
        where no eviction ranks by it.
      loaded: how much was loaded for it.
    """

    out: Float[Array, "B T N H"]
    lse: Float[Array, "B N T"]
    mass: tuple[Float[Array, "B N T M S"], ...] | None
    loaded: Loaded


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedRead:
    """Partials of a layer's pages and φ.

    Attributes:
      lists: one partial for each page list.
      mass: what each query gave each list's slots, under the list's own lse; None where not asked for.
      completion: φ's partial; empty where nothing is left out.
      chosen: slots that the selection chose of the last list, where it acted.
      hosted: the layer's hosted pages after the read.
    """

    lists: tuple[Partial, ...] = ()
    mass: tuple[Float[Array, "B N T M S"], ...] | None = None
    completion: tuple[Partial, ...] = ()
    chosen: Int[Array, "B K"] | None = None
    hosted: Hosted | None = None

    @property
    def partials(self) -> tuple[Partial, ...]:
        """All of them."""
        return self.lists + self.completion


def read_pages(
    info: LayerInfo,
    cache: LayerCache,
    q: Float[Array, "B N T H"],
    *,
    by: Selection | None,
    softcap: float | None = None,
    with_mass: bool = False,
) -> PagedRead:
    """Reads pages and φ.

    Args:
      info: which layer.
      cache: read as it is.
      q: one query a head, or several where nothing chooses.
      by: what chooses among the slots, for decode reads the policy's selection; None: all are visited.
      softcap: of the scores.
      with_mass: also what each slot received.
    """
    policy = info.policy
    if cache.pages is None:
        return PagedRead()
    selective = by is not None and not by.idle and by.applies(info.kind)
    partials: list[Partial] = []
    masses: list[Array] = []
    chosen: Int[Array, "B K"] | None = None
    visited: Visited | None = None
    hosted = cache.hosted
    partial: tuple[Array, ...]
    lists = [(pages, list_id) for pages in cache.pools for list_id in range(pages.table.shape[2])]
    # Asked for mass, every query is a head of its own: it is scaled query by query before it is added up.
    each = q.reshape(q.shape[0], -1, 1, q.shape[-1]) if with_mass else q
    for at, (pages, list_id) in enumerate(lists):
        picked: Picked | None = None
        last, longest = at == len(lists) - 1, pages.span + cache.ring.window
        if last and hosted is not None:
            chooses, where = by if selective else None, (info.total, longest)
            partial, visited, hosted = read_hosted(policy.storage, chooses, cache, q, *where, softcap)
            chosen = None if visited is None else visited.live.sum(axis=-1)
            partials.append((partial[0], partial[1]))
            continue
        if selective and by is not None and last:
            picked = by.select(info.weights("selection"), q[:, :, 0], pages, list_id, info.total, longest)
            chosen = _live(pages, list_id, picked).sum(axis=(-2, -1))
        if picked is not None and picked.bias is None:
            visited = _visited(policy, pages, list_id, picked)
            partial = gathered_decode(
                each, visited.k, visited.v, visited.live, mass=with_mass, softcap=softcap
            )
            if with_mass:
                partial = (*partial[:2], _in_place(pages, picked, partial[2]))
        else:
            partial = ragged_decode(
                each,
                pages.k,
                pages.v,
                pages.table[:, :, list_id],
                pages.length[:, :, list_id],
                scales=pages.scales,
                # Of a pool most of which is not read, a list's pages are named: a walk would visit all.
                pages=_every_entry(pages) if selective and picked is None else None,
                bias=None if picked is None else picked.bias,
                mass=with_mass,
                softcap=softcap,
                shared=pages.shared,
                turn=pages.turned,
            )
        if with_mass:
            partials.append((partial[0].reshape(q.shape), partial[1].reshape(q.shape[:3])))
            masses.append(partial[2].reshape(*q.shape[:3], *partial[2].shape[2:]))
        else:
            partials.append((partial[0], partial[1]))
    completion = () if policy.completion.idle else _completion(info, cache, q, visited)
    return PagedRead(
        lists=tuple(partials),
        mass=tuple(masses) if with_mass else None,
        completion=completion,
        chosen=chosen,
        hosted=hosted,
    )


def _completion(info: LayerInfo, cache: LayerCache, q: Array, visited: Visited | None) -> tuple[Partial, ...]:
    """φ of what this read leaves out; nothing where nothing can be left out."""
    policy, pages, weights = info.policy, cache.pages, info.weights("completion")
    assert pages is not None
    if not policy.selection.acts:  # φ holds the rejected and evicted, none of which is read
        return (policy.completion.read(weights, cache.summary, q, None),)
    if visited is None:  # a dense read under a selective policy visits every selectable slot that is left
        if policy.admission.idle and not policy.budget.limited:
            return ()
        visited = _visited(policy, pages, pages.table.shape[2] - 1, Picked(entries=_every_entry(pages)))
    return (policy.completion.read(weights, cache.summary, q, visited),)


def _every_entry(pages: Pages) -> Int[Array, "B K M"]:
    every = jnp.arange(pages.table.shape[-1])
    return jnp.broadcast_to(every, (*pages.table.shape[:2], len(every)))


def _slots(pages: Pages, picked: Picked) -> Int[Array, "B K J U"]:
    """Places in the list of the slots of each picked unit; of what is EMPTY those of the first."""
    unit = picked.unit or pages.size
    return jnp.maximum(picked.entries, 0)[..., None] * unit + jnp.arange(unit)


def _live(pages: Pages, list_id: int, picked: Picked) -> Bool[Array, "B K J U"]:
    """Which of them are visited."""
    live = _slots(pages, picked) < pages.length[:, :, list_id, None, None]
    live = live & (picked.entries >= 0)[..., None]
    return live if picked.slots is None else live & picked.slots


def _visited(policy: Policy, pages: Pages, list_id: int, picked: Picked) -> Visited:
    """The slots of the picked units as they are stored, gathered once."""
    at = _slots(pages, picked)
    entries, slot = split(at, pages.size)
    page = jnp.maximum(along(pages.table[:, :, list_id], entries[..., 0], axis=-1), 0)
    if policy.storage.scaled:
        k, v = policy.storage.read(pages, page[..., None], slot)
    else:  # whole units at a time: the pool of pages is a pool of smaller pages, too
        unit = at.shape[-1]
        which = page * (pages.size // unit) + slot[..., 0] // unit
        k, v = (there(x.reshape(-1, unit, x.shape[-1]), which) for x in (pages.k, pages.v))
    flat = (*at.shape[:2], -1)
    return Visited(
        k=k.reshape(*flat, k.shape[-1]),
        v=v.reshape(*flat, v.shape[-1]),
        pos=there(pages.pos, page[..., None], slot).reshape(flat),
        live=_live(pages, list_id, picked).reshape(flat),
    )


def _in_place(pages: Pages, picked: Picked, mass: Float[Array, "B N C"]) -> Float[Array, "B N M S"]:
    """What the slots in hand received, at their places among all slots of the list."""
    (rows, heads, _, entries), n = pages.table.shape, mass.shape[1]
    at = _slots(pages, picked).reshape(rows, heads, 1, -1)
    b, k, g = jnp.arange(rows)[:, None, None, None], jnp.arange(heads)[:, None, None], jnp.arange(n // heads)
    received = jnp.zeros((rows, heads, n // heads, pages.span), jnp.float32)
    received = received.at[b, k, g[:, None], at].add(mass.reshape(rows, heads, n // heads, -1))
    return received.reshape(rows, n, entries, pages.size)


def loaded(info: LayerInfo, cache: LayerCache, paged: PagedRead, ring: Int[Array, " B"]) -> Loaded:
    """How much a decode read loads: ``ring`` ring slots, and what ``paged`` visited of the pages."""
    heads = cache.ring.k.shape[1]
    slots = selector = jnp.zeros((len(ring), heads), jnp.int32)
    if cache.pages is not None:
        slots = sum((pages.length.sum(axis=-1) for pages in cache.pools), slots)
    if paged.chosen is not None:
        pages, last = cache.pools[-1], cache.pools[-1].table.shape[2] - 1
        slots = slots - pages.length[:, :, last] + paged.chosen
        selector = _selector_tokens(info.policy, cache)
    return Loaded(
        ring=ring,
        pages=slots,
        selector=selector.astype(jnp.float32),
        summary=jnp.asarray(bool(paged.completion)),
    )


def _selector_tokens(policy: Policy, cache: LayerCache) -> Float[Array, "B K"]:
    """Token-equivalents of what the selection looks at: its per-page values, or every key."""
    pages = cache.pools[-1]
    length = pages.length[:, :, -1]
    if cache.hosted is not None:
        length = length + cache.hosted.owned * pages.size
    shapes = policy.selection.summary_shapes(pages.size, pages.head_dim).values()
    if shapes:
        of_a_page = sum(math.prod(shape) for shape in shapes) / (2 * pages.head_dim)
        return blocks(length, pages.size) * of_a_page
    return length / 2


def merged(
    partials: tuple[Partial, ...], dtype: jnp.dtype, sinks: Float[Array, " N"] | None = None
) -> tuple[Float[Array, "B T N H"], Array]:
    """One merge of all partials: the output back in the model's layout, and the lse of everything read.

    A head's sink is one partial more: its logit is the lse, and the output is 0.
    """
    if sinks is not None:
        out, lse = partials[0]
        lse = jnp.broadcast_to(sinks.astype(jnp.float32)[:, None], lse.shape)
        partials = (*partials, (jnp.zeros(out.shape, jnp.float32), lse))
    out, lse = partials[0] if len(partials) == 1 else merge(list(partials))
    return major(out).astype(dtype), lse


def attend_among(
    q: Float[Array, "B N T H"],
    new: Entry,
    count: Int[Array, " B"],
    window: int | None,
    bits: Bool[Array, "B K T"] | None,
    softcap: float | None,
    dtype: DTypeLike = jnp.float32,
) -> Partial:
    """Attention among tokens that arrive together; beyond the window its cost follows the admitted ones.

    Its output is of ``dtype``: float32 where it is merged with others, the model's where it is all.
    """
    k, v, at = new.k, new.v, new.pos
    if bits is None or window is None or window >= q.shape[2]:
        return blockwise(q, k, v, q_pos=at, k_pos=at, window=window, admit=bits, softcap=softcap, dtype=dtype)
    return vertical_slash(q, k, v, bits, window=window, lengths=count, softcap=softcap, dtype=dtype)[:2]


def attend_since(
    q: Float[Array, "B N T H"],
    ring: Ring,
    new: Entry,
    length: Int[Array, " B"],
    count: Int[Array, " B"],
    softcap: float | None,
) -> Partial:
    """Attention of a chunk to the ring and to itself under one window, all in order of position.

    A row that has seen 3 of W = 4 tokens, and a chunk of 4 of which it has 2:

      keys       0  1  2 | 3  4  .  .  .
      from       ring    | chunk           the chunk's first query is at place 3, of 5 keys
    """
    held, (w, t) = rings.live(length, ring.window)[:, None], (ring.window, q.shape[2])
    place = jnp.arange(w + t)
    at = jnp.where(place < held, split(length[:, None] - held + place, w)[1], w + place - held)
    at = jnp.minimum(at, w + t - 1)[:, None]

    def joined(old: Array, late: Array) -> Array:
        index = at[..., None] if old.ndim > 3 else at
        return along(jnp.concatenate([old, late], axis=2), index, axis=2)

    k, v, bits = joined(ring.k, new.k), joined(ring.v, new.v), joined(ring.admit, new.admit)
    first = held[:, 0]
    return vertical_slash(q, k, v, bits, window=w, lengths=first + count, offset=first, softcap=softcap)[:2]
