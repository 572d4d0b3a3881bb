"""How the weights of a decoder lie: [outputs, inputs], as in the files of nearly all families.

So tensors are read into place, and one row times a weight is no slower on any CPU that was tried. Random
weights are still drawn, and fingerprints still taken, with the inputs first, so that no seed gives another
model and no saved fingerprint becomes invalid.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvjax.types import Params

INPUTS_FIRST: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("wq", "wk", "wv"), (2, 0, 1)),
    "wo": (1, 2, 0),
    **dict.fromkeys(("w_gate", "w_up", "w_down", "head"), (1, 0)),
}
"""Axes of each weight matrix, those of its inputs first."""


def inputs_first(weights: Params) -> Params:
    """The leaves of one layer as [inputs, outputs]; views of NumPy arrays."""
    return {name: x.transpose(INPUTS_FIRST.get(name, range(x.ndim))) for name, x in weights.items()}


def inputs_last(weights: Params) -> Params:
    """The leaves of ``inputs_first`` as a decoder takes them."""
    return {name: _inputs_last(name, x) for name, x in weights.items()}


def drawn(draw: Callable[[str, tuple[int, ...]], Any], name: str, shape: tuple[int, ...]) -> Any:
    """The leaf ``name`` of that shape; ``draw`` is called with the shape that has the inputs first."""
    axes = INPUTS_FIRST.get(name, range(len(shape)))
    return _inputs_last(name, draw(name, tuple(shape[axis] for axis in axes)))


def _inputs_last(name: str, x: Any) -> Any:
    return x.transpose(np.argsort(INPUTS_FIRST[name])) if name in INPUTS_FIRST else x
