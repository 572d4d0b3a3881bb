"""Values of a config.json, each checked where it is read."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kvjax.errors import UserError


class ModelError(UserError):
    """A folder, file or tree of weights that is not a model kvjax can read or write."""


def count(config: dict[str, Any], key: str, file: str, default: int | None = None) -> int:
    """A whole number from 1; null counts as absent."""
    value = default if config.get(key) is None else config[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"{file} has {key} {value!r}; it must be a whole number from 1.")
    return value


def number(config: dict[str, Any], key: str, file: str, default: float | None = None) -> float:
    """A number above 0; null counts as absent."""
    value = default if config.get(key) is None else config[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ModelError(f"{file} has {key} {value!r}; it must be a number above 0.")
    return float(value)


def numbers(config: dict[str, Any], key: str, length: int, file: str) -> tuple[float, ...]:
    """A list of ``length`` numbers above 0."""
    value = config.get(key)
    if not isinstance(value, list) or len(value) != length:
        raise ModelError(f"{file} has {key} {value!r}; it must be a list of {length} numbers.")
    return tuple(number({key: item}, key, file) for item in value)


def cast(array: np.ndarray, dtype: str, name: str) -> np.ndarray:
    """The array in another dtype, ``aligned``; refuses a float16 that overflows."""
    if str(array.dtype) == dtype:
        return array
    new = aligned(array.shape, dtype)
    with np.errstate(over="ignore"):
        np.copyto(new, array, casting="unsafe")
    if dtype == "float16" and not np.isfinite(new).all() and np.isfinite(array.astype(np.float32)).all():
        raise ModelError(f"{name} has values beyond float16's 65504; use dtype='bfloat16' or 'float32'.")
    return new


def aligned(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """An array that is not filled yet, placed so that jax on a CPU takes it over without a copy."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    return memory[begin : begin + size].view(dtype).reshape(shape)


_ALIGNMENT = 64
"""Bytes, XLA's."""
