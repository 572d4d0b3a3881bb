"""What a call of blockwise or column_mass says besides its queries, keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int

    Partial = tuple[Float[Array, "B N T H"], Float[Array, "B N T"]]
    """(out, lse)."""


class Sight(NamedTuple):
    """What a call is compiled for, as in ``api.blockwise``."""

    window: int | None
    scale: float
    softcap: float | None


class Where(NamedTuple):
    """Where queries and keys lie, as in ``api.blockwise``; nothing of it is differentiated."""

    q_pos: Int[Array, "B T"]
    k_pos: Int[Array, "B S"]
    admit: Bool[Array, "B K S"] | None


class Above(NamedTuple):
    """What a backward pass starts from; delta and up are 0 for queries that saw nothing.

    Attributes:
      up: gradient of out.
      lse: what the forward pass returned.
      delta: sum(out * up) of each query, less the gradient of its lse.
    """

    up: Float[Array, "B N T H"]
    lse: Float[Array, "B N T"]
    delta: Float[Array, "B N T"]
