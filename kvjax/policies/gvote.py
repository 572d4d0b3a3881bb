"""GVote: queries drawn from the prompt's own statistics vote for the tokens that future ones will need.

GVote: Adaptive Per-Request KV-Cache Compression without Manually Setting Budget (under review; section 3.3
and algorithm 1). Written alone it ranks and says how many; beside another budget it ranks, beside another
ranking it says how many (``kvjax.budgets.gvote``).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax.numpy as jnp

from kvjax.algebra import Eviction, Observation, Policy
from kvjax.budgets.gvote import Ballot, Voted
from kvjax.budgets.uniform import Uniform
from kvjax.types import Params

if TYPE_CHECKING:
    from jaxtyping import Array, Float


@dataclasses.dataclass(frozen=True, repr=False)
class Votes(Ballot, Eviction):
    """Score = votes of the sampled queries and the heads of a group; among equals, their mean attention."""

    name = "gvote"
    scores_prompt = True

    def score_prompt(self, params: Params | None, observed: Observation) -> Float[Array, "B K T"]:
        """Votes, and less than one for the attention."""
        votes, share = self.votes(observed)
        return votes + jnp.minimum(share, 0.999)


PRESETS = {"gvote": "gvote"}

EXAMPLES = (
    Policy(eviction=Votes(0.5, samples=2, ahead=8), budget=Voted(0.5, samples=2, ahead=8)),
    Policy(eviction=Votes(0.5, samples=2, ahead=8), budget=Uniform(24), sinks=2),
)
