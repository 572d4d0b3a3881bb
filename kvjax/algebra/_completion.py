"""Completion: what stands in for the tokens that a read leaves out?

Why: kvjax/DESIGN.md, 12.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from kvjax.algebra._part import Part
from kvjax.types import Params, pytree

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int


class Completion(Part):
    """What stands in for the tokens that a read leaves out. Two modes, never mixed:

    without selection it absorbs a token when it is rejected or evicted, and never subtracts; with selection
    it absorbs every selectable token once, and subtracts exactly what a read visits.
    """

    place = "completion"

    def empty(self, rows: int, heads: int, head_dim: int, context: int) -> Any:
        """The empty summary: a pytree with leading axis B in every leaf."""

    def absorb(
        self,
        params: Params | None,
        summary: Any,
        k: Float[Array, "B K T H"],
        v: Float[Array, "B K T H"],
        pos: Int[Array, "B K T"],
        take: Bool[Array, "B K T"],
    ) -> Any:
        """Adds the tokens where ``take`` to the summary, with the values that are stored (float32 inside)."""
        raise NotImplementedError

    def read(
        self, params: Params | None, summary: Any, q: Float[Array, "B N T H"], visited: Visited | None
    ) -> tuple[Float[Array, "B N T H"], Float[Array, "B N T"]]:
        """The partial (out, lse) of everything absorbed, minus what this read visited."""
        raise NotImplementedError


@pytree()
@dataclasses.dataclass(frozen=True, kw_only=True)
class Visited:
    """The slots that a selective read visited, with the values that are stored.

    Attributes:
      k, v: dequantised keys and values.
      pos: true positions.
      live: which of the C candidates were really visited.
    """

    k: Float[Array, "B K C H"]
    v: Float[Array, "B K C H"]
    pos: Int[Array, "B K C"]
    live: Bool[Array, "B K C"]


@dataclasses.dataclass(frozen=True, repr=False)
class Nothing(Completion):
    """Tokens that are not read count for nothing."""

    name = "nothing"
    idle = True
