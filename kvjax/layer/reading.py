"""Reads: a partial of every room, merged once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp

from kvjax.cache.pages import Pages
from kvjax.cache.ring import Entry
from kvjax.cache.state import LayerCache
from kvjax.layer.site import Site, major
from kvjax.policy import AdmitAll, Nothing, Policy, SelectAll, Visited
from kvjax.types import Heads
from pallas_kernels.blockwise.api import blockwise
from pallas_kernels.merge.api import merge
from pallas_kernels.ragged_decode.api import ragged_decode
from pallas_kernels.vertical_slash.api import vertical_slash

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int

Partial = tuple["Float[Array, 'B N T H']", "Float[Array, 'B N T']"]


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


def mixed(parts: list[Partial], x: Heads) -> Float[Array, "B T N H"]:
    """One merge of all rooms, back in the seam's layout."""
    out = parts[0][0] if len(parts) == 1 else merge(parts)[0]
    return major(out).astype(x.v.dtype)


def together(
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
