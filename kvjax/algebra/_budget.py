"""Budget: how many live slots may a KV head of this layer have at this step, and when is that enforced?"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from kvjax.algebra._arguments import Whole
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
        Whole(1, "period").check(f"every({self.k!r})", "k", self.k)

    def __repr__(self) -> str:
        return f"every({self.k})"


When = str | Every
"""When a budget acts: ``"after_prompt"``, ``"every_step"`` or ``Every(k)``."""


@dataclasses.dataclass(frozen=True)
class Frame:
    """What a target depends on: the layer, and the cost of a slot.

    Attributes:
      layer: index of the layer (may be traced).
      layers: number of layers.
      kv_heads: KV heads of a layer.
      slot_bytes: bytes of one live slot, K and V.
      confidence: what the budget computed from the logits that produced each row's token; None for tokens
        that the user gave (a prompt, a chunk) and for budgets that do not read logits.
      protected: tokens of a KV head that stay whatever its target (``Policy.protected``; may be traced).
      observed: the quantities of the prompt's tokens that the budget declares in ``needs``; None while
        decoding, when only counts are available.
      heads: all KV heads of the layer, for targets that depend on the scores of other heads.
      prompt: length of each row's prompt.
      weights: what the budget has learned, at this layer.
    """

    layer: Any
    layers: int
    kv_heads: int
    slot_bytes: float
    confidence: Float[Array, " B"] | None = None
    protected: Any = 0
    observed: Observation | None = None
    heads: AllHeads = HERE
    prompt: Int[Array, " B"] | None = None
    weights: Any = None


class Budget(Part):
    """How many live slots a KV head of a row may have, ring included, and when that is enforced.

    Class attributes:
      sizes: as in ``Part``; () stands for the first field.
      from_scores: targets are computed from the prompt's scores.
      over_layers: the KV heads of all layers share their slots (``targets_of_layers``). A prompt is then held
        whole until the scores of all layers are known (``Policy.holds_prompt``).
      needs_logits: ``confidence`` is computed from the logits of each step.
      voted: the prompt decides how many tokens stay, not a number of the user's. Such a budget needs an
        eviction that decides which tokens stay (not ``KeepRecent``); kvjax warns when a row keeps all of its
        tokens.
      limited: it evicts at some time.
      spares_prompt: no token of the prompt is evicted.
    """

    place = "budget"
    sizes: ClassVar[tuple[str, ...]] = ()
    from_scores: ClassVar[bool] = False
    over_layers: ClassVar[bool] = False
    needs_logits: ClassVar[bool] = False
    voted: ClassVar[bool] = False
    limited: ClassVar[bool] = True
    spares_prompt: ClassVar[bool] = False
    when: When = "after_prompt"

    def confidence(self, logits: Float[Array, "B V"]) -> Float[Array, " B"]:
        """What the next step's targets depend on (``frame.confidence``); called only if ``needs_logits``."""
        raise NotImplementedError

    @property
    def least(self) -> int | None:
        """The smallest target it can give, where that is known before a prompt is."""
        return None

    def least_beside(self, protected: int) -> int | None:
        """``least`` where this many tokens of a KV head are protected, for budgets that depend on that."""
        return self.least

    def smallest(self, frame: Frame, length: int) -> int | None:
        """The smallest target of a row of ``length`` tokens in any layer, computed on the host.

        None where only ``targets`` can tell.
        """
        return self.least_beside(frame.protected)

    @property
    def most(self) -> int | None:
        """The largest target it can give, where that is known before a prompt is."""
        return None

    def layer_mean(self, frame: Frame, length: Int[Array, " B"]) -> Int[Array, " B"] | None:
        """The mean target of KV heads, where scores or what it has learned only divide the slots.

        (``from_scores``, ``learns``.)
        """
        return None

    def secured(
        self, frame: Frame, length: Int[Array, " B"], scores: Float[Array, "B K T"]
    ) -> Float[Array, "B K T"]:
        """The scores, +inf for tokens that stay in a head whatever a wrapper makes of the scores."""
        return scores

    def targets(
        self, frame: Frame, length: Int[Array, " B"], scores: Float[Array, "B K T"] | None
    ) -> Int[Array, "B K"]:
        """Live slots for each KV head of a layer, broadcastable to [B, K].

        Args:
          frame: which layer, and what a slot costs.
          length: tokens each row has seen.
          scores: eviction scores over the prompt, -inf where the token may not stay and +inf where it must;
            only given when ``from_scores``.
        """
        raise NotImplementedError

    def targets_of_layers(
        self, frame: Frame, length: Int[Array, " B"], scores: Sequence[Float[Array, "B K T"]]
    ) -> list[Int[Array, "B K"]]:
        """Live slots for each KV head of several layers; asked instead of ``targets`` where ``over_layers``.

        Args:
          frame: of any of these layers.
          length: as in ``targets``.
          scores: as in ``targets``, of each layer that sees the whole prompt; all KV heads, those on other
            devices too.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, repr=False)
class Unlimited(Budget):
    """Every token may stay."""

    name = "unlimited"
    idle = True
    limited = False


@dataclasses.dataclass(frozen=True, repr=False)
class Spent(Budget):
    """A prompt was cut, and nothing more goes: what is left of a budget that acts after the prompt alone."""

    name = "spent"
