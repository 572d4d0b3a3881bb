"""A whole prompt whose beginning was read before: its keys and values are known, and only the rest is read.

What a token's keys and values are does not depend on what follows, nor, where no part hides tokens while a
prompt is read, on the policy. So a later prompt with the same beginning reads the tokens behind it alone,
and ranks all, if ranking looks at no queries but theirs (``queries_behind``).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from kvjax import layer
from kvjax.algebra import Policy
from kvjax.cache.ring import Entry
from kvjax.types import EMPTY, Heads, Network, Params

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int, UInt

Keys = Sequence["tuple[Float[Array, '1 K T H'], Float[Array, '1 K T H']]"]
"""Keys and values of a prompt, layer by layer, padded."""


class Behind(NamedTuple):
    """What is known of a prompt: keys and values of its first ``tokens``; of others' behind them nothing."""

    tokens: int
    keys: Keys


def queries_behind(policy: Policy) -> int | None:
    """How many of a prompt's newest queries ranking it needs, beside keys and values of all its tokens.

    None where it needs anything else.
    """
    ranks = policy.eviction
    plain = (
        policy.admission.idle
        and policy.completion.idle
        and not policy.tracks_mass
        and not policy.holds_prompt
    )
    if not (policy.whole_prompt and plain and policy.needs <= {"q", "k", "v"}):
        return None
    if "q" not in policy.needs:
        return 1
    return max(ranks.queries, 1) if ranks.ranks_held else None


@functools.partial(jax.jit, static_argnames=("network", "window", "ring", "width"))
def prompt_layer_behind(
    network: Network,
    policy: Policy,
    window: int | None,
    ring: int,
    block: Params,
    weights: Params,
    index: Int[Array, ""],
    x: Float[Array, "1 I D"],
    k: Float[Array, "1 K S H"],
    v: Float[Array, "1 K S H"],
    begin: Int[Array, ""],
    total: Int[Array, " 1"],
    seeds: UInt[Array, " 1"],
    width: int,
) -> tuple[Float[Array, "1 I D"], Entry, Int[Array, "1 K"], Int[Array, "1 K"]]:
    """``prompt_layer`` for the tokens behind the first ``begin``; it ranks all. On one device.

    Args:
      network, policy, window, ring, block, weights, index, total, seeds: as there.
      x: of the tokens behind the beginning, padded.
      k, v: of the beginning, from ``begin`` on anything.
      width: T, padded: at least ``begin`` + I.
    """
    at = begin + jnp.arange(x.shape[1])[None]
    pos = jnp.where(jnp.arange(width) < total[:, None], jnp.arange(width), EMPTY)
    info = layer.LayerInfo(policy, weights, index, network.num_layers, window, total, seeds=seeds)

    def sized(known: Array) -> Array:
        known = known[:, :, :width]
        return jnp.pad(known, ((0, 0), (0, 0), (0, width - known.shape[2]), (0, 0)))

    def attend(_: int, heads: Heads, known: Any) -> tuple[Array, Any]:
        k, v = map(sized, known)
        out, ranked = layer.prompt_behind(info, heads, k, v, begin, pos)
        counts = layer.count_stored(ranked, info.total, ring), ranked.admit.sum(axis=-1)
        return out, (ranked, *counts)

    # Layers of one window share this program: the first of them stands for all.
    carry: Any = (k, v)
    x, (ranked, stored, stays) = network.layer(block, network.windows.index(window), x, at, attend, carry)
    return x, ranked, stored, stays
