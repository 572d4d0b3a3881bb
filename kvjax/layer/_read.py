"""Reads: a partial of the ring, of every page list and of φ, merged once; and a record of what was loaded."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import jax.numpy as jnp

from kvjax.algebra import Picked, Policy, Visited
from kvjax.cache import pages as paging
from kvjax.cache.pages import Pages
from kvjax.cache.ring import Entry
from kvjax.cache.state import LayerCache
from kvjax.layer._info import LayerInfo, major
from kvjax.types import pytree
from pallas_kernels.blockwise.api import blockwise
from pallas_kernels.merge.api import merge
from pallas_kernels.ragged_decode.api import ragged_decode
from pallas_kernels.vertical_slash.api import vertical_slash

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int

Partial = tuple["Float[Array, 'B N T H']", "Float[Array, 'B N T']"]
"""Attention output over some of the tokens, and its log-sum-exp."""


@pytree(static=("summary",))
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
    summary: bool


@pytree()
@dataclasses.dataclass(frozen=True, kw_only=True)
class Read:
    """What a decode read found.

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
      completion: φ's partial; none where nothing is left out.
      picked: what the selection chose of the last list, where it acted.
    """

    lists: tuple[Partial, ...] = ()
    mass: tuple[Float[Array, "B N T M S"], ...] | None = None
    completion: tuple[Partial, ...] = ()
    picked: Picked | None = None

    @property
    def partials(self) -> tuple[Partial, ...]:
        """All of them."""
        return self.lists + self.completion


def read_pages(
    info: LayerInfo,
    cache: LayerCache,
    q: Float[Array, "B N T H"],
    *,
    decoding: bool,
    softcap: float | None = None,
    with_mass: bool = False,
) -> PagedRead:
    """Reads pages and φ; a selection part acts on decode reads only."""
    policy = info.policy
    if cache.pages is None:
        return PagedRead()
    selective = decoding and not policy.selection.idle and policy.selection.applies(info.layer)
    partials: list[Partial] = []
    masses: list[Array] = []
    chosen = visited = None
    lists = [(pages, list_id) for pages in cache.pools for list_id in range(pages.table.shape[2])]
    for at, (pages, list_id) in enumerate(lists):
        picked = None
        if selective and at == len(lists) - 1:
            picked = policy.selection.select(info.weights("selection"), q[:, :, 0], pages, list_id)
            visited = _visited(policy, pages, list_id, picked.entries, picked.slots)
            chosen = picked
        # Asked for mass, every query is a head of its own: it is scaled query by query before it is added up.
        found = ragged_decode(
            q.reshape(q.shape[0], -1, 1, q.shape[-1]) if with_mass else q,
            pages.k,
            pages.v,
            pages.table[:, :, list_id],
            pages.length[:, :, list_id],
            scales=pages.scales,
            pages=None if picked is None else picked.entries,
            slots=None if picked is None else picked.slots,
            mass=with_mass,
            softcap=softcap,
        )
        if with_mass:
            partials.append((found[0].reshape(q.shape), found[1].reshape(q.shape[:3])))
            masses.append(found[2].reshape(*q.shape[:3], *found[2].shape[2:]))
        else:
            partials.append((found[0], found[1]))
    completion = () if policy.completion.idle else _completion(info, cache, q, visited)
    return PagedRead(
        lists=tuple(partials),
        mass=tuple(masses) if with_mass else None,
        completion=completion,
        picked=chosen,
    )


def _completion(info: LayerInfo, cache: LayerCache, q: Array, visited: Visited | None) -> tuple[Partial, ...]:
    """φ of what this read leaves out; nothing where nothing can be left out."""
    policy, pages, weights = info.policy, cache.pages, info.weights("completion")
    assert pages is not None  # noqa: S101
    if policy.selection.idle:  # φ holds the rejected and evicted, none of which is read
        return (policy.completion.read(weights, cache.summary, q, None),)
    if visited is None:  # a dense read under a selective policy visits every selectable slot that is left
        if policy.admission.idle and not policy.budget.limited:
            return ()
        every = jnp.arange(pages.table.shape[-1])
        every = jnp.broadcast_to(every, (*pages.table.shape[:2], len(every)))
        visited = _visited(policy, pages, pages.table.shape[2] - 1, every, None)
    return (policy.completion.read(weights, cache.summary, q, visited),)


def _visited(
    policy: Policy, pages: Pages, list_id: int, entries: Int[Array, "B K J"], mask: Array | None
) -> Visited | None:
    """The slots of the picked entries as they are stored; None when no completion part will look."""
    if policy.completion.idle:
        return None
    entry = jnp.maximum(entries, 0)
    page = jnp.maximum(jnp.take_along_axis(pages.table[:, :, list_id], entry, axis=-1), 0)
    slot = jnp.arange(pages.size)
    k, v = policy.storage.read(pages, page[..., None], slot)
    live = entry[..., None] * pages.size + slot < pages.length[:, :, list_id, None, None]
    live = live & (entries >= 0)[..., None] & (True if mask is None else mask)
    flat = (*entries.shape[:2], -1)
    return Visited(
        k=k.astype(jnp.float32).reshape(*flat, k.shape[-1]),
        v=v.astype(jnp.float32).reshape(*flat, v.shape[-1]),
        pos=pages.pos[page].reshape(flat),
        live=live.reshape(flat),
    )


def loaded(info: LayerInfo, cache: LayerCache, paged: PagedRead, ring: Int[Array, " B"]) -> Loaded:
    """How much a decode read loads: ``ring`` ring slots, and what ``paged`` visited of the pages."""
    heads = cache.ring.k.shape[1]
    slots = selector = jnp.zeros((len(ring), heads), jnp.int32)
    if cache.pages is not None:
        slots = sum((pages.length.sum(axis=-1) for pages in cache.pools), slots)
    if paged.picked is not None:
        pages, picked = cache.pools[-1], paged.picked
        last = pages.length.shape[2] - 1
        at = jnp.maximum(picked.entries, 0)[..., None] * pages.size + jnp.arange(pages.size)
        hit = (picked.entries >= 0)[..., None] & (at < pages.length[:, :, last, None, None])
        hit = hit if picked.slots is None else hit & picked.slots
        slots = slots - pages.length[:, :, last] + hit.sum(axis=(-2, -1))
        selector = _selector_tokens(info.policy, pages, last)
    return Loaded(
        ring=ring, pages=slots, selector=selector.astype(jnp.float32), summary=bool(paged.completion)
    )


def _selector_tokens(policy: Policy, pages: Pages, list_id: int) -> Float[Array, "B K"]:
    """Token-equivalents of what the selection looks at: its per-page values, or every key."""
    shapes = policy.selection.summary_shapes(pages.size, pages.head_dim).values()
    if shapes:
        of_a_page = sum(math.prod(shape) for shape in shapes) / (2 * pages.head_dim)
        return paging.used(pages)[:, :, list_id] * of_a_page
    return pages.length[:, :, list_id] / 2


def merged(partials: tuple[Partial, ...], dtype: jnp.dtype) -> tuple[Float[Array, "B T N H"], Array]:
    """One merge of all partials: the output back in the model's layout, and the lse of everything read."""
    out, lse = partials[0] if len(partials) == 1 else merge(list(partials))
    return major(out).astype(dtype), lse


def attend_among(
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
