"""Policies of one structure in one batch: each row has its own hyperparameters.

A policy's traced hyperparameters are leaves (``kvjax.algebra.Part``), so the policies of all rows can be
stacked, one number per row (``stack_policies``). What a part computes from tokens and slots runs row by row,
under ``vmap``: there the part sees its own numbers, and its code knows nothing of rows. Structure is shared;
parts without traced fields stay as they are.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from kvjax.algebra import Frame, Part, Policy
from kvjax.layer._info import OfRows

if TYPE_CHECKING:
    from jaxtyping import Array


def stack_policies(policies: Sequence[Policy]) -> Policy:
    """One policy whose leaves have a leading axis of rows; all must be of one structure."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *policies)


def by_rows(policy: Policy) -> Policy:
    """The stacked policy as the layers ask it, each of its answers row by row; a pytree like any policy."""
    parts = {part.place: _by_rows(part) if part.traced else part for part in policy.parts}
    stacked = object.__new__(Policy)
    vars(stacked).update(vars(policy) | parts)
    return stacked


def _by_rows(part: Part) -> Part:
    own: Any = type(part)
    by_row = object.__new__(_kind(own))
    vars(by_row).update(vars(part))
    return by_row


@functools.cache
def _kind(kind: Any) -> type[Part]:
    """The kind of part whose methods answer row by row."""
    wraps = {"arrive": _observing} | _METHODS[kind.place]
    if kind.at_layer is not Part.at_layer:
        wraps = wraps | {"at_layer": _at_layer}
    methods: dict[str, Any] = {name: wrap(getattr(kind, name)) for name, wrap in wraps.items()}
    for name in ("drafts", "later"):
        if isinstance(inner := getattr(kind, name, None), property):
            methods[name] = _held(inner)
    return type(kind.__name__, (kind,), methods | {"_of_one_row": kind})


def _held(inner: property) -> property:
    """A part that another one holds or is, row by row like that one."""

    def held(self: Part) -> Part:
        part: Part = inner.fget(self)  # type: ignore[misc]
        return _by_rows(part) if part is not self and part.traced else part

    return property(held)


def has_rows(part: Part) -> bool:
    """Does each row have hyperparameters of its own?"""
    return hasattr(part, "_of_one_row")


def row_by_row(part: Part, run: Callable[..., Any], params: Any, *args: Any) -> Any:
    """``run(part, params, *args)``; where rows have numbers of their own, for each with its own."""
    return _after_weights(run)(part, params, *args) if has_rows(part) else run(part, params, *args)


def _rows_of(part: Part, method: Callable[..., Any], *args: Any) -> Any:
    """``method(part of a row, args of the row)``, of all rows; arrays of ``args`` have a leading axis B."""

    def of_row(one: Part, row: Any) -> Any:
        alone = jax.tree.map(lambda x: x[None], row)
        return jax.tree.map(lambda x: x[0], method(one, *alone))

    return jax.vmap(of_row)(_stacked(part), args)


def _stacked(part: Part) -> Part:
    """The part whose traced fields are arrays of rows, with the methods of a single row."""
    whole = object.__new__(part._of_one_row)  # type: ignore[attr-defined]
    vars(whole).update(vars(part))
    return whole


def _at_layer(method: Callable[..., Any]) -> Callable[..., Any]:
    """``at_layer`` of a part that overrides it: each row has its own result."""

    def call(self: Part, weights: Any, layer: int) -> OfRows:
        return OfRows(jax.vmap(lambda one: method(one, weights, layer))(_stacked(self)))

    return call


def _weights(params: Any) -> tuple[OfRows | None, Callable[[OfRows | None], Any]]:
    """The weights that have a row axis, and a function to the weights of one row."""
    own = params if isinstance(params, OfRows) else None
    return own, lambda row: params if row is None else jax.tree.map(lambda x: x[0], row.tree)


def _after_weights(method: Callable[..., Any]) -> Callable[..., Any]:
    """Methods whose first argument are learned weights, usually the same for all rows."""

    def call(self: Part, params: Any, *args: Any) -> Any:
        own, of = _weights(params)
        return _rows_of(self, lambda one, own, *row: method(one, of(own), *row), own, *args)

    return call


def _plain(method: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Part, *args: Any) -> Any:
        return _rows_of(self, method, *args)

    return call


def _observing(method: Callable[..., Any]) -> Callable[..., Any]:
    """``arrive`` and ``admit``: an observation belongs to rows, except its layer."""

    def call(self: Part, params: Any, observed: Any) -> Any:
        own, of = _weights(params)

        def see(one: Part, own: Any, pos: Array, total: Array, values: dict[str, Array]) -> Any:
            return method(one, of(own), dataclasses.replace(observed, pos=pos, total=total, values=values))

        return _rows_of(self, see, own, observed.pos, observed.total, observed.values)

    return call


def _targets(method: Callable[..., Any]) -> Callable[..., Any]:
    """``targets``: a frame's confidence and its protected tokens may belong to a row."""

    def call(self: Part, frame: Frame, length: Array, scores: Array | None) -> Any:
        def of(one: Part, length: Array, extra: dict[str, Array]) -> Any:
            row = dataclasses.replace(
                frame,
                confidence=extra.get("confidence"),
                # A number, as a single policy has it.
                protected=extra["protected"][0] if "protected" in extra else frame.protected,
            )
            return method(one, row, length, extra.get("scores"))

        extra = {"confidence": frame.confidence, "protected": frame.protected, "scores": scores}
        return _rows_of(self, of, length, {name: x for name, x in extra.items() if np.ndim(x)})

    return call


def _select(method: Callable[..., Any]) -> Callable[..., Any]:
    """``select``: page lists and prompt lengths belong to a row, the pool to all."""

    def call(self: Part, params: Any, q: Array, pages: Any, list_id: int, total: Array, longest: int) -> Any:
        own, of = _weights(params)

        def see(one: Part, own: Any, q: Array, table: Array, length: Array, total: Array) -> Any:
            lists = dataclasses.replace(pages, table=table, length=length)
            return method(one, of(own), q, lists, list_id, total, longest)

        return _rows_of(self, see, own, q, pages.table, pages.length, total)

    return call


_Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]

_METHODS: dict[str, dict[str, _Wrap]] = {
    "admission": {"admit": _observing},
    "eviction": {"score": _after_weights, "query_weights": _plain, "accumulate": _plain},
    "selection": {"selectable": _plain, "select": _select},
    "storage": {},
    "budget": {"targets": _targets, "confidence": _plain},
    "completion": {"absorb": _after_weights, "read": _after_weights},
}
"""What layers ask of the parts of a place while decoding, besides ``arrive``."""
