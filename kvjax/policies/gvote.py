"""GVote: queries sampled from the prompt's statistics vote for the tokens that future queries will need.

Tang et al., GVote: Adaptive Per-Request KV-Cache Compression without Manually Setting Budget, section 3.3 and
algorithm 1, https://arxiv.org/abs/2509.03136

Written alone it ranks tokens and decides how many stay. Beside another budget it only
ranks; beside another eviction it only decides how many stay (``kvjax.budgets.gvote``).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from kvjax.algebra import Eviction, Observation, Policy
from kvjax.budgets.gvote import Ballot, Voted
from kvjax.budgets.uniform import Uniform
from kvjax.types import Params

if TYPE_CHECKING:
    from jaxtyping import Array, Float


@dataclasses.dataclass(frozen=True, repr=False)
class Votes(Ballot, Eviction):
    """Score = votes of the sampled queries and the heads of a group; among equals, their mean attention.

    With ``samples=inf``: the logarithm of the expected attention behind the sinks, mean over a group's heads.
    """

    name = "gvote"
    scores_prompt = True

    def score_prompt(self, params: Params | None, observed: Observation) -> Float[Array, "B K T"]:
        return self.votes(observed)[1]


PRESETS = {"gvote": "gvote", "gvote-expected": "gvote(0.7, samples=inf, nucleus=expected)"}

EXAMPLES = (
    Policy(eviction=Votes(0.5, samples=2, ahead=8), budget=Voted(0.5, samples=2, ahead=8)),
    Policy(eviction=Votes(0.5, samples=2, ahead=8), budget=Uniform(24), sinks=2),
    Policy(eviction=Votes(0.5, samples="inf", ahead=8), budget=Voted(0.5, samples="inf", ahead=8)),
)
