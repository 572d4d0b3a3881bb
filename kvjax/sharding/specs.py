"""How each kind of array is cut over the devices of a mesh.

  ring, table, length, summary   [B, K, ...]     rows over ``data``, KV heads over ``tensor``
  pool, refs, free               [D P, ...]      P pages of each of D devices; ids count within a device
  n_free, overflow               [D]             one per device; a number inside a device's program
  length, total, confidence      [B]             on every device: any process may look at them
  a model's weights              by dimension    ``SERVED``: N, E, F and V over ``context`` too
  weights in training            by dimension    ``TRAINED``: D over ``data``, heads and F over ``tensor``
  a policy's learned weights     [K or N, ...]   by head, except leaves that all heads share

Classes of pytrees whose leaves differ say how they are cut in a method ``specs`` (``Pages``, ``Entry``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

DATA, TENSOR, CONTEXT = "data", "tensor", "context"
AXES = (DATA, TENSOR, CONTEXT)

WHOLE = P()
"""The same on every device."""

ROWS = P(DATA)
"""Arrays that begin with [B]."""

HEADS = P(DATA, TENSOR)
"""Arrays that begin with [B, K] or [B, N]."""

MODEL_HEADS = P(DATA, None, TENSOR)
"""Heads in the model's layout [B, T, N, H]."""

POOL = P((DATA, TENSOR))
"""Arrays that begin with the pages of all devices."""

RESIDUAL = P(DATA, TENSOR, None)
"""The residual stream [B, T, D] between layers, in training."""

SERVED: Mapping[str, tuple[str, ...]] = {"K": (TENSOR,), **dict.fromkeys("NEFV", (TENSOR, CONTEXT))}
"""Axes over which a served model's dimensions are cut, by the letters of ``kvjax.types``."""

TRAINED: Mapping[str, tuple[str, ...]] = {
    "V": (DATA, TENSOR),
    "D": (DATA,),
    **dict.fromkeys("KNF", (TENSOR,)),
}
"""The same in training; a table [V, D] is cut along V alone, because its look-up goes by V."""


def of_state(tree: Any) -> Any:
    """How every leaf of caches, pages, entries and summaries is cut."""
    own = lambda x: hasattr(x, "specs")  # noqa: E731
    return jax.tree.map(lambda x: x.specs() if own(x) else HEADS, tree, is_leaf=own)


def of_weight(
    letters: str, shape: tuple[int, ...], size: Callable[[str], int], cut: Mapping[str, tuple[str, ...]]
) -> P:
    """How a weight of these dimensions is cut.

    A dimension that the mesh does not divide stays whole; axes that cut one dimension cut none after it.

    Args:
      letters: its dimensions.
      shape: their sizes.
      size: devices along an axis of the mesh.
      cut: ``SERVED`` or ``TRAINED``.
    """
    by_dimension: list[tuple[str, ...]] = []
    for letter, n in zip(letters, shape):
        axes = tuple(axis for axis in cut.get(letter, ()) if not any(axis in used for used in by_dimension))
        by_dimension.append(axes if n % math.prod(size(axis) for axis in axes) == 0 else ())
    return P(*[axes or None for axes in by_dimension]) if any(by_dimension) else WHOLE


def of_learned(parts: Iterable[Any], weights: Mapping[str, Any]) -> dict[str, Any]:
    """How the learned weights of a policy's parts are cut, of one layer or of all layers.

    Args:
      parts: of the policy; ``part.shared`` names leaves that all heads share.
      weights: by place.
    """
    shared = {part.place: part.shared for part in parts}

    def by_head(place: str, tree: Any) -> Any:
        def spec(path: Any, _: Any) -> P:
            return WHOLE if getattr(path[-1], "key", None) in shared[place] else P(TENSOR)

        return tree.specs() if hasattr(tree, "specs") else jax.tree_util.tree_map_with_path(spec, tree)

    return {place: by_head(place, tree) for place, tree in weights.items()}


def of_projection(leaf: Any) -> P:
    """How a weight of our decoder's ``Heads.project`` is cut.

    Its first axis counts query heads, where it has several.
    """
    return P(TENSOR) if leaf.ndim > 1 else WHOLE


def spread(specs: Any, tree: Any) -> Any:
    """One spec per leaf of ``tree``, from specs of its branches."""
    is_spec = lambda x: isinstance(x, P)  # noqa: E731
    return jax.tree.map(lambda spec, part: jax.tree.map(lambda _: spec, part), specs, tree, is_leaf=is_spec)
