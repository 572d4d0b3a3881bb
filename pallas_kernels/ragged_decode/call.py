"""What a call of ragged_decode is made of besides its queries; fields as in ``api.ragged_decode``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int, Num


class Options(NamedTuple):
    """What a call is compiled for."""

    mass: bool
    scale: float
    softcap: float | None
    shared: bool = False


class Pools(NamedTuple):
    """Pages of all KV heads; several codes an element where they are uint8 or uint16 (``codes``)."""

    k: Num[Array, "P S X"]
    v: Num[Array, "P S X"]
    scales: Any

    def all(self) -> list[Array]:
        return [x for x in self if x is not None]

    def for_scores(self) -> list[Array]:
        return [x for x in (self.k, self.scales) if x is not None]


class Lists(NamedTuple):
    """Which pages and slots each KV head reads."""

    table: Int[Array, "B K M"]
    length: Int[Array, "B K"]
    pages: Int[Array, "B K J"] | None
    slots: Bool[Array, "B K J S"] | None
    bias: Float[Array, "B N M S"] | None = None
