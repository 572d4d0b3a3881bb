"""SnapKV: the prompt's last queries vote for the tokens they attend to.

Li et al., SnapKV: LLM Knows What You are Looking for Before Generation, https://arxiv.org/abs/2404.14469
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax.numpy as jnp

from kvjax.algebra import Every, Eviction, Observation, Policy, PolicyError, Whole
from kvjax.budgets.ada import Ada
from kvjax.budgets.pyramid import Pyramid
from kvjax.budgets.uniform import Uniform
from kvjax.types import Params
from pallas_kernels.blockwise.api import blockwise, column_mass

if TYPE_CHECKING:
    from jaxtyping import Array, Float


@dataclasses.dataclass(frozen=True, repr=False)
class SnapKV(Eviction):
    """Mean attention of the last ``window`` queries, smoothed over neighbours, mean over a group's heads.

    The observation window itself is always kept. Smoothing is an average over ``kernel`` keys with zeros
    beyond the ends and inside the window, per query head, before the mean over the group.

    Attributes:
      window: number of queries that vote (fewer in shorter rows). Where the budget acts while decoding, so
        many newest queries are kept beside the ring, and neighbours are the held tokens in order of position.
      kernel: width of the smoothing, odd.

    Raises:
      PolicyError: window < 1, or a kernel that is not odd.
    """

    name = "snapkv"
    arguments = {
        "window": Whole(1, "number of queries", by_positions=True),
        "kernel": Whole(1, "odd width", 255, by_positions=True),
    }
    needs = frozenset({"q", "k", "v"})
    scores_prompt = ranks_held = True
    window: int = 32
    kernel: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kernel % 2 == 0:
            raise PolicyError(f"{self!r}: kernel={self.kernel!r} is even. Give an odd whole number.")

    @property
    def protects(self) -> int:
        return self.window

    @property
    def queries(self) -> int:
        return self.window

    def score_prompt(self, params: Params | None, observed: Observation) -> Float[Array, "B K T"]:
        votes = self._votes(observed)
        old = (observed.pos >= 0) & (observed.pos < (observed.total - self.window)[:, None])
        votes = jnp.where(old[:, None, :], votes, 0.0)
        side = self.kernel // 2
        wide = jnp.pad(votes, ((0, 0), (0, 0), (side, side)))
        t = votes.shape[-1]
        smooth = jnp.stack([wide[..., i : i + t] for i in range(self.kernel)]).mean(axis=0)
        rows, heads, t, _ = observed.k.shape
        return smooth.reshape(rows, heads, -1, t).mean(axis=2)

    def _votes(self, observed: Observation) -> Float[Array, "B N T"]:
        """Mean attention of each row's last queries to every key, per query head."""
        q, at = observed.queries("q", self.window)
        _, lse = blockwise(q, observed.k, observed.v, q_pos=at, k_pos=observed.pos, softcap=observed.softcap)
        lse = observed.with_sinks(lse)
        voters = (at >= 0).astype(jnp.float32)
        weights = voters / jnp.maximum(voters.sum(axis=-1, keepdims=True), 1.0)
        return column_mass(
            q, observed.k, lse, weights, q_pos=at, k_pos=observed.pos, softcap=observed.softcap
        )


PRESETS = {"snapkv": "snapkv + uniform(0.25)"}

EXAMPLES = (
    Policy(eviction=SnapKV(window=8), budget=Uniform(24)),
    Policy(eviction=SnapKV(window=8), budget=Ada(24)),
    Policy(eviction=SnapKV(window=8), budget=Pyramid(24), sinks=2),
    Policy(eviction=SnapKV(window=8), budget=Uniform(24, Every(4)), sinks=2),
)
