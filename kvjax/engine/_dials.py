"""Policies of one structure in one batch: each row has its own dials.

A policy's dials are leaves (``kvjax.algebra.Part``), so the policies of all rows can be stacked, a number a
row. What a part computes of tokens and slots is computed a row at a time, under ``vmap``: there the part sees
its own numbers, and its code knows nothing of rows. Structure is shared, and parts without dials are left as
they are.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from kvjax.algebra import Frame, Part, Policy
from kvjax.layer import OfRows

if TYPE_CHECKING:
    from jaxtyping import Array


def stack(policies: Sequence[Policy]) -> Policy:
    """One policy whose leaves have a leading axis of rows; all must be of one structure."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *policies)


def by_rows(policy: Policy) -> Policy:
    """The stacked policy as the layers ask it, each of its answers row by row; a pytree like any policy."""
    parts = {part.place: _by_rows(part) if part.traced else part for part in policy.parts}
    found = object.__new__(Policy)
    vars(found).update(vars(policy) | parts)
    return found


def _by_rows(part: Part) -> Part:
    mine: Any = type(part)
    kind = _kind(mine)
    found = object.__new__(kind)
    vars(found).update(vars(part))
    return found


@functools.cache
def _kind(kind: Any) -> type[Part]:
    """The kind of part whose methods answer row by row."""
    wraps = {"arrive": _observing} | _METHODS[kind.place]
    if kind.at_layer is not Part.at_layer:
        wraps = wraps | {"at_layer": _at_layer}
    methods = {name: wrap(getattr(kind, name)) for name, wrap in wraps.items()}
    return type(kind.__name__, (kind,), methods | {"_of_one_row": kind})


def _rows_of(part: Part, method: Callable[..., Any], *args: Any) -> Any:
    """``method(part of a row, args of the row)``, of all rows; arrays of ``args`` have a leading axis B."""

    def one(mine: Part, row: Any) -> Any:
        alone = jax.tree.map(lambda x: x[None], row)
        return jax.tree.map(lambda x: x[0], method(mine, *alone))

    return jax.vmap(one)(_stacked(part), args)


def _stacked(part: Part) -> Part:
    """The part whose dials are arrays of rows, with the methods of a single row."""
    whole = object.__new__(part._of_one_row)  # type: ignore[attr-defined]
    vars(whole).update(vars(part))
    return whole


def _at_layer(method: Callable[..., Any]) -> Callable[..., Any]:
    """``at_layer``, where a part has one of its own: what it makes of the weights is a row's."""

    def call(self: Part, weights: Any, layer: int) -> OfRows:
        return OfRows(jax.vmap(lambda mine: method(mine, weights, layer))(_stacked(self)))

    return call


def _weights(params: Any) -> tuple[OfRows | None, Callable[[OfRows | None], Any]]:
    """What of the weights goes along rows, and the weights of one of these."""
    own = params if isinstance(params, OfRows) else None
    return own, lambda row: params if row is None else jax.tree.map(lambda x: x[0], row.tree)


def _after_weights(method: Callable[..., Any]) -> Callable[..., Any]:
    """Methods whose first argument are learned weights, mostly the same for all rows."""

    def call(self: Part, params: Any, *args: Any) -> Any:
        own, of = _weights(params)
        return _rows_of(self, lambda mine, own, *row: method(mine, of(own), *row), own, *args)

    return call


def _plain(method: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Part, *args: Any) -> Any:
        return _rows_of(self, method, *args)

    return call


def _observing(method: Callable[..., Any]) -> Callable[..., Any]:
    """``arrive`` and ``admit``: of an observation, the layer is no row's."""

    def call(self: Part, params: Any, observed: Any) -> Any:
        own, of = _weights(params)

        def see(mine: Part, own: Any, pos: Array, total: Array, values: dict[str, Array]) -> Any:
            return method(mine, of(own), dataclasses.replace(observed, pos=pos, total=total, values=values))

        return _rows_of(self, see, own, observed.pos, observed.total, observed.values)

    return call


def _targets(method: Callable[..., Any]) -> Callable[..., Any]:
    """``targets``: of a frame, what the logits said and what is protected may be a row's."""

    def call(self: Part, frame: Frame, length: Array, scores: Array | None) -> Any:
        def of(mine: Part, length: Array, given: dict[str, Array]) -> Any:
            row = dataclasses.replace(
                frame,
                confidence=given.get("confidence"),
                # A number, as a single policy has it.
                protected=given["protected"][0] if "protected" in given else frame.protected,
            )
            return method(mine, row, length, given.get("scores"))

        given = {"confidence": frame.confidence, "protected": frame.protected, "scores": scores}
        return _rows_of(self, of, length, {name: x for name, x in given.items() if np.ndim(x)})

    return call


def _select(method: Callable[..., Any]) -> Callable[..., Any]:
    """``select``: page lists and prompt lengths belong to a row, the pool to all."""

    def call(self: Part, params: Any, q: Array, pages: Any, list_id: int, total: Array, longest: int) -> Any:
        own, of = _weights(params)

        def see(mine: Part, own: Any, q: Array, table: Array, length: Array, total: Array) -> Any:
            lists = dataclasses.replace(pages, table=table, length=length)
            return method(mine, of(own), q, lists, list_id, total, longest)

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
