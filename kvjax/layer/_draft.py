"""Tokens that are drafted: read beside the cache, verified there, and only then written.

A row that has seen L tokens, and three that are drafted; ring and pages stay as they are until ``write``:

  position    0 .. L-W-1 | L-W .. L-1 | L  L+1  L+2
  held in     pages      | ring       | block              draft    one query, pages by a selection
                                                           verify   all queries, pages whole

Why: kvjax/DESIGN.md, 38.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from kvjax.cache import ring as rings
from kvjax.cache.ring import Entry
from kvjax.cache.state import LayerCache
from kvjax.layer._admit import absorb_leaving, admit_or_replace
from kvjax.layer._info import LayerInfo, arriving, major, observe
from kvjax.layer._read import Partial, merged, read_pages
from kvjax.types import EMPTY, Heads
from pallas_kernels.blockwise.api import blockwise

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int


def empty_block(cache: LayerCache, length: int) -> Entry:
    """Room for ``length`` drafted tokens of a layer: keys, values and admission bits, nothing else."""
    rows, heads, _, dim = cache.ring.k.shape
    zeros = jnp.zeros((rows, heads, length, dim), cache.ring.k.dtype)
    bits = jnp.zeros((rows, heads, length), bool)
    return Entry(k=zeros, v=zeros, pos=jnp.full((rows, length), EMPTY), admit=bits, meta={})


def draft(
    info: LayerInfo,
    x: Heads,
    carry: tuple[LayerCache, Entry],
    length: Int[Array, " B"],
    at: Int[Array, " B"],
    active: Bool[Array, " B"],
) -> tuple[Float[Array, "B 1 N H"], Entry]:
    """One drafted token of every active row: into the block, and a selective read. The cache is left alone.

    Args:
      info: which layer; ``policy.selection.drafts`` chooses what is read.
      x: the token's heads (T = 1).
      carry: the cache after ``length`` tokens, and the block.
      length: tokens each row has seen, without drafted ones.
      at: the token's place in the block, the same for all rows.
      active: rows that really have one.
    """
    cache, block = carry
    pos = jnp.where(active, length + at, EMPTY)[:, None]
    new = arriving(info, x, pos, observe(info, x, pos))

    def put(held: Array, value: Array, axis: int) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(held, value.astype(held.dtype), at[0], axis)

    block = dataclasses.replace(
        block,
        k=put(block.k, new.k, 2),
        v=put(block.v, new.v, 2),
        pos=put(block.pos, pos, 1),
        admit=put(block.admit, new.admit, 2),
    )
    q = major(x.q)
    exact = _exact(info, cache, block, q, pos, length, x.softcap)
    paged = read_pages(info, cache, q, by=info.policy.selection.drafts, softcap=x.softcap)
    return merged((*exact, *paged.partials), x.v.dtype, x.sinks)[0], block


def verify(
    info: LayerInfo, x: Heads, cache: LayerCache, length: Int[Array, " B"], count: Int[Array, " B"]
) -> tuple[Float[Array, "B T N H"], Entry]:
    """``count`` of T tokens a row, each read as a step would read it; the cache is left alone.

    Args:
      info: which layer.
      x: the tokens' heads.
      cache: after ``length`` tokens.
      length: position of each row's first token.
      count: real tokens of each row, 0 .. T.

    Returns:
      The attention output, and the tokens as they arrive, for ``write``.
    """
    ahead = jnp.arange(x.q.shape[1])[None, :]
    pos = jnp.where(ahead < count[:, None], length[:, None] + ahead, EMPTY)
    new = arriving(info, x, pos, observe(info, x, pos))
    q = major(x.q)
    exact = _exact(info, cache, new, q, pos, length, x.softcap)
    paged = read_pages(info, cache, q, by=None, softcap=x.softcap)
    completion = paged.completion and (_completion(info, cache, new, q, length, count),)
    return merged((*exact, *paged.lists, *completion), x.v.dtype, x.sinks)[0], new


def write(
    info: LayerInfo,
    x: None,
    carry: tuple[LayerCache, Entry],
    length: Int[Array, " B"],
    count: Int[Array, " B"],
) -> LayerCache:
    """The cache after the first ``count`` of T verified tokens a row, written one by one as steps do.

    So page summaries, φ and page tables are those that plain decoding leaves, bit for bit.

    Args:
      info: which layer.
      x: no tokens arrive.
      carry: the cache after ``length`` tokens, and the tokens.
      length: position of each row's first token.
      count: how many of them were accepted.
    """
    del x
    cache, new = carry

    def one(i: Array, cache: LayerCache) -> LayerCache:
        came = (i < count).astype(jnp.int32)
        token = _column(new, i)
        token = dataclasses.replace(token, pos=jnp.where(i < count, length + i, EMPTY)[:, None])
        return admit_or_replace(info, cache, token, length + jnp.minimum(i, count), came)

    return jax.lax.fori_loop(0, count.max(), one, cache)


def _column(new: Entry, i: Array) -> Entry:
    """Token i of each row, without queries, which no policy that drafts keeps."""

    def cut(x: Array, axis: int = 2) -> Array:
        return jax.lax.dynamic_slice_in_dim(x, i, 1, axis)

    meta = {name: cut(x) for name, x in new.meta.items()}
    return Entry(k=cut(new.k), v=cut(new.v), pos=cut(new.pos, 1), admit=cut(new.admit), meta=meta)


def _exact(
    info: LayerInfo,
    cache: LayerCache,
    block: Entry,
    q: Float[Array, "B N T H"],
    q_pos: Int[Array, "B T"],
    length: Int[Array, " B"],
    softcap: float | None,
) -> tuple[Partial, Partial]:
    """Partials of ring and block: a key is seen within the window, and beyond it if it is admitted."""
    ring, policy = cache.ring, info.policy
    rejects = (
        not policy.admission.idle or policy.whole_prompt
    )  # a cut prompt leaves rejected tokens in the ring
    window = (
        ring.window if cache.pages is None or rejects else None
    )  # without pages the layer forgets for good

    def partial(k: Array, v: Array, pos: Array, admit: Array) -> Partial:
        bits = admit if window is not None and cache.pages is not None else None
        return blockwise(q, k, v, q_pos=q_pos, k_pos=pos, window=window, admit=bits, softcap=softcap)

    held = rings.positions(length, ring.window)
    return partial(ring.k, ring.v, held, ring.admit), partial(block.k, block.v, block.pos, block.admit)


def _completion(
    info: LayerInfo,
    cache: LayerCache,
    new: Entry,
    q: Float[Array, "B N T H"],
    length: Int[Array, " B"],
    count: Int[Array, " B"],
) -> Partial:
    """φ's partial for each query, of a φ that absorbed what left the window when its token arrived."""
    leaving = rings.leaving(cache.ring, new, length, count)
    completion, weights = info.policy.completion, info.weights("completion")

    def at(summary: Any, i: Array) -> tuple[Any, Partial]:
        summary = absorb_leaving(
            info, dataclasses.replace(cache, summary=summary), _column(leaving, i)
        ).summary
        return summary, completion.read(weights, summary, jax.lax.dynamic_slice_in_dim(q, i, 1, 2), None)

    _, (out, lse) = jax.lax.scan(at, cache.summary, jnp.arange(q.shape[2]))
    return jnp.moveaxis(out[..., 0, :], 0, 2), jnp.moveaxis(lse[..., 0], 0, 2)
