"""What a part may see of the tokens that arrive at a layer: the quantities it declared, nothing else."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from kvjax.algebra._errors import PolicyError
from kvjax.types import Rotate, pytree

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


OBSERVABLE = ("k", "v", "k_pre", "q", "q_pre", "hidden", "mass")
"""What a part may name in ``needs``; ``mass`` is an eviction's alone."""


@pytree(static=("layers", "softcap", "rotate"))
@dataclasses.dataclass(frozen=True, kw_only=True)
class Observation:
    """What a part may see of T tokens arriving at one layer; only declared quantities are there.

    Attributes:
      pos: true positions, EMPTY for padding.
      total: length of each row's prompt, known from the start.
      layer: index of this layer (may be traced).
      layers: how many there are.
      values: the declared quantities by name; read them through the properties.
      softcap, rotate: what bounds the model's scores, and its RoPE at this layer; see ``Heads``.
    """

    pos: Int[Array, "B T"]
    total: Int[Array, " B"]
    layer: int | Int[Array, ""]
    layers: int
    values: dict[str, Array]
    softcap: float | None = None
    rotate: Rotate | None = None

    def _declared(self, name: str) -> Array:
        if name not in self.values:
            raise PolicyError(
                f"a part reads {name!r} of the arriving tokens without declaring it in `needs`."
            )
        return self.values[name]

    @property
    def k(self) -> Float[Array, "B K T H"]:
        """Keys after RoPE."""
        return self._declared("k")

    @property
    def v(self) -> Float[Array, "B K T H"]:
        """Values."""
        return self._declared("v")

    @property
    def k_pre(self) -> Float[Array, "B K T H"]:
        """Keys before RoPE."""
        return self._declared("k_pre")

    @property
    def q(self) -> Float[Array, "B N T H"]:
        """Queries after RoPE."""
        return self._declared("q")

    @property
    def q_pre(self) -> Float[Array, "B N T H"]:
        """Queries before RoPE."""
        return self._declared("q_pre")

    @property
    def hidden(self) -> Float[Array, "B T D"]:
        """The input of the attention block."""
        return self._declared("hidden")

    @property
    def mass(self) -> Float[Array, "B N T"]:
        """Attention each token of a prompt received, weighed by the eviction (``Eviction.weigh``)."""
        return self._declared("mass")
