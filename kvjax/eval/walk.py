"""Tokens one by one through a compressed cache: given ones (teacher forcing) or the model's own (greedy).

One program for both, so that a length and policy compile once; besides log-likelihoods it counts what
the cache holds and what each read visits. It runs the decode step, not the prefill chunk: budgets that
act every step act, and selection reads as little as it would while decoding.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import decode, metrics
from kvjax import layer as layers
from kvjax.cache import line as lines
from kvjax.cache import pages as paging
from kvjax.cache.pages import Pages
from kvjax.cache.state import KVState, LayerCache
from kvjax.eval import counted
from kvjax.policy import AdmitAll, Nothing, Policy, SelectAll
from kvjax.types import Heads, Network, Params, Weighted, pytree

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int

CLASSES = (512, 4096)
"""Most steps a compiled walk can take; fewer cost no time, only output."""

READS = ("slots", "summary", "selector")
"""What a decode read loads, in tokens (K and V of one position): live slots; the completion's φ, by its
bytes; and what the selection looks at to choose (page summaries, or all keys)."""


@pytree()
@dataclasses.dataclass(frozen=True, kw_only=True)
class Walk:
    """What a walk found, step by step; beyond a row's count, anything.

    Attributes:
      nll: negative log-likelihood of each target, nats.
      best: the likeliest token after each step.
      live: slots that hold a token after each step, mean over layers and KV heads.
      reads: what a decode step loads per KV head, by ``READS``, mean over layers and KV heads.
    """

    nll: Float[Array, "B T"]
    best: Int[Array, "B T"]
    live: Float[Array, "B T"]
    reads: Float[Array, "B T R"]


def _reads(
    site: layers.Site, room: LayerCache, q: Float[Array, "B N H"], length: Int[Array, " B"]
) -> Float[Array, "B R"]:
    """What this layer's decode read loads, by ``READS``, mean over KV heads."""
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


def _step(
    network: Network,
    policy: Policy,
    params: Params,
    weights: Params,
    state: KVState,
    tokens: Int[Array, " B"],
    active: Bool[Array, " B"],
) -> tuple[KVState, Array, Float[Array, "B R"]]:
    """``decode.step``, and how much each row read."""
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


@functools.partial(jax.jit, static_argnames=("network", "policy"))
def _walk(
    network: Network,
    policy: Policy,
    params: Params,
    weights: Params,
    state: KVState,
    feed: Int[Array, "B T"],
    target: Int[Array, "B T"],
    count: Int[Array, " B"],
    forced: Bool[Array, ""],
) -> tuple[KVState, Walk]:
    rows, most = feed.shape
    blank = jnp.zeros((rows, most), jnp.float32)
    reads = jnp.zeros((rows, most, len(READS)), jnp.float32)
    found = Walk(nll=blank, best=jnp.zeros((rows, most), jnp.int32), live=blank, reads=reads)

    def one(carry: tuple[Array, KVState, Array, Walk]) -> tuple[Array, KVState, Array, Walk]:
        i, state, best, found = carry
        token = jnp.where(forced | (i == 0), feed[:, i], best)
        state, logits, reads = _step(network, policy, params, weights, state, token, i < count)
        best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        found = Walk(
            nll=found.nll.at[:, i].set(nats(logits, target[:, i])),
            best=found.best.at[:, i].set(best),
            live=found.live.at[:, i].set(mean_live(state)),
            reads=found.reads.at[:, i].set(reads),
        )
        return i + 1, state, best, found

    start = (jnp.asarray(0), state, jnp.zeros(rows, jnp.int32), found)
    _, state, _, found = jax.lax.while_loop(lambda carry: carry[0] < count.max(), one, start)
    return state, found


def nats(logits: Float[Array, "B V"], target: Int[Array, " B"]) -> Float[Array, " B"]:
    """Negative log-likelihood of each row's target."""
    chosen = jnp.take_along_axis(logits, target[:, None], axis=-1)[:, 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


def mean_live(state: KVState) -> Float[Array, " B"]:
    """Live slots of a stream, mean over layers and KV heads."""
    return metrics.live_slots(state).astype(jnp.float32).mean(axis=(0, 2))


def size_class(steps: int) -> int:
    """Steps of the program that takes ``steps``."""
    return next((size for size in CLASSES if size >= steps), -(-steps // CLASSES[-1]) * CLASSES[-1])


def walk(
    model: Weighted,
    policy: Policy,
    state: KVState,
    feed: list[list[int]],
    target: list[list[int]],
    *,
    forced: bool,
    weights: Params | None = None,
) -> tuple[KVState, Walk]:
    """Feeds tokens to a state that is left as it was.

    Args:
      model, policy, weights: as in ``decode.prefill``.
      state: with pages reserved; not donated.
      feed: per row, tokens to feed; only the first one where ``forced`` is False.
      target: per row, the token after each fed one; its length is the number of steps.
      forced: feed what is given, or the likeliest token of the step before.

    Returns:
      (the state after the walk, what was found, as NumPy arrays).
    """
    width = size_class(max(map(len, target)))
    count = np.asarray([len(row) for row in target], np.int32)
    state, found = _walk(
        model.network,
        policy,
        model.params,
        weights or {},
        state,
        decode.padded(feed, width),
        decode.padded(target, width),
        count,
        np.asarray(forced),
    )
    return state, jax.device_get(found)
