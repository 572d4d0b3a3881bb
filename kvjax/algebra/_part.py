"""What all parts have in common: frozen values that declare what they read and what they keep.

Why: kvjax/DESIGN.md, 5.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import jax

from kvjax.algebra._arguments import Argument, Whole
from kvjax.algebra._errors import PolicyError
from kvjax.algebra._observation import Observation
from kvjax.types import Network, Params, Weighted

if TYPE_CHECKING:
    from jaxtyping import Array, Float


class Part:
    """Anything that can stand in one of the six places. Subclasses are frozen dataclasses.

    A part is a pytree. Its fields are *structure*, static in a compiled program, except those named in
    ``traced``: hyperparameters that are passed to the program at every run, so that another budget or
    threshold needs no compilation. Inside a program such a field (``self.tau``) is a traced scalar; methods
    that only the host calls (``least``, ``most``, checks) see numbers.

    Class attributes:
      name: the part's word in the one-string form.
      place: the place it stands in.
      arguments: for each field, the values it takes; checked when the part is built.
      traced: the hyperparameters. No shape and no branch of a program may depend on their values.
      needs: quantities of ``Observation`` that the part reads.
      keeps: names of the values that the part stores with every token, a float32 each unless ``arrays`` says
        otherwise.
      learns: the method whose learned weights it reads, or "" if it learns nothing. The weights are passed as
        ``weights[place]``, a list with one pytree per layer.
      trained_by: the command that makes such weights, for error messages, or "".
      sizes: fields that say how much is kept or read; the part with other sizes counts as the same method.
      fitted: fields whose values the weights are trained for. Weight files store them, and kvjax warns when
        the policy has other values.
      shared: names of learned leaves that all heads share; every other leaf begins with [K] or [N].
      idle: the part does nothing in its place.
      wraps: it holds another part of its place (``of``), which in a string is written before it.

    Raises:
      PolicyError: a field has a value that ``arguments`` does not accept.
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
    shared: ClassVar[tuple[str, ...]] = ()
    idle: ClassVar[bool] = False
    wraps: ClassVar[bool] = False

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        jax.tree_util.register_pytree_node(cls, _flatten, lambda aux, leaves: _unflatten(cls, aux, leaves))

    def __post_init__(self) -> None:
        for name, argument in self.arguments.items():
            argument.check(self, name, getattr(self, name))

    def leaves(self) -> dict[str, Any]:
        """What a program receives of the hyperparameters, by attribute; by default the fields in ``traced``.

        Override it where a program needs another form, or a derived number that must be computed in the
        host's double precision: name a ``functools.cached_property``. A field in ``traced`` that is not among
        the leaves is None in a program.
        """
        return {name: self.arguments[name].leaf(getattr(self, name)) for name in self.traced}

    def check_positions(self, network: Network) -> None:
        """Refuses arguments beyond a model's positions (``Whole.by_positions``); defaults serve every model.

        Raises:
          PolicyError: names the argument and the positions.
        """
        for name, argument in self.arguments.items():
            value = getattr(self, name)
            if not (isinstance(argument, Whole) and argument.by_positions and isinstance(value, int)):
                continue
            most = max(network.max_positions, getattr(type(self), name, 0))  # the default
            if value > most:
                raise PolicyError(
                    f"{self!r}: {name}={value} is more than the {network.max_positions} positions of "
                    f"the model. Give at most {most}."
                )

    def check_weights(self, weights: Sequence[Params], network: Network) -> None:
        """Refuses learned weights that do not fit the network. The number of layers is already checked.

        Raises:
          PolicyError: names or shapes do not fit.
        """

    def check_shapes(
        self, index: int, layer: Params, expected: Mapping[str, tuple[int, ...]], network: Network
    ) -> None:
        """Refuses the learned weights of layer ``index`` if their names or shapes are not the expected ones.

        Raises:
          PolicyError: names both.
        """
        actual = {name: tuple(value.shape) for name, value in layer.items()}
        if actual != expected:
            raise PolicyError(
                f"{self!r}: the weights of layer {index} have shapes {actual}, but a model of "
                f"{network.num_heads} query and {network.num_kv_heads} KV heads of {network.head_dim} "
                f"channels needs {expected}. Use weights trained for this model."
            )

    def remark(self, weights: Sequence[Params], lengths: Sequence[int]) -> str | None:
        """A warning for learned weights that read prompts of these lengths, or None."""
        return None

    def at_layer(self, weights: Sequence[Params], layer: int) -> Any:
        """What the part reads of its learned weights at one layer; by default that layer's own."""
        return weights[layer]

    def example_weights(self, key: Array, network: Network) -> list[Params]:
        """Random weights of the right shapes for the conformance laws; one pytree per layer."""
        raise NotImplementedError

    def untrained(self, model: Weighted, seed: int) -> list[Params]:
        """Untrained weights that cost what trained ones do, for measuring speed and memory."""
        return self.example_weights(jax.random.PRNGKey(seed), model.network)

    def weight_shapes(self, network: Network) -> list[Params]:
        """Shapes and dtypes of trained weights, without a model; one pytree per layer."""
        model: Any = types.SimpleNamespace(network=network)
        return jax.eval_shape(lambda: self.untrained(model, 0))

    def arrive(self, params: Params | None, observed: Observation) -> dict[str, Float[Array, "B K T"]]:
        """Values for ``keeps``, computed once, when a token arrives."""
        return {}

    @property
    def arrays(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of those values in ``keeps`` that are not one float32 per slot."""
        return {}

    @property
    def chain(self) -> tuple[Part, ...]:
        """The part, after those that it holds (``Wrapper``)."""
        return (self,)

    @property
    def structure(self) -> str:
        """Name and fields as a user writes them, without traced fields and those at their defaults."""
        return self._written(
            f"{f.name}={_literal(getattr(self, f.name))}"
            for f in self._fields()
            if f.name not in self.traced and getattr(self, f.name) != f.default
        )

    @property
    def word(self) -> str:
        """Name and arguments as a user writes them, without what it holds."""
        return self._written(
            (f"{f.name}=" if at else "") + _literal(getattr(self, f.name))
            for at, f in enumerate(self._fields())
            if at == 0 or getattr(self, f.name) != f.default
        )

    def __repr__(self) -> str:
        return " + ".join(part.word for part in self.chain)

    def _fields(self) -> list[dataclasses.Field[Any]]:
        """What a user writes as arguments."""
        return list(dataclasses.fields(self))  # type: ignore[arg-type]

    def _written(self, arguments: Iterable[str]) -> str:
        text = ", ".join(arguments)
        return f"{self.name}({text})" if text else self.name


def _literal(value: Any) -> str:
    return value if isinstance(value, str) and value.isidentifier() else repr(value)


_LEAVES = "_leaves"
"""The attribute of a program's view of a part that holds its leaves."""

_Structure = tuple[tuple[str, ...], tuple[tuple[str, Any], ...]]


def _flatten(part: Part) -> tuple[tuple[Any, ...], _Structure]:
    """The leaves; and their names with the fields that are structure, which distinguish programs."""
    # A program's view already holds its leaves (tracers, shapes): they are not computed again.
    leaves = vars(part).get(_LEAVES) or part.leaves()
    fields = [f.name for f in dataclasses.fields(part)]  # type: ignore[arg-type]
    structure = tuple((name, getattr(part, name)) for name in fields if name not in part.traced)
    return tuple(leaves.values()), (tuple(leaves), structure)


def _unflatten(kind: type[Part], structure: _Structure, values: Sequence[Any]) -> Part:
    """A program's view of the part, with ``values`` (of any type) as its leaves; nothing is checked."""
    part = object.__new__(kind)
    names, fields = structure
    leaves = dict(zip(names, values))
    vars(part).update(dict.fromkeys(kind.traced) | dict(fields) | leaves | {_LEAVES: leaves})
    return part
