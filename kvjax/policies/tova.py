"""TOVA: the prompt's last query says who stays, with one voice for all heads of a layer.

Oren et al., Transformers are Multi-State RNNs, https://arxiv.org/abs/2401.06104
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax.numpy as jnp

from kvjax.budgets.uniform import Uniform
from kvjax.policy import Eviction, Observation, Policy
from kvjax.types import Params
from pallas_kernels.blockwise.api import blockwise, column_mass

if TYPE_CHECKING:
    from jaxtyping import Array, Float


@dataclasses.dataclass(frozen=True, repr=False)
class Tova(Eviction):
    """Score = attention of each row's last query, mean over all query heads of the layer.

    All KV heads keep the same tokens. Protects nothing, not even the last token (it gets its own attention
    like any other); implementations that always keep that one are ``recent(1)``.
    """

    name = "tova"
    needs = frozenset({"q", "k", "v"})
    scores_prompt = True

    def score_prompt(self, params: Params | None, seen: Observation) -> Float[Array, "B 1 T"]:
        """The last query's attention."""
        del params
        at = seen.total[:, None] - 1
        q = jnp.take_along_axis(seen.q, at[:, None, :, None], axis=2)
        _, lse = blockwise(q, seen.k, seen.v, q_pos=at, k_pos=seen.pos, softcap=seen.softcap)
        one = jnp.ones(at.shape, jnp.float32)
        mass = column_mass(q, seen.k, lse, one, q_pos=at, k_pos=seen.pos, softcap=seen.softcap)
        return mass.mean(axis=1, keepdims=True)


EXAMPLES = (Policy(eviction=Tova(), budget=Uniform(24)),)
