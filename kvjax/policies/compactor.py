"""Compactor: keeps the keys that others cannot stand in for (leverage) and those that their chunk attends to.

Chari and Van Durme, Compactor: Calibrated Query-Agnostic KV Cache Compression with Approximate Leverage
Scores, https://arxiv.org/abs/2507.08143

``leverage`` ranks by the first alone, ``compactor`` by both.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.algebra import FIRST, HERE, AllHeads, Eviction, Number, Observation, Policy, Whole
from kvjax.budgets.ada import Ada
from kvjax.budgets.uniform import Uniform
from kvjax.types import Params

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int

EXACT = jax.lax.Precision.HIGHEST

RIDGE = 1e-2
"""Added to the Gram matrix of the sketched keys, as the authors' code does."""

COLUMNS, SEED = Whole(1, "number of columns", 4096), Whole(0, "seed", 2**32 - 1)


def gaussian(observed: Observation, columns: int, seed: int | Int[Array, ""]) -> Float[Array, "K H S"]:
    """A sketch of variance 1 / S, which depends on seed, layer and head."""
    _, local, _, h = observed.k_pre.shape
    key = jax.random.fold_in(jax.random.PRNGKey(seed), observed.layer)
    drawn = jax.random.normal(key, (1, observed.heads.count(local), h, columns))
    return observed.heads.local(drawn * columns**-0.5)[0]


def leverage(
    k: Float[Array, "B K T H"], judged: Bool[Array, "B T"], sketch: Float[Array, "K H S"]
) -> Float[Array, "B K T"]:
    """x' (X' X + RIDGE I)^-1 x, where rows x of X are keys less their mean, sketched; 0 where not judged."""
    judged = judged[:, None, :, None]
    k = jnp.where(judged, k.astype(jnp.float32), 0.0)
    mean = k.sum(axis=2, keepdims=True) / jnp.maximum(judged.sum(axis=2, keepdims=True), 1)
    x = jnp.einsum("bkth,khs->bkts", jnp.where(judged, k - mean, 0.0), sketch, precision=EXACT)
    ridge = jnp.broadcast_to(RIDGE**0.5 * jnp.eye(x.shape[-1]), (*x.shape[:2], x.shape[-1], x.shape[-1]))
    # Rows of Q in place of a Cholesky factor of the Gram matrix: in float32 that one can fail.
    q, _ = jnp.linalg.qr(jnp.concatenate([x, ridge], axis=2))
    return (q[:, :, : x.shape[2]] ** 2).sum(axis=-1)


@dataclasses.dataclass(frozen=True, repr=False)
class Leverage(Eviction):
    """Score = leverage of the token's key before RoPE: how badly the head's other keys span it.

    Keys are multiplied by a Gaussian sketch first. Protects nothing.

    Attributes:
      sketch: columns of the sketch.
      seed: of the sketch.
    """

    name = "leverage"
    arguments = {"sketch": COLUMNS, "seed": SEED}
    traced = ("seed",)
    needs = frozenset({"k_pre"})
    scores_prompt = True
    sketch: int = 48
    seed: int = 0

    def leaves(self) -> dict[str, Any]:
        return {"seed": np.uint32(self.seed)}

    def score_prompt(self, params: Params | None, observed: Observation) -> Float[Array, "B K T"]:
        return leverage(observed.k_pre, observed.pos >= 0, gaussian(observed, self.sketch, self.seed))


@dataclasses.dataclass(frozen=True, repr=False)
class Compactor(Eviction):
    """Score = attention that a token receives in its chunk + ``blend`` times the leverage of its key.

    Between the ``first`` and the ``last`` tokens the prompt is cut into chunks. A query attends to all keys
    of its chunk, later ones too, by softmax of q k without a scale. What a token receives, mean over a
    group's heads, times the norm of its value, is averaged over the token and its two neighbours. Both terms
    are standardised over all heads and tokens of the layer.

    Attributes:
      blend: weight of the leverage, by default that of the authors' engine; kvpress takes the share that is
        removed.
      chunk: tokens of a chunk.
      first: first tokens, which go when no other is left.
      last: newest tokens, never evicted.
      sketch, seed: see ``Leverage``.
    """

    name = "compactor"
    arguments = {
        "blend": Number(what="weight"),
        "chunk": Whole(1, by_positions=True),
        "first": Whole(),
        "last": Whole(),
        "sketch": COLUMNS,
        "seed": SEED,
    }
    traced = ("blend", "seed")
    needs = frozenset({"q", "k", "k_pre", "v"})
    scores_prompt = True
    blend: float = 0.5
    chunk: int = 256
    first: int = 8
    last: int = 4
    sketch: int = 48
    seed: int = 0

    def leaves(self) -> dict[str, Any]:
        return super().leaves() | {"seed": np.uint32(self.seed)}

    @property
    def protects(self) -> int:
        return self.last

    def score_prompt(self, params: Params | None, observed: Observation) -> Float[Array, "B K T"]:
        pos, heads = observed.pos, observed.heads
        judged = (pos >= self.first) & (pos < (observed.total - self.last)[:, None])
        spread = leverage(observed.k_pre, judged, gaussian(observed, self.sketch, self.seed))
        received = self._received(observed, judged)
        score = _standard(received, judged, heads) + self.blend * _standard(spread, judged, heads)
        return jnp.where(judged[:, None, :], score, FIRST)

    def _received(self, observed: Observation, judged: Bool[Array, "B T"]) -> Float[Array, "B K T"]:
        """Attention inside chunks times the value's norm, smoothed; 0 beyond the judged tokens."""
        mask = judged[:, None, :, None]
        q, k, v = (jnp.where(mask, x.astype(jnp.float32), 0.0) for x in (observed.q, observed.k, observed.v))
        rows, _, t, h = k.shape
        size = max(1, min(self.chunk, t - self.first))
        chunks = max(1, -(-(t - self.first) // size))

        def cut(x: Array, axis: int) -> Array:
            """Chunks first, then the rest of the shape."""
            x = jax.lax.slice_in_dim(x, min(self.first, t), t, axis=axis)
            pad = [(0, 0)] * x.ndim
            pad[axis] = (0, chunks * size - x.shape[axis])
            shape = (*x.shape[:axis], chunks, size, *x.shape[axis + 1 :])
            return jnp.moveaxis(jnp.pad(x, pad).reshape(shape), axis, 0)

        # One chunk at a time: all of them would be T chunk numbers a head.
        columns = jax.lax.map(lambda xs: _columns(*xs), (cut(q, 2), cut(k, 2), cut(judged, 1)))
        columns = jnp.moveaxis(columns, 0, 2).reshape(rows, k.shape[1], -1)
        columns = jnp.pad(columns, ((0, 0), (0, 0), (self.first, 0)))[..., :t]
        received = jnp.pad(columns * jnp.linalg.norm(v, axis=-1), ((0, 0), (0, 0), (1, 1)))
        return (received[..., :-2] + received[..., 1:-1] + received[..., 2:]) / 3


def _columns(
    q: Float[Array, "B N S H"], k: Float[Array, "B K S H"], judged: Bool[Array, "B S"]
) -> Float[Array, "B K S"]:
    """Attention that each judged key of a chunk receives from its judged queries."""
    rows, heads, size, h = k.shape
    s = jnp.einsum("bkgsh,bkth->bkgst", q.reshape(rows, heads, -1, size, h), k, precision=EXACT)
    s = jnp.where(judged[:, None, None, None, :], s, jnp.finfo(jnp.float32).min)
    p = jnp.where(judged[:, None, None, :, None], jax.nn.softmax(s, axis=-1), 0.0)
    return jnp.where(judged[:, None, :], p.sum(axis=-2).mean(axis=2), 0.0)


def _standard(
    x: Float[Array, "B K T"], judged: Bool[Array, "B T"], heads: AllHeads = HERE
) -> Float[Array, "B K T"]:
    """Less the mean, over the deviation (n - 1), of a row's judged tokens in all heads of the layer."""
    judged = judged[:, None, :]
    each, count = judged.sum(axis=-1, keepdims=True), heads.count(x.shape[1])
    mean = heads.mean(jnp.where(judged, x, 0.0).sum(axis=-1, keepdims=True)) / jnp.maximum(each, 1)
    squares = heads.mean(jnp.where(judged, (x - mean) ** 2, 0.0).sum(axis=-1, keepdims=True))
    deviation = jnp.sqrt(squares * count / jnp.maximum(count * each - 1, 1))
    return (x - mean) / jnp.maximum(deviation, 1e-6)


PRESETS = {"compactor": "compactor + uniform(0.25)", "leverage": "leverage + uniform(0.25)"}

EXAMPLES = (
    Policy(eviction=Compactor(chunk=16, first=2, last=3, sketch=6), budget=Uniform(24)),
    Policy(eviction=Compactor(chunk=7, first=2, last=3, sketch=6), budget=Ada(20)),
    Policy(eviction=Leverage(sketch=6), budget=Uniform(24), sinks=2),
)
