"""CONF-KV: keeps recent tokens and tokens that lately received attention; confidence sets how many.

Li, Miao: CONF-KV: Confidence-Aware KV Cache Eviction with Mixed-Precision Storage for Long-Horizon LLM,
https://arxiv.org/abs/2605.24786
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from kvjax.algebra import Eviction, Number, Observation, Policy, Whole
from kvjax.budgets.confidence import Confidence
from kvjax.cache.pages import Slots
from kvjax.types import Params

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int


@dataclasses.dataclass(frozen=True, repr=False)
class ConfKV(Eviction):
    """Score = alpha * mass + (1 - alpha) * recency, both min-max normalised over the evictable tokens.

    Mass is a moving average over queries, a <- gamma a + (1 - gamma) mean over all heads of the layer, from 0
    when a token arrives; the queries of a prompt count as if they had come one by one. Recency is the token's
    position: the step at which it was written. With one candidate, or with equal ones, both are 0. All KV
    heads of a layer keep the same tokens. The other half of the method is the budget, ``confidence``.

    The paper gives no alpha and no gamma. Gamma is the best of a small search with the embedded model, on
    text that no result is reported on. Alpha lies in the middle of a plateau: up to 0.5 a first token that
    has all the attention goes when few tokens stay (``python -m studies.conf_kv --study alpha``,
    results/conf_kv).

    Attributes:
      alpha: weight of the mass, in [0, 1]; 0 ranks by recency alone, 1 by attention alone.
      gamma: the share of the mass that a step keeps, in [0, 1).
      recent: P, newest tokens that are protected.
    """

    name = "conf_kv"
    arguments = {"alpha": Number(0, 1), "gamma": Number(0, 1, open="high"), "recent": Whole()}
    traced = ("alpha", "gamma")
    needs = frozenset({"k", "mass"})
    keeps = ("mass",)
    shared_ranking = True
    alpha: float = 0.75
    gamma: float = 0.998
    recent: int = 64

    @functools.cached_property
    def beta(self) -> float:
        """1 - alpha, the weight of recency; a leaf of its own, in the host's double precision."""
        return 1 - self.alpha

    @functools.cached_property
    def fresh(self) -> float:
        """1 - gamma, the weight of a query's attention in the mass; a leaf of its own."""
        return 1 - self.gamma

    def leaves(self) -> dict[str, Any]:
        return super().leaves() | {"beta": self.beta, "fresh": self.fresh}

    @property
    def protects(self) -> int:
        return self.recent

    def arrive(self, params: Params | None, observed: Observation) -> dict[str, Float[Array, "B K T"]]:
        return {"mass": jnp.zeros(observed.k.shape[:3], jnp.float32)}

    def query_weights(self, age: Int[Array, "B T"]) -> Float[Array, "B T"]:
        """(1 - gamma) gamma^age: the weight of a query's attention after ``age`` more queries."""
        return self.fresh * self.gamma ** age.astype(jnp.float32)

    def accumulate(
        self, slots: Slots, mass: Float[Array, "B 1 C"], count: Int[Array, "B 1 1"]
    ) -> dict[str, Float[Array, "B K C"]]:
        """``count`` steps of the moving average."""
        return {"mass": self.gamma ** count.astype(jnp.float32) * slots.meta["mass"] + mass}

    def score(self, params: Params | None, slots: Slots) -> Float[Array, "B K C"]:
        mass, age = (_spread(x, slots.live) for x in (slots.meta["mass"], slots.pos.astype(jnp.float32)))
        return self.alpha * mass + self.beta * age

    def score_prompt(self, params: Params | None, observed: Observation) -> Float[Array, "B 1 T"]:
        """The same score for all tokens but the newest ``recent``, for a budget that acts once."""
        pos = observed.pos[:, None, :]
        free = (pos >= 0) & (pos < (observed.total - self.recent)[:, None, None])
        meta = {"mass": observed.heads.mean(observed.mass)}
        return self.score(params, Slots(pos=pos, live=free, meta=meta))


def _spread(x: Float[Array, "B K C"], candidates: Bool[Array, "B K C"]) -> Float[Array, "B K C"]:
    """Min-max normalisation over the candidates; 0 elsewhere."""
    low = jnp.where(candidates, x, jnp.inf).min(axis=-1, keepdims=True)
    high = jnp.where(candidates, x, -jnp.inf).max(axis=-1, keepdims=True)
    wide = high > low  # also false where there is no candidate
    return jnp.where(candidates & wide, (x - low) / jnp.where(wide, high - low, 1.0), 0.0)


PRESETS = {"conf-kv": "conf_kv + confidence", "conf-kv-l": "conf_kv + confidence(slope=1.5)"}

EXAMPLES = (
    Policy(eviction=ConfKV(recent=6), budget=Confidence(tight=14, loose=24, threshold=0.5)),
    Policy(
        eviction=ConfKV(alpha=0.8, gamma=0.7, recent=4), budget=Confidence(18, 26, threshold=0.5, slope=2.0)
    ),
)
