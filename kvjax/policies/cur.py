"""CurDKV: keeps the tokens whose key and value are both large among their neighbours'.

Sengupta et al., Value-Guided KV Compression for LLMs via Approximated CUR Decomposition,
https://arxiv.org/abs/2509.15038
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax.numpy as jnp

from kvjax.algebra import FIRST, Eviction, Observation, Policy, Whole
from kvjax.budgets.uniform import Uniform
from kvjax.types import Params

if TYPE_CHECKING:
    from jaxtyping import Array, Float


@dataclasses.dataclass(frozen=True, repr=False)
class Cur(Eviction):
    """Score = the token's share of |k|^2 in its window, times its share of |v|^2 there.

    The shares stand for leverage scores. Windows of ``window`` tokens follow each other from the first token
    on. A head's scores add up to one, so that heads can compete for slots. The first ``sinks`` tokens go when
    no other token is left.

    Attributes:
      window: tokens of a window.
      sinks: first tokens.
    """

    name = "cur"
    arguments = {"window": Whole(1, by_positions=True), "sinks": Whole()}
    traced = ("sinks",)
    needs = frozenset({"k", "v"})
    scores_prompt = True
    window: int = 16
    sinks: int = 4

    def score_prompt(self, params: Params | None, observed: Observation) -> Float[Array, "B K T"]:
        tokens = (observed.pos >= 0)[:, None, :]
        squares = ((x.astype(jnp.float32) ** 2).sum(axis=-1) for x in (observed.k, observed.v))
        of_keys, of_values = (self._in_windows(jnp.where(tokens, x, 0.0)) for x in squares)
        score = _share(of_keys * of_values)
        return jnp.where(observed.pos[:, None, :] < self.sinks, FIRST, score)

    def _in_windows(self, x: Float[Array, "B K T"]) -> Float[Array, "B K T"]:
        """Each number's share of the sum of its window."""
        *shape, t = x.shape
        padded = jnp.pad(x, ((0, 0), (0, 0), (0, -t % self.window)))
        return _share(padded.reshape(*shape, -1, self.window)).reshape(*shape, -1)[..., :t]


def _share(x: Float[Array, "... S"]) -> Float[Array, "... S"]:
    """Of the sum; 0 where that is 0."""
    return x / jnp.maximum(x.sum(axis=-1, keepdims=True), jnp.finfo(x.dtype).tiny)


PRESETS = {"cur": "cur + uniform(0.25)"}

EXAMPLES = (Policy(eviction=Cur(window=8, sinks=2), budget=Uniform(24)),)
