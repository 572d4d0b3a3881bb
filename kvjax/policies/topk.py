"""Top-K: reads only the tokens of the prompt's middle with the highest scores for the query.

Hoshi, Miyashita and Deguchi, Top-K Retrieval with Fixed-Size Linear-Attention Completion (version 2:
Residual-Mass Accounting for Partial-KV Decoding), https://arxiv.org/abs/2604.05438

The search is exhaustive: it reads every key of the middle in place, and no value. The query heads of a group
share one set, chosen by the largest of their scores. The prompt's ends and generated tokens are always read.
"""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from kvjax.algebra import MOST, Anchored, Argument, Picked, Policy, PolicyError, Whole
from kvjax.cache.pages import Pages
from kvjax.types import EMPTY
from pallas_kernels.ragged_decode.api import largest_scores

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

FINEST = 10_000
"""Largest denominator of a share; the product of a share and a prompt's length is then exact."""


@dataclasses.dataclass(frozen=True)
class Retrieved(Argument):
    """How many tokens a read retrieves: a number of tokens, or a share of the prompt."""

    what: str = "number of tokens or share of the prompt"

    def accepts(self, value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return 1 <= value <= MOST if isinstance(value, int) else 1 / FINEST <= value <= 1

    @property
    def expected(self) -> str:
        return f"a whole number, 1 or more, at most {MOST}, or a share such as 0.01"


def retrieved(k: int | float, tokens: Int[Array, ...] | int) -> Any:
    """Tokens that ``k`` means for prompts of ``tokens``: itself, or a share rounded up; exact."""
    if isinstance(k, int):
        return k + 0 * tokens
    share = Fraction(repr(k)).limit_denominator(FINEST)
    return -(-tokens * share.numerator // share.denominator)


@dataclasses.dataclass(frozen=True, repr=False)
class TopK(Anchored):
    """Each decode read visits, per KV head, the ``k`` tokens of the middle with the highest scores.

    Attributes:
      k: how many; or a share f of the prompt, which means ceil(f N) for a row of N tokens (where a budget
        evicts while decoding, at most that share of what it leaves). Tokens that are always read do not
        count.
      sinks, tail: first and last tokens of the prompt, always read, as generated tokens are.
      dense: number of first layers that are read whole.
    """

    name = "topk"
    arguments = {"k": Retrieved(), "sinks": Whole(), "tail": Whole(), "dense": Whole(0, "number of layers")}
    sizes = ("k",)
    by_worth = ranks_keys = True
    k: int | float = 0.01
    sinks: int = 4
    tail: int = 16
    dense: int = 0

    def most_units(self, longest: int) -> int:
        return units(self.k, longest, 1)

    def worth(self, q: Float[Array, "B N H"], pages: Pages, list_id: int) -> Float[Array, "B K C"]:
        score = _scores(q, pages, list_id)
        return score.reshape(*score.shape[:2], -1)

    def best(self, worth: Float[Array, "B K C"], total: Int[Array, " B"], longest: int) -> Picked:
        return _best(worth, self.k, total, longest, 1)


@dataclasses.dataclass(frozen=True, repr=False)
class TopKPages(Anchored):
    """Each decode read visits, per KV head, the chunks of the middle that hold the highest scores.

    As ``topk``, but whole chunks are read: as many as ``k`` tokens fill, at least one.

    Attributes:
      k, sinks, tail, dense: as in ``topk``.
      chunk: tokens of a chunk; divides the page.

    Raises:
      PolicyError: a value out of range; later, ``chunk`` does not divide the page.
    """

    name = "topk_pages"
    arguments = {**TopK.arguments, "chunk": Whole(1)}
    sizes = ("k",)
    by_worth = ranks_keys = True
    k: int | float = 0.01
    chunk: int = 16
    sinks: int = 4
    tail: int = 16
    dense: int = 0

    def summary_shapes(self, size: int, head_dim: int) -> dict[str, tuple[int, ...]]:
        """No values are kept; refuses pages that ``chunk`` does not divide."""
        if size % self.chunk:
            raise PolicyError(f"{self!r}: chunk={self.chunk} does not divide pages of {size} slots.")
        return {}

    @property
    def unit(self) -> int:
        return self.chunk

    def most_units(self, longest: int) -> int:
        return units(self.k, longest, self.chunk)

    def worth(self, q: Float[Array, "B N H"], pages: Pages, list_id: int) -> Float[Array, "B K C"]:
        score = _scores(q, pages, list_id)
        return score.reshape(*score.shape[:2], -1, self.chunk).max(axis=-1)

    def best(self, worth: Float[Array, "B K C"], total: Int[Array, " B"], longest: int) -> Picked:
        return _best(worth, self.k, total, longest, self.chunk)


def units(k: int | float, longest: int, unit: int) -> int:
    """The most units that ``k`` tokens of rows of ``longest`` fill."""
    return max(int(retrieved(k, longest)) // unit, 1)


def _scores(q: Float[Array, "B N H"], pages: Pages, list_id: int) -> Float[Array, "B K M S"]:
    """Largest score of each slot of the list over its group's queries; -inf for empty slots."""
    table, length = pages.table[:, :, list_id], pages.length[:, :, list_id]
    return largest_scores(q, pages.k, table, length, scales=pages.scales, turn=pages.turned)


def _best(
    score: Float[Array, "B K C"], k: int | float, total: Int[Array, " B"], longest: int, unit: int
) -> Picked:
    """The units with the highest scores, as many as ``k`` tokens fill."""
    most = min(units(k, longest, unit), score.shape[-1])
    value, index = jax.lax.top_k(score, most)
    count = jnp.maximum(retrieved(k, total) // unit, 1)[:, None, None]
    picked = (value > -jnp.inf) & (jnp.arange(most) < count)
    return Picked(entries=jnp.where(picked, index, EMPTY), unit=unit)


PRESETS = {"topk": "topk(0.01)"}

EXAMPLES = (
    Policy(selection=TopK(5, sinks=2, tail=6)),
    Policy(selection=TopKPages(8, chunk=4, sinks=2, tail=6)),
)
