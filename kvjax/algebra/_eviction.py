"""Eviction: which token goes when a KV head is over its target? The one with the lowest score."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

import jax.numpy as jnp

from kvjax.algebra._observation import Observation
from kvjax.algebra._part import Part
from kvjax.algebra._replay import Piece, Replay, Tokenizer
from kvjax.cache.pages import Slots
from kvjax.types import Params

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Array, Bool, Float, Int


FIRST = float(jnp.finfo(jnp.float32).max)
"""Score of a token that an eviction keeps before all that it ranks; a budget that counts tokens counts it."""


class Eviction(Part):
    """Which token goes when a KV head is over its target: the lowest score; ties keep the lowest position.

    Class attributes:
      scores_prompt: a token's score needs the whole prompt (SnapKV ...).
      ranks_held: ``score_prompt`` also ranks what a KV head holds later. A budget that acts while decoding
        then asks it about the held tokens of each KV head, in order of position, as about a prompt of their
        own that has gaps. Without it generated tokens have no score where ``scores_prompt``.
      on_arrival: where ``scores_prompt``, how to write the part so that it ranks generated tokens too, or "".
      shared_ranking: all KV heads of a layer keep the same tokens. While decoding their slots then have one
        order, and ``accumulate`` receives the mean mass over all heads of the layer (N is 1).
      replays: a prompt is fed once more, in ``pieces``, before it is cut (``replayed``); other parts then see
        its keys and values only.
      runs: of a prompt it keeps runs of neighbouring tokens, the same in all KV heads of a layer (``Runs``).
    """

    place = "eviction"
    scores_prompt: ClassVar[bool] = False
    ranks_held: ClassVar[bool] = False
    on_arrival: ClassVar[str] = ""
    shared_ranking: ClassVar[bool] = False
    replays: ClassVar[bool] = False
    runs: ClassVar[bool] = False

    @property
    def later(self) -> Eviction:
        """What ranks while decoding: this eviction, or another one that it holds for that (``then``)."""
        return self

    @property
    def needs_mass(self) -> bool:
        """Does it rank by the attention that a token receives ("mass" in ``needs``)?

        For a whole prompt that is ``observed.mass``. Where the budget acts while decoding, every read updates
        the values in ``keeps`` (``query_weights``, ``accumulate``).
        """
        return "mass" in self.needs

    @property
    def protects(self) -> int:
        """Newest tokens that this method never evicts."""
        return 0

    @property
    def queries(self) -> int:
        """Newest queries of every head that must be kept for ranking held tokens (``ranks_held``).

        Those of ``q`` and ``q_pre`` that are in ``needs``.
        """
        return 0

    def score(self, params: Params | None, slots: Slots) -> Float[Array, "B K C"]:
        """Rank of the slots that may go (``slots.live``) from the values kept with them; else any number."""
        raise NotImplementedError

    def query_weights(self, age: Int[Array, "B T"]) -> Float[Array, "B T"]:
        """How much the attention of a query counts, given how many tokens of the same read came after it."""
        raise NotImplementedError

    def accumulate(
        self, slots: Slots, mass: Float[Array, "B N C"], count: Int[Array, "B 1 1"]
    ) -> dict[str, Float[Array, "B K C"]]:
        """The kept values after a read.

        Args:
          slots: values so far; as on arrival for tokens that were read for the first time.
          mass: weighted attention of all queries of the read to each slot, per query head.
          count: queries of the read, at least 1.
        """
        raise NotImplementedError

    def score_prompt(self, params: Params | None, observed: Observation) -> Float[Array, "B K T"]:
        """Rank of all prompt tokens at once. By default: ``score`` of their values on arrival.

        Where ``ranks_held``, queries are read by ``observed.queries``, and positions may have gaps.
        """
        meta = self.arrive(params, observed)
        pos = jnp.broadcast_to(observed.pos[:, None, :], (observed.pos.shape[0], 1, observed.pos.shape[1]))
        seen = observed.total[:, None, None]
        return self.score(params, Slots(pos=pos, live=pos >= 0, meta=meta, seen=seen))

    def pieces(self, prompt: Int[np.ndarray, " T"], text: Tokenizer | None) -> list[Piece]:
        """What is fed behind a prompt, one piece after the other; asked on the host, where it ``replays``.

        Raises:
          PolicyError: it needs a tokenizer, and the model has none.
        """
        raise NotImplementedError

    def replayed(self, piece: Replay) -> Float[Array, "B K T"]:
        """Scores that a piece gives the prompt's tokens, 0 or more; of all pieces the highest counts."""
        raise NotImplementedError

    def rescored(self, observed: Observation, scores: Float[Array, "B K T"]) -> Float[Array, "B K T"]:
        """What a wrapper makes of a prompt's scores, once the budget has seen them; see ``choose``."""
        return scores

    def choose(
        self, observed: Observation, scores: Float[Array, "B K T"], target: Int[Array, "B K"]
    ) -> Bool[Array, "B K T"]:
        """Which tokens of a prompt stay, asked after the budget has said each head's number.

        By default those with the best scores; of equals the lowest positions.

        Args:
          observed: the prompt.
          scores: of ``score_prompt``; +inf where a token is protected, -inf where it may not stay.
          target: tokens of each KV head, broadcastable.
        """
        place = jnp.argsort(jnp.argsort(-scores, axis=-1, stable=True), axis=-1)
        return place < target[..., None]


@dataclasses.dataclass(frozen=True, repr=False)
class KeepRecent(Eviction):
    """The oldest token goes."""

    name = "keep_recent"
    idle = True

    def score(self, params: Params | None, slots: Slots) -> Float[Array, "B K C"]:
        return slots.pos.astype(jnp.float32)
