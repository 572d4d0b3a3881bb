"""KeyDiff: evicts keys that point in the same direction as the others and keeps distinctive ones.

Park et al., KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference in
Resource-Constrained Environments, https://arxiv.org/abs/2504.15364
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax.numpy as jnp

from kvjax.algebra import Every, Eviction, Observation, Policy
from kvjax.budgets.uniform import Uniform
from kvjax.types import Params

if TYPE_CHECKING:
    from jaxtyping import Array, Float


@dataclasses.dataclass(frozen=True, repr=False)
class KeyDiff(Eviction):
    """Score = minus the cosine between a key and the anchor, the mean of all unit keys of its KV head.

    Keys are taken after RoPE, as they are cached, and in float32 (in bf16 many scores would tie). The anchor
    is that of the whole prompt; the paper reads a prompt in blocks under the budget and renews the anchor
    with each block. Protects nothing. Where the budget acts while decoding, the anchor is that of the keys
    that are held.
    """

    name = "keydiff"
    needs = frozenset({"k"})
    scores_prompt = ranks_held = True

    def score_prompt(self, params: Params | None, observed: Observation) -> Float[Array, "B K T"]:
        k = jnp.where((observed.pos >= 0)[:, None, :, None], observed.k.astype(jnp.float32), 0.0)
        unit = _unit(k)
        return -(unit * _unit(unit.sum(axis=2, keepdims=True))).sum(axis=-1)


def _unit(x: Float[Array, "... H"]) -> Float[Array, "... H"]:
    """Scaled to length one; 0 stays 0."""
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), jnp.finfo(x.dtype).tiny)


PRESETS = {"keydiff": "keydiff + uniform(0.25)"}

EXAMPLES = (
    Policy(eviction=KeyDiff(), budget=Uniform(24)),
    Policy(eviction=KeyDiff(), budget=Uniform(24, Every(8)), recent=4),
)
