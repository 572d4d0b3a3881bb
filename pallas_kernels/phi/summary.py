"""What a summary of any number of tokens holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from jaxtyping import Array, Float


class Summary(NamedTuple):
    """Tokens of each stream seen through F positive features; everything float32.

    The shift makes it stable: no feature's largest token ever leaves the range of float32. Nothing
    absorbed is ``(-inf, 0, 0)``.

    Attributes:
      shift: m, the largest log feature of any token absorbed.
      weight: u, the sum of exp(log feature - m).
      values: T, the same sum with every term times its token's value.
    """

    shift: Float[Array, "B K F"]
    weight: Float[Array, "B K F"]
    values: Float[Array, "B K F H"]
