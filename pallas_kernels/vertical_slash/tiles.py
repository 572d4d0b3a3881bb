"""Tiles of vertical_slash as pure functions on values (see ``pallas_kernels.tiles``).

Every visible pair belongs to exactly one of two reads: the vertical one has the packed keys up to the last
position that is outside a query's window, the band has the row's own keys after it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from pallas_kernels import tiles

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int


class Rule(NamedTuple):
    """What is static in a call, as in ``api.vertical_slash``."""

    window: int
    capacity: int
    scale: float
    softcap: float | None
    dtype: Any = np.dtype("float32")
    """Of ``out``."""


class Reach(NamedTuple):
    """Positions, per query: the last one outside its window, and the newest it sees; -1 for none.

    A column each, or equal lanes.
    """

    older: Int[Array, "R W"]
    newest: Int[Array, "R W"]


def reach(i: Int[Array, "R W"], length: Int[Array, ""], rule: Rule) -> Reach:
    """What queries i of a row of ``length`` tokens see."""
    live = i < length
    return Reach(jnp.where(live, i - rule.window, -1), jnp.where(live, i, -1))


def band(reach: Reach, j: Int[Array, "1 S"]) -> Bool[Array, "R S"]:
    """Keys j of the row itself."""
    return (j > reach.older) & (j <= reach.newest)


def vertical(reach: Reach, pos: Int[Array, "1 S"]) -> Bool[Array, "R S"]:
    """Packed keys at ``pos``."""
    return pos <= reach.older


def either(reach: Reach, packed: Bool[Array, ""], p: Int[Array, "1 S"]) -> Bool[Array, "R S"]:
    """``vertical`` where ``packed``, else ``band``."""
    low, high = jnp.where(packed, -1, reach.older), jnp.where(packed, reach.older, reach.newest)
    return (p > tiles.spread(low, p.shape[1])) & (p <= tiles.spread(high, p.shape[1]))


def grow(
    stats: tiles.Stats, q: Array, k: Array, v: Array, see: Bool[Array, "R S"] | None, rule: Rule
) -> tiles.Stats:
    """The statistics after one more tile of keys; ``see`` None: all of them are seen."""
    s = tiles.cap(tiles.product_nt(q, k) * rule.scale, rule.softcap)
    return tiles.grow(stats, s, see, lambda p: tiles.product_nn(p.astype(v.dtype), v))
