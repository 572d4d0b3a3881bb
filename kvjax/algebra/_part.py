"""What all parts are, in whatever place they stand: frozen values that declare what they read and keep."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import jax

from kvjax.algebra._arguments import Argument
from kvjax.algebra._observation import Observation
from kvjax.types import Network, Params, Weighted

if TYPE_CHECKING:
    from jaxtyping import Array, Float


class Part:
    """Anything that can stand in one of the six places. Subclasses are frozen dataclasses.

    A part is a pytree. Its fields are *structure*, static in a compiled program, except those it names in
    ``traced``: hyperparameters that are passed to the program at every run, so another budget or threshold
    needs no compilation. Inside a program such a field (``self.tau``) is a traced scalar; methods that only
    the host calls (``least``, ``most``, checks) see numbers.

    Class attributes:
      name: how the part is called in the one-string form.
      place: the place it stands in.
      arguments: what values its fields take; checked when the part is built.
      dials: fields that are no structure: no shape, no branch of the program depends on their values.
      needs: fields of ``Observation`` it reads.
      keeps: names of the per-slot values it owns.
      learns: the method whose learned weights it reads, or "" for a part that learns nothing. They travel as
        ``weights[place]``, a list with one pytree a layer.
      trained_by: the command that makes such weights, as an error names it; "" where there is none.
      sizes: fields that say how much is kept or read; with other numbers there it is the same method.
      fitted: arguments whose values weights are trained for; files note them, and other values are told.
      renamed: former names of fields, and their names today; the one-string form refuses the former.
      shared: names of learned leaves that all heads share; every other leaf begins with [K] or [N].
      idle: this is the part that does nothing in its place.
    """

    name: ClassVar[str]
    place: ClassVar[str]
    arguments: ClassVar[Mapping[str, Argument]] = {}
    traced: ClassVar[tuple[str, ...]] = ()
    needs: ClassVar[frozenset[str]] = frozenset()
    keeps: ClassVar[tuple[str, ...]] = ()
    learns: ClassVar[str] = ""
    trained_by: ClassVar[str] = ""
    sizes: ClassVar[tuple[str, ...]] = ()
    fitted: ClassVar[tuple[str, ...]] = ()
    renamed: ClassVar[Mapping[str, str]] = {}
    shared: ClassVar[tuple[str, ...]] = ()
    idle: ClassVar[bool] = False

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        jax.tree_util.register_pytree_node(cls, _flatten, lambda aux, leaves: _unflatten(cls, aux, leaves))

    def __post_init__(self) -> None:
        for name, argument in self.arguments.items():
            argument.check(self, name, getattr(self, name))

    def leaves(self) -> dict[str, Any]:
        """What a program is given of the dials, by attribute; by default the fields themselves.

        Override it where a program needs another form, or something derived that only the host's double
        precision gives exactly: name a ``functools.cached_property``. A dial that is not among the leaves is
        None in a program.
        """
        return {name: self.arguments[name].leaf(getattr(self, name)) for name in self.traced}

    def check_weights(self, weights: Sequence[Params], network: Network) -> None:
        """Refuses learned weights that do not fit the network; the number of layers is checked already.

        Raises:
          PolicyError: names or shapes that do not fit.
        """

    def remark(self, weights: Sequence[Params], lengths: Sequence[int]) -> str | None:
        """What a user should be told of learned weights that read prompts of these lengths; None: nothing."""
        return None

    def at_layer(self, weights: Sequence[Params], layer: int) -> Any:
        """What this part reads of its learned weights at one layer; by default that layer's own."""
        return weights[layer]

    def example_weights(self, key: Array, network: Network) -> list[Params]:
        """Random weights of the right shapes, for the conformance laws; one pytree a layer."""
        raise NotImplementedError

    def untrained(self, model: Weighted, seed: int) -> list[Params]:
        """Weights that have learned nothing and cost what trained ones do, for measuring speed and memory."""
        return self.example_weights(jax.random.PRNGKey(seed), model.network)

    def weight_shapes(self, network: Network) -> list[Params]:
        """Shapes and dtypes of weights as they are trained, where no model is at hand; one pytree a layer."""
        model: Any = types.SimpleNamespace(network=network)
        return jax.eval_shape(lambda: self.untrained(model, 0))

    def arrive(self, params: Params | None, observed: Observation) -> dict[str, Float[Array, "B K T"]]:
        """Values for ``keeps``, asked once, when a token arrives."""
        return {}

    @property
    def arrays(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of those among ``keeps`` that are more than a float32 a slot."""
        return {}

    @property
    def structure(self) -> str:
        """Its name and the fields that are no dials, as one writes them; those at their defaults left out."""
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        given = [
            f"{f.name}={_literal(getattr(self, f.name))}"
            for f in fields
            if f.name not in self.traced and getattr(self, f.name) != f.default
        ]
        return f"{self.name}({', '.join(given)})" if given else self.name

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


_GIVEN = "_given_leaves"
"""Where a program's view of a part keeps its leaves."""

_Structure = tuple[tuple[str, ...], tuple[tuple[str, Any], ...]]


def _flatten(part: Part) -> tuple[tuple[Any, ...], _Structure]:
    """The leaves; and their names beside the fields that are structure, which tell programs apart."""
    # Inside a program the leaves are what it was given, whatever stands for numbers there.
    leaves = vars(part).get(_GIVEN) or part.leaves()
    fields = [f.name for f in dataclasses.fields(part)]  # type: ignore[arg-type]
    structure = tuple((name, getattr(part, name)) for name in fields if name not in part.traced)
    return tuple(leaves.values()), (tuple(leaves), structure)


def _unflatten(kind: type[Part], structure: _Structure, leaves: Sequence[Any]) -> Part:
    """The part with whatever stands for its leaves, unchecked: a program's view of it."""
    part = object.__new__(kind)
    names, fields = structure
    given = dict(zip(names, leaves))
    vars(part).update(dict.fromkeys(kind.traced) | dict(fields) | given | {_GIVEN: given})
    return part
