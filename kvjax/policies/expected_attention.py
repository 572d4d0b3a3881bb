"""Expected attention: keeps the tokens that future queries will attend to if they resemble the prompt's.

Devoto et al., Expected Attention: KV Cache Compression by Estimating Attention from Future Queries
Distribution, https://arxiv.org/abs/2510.00636
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from kvjax.algebra import FIRST, Every, Eviction, Number, Observation, Policy, Whole
from kvjax.budgets.uniform import Uniform
from kvjax.types import Params

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float

EXACT = jax.lax.Precision.HIGHEST


@dataclasses.dataclass(frozen=True, repr=False)
class ExpectedAttention(Eviction):
    """Score = expected share of a future query's attention, times the norm of the value.

    Queries before RoPE, of all prompt tokens except the ``sinks``, are modelled as a Gaussian (mean m,
    covariance C divided by their number), rotated by the mean of the model's rotations R over the ``ahead``
    positions that follow. E exp(q k / sqrt(H)) is then exp(R m k / sqrt(H) + k' R C R' k / 2H). Shares
    are taken over the tokens after the sinks per query head, and averaged over a group's heads. The sinks of
    all heads stay before all other tokens of the layer, whose slots the heads may share; among sinks the
    lowest positions stay first.

    Attributes:
      ahead: future positions whose rotations are averaged.
      sinks: first tokens, kept and left out of the statistics.
      floor: added to a share before it is multiplied by the value's norm.
      newest: where the budget acts while decoding, so many newest queries are kept and modelled.
    """

    name = "expected_attention"
    arguments = {
        "ahead": Whole(1, "number of positions", 4096, by_positions=True),
        "sinks": Whole(),
        "floor": Number(),
        "newest": Whole(1, "number of queries", by_positions=True),
    }
    traced = ("sinks", "floor")
    needs = frozenset({"q_pre", "k", "v"})
    scores_prompt = ranks_held = True
    ahead: int = 512
    sinks: int = 4
    floor: float = 0.0
    newest: int = 128

    @property
    def queries(self) -> int:
        return self.newest

    def score_prompt(self, params: Params | None, observed: Observation) -> Float[Array, "B K T"]:
        judged = observed.pos >= self.sinks
        k, v = (
            jnp.where(_over_tokens(observed.pos >= 0), x.astype(jnp.float32), 0.0)
            for x in (observed.k, observed.v)
        )
        q, at = observed.queries("q_pre")
        mean, spread = _rotated(observed, self.ahead, *_gaussian(q, at >= self.sinks))
        logits = _log_expectation(k, mean, spread)
        logits = jnp.where(judged[:, None, None, :], logits, -jnp.inf)
        highest = logits.max(axis=-1, keepdims=True, initial=jnp.finfo(jnp.float32).min)
        weight = jnp.exp(logits - highest)
        share = weight / jnp.maximum(weight.sum(axis=-1, keepdims=True), jnp.finfo(jnp.float32).tiny)
        score = (share.mean(axis=2) + self.floor) * jnp.linalg.norm(v, axis=-1)
        return jnp.where(judged[:, None, :], score, FIRST)


def _over_tokens(x: Bool[Array, "B T"]) -> Bool[Array, "B 1 T 1"]:
    return x[:, None, :, None]


def _gaussian(
    q: Float[Array, "B N T H"], judged: Array
) -> tuple[Float[Array, "B N H"], Float[Array, "B N H H"]]:
    """Mean and covariance of the queries of ``judged`` tokens, per query head; zeros where there are none."""
    q = jnp.where(_over_tokens(judged), q.astype(jnp.float32), 0.0)
    count = jnp.maximum(judged.sum(axis=-1), 1)[:, None, None]
    mean = q.sum(axis=2) / count
    centred = jnp.where(_over_tokens(judged), q - mean[:, :, None], 0.0)
    return mean, jnp.einsum("bnti,bntj->bnij", centred, centred, precision=EXACT) / count[..., None]


def _rotated(
    observed: Observation, ahead: int, mean: Float[Array, "B N H"], spread: Float[Array, "B N H H"]
) -> tuple[Float[Array, "B N H"], Float[Array, "B N H H"]]:
    """Both rotated by the mean rotation of the positions that follow each row's prompt."""
    r = observed.rotation_ahead(ahead, mean.shape[-1])
    if r is None:
        return mean, spread
    mean = jnp.einsum("bnh,bhi->bni", mean, r, precision=EXACT)
    return mean, jnp.einsum("bnhg,bhi,bgj->bnij", spread, r, r, precision=EXACT)


def _log_expectation(
    k: Float[Array, "B K T H"], mean: Float[Array, "B N H"], spread: Float[Array, "B N H H"]
) -> Float[Array, "B K G T"]:
    """log E exp(q k / sqrt(H)) of every key under its group's Gaussians."""
    rows, heads, _, h = k.shape
    mean, spread = mean.reshape(rows, heads, -1, h), spread.reshape(rows, heads, -1, h, h)
    linear = jnp.einsum("bkgh,bkth->bkgt", mean, k, precision=EXACT)
    half = jnp.einsum("bkghi,bkti->bkgth", spread, k, precision=EXACT)
    return linear * h**-0.5 + (half * k[:, :, None]).sum(axis=-1) / (2 * h)


PRESETS = {"expected-attention": "expected_attention + uniform(0.25)"}

EXAMPLES = (
    Policy(eviction=ExpectedAttention(ahead=16, sinks=2), budget=Uniform(24)),
    Policy(eviction=ExpectedAttention(ahead=16, sinks=2, newest=8), budget=Uniform(24, Every(8)), recent=4),
)
