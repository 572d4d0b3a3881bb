"""Scissorhands: keeps the tokens that the last queries attended to most often.

Liu et al., Scissorhands: Exploiting the Persistence of Importance Hypothesis for LLM KV Cache Compression at
Test Time, https://arxiv.org/abs/2305.17118
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from kvjax.algebra import Eviction, Observation, Policy, Whole
from kvjax.budgets.uniform import Uniform
from kvjax.types import EMPTY, Params

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

BLOCK = 16
"""Queries handled together, so that attention rows of the whole history are never in memory at once."""

SLACK = 1e-5
"""Attention below the mean by this relative amount still counts: rounding must not decide among equals."""


@dataclasses.dataclass(frozen=True, repr=False)
class Scissorhands(Eviction):
    """Score = how many of the last ``window`` queries gave the token at least the mean of their attention.

    A query that sees n tokens gives 1 / n in the mean; a query does not count tokens after it. Counts are
    added over a group's heads and tie often: equal counts keep the lowest positions.

    Each query has a threshold of its own, but reads return sums over queries. So where the budget acts while
    decoding, the history's queries are kept, and n counts the tokens that are still held.

    Attributes:
      window: queries of the history (fewer in shorter rows).
      recent: newest tokens that are protected.
    """

    name = "scissorhands"
    arguments = {"window": Whole(1, by_positions=True), "recent": Whole()}
    needs = frozenset({"q", "k"})
    scores_prompt = ranks_held = True
    window: int = 400
    recent: int = 10

    @property
    def protects(self) -> int:
        return self.recent

    @property
    def queries(self) -> int:
        return self.window

    def score_prompt(self, params: Params | None, observed: Observation) -> Float[Array, "B K T"]:
        q, at = observed.queries("q", self.window)
        blocks = -(-q.shape[2] // BLOCK)
        more = blocks * BLOCK - q.shape[2]
        q = jnp.pad(q, ((0, 0), (0, 0), (0, more), (0, 0)))
        at = jnp.pad(at, ((0, 0), (0, more)), constant_values=EMPTY)

        def count(counts: Float[Array, "B K T"], block: Int[Array, ""]) -> tuple[Array, None]:
            of_block = jax.lax.dynamic_slice_in_dim(q, block * BLOCK, BLOCK, axis=2)
            its_at = jax.lax.dynamic_slice_in_dim(at, block * BLOCK, BLOCK, axis=1)
            return counts + _above_mean(observed, of_block, its_at), None

        start = jnp.zeros(observed.k.shape[:3], jnp.float32)
        return jax.lax.scan(count, start, jnp.arange(blocks))[0]


def _above_mean(
    observed: Observation, q: Float[Array, "B N I H"], at: Int[Array, "B I"]
) -> Float[Array, "B K T"]:
    """How many (query, head) pairs attend to each token, for queries at positions ``at`` (EMPTY: none)."""
    rows, heads, t, h = observed.k.shape
    q = q.reshape(rows, heads, -1, at.shape[1], h)
    s = jnp.einsum(
        "bkgih,bkth->bkgit",
        q,
        observed.k,
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    sees = (observed.pos[:, None, :] >= 0) & (observed.pos[:, None, :] <= at[:, :, None])  # [B, I, T]
    s = s * h**-0.5
    s = s if observed.softcap is None else observed.softcap * jnp.tanh(s / observed.softcap)
    s = jnp.where(sees[:, None, None], s, -jnp.inf)
    seen = jnp.maximum(sees.sum(axis=-1), 1)[:, None, None, :, None]
    mean = jax.nn.logsumexp(s, axis=-1, keepdims=True) - jnp.log(seen)
    high = (s >= mean - SLACK) & sees[:, None, None]
    return high.astype(jnp.float32).sum(axis=(2, 3))


PRESETS = {"scissorhands": "scissorhands + uniform(0.25)"}

EXAMPLES = (Policy(eviction=Scissorhands(window=20, recent=4), budget=Uniform(24)),)
