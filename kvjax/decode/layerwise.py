"""A whole prompt layer by layer, each layer compressed before the next one runs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import ageing, metrics
from kvjax import layer as layers
from kvjax.cache import pool
from kvjax.cache import state as states
from kvjax.cache.ring import Entry
from kvjax.cache.state import KVState, LayerCache
from kvjax.decode.requests import Progress
from kvjax.decode.sizes import bucket, padded
from kvjax.decode.walk import logits_of, with_confidence
from kvjax.decode.weights import at_layer
from kvjax.policy import Policy
from kvjax.types import EMPTY, Heads, Network, Params, Weighted

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


def prefill_whole(
    model: Weighted,
    policy: Policy,
    state: KVState,
    prompts: Sequence[Sequence[int]],
    weights: Params,
    progress: Progress | None,
) -> tuple[KVState, Float[Array, "B V"]]:
    """Read the prompts into an empty state that knows their lengths (``total``), as ``prefill`` does."""
    network, params, total = model.network.at(state.context), model.params, state.total
    width = bucket(max(len(prompt) for prompt in prompts))
    positions = jnp.broadcast_to(jnp.arange(width), (len(prompts), width))
    x = network.embed(params, jnp.asarray(padded(prompts, width)), positions)
    rooms = list(state.layers)
    for index, block in enumerate(params["layers"]):
        mine = at_layer(policy, weights, index)
        room, window = rooms[index], network.windows[index]
        at = jnp.asarray(index)
        x, judged, kept = _prompt_layer(network, policy, window, room.ring.window, block, mine, at, x, total)
        # The one look of the host between two layers.
        need = tuple(pool.coarse_class(pages) for pages in ageing.pages_for(policy, room, np.asarray(kept)))
        whole = sum(leaf.nbytes for leaf in jax.tree.leaves(judged))
        before = metrics.allocated(tuple(rooms))
        rooms[index] = _pack_layer(policy, network.num_layers, need, mine, room, judged, at, total)
        state = metrics.raise_peak(state, whole, before + whole + metrics.allocated((rooms[index],)))
        if progress:
            progress(index + 1, network.num_layers)
    # A buffer of its own: the state is donated, and no buffer can be donated twice.
    state = dataclasses.replace(state, layers=tuple(rooms), length=jnp.copy(total))
    state = states.fit(metrics.with_peak(state))  # raises if a pool was too small
    last = jnp.take_along_axis(x, (total - 1)[:, None, None], axis=1)[:, 0]
    logits = logits_of(network, params, last)
    return with_confidence(policy, state, logits, jnp.ones(len(prompts), bool)), logits


@functools.partial(jax.jit, static_argnames=("network", "policy", "window", "ring"))
def _prompt_layer(
    network: Network,
    policy: Policy,
    window: int | None,
    ring: int,
    block: Params,
    weights: Params,
    index: Int[Array, ""],
    x: Float[Array, "B T D"],
    total: Int[Array, " B"],
) -> tuple[Float[Array, "B T D"], Entry, Int[Array, "B K"]]:
    """One layer over the whole prompt; ``index`` is traced, so that all layers share one program."""
    at = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
    pos = jnp.where(at < total[:, None], at, EMPTY)
    site = layers.Site(policy, weights, index, network.num_layers, window, total)

    def attend(_: int, heads: Heads, judged: Entry | None) -> tuple[Array, Entry | None]:
        del judged
        return layers.prompt(site, heads, pos)

    # Layers of one window share this program: the first of them stands for all.
    x, judged = network.layer(block, network.windows.index(window), x, at, attend, None)
    assert judged is not None  # noqa: S101  (attend has run)
    return x, judged, layers.survivors(judged, total, ring)


@functools.partial(jax.jit, static_argnames=("policy", "layers_", "pages"))
def _pack_layer(
    policy: Policy,
    layers_: int,
    pages: tuple[int, ...],
    weights: Params,
    room: LayerCache,
    judged: Entry,
    index: Int[Array, ""],
    total: Int[Array, " B"],
) -> LayerCache:
    """Store a judged layer in pools of so many pages, one for each of its rooms."""
    site = layers.Site(policy, weights, index, layers_, None, total)
    room = room.with_rooms([pool.resize(held, count) for held, count in zip(room.rooms, pages)])
    return layers.pack(site, room, judged, total)
