"""The seam of a layer on a mesh: what is behind it runs on every device, with its own rows and heads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from kvjax.algebra import AllHeads, Part, Policy
from kvjax.layer._info import LayerInfo, OfRows
from kvjax.layer._read import Loaded, Read
from kvjax.sharding.mesh import OUT, ROWS, STREAMS, TENSOR, WHOLE, Mesh
from kvjax.types import Heads, Params

if TYPE_CHECKING:
    from jaxtyping import Array

Behind = Callable[..., Any]
"""``behind(info, heads, carry, *rows)``: what happens at a layer, of the rows and heads of one device."""


def at_seam(
    mesh: Mesh,
    behind: Behind,
    info: LayerInfo,
    x: Heads | None,
    carry: Any,
    rows: tuple[Any, ...] = (),
    out: Any = None,
) -> Any:
    """``behind(info, x, carry, *rows)``, on each device of the mesh of its own part; on one device just that.

    Args:
      mesh: where the cache lies.
      behind: pure; all arrays it needs come through its arguments.
      info: which layer.
      x: the new tokens' heads, or None.
      carry: a cache, or arrays that begin with [B, K] or [B, N].
      rows: arrays that begin with [B].
      out: how what follows the heads of the model's layout is cut; by default like the carry. Where there
        are no heads, how all of it is.
    """
    if mesh.grid is None:
        return behind(info, x, carry, *rows)
    policy, of_carry = info.policy, mesh.specs(carry)
    arrays = {name: getattr(x, name) for name in _looked_at(policy)} if x is not None else {}
    project = x.project if x is not None and "hidden" in policy.needs else None
    heads = AllHeads(TENSOR, mesh.size(TENSOR)) if mesh.size(TENSOR) > 1 else AllHeads()
    given = {
        "policy": (policy, P()),
        "params": (info.params, _learned(policy, info.params)),
        "layer": (jnp.asarray(info.layer), P()),
        "of_rows": ((info.total, info.confidence, info.seeds), ROWS),
        "arrays": (arrays, {name: ROWS if name == "hidden" else OUT for name in arrays}),
        "project": (project, jax.tree.map(_of_project, project)),
        "carry": (carry, of_carry),
        "rows": (rows, ROWS),
    }

    def here(mine: dict[str, Any]) -> Any:
        total, confidence, seeds = mine["of_rows"]
        local = dataclasses.replace(
            info,
            policy=mine["policy"],
            params=mine["params"],
            layer=mine["layer"],
            total=total,
            confidence=confidence,
            seeds=seeds,
            heads=heads,
            alike=info.layer if info.alike is None and isinstance(info.layer, int) else info.alike,
        )
        tokens = None
        if x is not None:
            absent = dict.fromkeys(("q", "k", "v", "q_pre", "k_pre", "hidden"))
            named: dict[str, Any] = absent | mine["arrays"]
            tokens = Heads(**named, softcap=x.softcap, rotate=x.rotate, project=mine["project"])
        return behind(local, tokens, mine["carry"], *mine["rows"])

    values, specs = ({name: pair[i] for name, pair in given.items()} for i in (0, 1))
    out = of_carry if out is None else out
    return mesh.each(here, [values], [specs], out if x is None else (OUT, out))


READ: Any = Read(
    out=OUT,  # type: ignore[arg-type]
    lse=STREAMS,  # type: ignore[arg-type]
    mass=STREAMS,  # type: ignore[arg-type]
    loaded=Loaded(ring=ROWS, pages=STREAMS, selector=STREAMS, summary=WHOLE),  # type: ignore[arg-type]
)
"""How the record of a read is cut."""


def _looked_at(policy: Policy) -> list[str]:
    """What of the heads is read behind the seam; what is not is not brought there."""
    return ["q", "k", "v", *(name for name in ("q_pre", "k_pre", "hidden") if name in policy.needs)]


def of_learned(policy: Policy, weights: Params) -> Params:
    """How learned weights are laid, of one layer or of all: each device has those of its heads.

    Whole are leaves that heads share, and what a part reads of all layers together: its heads are compared.
    """
    whole = [part.place for part in policy.learned if type(part).at_layer is not Part.at_layer]
    return _learned(policy, weights) | {x: jax.tree.map(lambda _: WHOLE, weights[x]) for x in whole}


def _learned(policy: Policy, params: Params) -> Params:
    """How what the parts read of their weights is cut: by head, but what a part says its heads share."""
    parts = {part.place: part for part in policy.parts}
    return {place: _by_head(parts[place], mine) for place, mine in params.items()}


def _by_head(part: Part, mine: Any) -> Any:
    if isinstance(mine, OfRows):
        return jax.tree.map(lambda _: STREAMS, mine)

    def one(path: Any, _: Array) -> P:
        return WHOLE if getattr(path[-1], "key", None) in part.shared else P(TENSOR)

    return jax.tree_util.tree_map_with_path(one, mine)


def _of_project(leaf: Array) -> P:
    """How a weight of ``Heads.project`` is cut: its last axis but one counts query heads."""
    return P(*[None] * (leaf.ndim - 2), TENSOR) if leaf.ndim > 1 else P()
