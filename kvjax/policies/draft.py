"""Draft: a selection writes a few tokens ahead, one full read verifies them; the text is that of full reads.

Leviathan et al., Fast Inference from Transformers via Speculative Decoding, https://arxiv.org/abs/2211.17192.
Here both models are one and read the same cache, as in Sun et al., TriForce, section 4.1,
https://arxiv.org/abs/2404.11912.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from kvjax.algebra import Observation, OfPlace, PolicyError, Selection, Whole
from kvjax.types import Network, Params

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int


class Drafting(OfPlace):
    """A selection as an argument; one that chooses, and learns nothing."""

    what = place = "selection"

    def accepts(self, value: Any) -> bool:
        return isinstance(value, Selection) and value.acts and not value.learns

    @property
    def expected(self) -> str:
        return "a selection, for example quest(chunks=8)"

    def check(self, call: object, name: str, value: Any) -> None:
        """Accepts a selection, and None: that one must be there, the part says when all is checked."""
        if value is not None:
            super().check(call, name, value)


@dataclasses.dataclass(frozen=True, repr=False)
class Draft(Selection):
    """Plain reads visit everything; ``generate`` and ``stream`` draft by a selection, and verify by those.

    Pages hold what the selection ranks by. Whatever it drafts, texts and caches are those of plain decoding.

    Attributes:
      by: the selection that drafts.
      most: tokens that are drafted at a time, at most; how many, follows from what they gain.

    Raises:
      PolicyError: no selection drafts.
    """

    name = "draft"
    arguments = {"by": Drafting(), "most": Whole(1, "number of tokens", 16)}
    traced = ("by",)  # its numbers are leaves
    by: Selection = None  # type: ignore[assignment]
    most: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.by is None:
            raise PolicyError(f"{self!r}: nothing drafts. Give a selection, as in draft(quest(chunks=8)).")

    @property
    def drafts(self) -> Selection:  # type: ignore[override]
        return self.by

    @property
    def recent(self) -> int:  # type: ignore[override]
        return self.by.recent

    @property
    def splits(self) -> bool:  # type: ignore[override]
        return self.by.splits

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return self.by.needs

    @property
    def keeps(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.by.keeps

    @property
    def arrays(self) -> dict[str, tuple[tuple[int, ...], str]]:
        return self.by.arrays

    @property
    def structure(self) -> str:
        return self._called(self.by.structure)

    @property
    def word(self) -> str:
        return self._called("" if self.by is None else repr(self.by))

    def _called(self, drafts: str) -> str:
        most = "" if self.most == type(self).most else f", most={self.most!r}"
        return f"{self.name}({drafts}{most})"

    def check_positions(self, network: Network) -> None:
        self.by.check_positions(network)

    def arrive(self, params: Params | None, observed: Observation) -> dict[str, Float[Array, "B K T"]]:
        return self.by.arrive(params, observed)

    def applies(self, layer: int) -> bool:
        return False

    def selectable(self, pos: Int[Array, "B T"], total: Int[Array, " B"]) -> Bool[Array, "B T"]:
        return self.by.selectable(pos, total)

    def summary_shapes(self, size: int, head_dim: int) -> dict[str, tuple[int, ...]]:
        return self.by.summary_shapes(size, head_dim)

    def summarise(
        self, k: Float[Array, "Q S H"], live: Bool[Array, "Q S"]
    ) -> dict[str, Float[Array, "Q ..."]]:
        return self.by.summarise(k, live)


EXAMPLES = (
    "draft(quest(chunks=3, chunk=4, dense=1, recent=8))",
    "draft(topk(5, sinks=2, tail=6), most=2)",
)
