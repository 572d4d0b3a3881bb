"""Pages that rows of a lane share: a row that begins with a state another row began with borrows its pages.

A full page is never written again where nothing leaves a list once the prompt is read (``lendable``). So a
row that begins with the same state as another takes the other's full pages into its own lists and copies the
rest: the page that is part full, the ring, φ. That is copy-on-write with the copy made at the door. A page
returns to the pool when the last of its owners goes, whoever that is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kvjax.algebra import Policy
from kvjax.cache.rows import Loan
from kvjax.cache.state import KVState

if TYPE_CHECKING:
    from jaxtyping import Int


class Beginning(Protocol):
    """A state that rows begin with: a prefix, a context."""

    @property
    def pages(self) -> Sequence[Int[np.ndarray, "K R"]]:
        """Full ones of each list, of each pool of each layer in turn."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class Lent:
    """What a row of a lane can lend.

    Attributes:
      row: its place.
      pages: as of ``Beginning``.
    """

    row: int
    pages: Sequence[Int[np.ndarray, "K R"]]

    def of_layer(self, index: int, kinds: int) -> Loan:
        """For the layer of that number among those that have pools, of so many pools each."""
        mine: Any = tuple(np.asarray(x, np.int32) for x in self.pages[index * kinds : (index + 1) * kinds])
        row: Any = np.int32(self.row)
        return Loan(row=row, pages=mine)


def lendable(policy: Policy) -> bool:
    """Does nothing leave a list, or change in it, once the prompt is read?"""
    return not policy.decides_later


def full_pages(state: KVState) -> list[Int[np.ndarray, "K R"]]:
    """Of a state of one row, as ``Beginning`` has them."""
    pools = [pages for layer in state.layers for pages in layer.pools]
    return [np.asarray(pages.length)[0] // pages.size for pages in pools]


def marked(state: KVState, shared: bool) -> KVState:
    """The state, whose pages may have several owners or have not; nothing is copied."""
    layers = [
        layer.with_pools([dataclasses.replace(pages, shared=shared) for pages in layer.pools])
        for layer in state.layers
    ]
    return dataclasses.replace(state, layers=tuple(layers))
