"""ChunkKV: keeps whole runs of neighbouring tokens by their mean score, the same in all heads of a layer.

Liu et al., ChunkKV: Semantic-Preserving KV Cache Compression for Efficient Long-Context LLM Inference,
https://arxiv.org/abs/2502.00299
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax.numpy as jnp

from kvjax.algebra import Runs, Whole, places, run_means

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True, repr=False)
class Chunks(Runs):
    """The runs with the highest mean score stay, whole, as long as the budget holds them.

    Slots that are left then go to the best tokens of the next run, so that a head keeps as many tokens as the
    budget says.
    """

    name = "chunks"
    arguments = {"size": Whole(1)}
    size: int = 20

    def order(self, scores: Float[Array, "B M S"]) -> Int[Array, "B T"]:
        run = jnp.repeat(places(run_means(scores)), scores.shape[-1], axis=-1)
        return jnp.lexsort((-scores.reshape(run.shape), run))


PRESETS = {"chunkkv": "snapkv + chunks(20) + uniform(0.25)"}

EXAMPLES = ("keydiff + chunks(7) + uniform(24)", "snapkv(8) + critical + chunks(5) + uniform(24) + sinks(2)")
