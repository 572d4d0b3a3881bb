"""Expected attention: keeps the tokens that future queries will attend to if they resemble the prompt's.

Devoto et al., Expected Attention: KV Cache Compression by Estimating Attention from Future Queries
Distribution, https://arxiv.org/abs/2510.00636
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from kvjax.algebra import FIRST, Every, Eviction, Number, Observation, Policy, PolicyError, Switch, Whole
from kvjax.budgets.uniform import Uniform
from kvjax.types import Network, Params

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

    Learned weights, where ``stored``: ``mean`` [N, H] and ``covariance`` [N, H, H] per layer.

    Attributes:
      ahead: future positions whose rotations are averaged.
      sinks: first tokens, kept and left out of the statistics.
      floor: epsilon, added to a share before it is multiplied by the value's norm.
      covariance: False leaves the second term out, as if all queries were their mean.
      stored: m and C are those of a calibration text, not the prompt's own.
      newest: where the budget acts while decoding, so many newest queries are kept and modelled.
    """

    name = "expected_attention"
    arguments = {
        "ahead": Whole(1, "number of positions", 4096, by_positions=True),
        "sinks": Whole(),
        "floor": Number(),
        "covariance": Switch(),
        "stored": Switch(),
        "newest": Whole(1, "number of queries", by_positions=True),
    }
    traced = ("sinks", "floor")
    needs = frozenset({"q_pre", "k", "v"})
    scores_prompt = ranks_held = True
    trained_by = "python -m train.queries --config FILE --part expected_attention --export FILE"
    fitted = ("sinks",)
    ahead: int = 512
    sinks: int = 4
    floor: float = 0.0
    covariance: bool = True
    stored: bool = False
    newest: int = 128

    @property
    def queries(self) -> int:
        return 0 if self.stored else self.newest

    @property
    def learns(self) -> str:  # type: ignore[override]
        """The calibrated statistics, if it reads them."""
        return self.name if self.stored else ""

    def check_weights(self, weights: Sequence[Params], network: Network) -> None:
        n, h = network.num_heads, network.head_dim
        for index, layer in enumerate(weights):
            self.check_shapes(index, layer, {"mean": (n, h), "covariance": (n, h, h)}, network)

    def example_weights(self, key: Array, network: Network) -> list[Params]:
        n, h = network.num_heads, network.head_dim

        def one_layer(key: Array) -> Params:
            mean, root = jax.random.normal(key, (n, h)), jax.random.normal(key, (n, h, h)) / h
            return {"mean": mean, "covariance": root @ jnp.swapaxes(root, 1, 2)}

        return [one_layer(layer_key) for layer_key in jax.random.split(key, network.num_layers)]

    def score_prompt(self, params: Params | None, observed: Observation) -> Float[Array, "B K T"]:
        judged = observed.pos >= self.sinks
        k, v = (
            jnp.where(_over_tokens(observed.pos >= 0), x.astype(jnp.float32), 0.0)
            for x in (observed.k, observed.v)
        )
        mean, spread = _rotated(observed, self.ahead, *self._statistics(params, observed))
        logits = _log_expectation(k, mean, spread)
        logits = jnp.where(judged[:, None, None, :], logits, -jnp.inf)
        highest = logits.max(axis=-1, keepdims=True, initial=jnp.finfo(jnp.float32).min)
        weight = jnp.exp(logits - highest)
        share = weight / jnp.maximum(weight.sum(axis=-1, keepdims=True), jnp.finfo(jnp.float32).tiny)
        score = (share.mean(axis=2) + self.floor) * jnp.linalg.norm(v, axis=-1)
        return jnp.where(judged[:, None, :], score, FIRST)

    def _statistics(
        self, params: Params | None, observed: Observation
    ) -> tuple[Float[Array, "B N H"], Float[Array, "B N H H"] | None]:
        """m and C before rotation; C is None where it is left out."""
        if not self.stored:
            q, at = observed.queries("q_pre")
            mean, spread = _gaussian(q, at >= self.sinks)
        elif params is None:
            raise PolicyError(f"{self!r} has no statistics. Pass weights=kvjax.weights_for(policy, model).")
        else:
            rows = observed.pos.shape[0]
            mean, spread = (
                jnp.broadcast_to(x, (rows, *x.shape)) for x in (params["mean"], params["covariance"])
            )
        return mean, spread if self.covariance else None


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
    observed: Observation, ahead: int, mean: Float[Array, "B N H"], spread: Float[Array, "B N H H"] | None
) -> tuple[Float[Array, "B N H"], Float[Array, "B N H H"] | None]:
    """Both rotated by the mean rotation of the positions that follow each row's prompt."""
    r = observed.rotation_ahead(ahead, mean.shape[-1])
    if r is None:
        return mean, spread
    mean = jnp.einsum("bnh,bhi->bni", mean, r, precision=EXACT)
    if spread is None:
        return mean, None
    return mean, jnp.einsum("bnhg,bhi,bgj->bnij", spread, r, r, precision=EXACT)


def _log_expectation(
    k: Float[Array, "B K T H"], mean: Float[Array, "B N H"], spread: Float[Array, "B N H H"] | None
) -> Float[Array, "B K G T"]:
    """log E exp(q k / sqrt(H)) of every key under its group's Gaussians."""
    rows, heads, _, h = k.shape
    linear = jnp.einsum("bkgh,bkth->bkgt", mean.reshape(rows, heads, -1, h), k, precision=EXACT)
    if spread is None:
        return linear * h**-0.5
    spread = spread.reshape(rows, heads, -1, h, h)
    half = jnp.einsum("bkghi,bkti->bkgth", spread, k, precision=EXACT)
    return linear * h**-0.5 + (half * k[:, :, None]).sum(axis=-1) / (2 * h)


PRESETS = {"expected-attention": "expected_attention + uniform(0.25)"}

EXAMPLES = (
    Policy(eviction=ExpectedAttention(ahead=16, sinks=2), budget=Uniform(24)),
    Policy(eviction=ExpectedAttention(ahead=16, sinks=2, newest=8), budget=Uniform(24, Every(8)), recent=4),
    Policy(eviction=ExpectedAttention(ahead=16, sinks=2, covariance=False, stored=True), budget=Uniform(24)),
)
