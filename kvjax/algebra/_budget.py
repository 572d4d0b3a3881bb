"""Budget: how many live slots may this layer, head and step have, and when is that enforced?"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

from kvjax.algebra._errors import PolicyError
from kvjax.algebra._observation import Observation
from kvjax.algebra._part import Part
from kvjax.sharding.all_heads import HERE, AllHeads

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class Every:
    """A budget that acts each time a row has seen a multiple of ``k`` tokens.

    Raises:
      PolicyError: k < 1.
    """

    k: int

    def __post_init__(self) -> None:
        if isinstance(self.k, bool) or not isinstance(self.k, int) or self.k < 1:
            raise PolicyError(f"every({self.k!r}) is no period. Give a whole number of tokens, at least 1.")

    def __repr__(self) -> str:
        return f"every({self.k})"


When = str | Every
"""When a budget acts: ``"after_prompt"``, ``"every_step"`` or ``Every(k)``."""


@dataclasses.dataclass(frozen=True)
class Frame:
    """Where a target is asked for: this layer among ``layers``, and what a slot costs.

    Attributes:
      layer: index of the layer (may be traced).
      layers: number of layers.
      kv_heads: KV heads of a layer.
      slot_bytes: bytes of one live slot, K and V.
      confidence: what the budget said of the logits that produced each row's token; None for given tokens (a
        prompt, a chunk), and for budgets that do not look.
      protected: tokens of a stream that stay whatever its target (``Policy.protected``; may be traced).
      observed: the prompt's tokens, as far as the budget declared in ``needs`` that it looks at them; None
        while decoding, when only counts are asked for.
      heads: how targets of a head that depend on the others' scores hear of them.
    """

    layer: Any
    layers: int
    kv_heads: int
    slot_bytes: float
    confidence: Float[Array, " B"] | None = None
    protected: Any = 0
    observed: Observation | None = None
    heads: AllHeads = HERE


class Budget(Part):
    """How many live slots a stream may have, ring included, and when that is enforced.

    Class attributes:
      sizes: as in ``Part``; () is the first field.
      from_scores: are targets made of the prompt's scores?
      needs_logits: is ``confidence`` asked of the logits?
      voted: does the prompt say how many tokens stay, and no number of the user's? Such a budget stands
        beside a part that says which, never beside ``KeepRecent``; a row that keeps all of them is told.
    """

    place = "budget"
    sizes: ClassVar[tuple[str, ...]] = ()
    from_scores: ClassVar[bool] = False
    needs_logits: ClassVar[bool] = False
    voted: ClassVar[bool] = False
    when: When = "after_prompt"

    @property
    def limited(self) -> bool:
        """Does it ever evict?"""
        return True

    def confidence(self, logits: Float[Array, "B V"]) -> Float[Array, " B"]:
        """What the next step's targets depend on (``frame.confidence``); only asked if ``needs_logits``."""
        raise NotImplementedError

    @property
    def least(self) -> int | None:
        """The smallest target it can give, where that is known beforehand."""
        return None

    def least_beside(self, protected: int) -> int | None:
        """``least`` where so many tokens of a stream are protected, for budgets that mind."""
        return self.least

    def smallest(self, frame: Frame, length: int) -> int | None:
        """The smallest target that a row of ``length`` tokens has in any layer; only the host calls this.

        None where ``targets`` alone can tell.
        """
        return self.least_beside(frame.protected)

    @property
    def most(self) -> int | None:
        """The largest target it can give, where that is known beforehand."""
        return None

    def layer_mean(self, frame: Frame, length: Int[Array, " B"]) -> Int[Array, " B"] | None:
        """The mean target of a layer's streams where scores only share it out (``from_scores``)."""
        return None

    def targets(
        self, frame: Frame, length: Int[Array, " B"], scores: Float[Array, "B K T"] | None
    ) -> Int[Array, "B K"]:
        """Live slots for each stream of a layer, broadcastable to [B, K].

        Args:
          frame: which layer, and what a slot costs.
          length: tokens each row has seen.
          scores: eviction scores over the prompt, -inf where the token may not stay and +inf where it
            must; only given when ``from_scores``.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, repr=False)
class Unlimited(Budget):
    """Every token may stay."""

    name = "unlimited"
    idle = True

    @property
    def limited(self) -> bool:
        """Never."""
        return False
