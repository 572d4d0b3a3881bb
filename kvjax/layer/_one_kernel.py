"""A decode step in one kernel: window exit, write and read, for policies of admission alone.

Why: kvjax/DESIGN.md, 20.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from kvjax.algebra import Native
from kvjax.cache import pages as paging
from kvjax.cache import ring as rings
from kvjax.cache.pages import Coming, Pages
from kvjax.cache.ring import Entry, Ring
from kvjax.cache.state import LayerCache
from kvjax.layer._admit import destination
from kvjax.layer._info import LayerInfo
from kvjax.layer._read import PagedRead, Read, loaded, merged
from kvjax.types import EMPTY, Heads
from pallas_kernels.decode_step.api import Cache, decode_step, has_body

if TYPE_CHECKING:
    from jaxtyping import Array, Int


class Unwritten(Native):
    """Finds slots; the kernel writes their keys and values."""

    def write(
        self, pages: Pages, page: Array, slot: Array, k: Array, v: Array, coming: Coming | None = None
    ) -> Pages:
        """The same pages."""
        return pages


def fits(info: LayerInfo, cache: LayerCache, x: Heads) -> bool:
    """Whether one kernel does a step of this layer on this device; known from shapes and the policy alone.

    Nothing may come between the write and the read (an eviction, a demotion), and the read is of all of the
    ring and of one list of pages, with no selection, φ, codes or soft cap.
    """
    policy, pages = info.policy, cache.pages
    if pages is None or cache.demoted is not None or pages.table.shape[2] != 1 or x.softcap is not None:
        return False
    if policy.decides_later or not (policy.selection.idle and policy.completion.idle):
        return False
    return has_body(x.q[:, 0], _arrays(cache.ring, pages), pages.table[:, :, 0])


def step_in_one_kernel(
    info: LayerInfo,
    cache: LayerCache,
    new: Entry,
    x: Heads,
    length: Int[Array, " B"],
    count: Int[Array, " B"],
) -> tuple[Read, LayerCache]:
    """``step`` where it ``fits``: pages and small arrays are updated here, keys and values by the kernel.

    Args:
      info: which layer.
      cache: after ``length`` tokens.
      new: one token a row, as it arrives.
      x: its heads.
      length: tokens each row has seen.
      count: 1 for rows that have a new token, else 0.
    """
    policy, ring, pages = info.policy, cache.ring, cache.pages
    assert pages is not None
    leaving = rings.leaving(ring, new, length, count)
    list_id = destination(info, leaving)

    def enter(pages: Pages) -> Pages:
        return paging.append(pages, Unwritten(), policy.selection, leaving, list_id)

    def if_any(pages: Pages) -> Pages:
        return jax.lax.cond(jnp.any(list_id >= 0), enter, lambda same: same, pages)

    # A GPU starts more for a branch than in it.
    rest = dataclasses.replace(pages, k=None, v=None)  # type: ignore[arg-type]
    stored = jax.lax.platform_dependent(rest, cuda=enter, rocm=enter, default=if_any)
    held = rings.put(
        ring, new, length, count
    )  # keys and values, too, which XLA leaves out: nobody reads them
    out, lse, after = decode_step(
        x.q[:, 0],
        new.k[:, :, 0],
        new.v[:, :, 0],
        _arrays(ring, pages),
        stored.table[:, :, 0],
        pages.length[:, :, 0],
        seen=jnp.where(count > 0, length, EMPTY),
        enters=list_id[..., 0] >= 0,
    )
    cache = dataclasses.replace(
        cache,
        ring=dataclasses.replace(held, k=after.ring_k, v=after.ring_v),
        pages=dataclasses.replace(stored, k=after.k_pages, v=after.v_pages),
    )
    size = loaded(info, cache, PagedRead(), rings.live(length + count, ring.window))
    whole, lse = merged(((out[:, :, None], lse[..., None]),), x.v.dtype, x.sinks)
    return Read(out=whole, lse=lse, mass=None, loaded=size), cache


def _arrays(ring: Ring, pages: Pages) -> Cache:
    return Cache(ring.k, ring.v, pages.k, pages.v)
