"""What all parts are, in whatever place they stand: frozen values that declare what they read and keep."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from kvjax.algebra._observation import Observation
from kvjax.types import Network, Params

if TYPE_CHECKING:
    from jaxtyping import Array, Float


class Part:
    """Anything that can stand in one of the six places. Subclasses are frozen dataclasses.

    Class attributes:
      name: how the part is called in the one-string form.
      place: the place it stands in.
      needs: fields of ``Observation`` it reads.
      keeps: names of the per-slot values it owns.
      learns: the method whose learned weights it reads, or "" for a part that learns nothing. They travel as
        ``weights[place]``, a list with one pytree a layer.
      trained_by: the command that makes such weights, as an error names it; "" where there is none.
      sizes: fields that say how much is kept or read; with other numbers there it is the same method.
      fitted: arguments whose values weights are trained for; files note them, and other values are told.
      idle: this is the part that does nothing in its place.
    """

    name: ClassVar[str]
    place: ClassVar[str]
    needs: ClassVar[frozenset[str]] = frozenset()
    keeps: ClassVar[tuple[str, ...]] = ()
    learns: ClassVar[str] = ""
    trained_by: ClassVar[str] = ""
    sizes: ClassVar[tuple[str, ...]] = ()
    fitted: ClassVar[tuple[str, ...]] = ()
    idle: ClassVar[bool] = False

    def check_weights(self, weights: Sequence[Params], network: Network) -> None:
        """Refuses learned weights that do not fit the network; the number of layers is checked already.

        Raises:
          PolicyError: names or shapes that do not fit.
        """

    def at_layer(self, weights: Sequence[Params], layer: int) -> Any:
        """What this part reads of its learned weights at one layer; by default that layer's own."""
        return weights[layer]

    def example_weights(self, key: Array, network: Network) -> list[Params]:
        """Random weights of the right shapes, for the conformance laws; one pytree a layer."""
        raise NotImplementedError

    def arrive(self, params: Params | None, observed: Observation) -> dict[str, Float[Array, "B K T"]]:
        """Values for ``keeps``, asked once, when a token arrives."""
        del params, observed
        return {}

    def __repr__(self) -> str:
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        given = [
            (f"{f.name}=" if at else "") + _literal(getattr(self, f.name))
            for at, f in enumerate(fields)
            if at == 0 or getattr(self, f.name) != f.default
        ]
        return f"{self.name}({', '.join(given)})" if given else self.name


def _literal(value: Any) -> str:
    return value if isinstance(value, str) and value.isidentifier() else repr(value)
