"""Forced decoding: tokens one by one through a compressed cache, a reference's or the model's own (greedy).

One program for both and for a mixture, so that a length and policy compile once. Besides log-likelihoods it
counts what the cache holds and what each read loads. It runs the decode step, not the prefill chunk: budgets
that act every step act, and selection reads as little as it would while decoding.
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
from kvjax.types import Network, Params, Weighted, pytree

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int

CLASSES = (512, 4096)
"""Most steps a program can take; fewer cost no time, only output."""

READ_KINDS = ("slots", "summary", "selector")
"""What a decode step loads, in tokens (K and V of one position): live slots; the completion's φ, by its
bytes; and what the selection looks at to choose (page summaries, or all keys)."""


@pytree()
@dataclasses.dataclass(frozen=True, kw_only=True)
class Steps:
    """Measurements step by step; undefined beyond a row's count.

    Attributes:
      nll: negative log-likelihood of each target, nats.
      best: the likeliest token after each step.
      live: slots that hold a token after each step, mean over layers and KV heads.
      reads: what a decode step loads per KV head, by ``READ_KINDS``, mean over layers and KV heads.
      kl, top: against a reference's logits: the divergence of its distribution from this one, nats; do both
        have the same likeliest token? None without a reference.
    """

    nll: Float[Array, "B T"]
    best: Int[Array, "B T"]
    live: Float[Array, "B T"]
    reads: Float[Array, "B T R"]
    kl: Float[Array, "B T"] | None = None
    top: Bool[Array, "B T"] | None = None


@functools.partial(jax.jit, static_argnames="network")
def _steps(
    network: Network,
    policy: Policy,
    params: Params,
    weights: Params,
    state: KVState,
    feed: Int[Array, "B T"],
    target: Int[Array, "B T"],
    count: Int[Array, " B"],
    forced: Bool[Array, "B T"],
    reference: Float[Array, "B S V"] | None = None,
) -> tuple[KVState, Steps]:
    batch, most = feed.shape
    zeros = jnp.zeros((batch, most), jnp.float32)
    loads = jnp.zeros((batch, most, len(READ_KINDS)), jnp.float32)
    record = Steps(nll=zeros, best=jnp.zeros((batch, most), jnp.int32), live=zeros, reads=loads)
    if reference is not None:
        record = dataclasses.replace(record, kl=zeros, top=jnp.zeros((batch, most), bool))

    def step(state: KVState, rows: _Rows) -> tuple[KVState, tuple[Array, Array]]:
        token = jnp.where(forced[:, rows.i] | (rows.i == 0), feed[:, rows.i], rows.best)
        loads: list[Array] = []

        def count_loads(_: int, cache: LayerCache, read: layer.Read) -> None:
            loads.append(_loads(cache, read.loaded))

        state, logits = decode.step(
            network, policy, params, weights, state, token, rows.active, on_read=count_loads
        )
        return state, (logits, jnp.stack(loads).mean(axis=0))

    def advance(rows: _Rows, result: tuple[Array, Array], state: KVState) -> tuple[_Rows, Steps]:
        logits, loaded = result
        best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        fresh = Steps(nll=nats(logits, target[:, rows.i]), best=best, live=mean_live(state), reads=loaded)
        if reference is not None:
            at = jnp.minimum(rows.i, reference.shape[1] - 1)
            right = jax.lax.dynamic_index_in_dim(reference, at, axis=1, keepdims=False)
            top = best == jnp.argmax(right, axis=-1)
            fresh = dataclasses.replace(fresh, kl=divergence(right, logits), top=top)
        return _Rows(i=rows.i + 1, best=best, active=rows.i + 1 < count), fresh

    rows = _Rows(i=jnp.asarray(0), best=jnp.zeros(batch, jnp.int32), active=count > 0)
    state, _, record = decode.decode_loop(step, advance, state, rows, record, most)
    return state, record


@pytree()
@dataclasses.dataclass(frozen=True, kw_only=True)
class _Rows:
    """Rows that are fed: the step, the likeliest token after the last one, rows that have a token left."""

    i: Int[Array, ""]
    best: Int[Array, " B"]
    active: Bool[Array, " B"]


def _loads(cache: LayerCache, loaded: layer.Loaded) -> Float[Array, "B R"]:
    """What a layer's decode read loads, by ``READ_KINDS``, mean over KV heads."""
    slots = loaded.ring.astype(jnp.float32) + loaded.pages.astype(jnp.float32).mean(axis=-1)
    phi = jnp.full_like(slots, metrics.summary_tokens(cache, by_bytes=True)) * loaded.summary
    return jnp.stack([slots, phi, loaded.selector.mean(axis=-1)], axis=-1)


def nats(logits: Float[Array, "B V"], target: Int[Array, " B"]) -> Float[Array, " B"]:
    """Negative log-likelihood of each row's target."""
    chosen = jnp.take_along_axis(logits, target[:, None], axis=-1)[:, 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


def divergence(right: Float[Array, "B V"], logits: Float[Array, "B V"]) -> Float[Array, " B"]:
    """Kullback-Leibler divergence of the ``right`` distribution from the other, of their logits; nats."""
    right, own = jax.nn.log_softmax(right), jax.nn.log_softmax(logits)
    return jnp.sum(jnp.exp(right) * (right - own), axis=-1)


@functools.partial(jax.jit, static_argnames="network")
def _logits(
    network: Network, policy: Policy, params: Params, weights: Params, state: KVState, feed: Int[Array, "B T"]
) -> Float[Array, "B T V"]:
    def step(state: KVState, token: Array) -> tuple[KVState, Array]:
        active = jnp.ones(token.shape, bool)
        return decode.step(network, policy, params, weights, state, token, active)

    return jnp.swapaxes(jax.lax.scan(step, state, feed.T)[1], 0, 1)


def logits(
    model: Weighted, policy: Policy, state: KVState, feed: list[list[int]], weights: Params | None = None
) -> Float[Array, "B T V"]:
    """The logits after each fed token, on the device; undefined beyond a row's last one.

    Args:
      model, policy, weights: as in ``decode.prefill``.
      state: with pages reserved; not donated.
      feed: per row, tokens to feed.
    """
    tokens = decode.padded(feed, max(map(len, feed)))
    every: Float[Array, "B T V"] = _logits(model.network, policy, model.params, weights or {}, state, tokens)
    return every


def mean_live(state: KVState) -> Float[Array, " B"]:
    """Live slots of a KV head, mean over layers and KV heads."""
    return metrics.live_slots(state).astype(jnp.float32).mean(axis=(0, 2))


def size_class(steps: int) -> int:
    """Steps of the program that takes ``steps``."""
    return next((size for size in CLASSES if size >= steps), -(-steps // CLASSES[-1]) * CLASSES[-1])


def steps(
    model: Weighted,
    policy: Policy,
    state: KVState,
    feed: list[list[int]],
    target: list[list[int]],
    *,
    forced: bool | list[list[bool]],
    weights: Params | None = None,
    reference: Float[Array, "B S V"] | None = None,
) -> tuple[KVState, Steps]:
    """Feeds tokens to a state, which is not changed.

    Args:
      model, policy, weights: as in ``decode.prefill``.
      state: with pages reserved; not donated.
      feed: per row, tokens to feed; only the first one where ``forced`` is False.
      target: per row, the token after each fed one; its length is the number of steps.
      forced: feed the tokens of ``feed``, or the likeliest token of the step before; per row and token where
        it is a list. The first token is always fed.
      reference: logits after the same fed tokens, to compare with.

    Returns:
      (the state after the steps, measurements as NumPy arrays).
    """
    width = size_class(max(map(len, target)))
    given = np.full((len(feed), width), forced if isinstance(forced, bool) else True)
    if not isinstance(forced, bool):
        for row, own in zip(given, forced):
            row[: len(own)] = own
    count = np.asarray([len(row) for row in target], np.int32)
    rest, learned, begin = decode.after_prompt(policy, weights or {}, state)
    end, measured = _steps(
        model.network,
        rest,
        model.params,
        learned,
        begin,
        decode.padded(feed, width),
        decode.padded(target, width),
        count,
        given,
        reference,
    )
    return dataclasses.replace(end, structure=state.structure), jax.device_get(measured)
