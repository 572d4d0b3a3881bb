"""The maps' objective and the metrics of checks, on a batch of traces (arXiv 2604.05438, appendix B).

The KV heads of all layers lie along one axis, A = L x K, each with the maps of its G query heads: one program
for all, and a mesh shards that axis without communication.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from kvjax.policies import phi
from kvjax.types import Params
from train.phi.maps import folded
from train.phi.settings import Loss, Target

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float

LEAST = 1e-30
"""Smallest feature product under its row's shift: a score 69 below the best."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """The static arguments of the objective.

    Attributes:
      loss, target: of the config.
      prompt: N.
      softcap: of the model's scores, or None.
    """

    loss: Loss
    target: Target
    prompt: int
    softcap: float | None = None

    @property
    def visits(self) -> int:
        """Tokens of the summary that a check reads exactly."""
        return min(round(self.target.retrieved * self.prompt), self.prompt)


def teacher(batch: dict[str, Array], softcap: float | None) -> Float[Array, "B A G Q T"]:
    """The model's scores of every query and token."""
    q, k = (batch[name].astype(jnp.float32) for name in ("q", "k"))
    s = jnp.einsum("bagqh,bath->bagqt", q, k) * q.shape[-1] ** -0.5
    return s if softcap is None else softcap * jnp.tanh(s / softcap)


def student(maps: Params, batch: dict[str, Array]) -> Float[Array, "B A G Q T"]:
    """log φ_q · φ_k of every query and token, in one product of features shifted to at most 1.

    All -inf for a silent head (``train.phi.silence``).

    Args:
      maps: as served (``folded``), heads of all layers along one axis.
      batch: see ``train.phi.batches``.
    """
    b, a, g, n, h = batch["q"].shape
    log_q = phi.log_features(maps, "q", batch["q"].reshape(b, a * g, n, h)).reshape(b, a, g, n, -1)
    log_k = phi.log_features(maps, "k", batch["k"])
    most = jax.lax.stop_gradient(log_k.max(axis=2, keepdims=True))
    row = log_q + most[:, :, None]
    shift = jax.lax.stop_gradient(row.max(axis=-1, keepdims=True))
    silent = shift == -jnp.inf
    shift = jnp.where(silent, 0, shift)
    exact = jax.lax.Precision.HIGHEST
    z = jnp.einsum("bagqf,batf->bagqt", jnp.exp(row - shift), jnp.exp(log_k - most), precision=exact)
    return jnp.where(silent, -jnp.inf, shift + jnp.log(jnp.maximum(z, LEAST)))


def summarised(task: Task, batch: dict[str, Array]) -> Bool[Array, "B A T"]:
    """The tokens in the summary: those that the policy drops, or the prompt's middle."""
    at = jnp.arange(batch["k"].shape[2])
    if "dropped" in batch:
        return batch["dropped"]
    middle = (at >= task.target.sinks) & (at < task.prompt - task.target.tail)
    return jnp.broadcast_to(middle, batch["k"].shape[:3])


def huber(x: Float[Array, ...], delta: float) -> Float[Array, ...]:
    """x^2 / 2 up to delta, linear beyond."""
    size = jnp.abs(x)
    return jnp.where(size <= delta, 0.5 * x * x, delta * (size - 0.5 * delta))


def distance(
    loss: Loss, s: Float[Array, "... T"], guess: Float[Array, "... T"], among: Bool[Array, "... T"]
) -> dict[str, Float[Array, ...]]:
    """The terms of the objective for each query, and their sum ``all``.

    Args:
      loss: weights.
      s: teacher's scores.
      guess: student's.
      among: the tokens of the softmax; if there are none, every term is 0.
    """
    some = among.any(axis=-1)
    among = among | ~some[..., None]
    best = jnp.where(among, s, -jnp.inf).max(axis=-1, keepdims=True)
    r, guess = s - best, guess - best

    def mean(x: Array, of: Array) -> Array:
        return jnp.where(of, x, 0.0).sum(axis=-1) / jnp.maximum(of.sum(axis=-1), 1)

    def soft(x: Array) -> Array:
        return jax.nn.log_softmax(jnp.where(among, x / loss.temperature, -1e30), axis=-1)

    p, log_p = jnp.exp(soft(r)), soft(r)
    band = among & (r >= -loss.band)
    total = lambda x: jax.nn.logsumexp(jnp.where(among, x, -1e30), axis=-1)  # noqa: E731
    terms = {
        "kl": loss.temperature**2 * jnp.where(among, p * (log_p - soft(guess)), 0.0).sum(axis=-1),
        "top": mean(huber(guess - r, loss.delta), band),
        "far": mean(huber(jnp.maximum(guess + loss.band, 0.0), loss.delta), among & ~band),
        "mass": huber(jnp.maximum(total(guess) - total(r), 0.0), loss.delta),
    }
    terms = {name: jnp.where(some, value, 0.0) for name, value in terms.items()}
    more = loss.top * terms["top"] + loss.far * terms["far"] + loss.mass * terms["mass"]
    return terms | {"all": loss.kl * terms["kl"] + (1 - loss.kl) * more}


def objective(
    task: Task, params: Params, batch: dict[str, Array]
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """The sum of all heads' losses, a mean over rows and queries each; metrics are means over heads."""
    among = summarised(task, batch)[:, :, None, None]
    s, guess = teacher(batch, task.softcap), student(folded(params), batch)
    terms = distance(task.loss, s, guess, jnp.broadcast_to(among, s.shape))
    return terms["all"].mean(axis=(0, 2, 3)).sum(), {name: x.mean() for name, x in terms.items()}


class Scores(NamedTuple):
    """Scores of the queries behind the prompt, [B, A, G, Q, T].

    Attributes:
      scores, guess: the teacher's and φ's.
      seen: tokens up to the query.
      inside: those of them in the summary.
      order: each token's rank by the largest score in its group, from 0.
    """

    scores: Array
    guess: Array
    seen: Array
    inside: Array
    order: Array


def scored(task: Task, maps: Params, batch: dict[str, Array]) -> Scores:
    """The scores of a batch; ``maps`` as in ``student``."""
    s = teacher(batch, task.softcap)
    seen = jnp.arange(s.shape[-1]) <= batch["at"][:, None, None, :, None]
    inside = jnp.broadcast_to(summarised(task, batch)[:, :, None, None], s.shape) & seen
    best = jnp.where(inside, s, -jnp.inf).max(axis=2, keepdims=True)
    order = jnp.argsort(jnp.argsort(-best, axis=-1), axis=-1)
    return Scores(s, student(maps, batch), jnp.broadcast_to(seen, s.shape), inside, order)


class Outputs(NamedTuple):
    """Attention's output for the queries behind the prompt.

    Attributes:
      full: [B, A, G, Q, H].
      alone, completed: less ``full`` [C, B, A, G, Q, H]: without the summary's tokens; with φ in their place.
    """

    full: Array
    alone: Array
    completed: Array


def outputs(x: Scores, v: Float[Array, "B A T H"], counts: Sequence[int]) -> Outputs:
    """What is read, and how far off it is.

    Args:
      x: of the batch.
      v: its values.
      counts: numbers C of the summary's best tokens that are read exactly.
    """
    v = v.astype(jnp.float32)

    def output(scores: Array, among: Array) -> Array:
        p = jax.nn.softmax(jnp.where(among, scores, -jnp.inf), axis=-1)
        return jnp.einsum("bagqt,bath->bagqh", p, v)

    full = output(x.scores, x.seen)
    alone, completed = [], []
    for count in counts:
        rest = x.inside & (x.order >= count)
        alone.append(output(x.scores, x.seen & ~rest) - full)
        completed.append(output(jnp.where(rest, x.guess, x.scores), x.seen) - full)
    return Outputs(full, jnp.stack(alone), jnp.stack(completed))


def errors(
    x: Scores, v: Float[Array, "B A T H"], counts: Sequence[int]
) -> tuple[Float[Array, "C B A G Q"], Float[Array, "C B A G Q"]]:
    """Relative L1 errors of ``outputs``: without the summary's tokens, and with φ in their place."""
    out = outputs(x, v, counts)
    size = jnp.abs(out.full).sum(axis=-1) + 1e-9
    return jnp.abs(out.alone).sum(axis=-1) / size, jnp.abs(out.completed).sum(axis=-1) / size


def projected(error: Float[Array, "... A G Q H"], wo: Float[Array, "A G H D"]) -> Float[Array, "... A G Q"]:
    """L2 norm of an output's error after the head's part of the output projection: what the model is given.

    A relative error counts a head that says nothing as much as one on which the answer depends.
    """
    moved = jnp.einsum("...agqh,aghd->...agqd", error, wo, precision=jax.lax.Precision.HIGHEST)
    return jnp.linalg.norm(moved, axis=-1)


def projection(layers: Sequence[Params], kv_heads: int) -> Float[Array, "A G H D"]:
    """The output projection of each head, of a model's layers."""
    every = jnp.stack([jnp.moveaxis(jnp.asarray(layer["wo"], jnp.float32), 0, -1) for layer in layers])
    return every.reshape(len(layers) * kv_heads, -1, *every.shape[2:])


def quality(task: Task, params: Params, batch: dict[str, Array]) -> dict[str, Float[Array, "B A"]]:
    """What serving would lose, means over a head's queries.

    Relative L1 errors of attention's output: ``left_out``, without the summary's tokens; ``completed``, with
    φ in their place; ``selected`` and ``both``, the same with the best tokens read exactly. ``over``: by how
    much φ overestimates the log of the summary's mass.
    """
    x = scored(task, folded(params), batch)
    pairs = zip(*(e.mean(axis=(3, 4)) for e in errors(x, batch["v"], (0, task.visits))))
    (left_out, completed), (selected, both) = pairs
    mass = [jax.nn.logsumexp(jnp.where(x.inside, s, -1e30), axis=-1) for s in (x.guess, x.scores)]
    over = jnp.where(x.inside.any(axis=-1), jnp.maximum(mass[0] - mass[1], 0.0), 0.0).mean(axis=(2, 3))
    named = {"left_out": left_out, "completed": completed, "selected": selected, "both": both}
    return named | {"over": over}
