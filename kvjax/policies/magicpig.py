"""MagicPIG: samples tokens whose hashes collide with the query's and weights them by their probability.

Chen et al., MagicPIG: LSH Sampling for Efficient LLM Generation, https://arxiv.org/abs/2410.16179

Each of ``tables`` hash tables gives a key the signs of its products with ``bits`` random directions. A token
is sampled for a query head when its code equals the query's in two or more tables. At an angle θ between key
and query this has the probability

  u = (1 - θ / π)^bits        p = 1 - (1 - u)^tables - tables u (1 - u)^(tables - 1)

and -log p is added to the token's score, so that the expected sums of the softmax over random directions are
exact. The prompt's ends and generated tokens are always read, p = 1. Keys are hashed as they arrive and are
not centred: their mean is known only at the end of the prompt. This is built for quality, not for speed:
codes of all slots are compared, and the read walks the whole list.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.algebra import Anchored, Observation, Picked, Policy, Whole
from kvjax.cache.pages import Pages
from kvjax.types import Params
from pallas_kernels.ragged_decode.api import largest_scores

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int, UInt16

SETTINGS = {0.01: (11, 200), 0.02: (10, 150), 0.03: (10, 200), 0.04: (9, 120), 0.05: (8, 75)}
"""(bits, tables) that read a given share of the prompt (https://arxiv.org/abs/2604.05438, E.2)."""


@dataclasses.dataclass(frozen=True, repr=False)
class MagicPIG(Anchored):
    """Each decode read visits the tokens of the middle that share the query's code in two or more tables.

    A slot keeps two bytes per table.

    Attributes:
      bits: of a code, the paper's K.
      tables: number of hash tables, the paper's L.
      sinks, tail: first and last tokens of the prompt, always read, as generated tokens are.
      dense: number of first layers that are read whole.
      seed: of the random directions.
    """

    name = "magicpig"
    arguments = {
        "bits": Whole(1, "number of bits", 16),
        "tables": Whole(2, "number of tables", 1024),
        "sinks": Whole(),
        "tail": Whole(),
        "dense": Whole(0, "number of layers"),
        "seed": Whole(0, "seed", 2**32 - 1),
    }
    sizes = ("bits", "tables")
    estimates = True
    needs = frozenset({"k"})
    keeps = ("code", "norm")
    bits: int = 10
    tables: int = 150
    sinks: int = 4
    tail: int = 16
    dense: int = 0
    seed: int = 0

    @property
    def arrays(self) -> dict[str, tuple[tuple[int, ...], str]]:
        return {"code": ((self.tables,), "uint16")}

    def arrive(self, params: Params | None, observed: Observation) -> dict[str, Float[Array, "B K T ..."]]:
        k = observed.k.astype(jnp.float32)
        return {"code": self.codes(k), "norm": jnp.linalg.norm(k, axis=-1)}

    def codes(self, x: Float[Array, "... H"]) -> UInt16[Array, "... L"]:
        """The code of each table."""
        directions = _directions(self.seed, x.shape[-1], self.tables, self.bits)
        sign = jnp.einsum("...h,hlb->...lb", x, directions, precision=jax.lax.Precision.HIGHEST) > 0
        return (sign * 2 ** jnp.arange(self.bits)).sum(axis=-1).astype(jnp.uint16)

    def select(
        self,
        params: Params | None,
        q: Float[Array, "B N H"],
        pages: Pages,
        list_id: int,
        total: Int[Array, " B"],
        longest: int,
    ) -> Picked:
        """The sampled tokens with -log p as a bias over the whole list."""
        (rows, heads, _, entries), n = pages.table.shape, q.shape[1]
        q = q.astype(jnp.float32)
        table, length = pages.table[:, :, list_id], pages.length[:, :, list_id]
        score = largest_scores(q, pages.k, table, length, scales=pages.scales, turn=pages.turned, each=True)
        ids = jnp.maximum(table, 0)
        norm = pages.meta["selection.norm"][ids][:, :, None]  # [B, K, 1, M, S]
        cosine = score.reshape(rows, heads, -1, entries, pages.size) * q.shape[-1] ** 0.5
        cosine /= jnp.linalg.norm(q, axis=-1).reshape(rows, heads, -1, 1, 1) * norm + 1e-30
        of_query = self.codes(q).reshape(rows, heads, n // heads, 1, 1, self.tables)
        of_keys = pages.meta["selection.code"][ids][:, :, None]
        hits = (of_query == of_keys).sum(axis=-1)
        sampled = (hits >= 2) & (score > -jnp.inf).reshape(hits.shape)
        bias = jnp.where(sampled, -self.log_probability(cosine), -jnp.inf)
        every = jnp.broadcast_to(jnp.arange(entries), table.shape)
        return Picked(entries=every, slots=sampled.any(axis=2), bias=bias.reshape(rows, n, *hits.shape[3:]))

    def log_probability(self, cosine: Float[Array, ...]) -> Float[Array, ...]:
        """log p of a token at that angle; only approximate far below any value that is ever sampled."""
        t = self.tables
        u = (1 - jnp.arccos(jnp.clip(cosine, -1.0, 1.0)) / jnp.pi) ** self.bits
        u = jnp.clip(u, 1e-15, 1 - 1e-7)
        rest = jnp.log1p(-u)
        p = -jnp.expm1(t * rest) - t * u * jnp.exp((t - 1) * rest)
        # Where collisions are rare the difference above cancels: sum the probabilities of 2, 3 ... hits.
        few = sum(float(math.comb(t, j)) * u**j * jnp.exp((t - j) * rest) for j in range(2, min(t, 5) + 1))
        return jnp.log(jnp.where(t * u < 0.1, few, p))


@functools.lru_cache(maxsize=4)  # anybody may ask for another seed
def _directions(seed: int, head_dim: int, tables: int, bits: int) -> np.ndarray:
    """Standard normal [H, L, K], the same in all layers and heads."""
    drawn = np.random.default_rng(seed).standard_normal((head_dim, tables, bits))
    return drawn.astype(np.float32)


PRESETS = {"magicpig": "magicpig(10, 150)"}

EXAMPLES = (Policy(selection=MagicPIG(3, 12, sinks=2, tail=6)),)
