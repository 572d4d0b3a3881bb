"""Tokens one by one through a compressed cache: given ones (teacher forcing) or the model's own (greedy).

One program for both, so that a length and policy compile once; besides log-likelihoods it counts what
the cache holds and what each read visits. It runs the decode step, not the prefill chunk: budgets that
act every step act, and selection reads as little as it would while decoding.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import decode, layer, metrics
from kvjax.algebra import Policy
from kvjax.cache.state import KVState, LayerCache
from kvjax.eval import counted
from kvjax.types import Network, Params, Weighted, pytree

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


def _reads(cache: LayerCache, loaded: layer.Loaded) -> Float[Array, "B R"]:
    """What a layer's decode read loads, by ``READS``, mean over KV heads."""
    slots = loaded.ring.astype(jnp.float32) + loaded.pages.astype(jnp.float32).mean(axis=-1)
    phi = counted.summary_tokens(cache, by_bytes=True) if loaded.summary else 0.0
    return jnp.stack([slots, jnp.full_like(slots, phi), loaded.selector.mean(axis=-1)], axis=-1)


@functools.partial(jax.jit, static_argnames="network")
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
        found_reads: list[Array] = []

        def count_read(_: layer.LayerInfo, cache: LayerCache, read: layer.Read) -> None:
            found_reads.append(_reads(cache, read.loaded))

        state, logits = decode.step(
            network, policy, params, weights, state, token, i < count, on_read=count_read
        )
        best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        found = Walk(
            nll=found.nll.at[:, i].set(nats(logits, target[:, i])),
            best=found.best.at[:, i].set(best),
            live=found.live.at[:, i].set(mean_live(state)),
            reads=found.reads.at[:, i].set(jnp.stack(found_reads).mean(axis=0)),
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
