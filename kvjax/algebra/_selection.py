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


@pytree()
@dataclasses.dataclass(frozen=True, kw_only=True)
class Picked:
    """What one read visits of a list: entries of the page list and, optionally, slots inside them.

    Attributes:
      entries: indices into the list's M entries, EMPTY for none; no index twice.
      slots: bitmask inside the picked pages, or None for all their slots.
    """

    entries: Int[Array, "B K J"]
    slots: Bool[Array, "B K J S"] | None


class Selection(Part):
    """Which slots a decode read visits; removes nothing. Prefill reads everything.

    Class attributes:
      splits: the part reads some tokens always and chooses among the others (two page lists).
    """

    place = "selection"
    splits: ClassVar[bool] = False

    @property
    def recent(self) -> int:
        """Newest tokens that every read sees exactly."""
        return 0

    def applies(self, layer: int) -> bool:
        """Is this layer read selectively?"""
        del layer
        return True

    def selectable(self, pos: Int[Array, "B T"], total: Int[Array, " B"]) -> Bool[Array, "B T"]:
        """Is the token chosen among (list 1) or always read (list 0)? Only asked if ``splits``."""
        del total
        return jnp.ones(pos.shape, bool)

    def summary_shapes(self, size: int, head_dim: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the per-page values, for pages of ``size`` slots."""
        del size, head_dim
        return {}

    def summarise(
        self, k: Float[Array, "Q S H"], live: Bool[Array, "Q S"]
    ) -> dict[str, Float[Array, "Q ..."]]:
        """Per-page values from a page's content; recomputed whenever the page is touched."""
        del k, live
        return {}

    def select(self, params: Params | None, q: Float[Array, "B N H"], pages: Pages, list_id: int) -> Picked:
        """The entries of list ``list_id`` that these queries visit."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, repr=False)
class SelectAll(Selection):
    """Every read visits every slot."""

    name = "select_all"
    idle = True

    def applies(self, layer: int) -> bool:
        """Never selective."""
        del layer
        return False
