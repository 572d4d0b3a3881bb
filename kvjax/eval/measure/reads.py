"""What a decode step loads, counted while it is taken.

The step of ``decode`` once more, with a visitor that looks at each layer after its read; which branches that
read takes (selection, completion) is repeated here.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import jax.numpy as jnp

from kvjax import decode
from kvjax import layer as layers
from kvjax.cache import line as lines
from kvjax.cache import pages as paging
from kvjax.cache.pages import Pages
from kvjax.cache.state import KVState, LayerCache
from kvjax.eval.measure import counted
from kvjax.policy import AdmitAll, Nothing, Policy, SelectAll
from kvjax.types import Heads, Network, Params

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int

KINDS = ("slots", "summary", "selector")
"""In tokens (K and V of one position): live slots; the completion's φ, by its bytes; and what the selection
looks at to choose (page summaries, or all keys)."""


def step(
    network: Network,
    policy: Policy,
    params: Params,
    weights: Params,
    state: KVState,
    tokens: Int[Array, " B"],
    active: Bool[Array, " B"],
) -> tuple[KVState, Array, Float[Array, "B R"]]:
    """``decode.step``, and what each row read by ``KINDS``, mean over layers and KV heads."""
    read: list[Array] = []

    def visit(site: layers.Site, heads: Heads, room: LayerCache) -> tuple[Array, LayerCache]:
        out, room = layers.step(site, room, heads, state.length, active)
        read.append(_reads(site, room, heads.q[:, 0], state.length + active))
        return out, room

    x, rooms = decode.through(network, policy, params, weights, state, tokens[:, None], visit)
    length, logits = state.length + active.astype(jnp.int32), network.logits(params, x[:, 0])
    after = decode.with_confidence(
        policy, dataclasses.replace(state, layers=rooms, length=length), logits, active
    )
    return after, logits, jnp.stack(read).mean(axis=0)


def _reads(
    site: layers.Site, room: LayerCache, q: Float[Array, "B N H"], length: Int[Array, " B"]
) -> Float[Array, "B R"]:
    """What this layer's decode read loads, by ``KINDS``, mean over KV heads."""
    ring = jnp.minimum(length, room.ring.window).astype(jnp.float32)
    slots, phi, selector = ring, jnp.zeros_like(ring), jnp.zeros_like(ring)
    if room.pages is not None:
        pages, choose = room.pages, site.policy.selection
        held = lines.held(room.rooms)
        if choose != SelectAll() and choose.applies(site.layer):
            last = pages.length.shape[2] - 1
            selector = _looked_at(site.policy, pages, last).mean(axis=-1)
            picked = choose.select(site.weights("selection"), q, pages, last)
            slot = jnp.arange(pages.size)
            at = jnp.maximum(picked.pages, 0)[..., None] * pages.size + slot
            hit = (picked.pages >= 0)[..., None] & (at < pages.length[:, :, last, None, None])
            hit = hit if picked.slots is None else hit & picked.slots
            held = held - pages.length[:, :, last] + hit.sum(axis=(-2, -1))
        slots = ring + held.astype(jnp.float32).mean(axis=-1)
        if _completes(site):
            phi = jnp.full_like(ring, counted.summary_tokens(room, by_bytes=True))
    return jnp.stack([slots, phi, selector], axis=-1)


def _looked_at(policy: Policy, pages: Pages, last: int) -> Float[Array, "B K"]:
    """Token-equivalents of what the selector loads to choose: its page summaries, or every key."""
    dim = pages.head_dim
    shapes = policy.selection.summary_shapes(pages.size, dim).values()
    if shapes:
        a_page = sum(math.prod(shape) for shape in shapes) / (2 * dim)
        return paging.used(pages)[:, :, last] * a_page
    return pages.length[:, :, last] / 2


def _completes(site: layers.Site) -> bool:
    """Does this layer's decode read ask φ? Not where nothing can be left out: see ``layer.read_pages``."""
    policy = site.policy
    if policy.completion == Nothing():
        return False
    dense = policy.selection != SelectAll() and not policy.selection.applies(site.layer)
    return not dense or policy.admission != AdmitAll() or policy.budget.limited
