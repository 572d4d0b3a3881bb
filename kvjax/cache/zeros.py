"""Arrays of zeros, all that belong together in one program: each fill alone would be one of its own."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxtyping import Array


def zeros(**shapes: tuple[tuple[int, ...], Any]) -> dict[str, Array]:
    """An array for each name, of that (shape, dtype)."""
    return _zeros(tuple((name, shape, jnp.dtype(dtype)) for name, (shape, dtype) in shapes.items()))


@functools.partial(jax.jit, static_argnums=0)
def _zeros(shapes: tuple[tuple[str, tuple[int, ...], jnp.dtype], ...]) -> dict[str, Array]:
    return {name: jnp.zeros(shape, dtype) for name, shape, dtype in shapes}


def of_slots(
    slots: tuple[int, ...], meta: Iterable[str], arrays: Mapping[str, tuple[tuple[int, ...], str]]
) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Shape and dtype of the values kept with each slot, by name: a float32, or what ``arrays`` says."""
    kinds = {name: arrays.get(name, ((), jnp.float32)) for name in meta}
    return {name: ((*slots, *shape), dtype) for name, (shape, dtype) in kinds.items()}
