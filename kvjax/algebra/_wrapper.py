"""Wrappers: evictions that hold another eviction and choose by its scores.

Why: kvjax/DESIGN.md, 26.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from kvjax.algebra._arguments import Argument, OfPlace
from kvjax.algebra._errors import PolicyError
from kvjax.algebra._eviction import FIRST, Eviction
from kvjax.algebra._observation import Observation
from kvjax.algebra._part import Part
from kvjax.algebra._replay import Piece, Replay, Tokenizer
from kvjax.types import Params

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Array, Bool, Float, Int


class Ranking(OfPlace):
    """An eviction as an argument; one that does something, and not a wrapper."""

    what = place = "eviction"

    def accepts(self, value: Any) -> bool:
        return isinstance(value, Eviction) and not value.idle and not isinstance(value, Wrapper)

    @property
    def expected(self) -> str:
        return "an eviction that does something and is not a wrapper, for example knorm"

    def check(self, call: object, name: str, value: Any) -> None:
        """Accepts an eviction, and None: whether one must be there, the part says when all is checked."""
        if value is not None:
            super().check(call, name, value)


class Held(Argument):
    """The eviction that a wrapper holds; one that does something."""

    what = "eviction"

    def accepts(self, value: Any) -> bool:
        return isinstance(value, Eviction) and not value.idle

    @property
    def expected(self) -> str:
        return "an eviction, as in Critical(of=SnapKV())"

    def check(self, call: object, name: str, value: Any) -> None:
        """Accepts an eviction.

        Raises:
          PolicyError: there is none, or the value is something else.
        """
        if value is None or isinstance(value, Eviction) and value.idle:
            raise PolicyError(
                f"{call} has nothing to wrap. Write an eviction before it, for example 'snapkv + {call}'."
            )
        super().check(call, name, value)


@dataclasses.dataclass(frozen=True, repr=False)
class Wrapper(Eviction):
    """An eviction that holds another one: it takes that one's scores, and chooses after the budget.

    In the one-string form a wrapper follows the eviction; several apply in the order written. A budget that
    divides a layer's slots by scores sees those of the eviction itself. Then each wrapper changes the scores
    of the one it holds (``rescored``), and the last one chooses (``choose``).

    Attributes:
      of: the eviction that it holds.

    Raises:
      PolicyError: nothing is held.
    """

    scores_prompt = True
    wraps = True
    of: Eviction = dataclasses.field(default=None, kw_only=True)  # type: ignore[assignment]

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        cls.arguments = {**cls.arguments, "of": Held()}
        cls.traced = (*(name for name in cls.traced if name != "of"), "of")  # its numbers are leaves, too

    @property
    def chain(self) -> tuple[Part, ...]:
        return (*self.of.chain, self) if hasattr(self.of, "chain") else (self,)

    @property
    def on_arrival(self) -> str:  # type: ignore[override]
        return self.of.on_arrival if self.of.scores_prompt else repr(self.of)

    @property
    def shared(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.of.shared

    @property
    def needs_mass(self) -> bool:
        return self.of.needs_mass

    @property
    def replays(self) -> bool:  # type: ignore[override]
        return self.of.replays

    @property
    def protects(self) -> int:
        return self.of.protects

    def query_weights(self, age: Int[Array, "B T"]) -> Float[Array, "B T"]:
        return self.of.query_weights(age)

    def pieces(self, prompt: Int[np.ndarray, " T"], text: Tokenizer | None) -> list[Piece]:
        return self.of.pieces(prompt, text)

    def replayed(self, piece: Replay) -> Float[Array, "B K T"]:
        return self.of.replayed(piece)

    def score_prompt(self, params: Params | None, observed: Observation) -> Float[Array, "B K T"]:
        return self.of.score_prompt(params, observed)

    def rescored(self, observed: Observation, scores: Float[Array, "B K T"]) -> Float[Array, "B K T"]:
        return self.of.rescored(observed, scores)

    def choose(
        self, observed: Observation, scores: Float[Array, "B K T"], target: Int[Array, "B K"]
    ) -> Bool[Array, "B K T"]:
        return super().choose(observed, self.rescored(observed, scores), target)

    def _fields(self) -> list[dataclasses.Field[Any]]:
        return [field for field in super()._fields() if field.name != "of"]


@dataclasses.dataclass(frozen=True, repr=False)
class Runs(Wrapper):
    """Keeps runs of neighbouring tokens, the same in all KV heads of a layer; no wrapper follows it.

    A row is cut into runs of ``size`` tokens from its first one on; the last may be shorter. The scores of a
    token are summed over the layer's KV heads. A protected token counts one more than the highest score of
    the row, and stays whatever its run. Each head keeps as many tokens as the budget says, in one order
    (``order``).

    Attributes:
      size: tokens of a run.
    """

    runs = True
    size: int = 20

    def order(self, scores: Float[Array, "B M S"]) -> Int[Array, "B T"]:
        """The tokens [B, M * S] in the order in which they stay.

        Args:
          scores: of M runs; -inf where a token may not stay, and beyond the row.
        """
        raise NotImplementedError

    def choose(
        self, observed: Observation, scores: Float[Array, "B K T"], target: Int[Array, "B K"]
    ) -> Bool[Array, "B K T"]:
        scores = self.of.rescored(observed, scores)
        t, heads = scores.shape[-1], observed.heads
        first, ranked = scores >= FIRST, jnp.isfinite(scores) & (scores < FIRST)
        highest = heads.largest(jnp.where(ranked, scores, -FIRST).max(axis=2, keepdims=True))
        filled = jnp.where(first, jnp.where(highest > -FIRST, highest, 0.0) + 1, scores)
        may = scores > -jnp.inf  # the same in all heads (``_refuse_illegal_pairs``)
        token = heads.mean(jnp.where(may, filled, 0.0))[:, 0] * heads.count(scores.shape[1])
        token = jnp.where(may[:, 0], token, -jnp.inf)
        size = min(self.size, t)
        wide = jnp.pad(token, ((0, 0), (0, -t % size)), constant_values=-jnp.inf)
        place = jnp.argsort(self.order(wide.reshape(len(wide), -1, size)), axis=-1)[:, None, :t]
        worth = jnp.where(first, 1.0, jnp.where(may, -place.astype(jnp.float32), -jnp.inf))
        return super(Wrapper, self).choose(observed, worth, target)


def run_means(scores: Float[Array, "B M S"]) -> Float[Array, "B M"]:
    """Mean score of each run's tokens that may stay; -inf where it has none."""
    may = scores > -jnp.inf
    count = may.sum(axis=-1)
    total = jnp.where(may, scores, 0.0).sum(axis=-1)
    return jnp.where(count > 0, total / jnp.maximum(count, 1), -jnp.inf)


def places(scores: Float[Array, "... M"]) -> Int[Array, "... M"]:
    """Place of each score, 0 for the highest; ties go to the lowest index."""
    return jnp.argsort(jnp.argsort(-scores, axis=-1, stable=True), axis=-1)
