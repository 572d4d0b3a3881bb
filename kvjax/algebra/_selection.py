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
    """What one read visits of a page list, in units of U consecutive slots: pages, chunks or tokens.

    Attributes:
      entries: indices of the units, counted from the start of the list; EMPTY for none; no index twice.
      slots: bitmask inside the picked units, or None for all their slots.
      unit: U, a divisor of the page size; None for whole pages.
      bias: added to the scores of each query head before its softmax; an estimator's -log p. Such a read
        walks the whole list: ``entries`` are all its pages in order, and slots that are not visited have
        -inf.
    """

    entries: Int[Array, "B K J"]
    slots: Bool[Array, "B K J U"] | None = None
    unit: int | None = None
    bias: Float[Array, "B N M S"] | None = None


class Selection(Part):
    """Which slots a decode read visits; removes nothing. Prefill reads everything.

    ``recent`` is the number of newest tokens that every read sees exactly. ``drafts`` is None, or the
    selection by which tokens are drafted while plain reads visit everything (``kvjax.decode``); ``most`` says
    how many at a time.

    Class attributes:
      splits: the part always reads some tokens and chooses among the others (two page lists).
      estimates: the tokens that a read visits also represent those that it leaves out (``Picked.bias``).
      by_worth: it ranks units of slots (``worth``, ``best``), so its list may lie in two memories.
      ranks_keys: it ranks them by every key, not by values of a page.
    """

    place = "selection"
    splits: ClassVar[bool] = False
    estimates: ClassVar[bool] = False
    by_worth: ClassVar[bool] = False
    ranks_keys: ClassVar[bool] = False
    recent: int = 0
    drafts: Selection | None = None
    most: int = 0

    @property
    def unit(self) -> int:
        """Slots that it chooses together (``by_worth``)."""
        return 1

    @property
    def always(self) -> int:
        """Paged tokens of a prompt that every read visits, beside those it chooses."""
        return 0

    @property
    def acts(self) -> bool:
        """Do plain reads choose? Then a completion part stands for what they leave out."""
        return not self.idle and self.drafts is None

    def applies(self, layer: int) -> bool:
        """Is this layer read selectively?"""
        return True

    def selectable(self, pos: Int[Array, "B T"], total: Int[Array, " B"]) -> Bool[Array, "B T"]:
        """Is the token one to choose from (list 1), or always read (list 0)? Called only if ``splits``."""
        return jnp.ones(pos.shape, bool)

    def summary_shapes(self, size: int, head_dim: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the per-page values, for pages of ``size`` slots."""
        return {}

    def summarise(
        self, k: Float[Array, "Q S H"], live: Bool[Array, "Q S"]
    ) -> dict[str, Float[Array, "Q ..."]]:
        """Per-page values from a page's content; recomputed whenever the page changes."""
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
        """The slots of list ``list_id`` that these queries visit; by default the units of most ``worth``.

        Args:
          params: learned weights of the part.
          q: one query per head.
          pages, list_id: the page list to choose from.
          total: prompt lengths of the rows.
          longest: upper bound on the tokens of any row of these pages, unless a budget evicts.
        """
        return self.best(self.worth(q, pages, list_id), total, longest)

    def worth(self, q: Float[Array, "B N H"], pages: Pages, list_id: int) -> Float[Array, "B K C"]:
        """How much each of a list's C units is worth to these queries; -inf for empty units."""
        raise NotImplementedError

    def best(self, worth: Float[Array, "B K C"], total: Int[Array, " B"], longest: int) -> Picked:
        """The units that are visited; ``total`` and ``longest`` as in ``select``."""
        raise NotImplementedError

    def most_units(self, longest: int) -> int:
        """The most units that a read of a row of ``longest`` tokens visits (``by_worth``)."""
        raise NotImplementedError


class Anchored(Selection):
    """A selection in the middle of the prompt: the prompt's ends and generated tokens are always read.

    Subclasses have the fields ``sinks`` and ``tail``, first and last tokens of the prompt that every read
    sees exactly, and ``dense``, the number of first layers that are read whole.
    """

    splits = True
    sinks: int
    tail: int
    dense: int

    def applies(self, layer: int) -> bool:
        return layer >= self.dense

    @property
    def always(self) -> int:
        return self.sinks + self.tail

    @property
    def recent(self) -> int:  # type: ignore[override]
        """``tail``, and no more: right after the prompt the ring then holds nothing of the middle."""
        return max(self.tail, 1)

    def selectable(self, pos: Int[Array, "B T"], total: Int[Array, " B"]) -> Bool[Array, "B T"]:
        return (pos >= self.sinks) & (pos < (total - self.tail)[:, None])


@dataclasses.dataclass(frozen=True, repr=False)
class SelectAll(Selection):
    """Every read visits every slot."""

    name = "select_all"
    idle = True

    def applies(self, layer: int) -> bool:
        return False
