"""Then: one eviction ranks the prompt, the other one the answer."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from kvjax.algebra import Eviction, Observation, PolicyError, Ranking, Wrapper
from kvjax.cache.pages import Slots
from kvjax.types import Network, Params

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int


@dataclasses.dataclass(frozen=True, repr=False)
class Then(Wrapper):
    """The wrapped eviction cuts the prompt, once; whenever the budget acts later, ``answer`` ranks.

    Later, ``answer`` ranks all that a KV head holds, what is left of the prompt too. The newest tokens that
    one of the two protects are always kept. What comes after the first prompt of a conversation is answer.
    One of the two may have learned weights.

    Attributes:
      answer: the eviction that ranks while decoding.

    Raises:
      PolicyError: there is none.
    """

    name = "then"
    arguments = {"answer": Ranking()}
    traced = ("answer",)  # its numbers are leaves
    answer: Eviction = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.answer is None:
            raise PolicyError(f"{self!r}: nothing ranks the answer. Give an eviction, as in then(knorm).")

    @property
    def later(self) -> Eviction:
        return self.answer

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return self.answer.needs

    @property
    def keeps(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.answer.keeps

    @property
    def arrays(self) -> dict[str, tuple[tuple[int, ...], str]]:
        return self.answer.arrays

    @property
    def shared(self) -> tuple[str, ...]:  # type: ignore[override]
        return (*self.of.shared, *self.answer.shared)

    @property
    def shared_ranking(self) -> bool:  # type: ignore[override]
        return self.answer.shared_ranking

    @property
    def runs(self) -> bool:  # type: ignore[override]
        return self.of.runs

    @property
    def protects(self) -> int:
        return max(self.of.protects, self.answer.protects)

    @property
    def structure(self) -> str:
        return f"{self.name}({self.answer.structure})"

    @property
    def word(self) -> str:
        return f"{self.name}({'' if self.answer is None else repr(self.answer)})"

    def check_positions(self, network: Network) -> None:
        self.answer.check_positions(network)

    def arrive(self, params: Params | None, observed: Observation) -> dict[str, Float[Array, "B K T"]]:
        return self.answer.arrive(params, observed)

    def score(self, params: Params | None, slots: Slots) -> Float[Array, "B K C"]:
        return self.answer.score(params, slots)

    def accumulate(self, slots: Slots, mass: Float[Array, "B N C"], count: Array) -> dict[str, Any]:
        return self.answer.accumulate(slots, mass, count)

    def choose(
        self, observed: Observation, scores: Float[Array, "B K T"], target: Int[Array, "B K"]
    ) -> Bool[Array, "B K T"]:
        return self.of.choose(observed, scores, target)


PRESETS = {"snapkv-then-knorm": 'snapkv + then(knorm) + uniform(0.25, when="every(64)")'}

EXAMPLES = (
    "snapkv(8) + then(knorm) + uniform(24, when=every(8))",
    "knorm + then(snapkv(4, kernel=3)) + uniform(24, when=every(4)) + sinks(2)",
)
