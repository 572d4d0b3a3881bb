"""CONF-KV: tokens that are recent or lately received attention stay, as many as the model's confidence asks.

Li, Miao: CONF-KV: Confidence-Aware KV Cache Eviction with Mixed-Precision Storage for Long-Horizon LLM
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
    """Score = alpha * mass + (1 - alpha) * recency, min-max normalised over the layer's evictable tokens.

    Mass is smoothed over queries, a <- gamma a + (1 - gamma) mean over all heads of the layer, from 0 when a
    token arrives; a prompt's queries count as if they had come one by one. Recency is the token's position:
    the step it was written in. Over one candidate, or over equal ones, either is 0. All KV heads of a layer
    keep the same tokens. The other half of the method is the budget, ``confidence``.

    The paper gives no alpha and no gamma. Ours are the best of a small search on the embedded model and text
    on which nothing is reported (``python -m studies.conf_kv --study search``, results/conf_kv).

    Attributes:
      alpha: how much mass counts, in [0, 1]; 0 ranks by recency alone, 1 by attention alone.
      gamma: how much of the mass a step keeps, in [0, 1).
      recent: P, newest tokens that are protected.

    Raises:
      PolicyError: a value out of range.
    """

    name = "conf_kv"
    arguments = {
        "alpha": Number(0, 1),
        "gamma": Number(0, 1, open="high"),
        "recent": Whole(),
    }
    traced = ("alpha", "gamma")
    needs = frozenset({"k", "mass"})
    keeps = ("mass",)
    shared_ranking = True
    alpha: float = 0.5
    gamma: float = 0.998
    recent: int = 64

    @functools.cached_property
    def beta(self) -> float:
        """1 - alpha, how much recency counts; a leaf of its own, in the host's double precision."""
        return 1 - self.alpha

    @functools.cached_property
    def fresh(self) -> float:
        """1 - gamma, how much of a query's attention enters the mass; a leaf of its own."""
        return 1 - self.gamma

    def leaves(self) -> dict[str, Any]:
        """alpha, gamma, and their complements."""
        return super().leaves() | {"beta": self.beta, "fresh": self.fresh}

    @property
    def protects(self) -> int:
        """``recent``."""
        return self.recent

    def arrive(self, params: Params | None, observed: Observation) -> dict[str, Float[Array, "B K T"]]:
        """Nothing received yet."""
        return {"mass": jnp.zeros(observed.k.shape[:3], jnp.float32)}

    def query_weights(self, age: Int[Array, "B T"]) -> Float[Array, "B T"]:
        """(1 - gamma) gamma^age: what is left of a query's attention after ``age`` more queries."""
        return self.fresh * self.gamma ** age.astype(jnp.float32)

    def accumulate(
        self, slots: Slots, mass: Float[Array, "B 1 C"], count: Int[Array, "B 1 1"]
    ) -> dict[str, Float[Array, "B K C"]]:
        """``count`` turns of the moving average."""
        left = self.gamma ** count.astype(jnp.float32)
        return {"mass": left * slots.meta["mass"] + mass}

    def score(self, params: Params | None, slots: Slots) -> Float[Array, "B K C"]:
        """The mix; candidates are the live."""
        mass, age = (_spread(x, slots.live) for x in (slots.meta["mass"], slots.pos.astype(jnp.float32)))
        return self.alpha * mass + self.beta * age

    def score_prompt(self, params: Params | None, observed: Observation) -> Float[Array, "B 1 T"]:
        """The mix over all tokens but the newest ``recent``, for a budget that acts once."""
        pos = observed.pos[:, None, :]
        free = (pos >= 0) & (pos < (observed.total - self.recent)[:, None, None])
        meta = {"mass": observed.heads.mean(observed.mass)}
        return self.score(params, Slots(pos=pos, live=free, meta=meta))


def _spread(x: Float[Array, "B K C"], among: Bool[Array, "B K C"]) -> Float[Array, "B K C"]:
    """Min-max over the candidates."""
    low = jnp.where(among, x, jnp.inf).min(axis=-1, keepdims=True)
    high = jnp.where(among, x, -jnp.inf).max(axis=-1, keepdims=True)
    wide = high > low  # also false where there is no candidate
    return jnp.where(among & wide, (x - low) / jnp.where(wide, high - low, 1.0), 0.0)


PRESETS = {"conf-kv": "conf_kv + confidence", "conf-kv-l": "conf_kv + confidence(slope=1.5)"}

EXAMPLES = (
    Policy(eviction=ConfKV(recent=6), budget=Confidence(tight=14, loose=24, threshold=0.5)),
    Policy(
        eviction=ConfKV(alpha=0.8, gamma=0.7, recent=4), budget=Confidence(18, 26, threshold=0.5, slope=2.0)
    ),
)
