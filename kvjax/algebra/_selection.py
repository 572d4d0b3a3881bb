"""Selection: which slots does this read visit? It removes nothing."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

import jax.numpy as jnp

from kvjax.algebra._part import Part
from kvjax.cache.pages import Pages
from kvjax.types import Params, pytree

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int


@pytree(static=("unit",))
@dataclasses.dataclass(frozen=True, kw_only=True)
class Picked:
    """What one read visits of a list, in units of U consecutive slots: pages, chunks of them, or tokens.

    Attributes:
      entries: which units, counted from the start of the list; EMPTY for none; no index twice.
      slots: bitmask inside the picked units, or None for all their slots.
      unit: U, a divisor of the page; None for whole pages.
      bias: added to the scores of each query head before its softmax; an estimator's -log p. Such a read
        walks the whole list, so ``entries`` are all its pages in order, and what is not visited has -inf.
    """

    entries: Int[Array, "B K J"]
    slots: Bool[Array, "B K J U"] | None = None
    unit: int | None = None
    bias: Float[Array, "B N M S"] | None = None


class Selection(Part):
    """Which slots a decode read visits; removes nothing. Prefill reads everything.

    Class attributes:
      splits: the part reads some tokens always and chooses among the others (two page lists).
      estimates: what a read visits stands for what it leaves out, too (``Picked.bias``).
    """

    place = "selection"
    splits: ClassVar[bool] = False
    estimates: ClassVar[bool] = False

    @property
    def recent(self) -> int:
        """Newest tokens that every read sees exactly."""
        return 0

    def applies(self, layer: int) -> bool:
        """Is this layer read selectively?"""
        return True

    def selectable(self, pos: Int[Array, "B T"], total: Int[Array, " B"]) -> Bool[Array, "B T"]:
        """Is the token chosen among (list 1) or always read (list 0)? Only asked if ``splits``."""
        return jnp.ones(pos.shape, bool)

    def summary_shapes(self, size: int, head_dim: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the per-page values, for pages of ``size`` slots."""
        return {}

    def summarise(
        self, k: Float[Array, "Q S H"], live: Bool[Array, "Q S"]
    ) -> dict[str, Float[Array, "Q ..."]]:
        """Per-page values from a page's content; recomputed whenever the page is touched."""
        return {}

    def select(
        self,
        params: Params | None,
        q: Float[Array, "B N H"],
        pages: Pages,
        list_id: int,
        total: Int[Array, " B"],
        longest: int,
    ) -> Picked:
        """What of list ``list_id`` these queries visit.

        Args:
          params: learned weights of the part.
          q: one query a head.
          pages, list_id: where it chooses.
          total: the rows' prompt lengths.
          longest: tokens beyond which no row of these pages can get, unless a budget evicts.
        """
        raise NotImplementedError


class Anchored(Selection):
    """A selection among the middle of the prompt: its ends and what is generated are always read.

    Subclasses have the fields ``sinks`` and ``tail``, first and last tokens of the prompt that every read
    sees exactly, and ``dense``, first layers that are read whole.
    """

    splits = True
    sinks: int
    tail: int
    dense: int

    def applies(self, layer: int) -> bool:
        """All layers but the first ``dense``."""
        return layer >= self.dense

    @property
    def recent(self) -> int:
        """``tail``: no larger ring, so that right after the prompt it holds nothing of the middle."""
        return max(self.tail, 1)

    def selectable(self, pos: Int[Array, "B T"], total: Int[Array, " B"]) -> Bool[Array, "B T"]:
        """sinks <= pos < total - tail."""
        return (pos >= self.sinks) & (pos < (total - self.tail)[:, None])


@dataclasses.dataclass(frozen=True, repr=False)
class SelectAll(Selection):
    """Every read visits every slot."""

    name = "select_all"
    idle = True

    def applies(self, layer: int) -> bool:
        """Never selective."""
        return False
