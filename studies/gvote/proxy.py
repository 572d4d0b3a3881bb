"""Drawn queries beside true ones: a text is read whole, its head is the prompt, its tail is the future.

Everything is about the model's own attention over the prompt's keys alone, layer by layer.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import decode, layer
from kvjax.algebra import Observation, Policy
from kvjax.budgets.gvote import Ballot, Voted, best, nucleus
from kvjax.policies.gvote import Votes
from kvjax.types import EMPTY, Heads, Network, Params, Weighted, pytree

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

FUTURE = 64
"""Tokens of a text that are the future of what stands before them."""


@pytree()
@dataclasses.dataclass(frozen=True, kw_only=True)
class Agreement:
    """How drawn queries agree with true ones, in one layer and text.

    Attributes:
      overlap: of each query head, the future queries' mass inside the top-p set of one drawn query.
      usage: the size of that set over the prompt's.
      r: Pearson correlation of drawn and true attention; means over voters and future queries.
      kept: of each KV head, the share of the prompt that the union keeps, by p and by number of voters.
      held: the future queries' mass inside it, the worst head of the group.
    """

    overlap: Float[Array, " N"]
    usage: Float[Array, " N"]
    r: Float[Array, " N"]
    kept: Float[Array, "K P S"]
    held: Float[Array, "K P S"]


def agreement_of(
    model: Weighted,
    ids: Sequence[int],
    *,
    ps: Sequence[float],
    counts: Sequence[int],
    ahead: int,
    seed: int = 0,
) -> Agreement:
    """Every layer of one text, a leading axis L.

    Args:
      ids: the prompt and ``FUTURE`` tokens after it.
      ps: nucleus shares; the first is that of overlap and usage.
      counts: numbers of voters.
      ahead: n_f.
      seed: of the request.
    """
    reading = decode.read_full(model, [list(ids)])
    network, layers = model.network.at(reading.context), []
    length = jnp.asarray([len(ids)], jnp.int32)
    for index, block in enumerate(model.params["layers"]):
        inputs = reading.inputs[index], length, jnp.asarray(ps), jnp.asarray([seed], jnp.uint32)
        layers.append(_agreement(network, tuple(counts), ahead, block, jnp.asarray(index), *inputs))
    return jax.tree.map(lambda *x: np.stack([np.asarray(y) for y in x]), *layers)


@functools.partial(jax.jit, static_argnames=("network", "counts", "ahead"))
def _agreement(
    network: Network,
    counts: tuple[int, ...],
    ahead: int,
    block: Params,
    index: Int[Array, ""],
    x: Float[Array, "1 T D"],
    length: Int[Array, " 1"],
    ps: Float[Array, " P"],
    seeds: Int[Array, " 1"],
) -> Agreement:
    at = jnp.arange(x.shape[1])[None]
    prompt = length - FUTURE

    def attend(_: int, heads: Heads, agreement: Agreement | None) -> tuple[Array, Agreement | None]:
        ballot = Votes(samples=max(counts), ahead=ahead)
        policy = Policy(eviction=ballot, budget=Voted(samples=max(counts), ahead=ahead))
        info = layer.LayerInfo(policy, {}, index, network.num_layers, None, prompt, seeds=seeds)
        seen = layer.observe(info, heads, jnp.where(at < prompt[:, None], at, EMPTY))
        future = jnp.take_along_axis(heads.q, (prompt[:, None] + jnp.arange(FUTURE))[..., None, None], axis=1)
        return jnp.zeros_like(heads.q), _compared(ballot, seen, future[0], counts, ps)

    _, agreement = network.layer(block, 0, x, at, attend, None)
    assert agreement is not None
    return agreement


def _compared(
    ballot: Ballot, seen: Observation, future: Float[Array, "F N H"], counts: Sequence[int], ps: Array
) -> Agreement:
    k, present = seen.k[0].astype(jnp.float32), seen.pos[0] >= 0
    total, heads = present.sum(), k.shape[0]

    def scores(q: Float[Array, "Q N H"]) -> Float[Array, "K G Q T"]:
        q = jnp.moveaxis(q.astype(jnp.float32).reshape(len(q), heads, -1, q.shape[-1]), 0, 2)
        s = jnp.einsum("kgqh,kth->kgqt", q, k) * q.shape[-1] ** -0.5
        s = s if seen.softcap is None else seen.softcap * jnp.tanh(s / seen.softcap)
        return jnp.where(present, s, -jnp.inf)

    drawn, true = scores(ballot.voters(seen)[:, 0]), scores(future)
    attention, future_attention = (jax.nn.softmax(s, axis=-1) for s in (drawn, true))
    inside = best(drawn, nucleus(drawn, ps[0]))
    mass = future_attention.mean(axis=2)  # [K, G, T]
    last = scores(seen.q_last)[:, :, 0]

    def union(p: Array) -> tuple[Array, Array]:
        count = nucleus(last, p)
        named = best(drawn, jnp.broadcast_to(count[..., None], drawn.shape[:-1])).any(axis=1)  # [K, S, T]
        keep = jnp.stack([named[:, :s].any(axis=1) for s in counts], axis=1)
        held = jnp.einsum("kst,kgt->kgs", keep.astype(jnp.float32), mass).min(axis=1)
        return keep.sum(axis=-1) / total, held

    kept, held = jax.lax.map(union, ps)
    flat = (-1,)
    return Agreement(
        overlap=jnp.einsum("kgst,kgt->kgs", inside.astype(jnp.float32), mass).mean(axis=-1).reshape(flat),
        usage=(inside.sum(axis=-1) / total).mean(axis=-1).reshape(flat),
        r=_pearson(attention, future_attention, present, total).reshape(flat),
        kept=jnp.moveaxis(kept, 0, 1),
        held=jnp.moveaxis(held, 0, 1),
    )


def _pearson(a: Array, b: Array, present: Array, total: Array) -> Float[Array, "K G"]:
    """Mean correlation of every drawn with every true row of attention."""

    def unit(x: Array) -> Array:
        x = jnp.where(present, x - 1 / total, 0.0)
        return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)

    return jnp.einsum("kgst,kgft->kgsf", unit(a), unit(b)).mean(axis=(2, 3))


def as_json(agreement: Agreement) -> dict[str, Any]:
    """Means over all axes but those that say something."""
    return {
        "overlap": float(agreement.overlap.mean()),
        "usage": float(agreement.usage.mean()),
        "r": float(agreement.r.mean()),
        "best_r": float(agreement.r.max()),
    }
