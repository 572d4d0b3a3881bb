"""The attention function that a model calls at each layer; on a mesh every device runs its own part."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from kvjax.algebra import AllHeads, Part, Policy
from kvjax.layer._info import LayerInfo
from kvjax.layer._read import Loaded, Read
from kvjax.sharding.mesh import Mesh
from kvjax.sharding.specs import HEADS, MODEL_HEADS, ROWS, TENSOR, WHOLE, of_projection, of_state
from kvjax.sharding.specs import of_learned as of_parts
from kvjax.types import AttendFn, Heads, Params, Project

if TYPE_CHECKING:
    from jaxtyping import Array, Float

LayerFn = Callable[..., "tuple[Array, Any]"]
"""What happens at a layer, ``(info, heads, carry, *rows) -> (attention output, carry after it)``: ``step``,
``chunk``, ``prompt`` or your own."""

READ: Any = Read(
    out=MODEL_HEADS,  # type: ignore[arg-type]
    lse=HEADS,  # type: ignore[arg-type]
    mass=HEADS,  # type: ignore[arg-type]
    loaded=Loaded(ring=ROWS, pages=HEADS, selector=HEADS, summary=WHOLE),  # type: ignore[arg-type]
)
"""How the record of a read is cut."""


def attention(
    run: LayerFn,
    info: Callable[[int], LayerInfo],
    mesh: Mesh,
    rows: tuple[Any, ...] = (),
    out: Callable[[Any], Any] = of_state,
) -> AttendFn[Any]:
    """``run`` as the function that the model calls at each layer.

    Args:
      run: pure; all arrays that it needs come through its arguments.
      info: of a layer, by the index that the model passes.
      mesh: where the cache lies.
      rows: further arguments of ``run``: arrays that begin with [B].
      out: how the carry that ``run`` returns is cut, by the carry it was given.
    """

    def attend(index: int, heads: Heads, carry: Any) -> tuple[Array, Any]:
        if mesh.grid is None:
            return run(info(index), heads, carry, *rows)
        cut = (MODEL_HEADS, out(carry))
        return on_devices(run, info(index), heads, carry, mesh, rows, cut)  # type: ignore[no-any-return]

    return attend


def on_devices(
    run: Callable[..., Any],
    info: LayerInfo,
    x: Heads | None,
    carry: Any,
    mesh: Mesh,
    rows: tuple[Any, ...] = (),
    out: Any = None,
) -> Any:
    """``run(info, x, carry, *rows)`` on each device, of its own rows and heads; on one device just that.

    Args:
      run, info, mesh, rows: as in ``attention``.
      x: the new tokens' heads, or None.
      carry: a cache, or arrays that begin with [B, K] or [B, N].
      out: how the result is cut.
    """
    if mesh.grid is None:
        return run(info, x, carry, *rows)
    policy = info.policy
    # What the layer does not look at is not brought to the devices.
    names = ["q", "k", "v", *(name for name in ("q_pre", "k_pre", "hidden") if name in policy.needs)]
    arrays = {name: getattr(x, name) for name in names} if x is not None else {}
    project = x.project if x is not None and "hidden" in policy.needs else None
    by_head = project if hasattr(project, "among") else None
    wo = x.wo if x is not None and "wo_norm" in policy.needs else None
    sinks = x.sinks if x is not None else None
    heads = AllHeads(TENSOR, mesh.size(TENSOR)) if mesh.size(TENSOR) > 1 else AllHeads()
    inputs = {
        "policy": (policy, WHOLE),
        "params": (info.params, of_parts(policy.parts, info.params)),
        "layer": (jnp.asarray(info.layer), WHOLE),
        "of_rows": ((info.total, info.confidence, info.seeds), ROWS),
        "arrays": (arrays, {name: ROWS if name == "hidden" else MODEL_HEADS for name in arrays}),
        "project": (by_head, jax.tree.map(of_projection, by_head)),
        "wo": (wo, None if wo is None else P(None, TENSOR)),
        "sinks": (sinks, None if sinks is None else P(TENSOR)),
        "carry": (carry, of_state(carry)),
        "rows": (rows, ROWS),
    }

    def local(part: dict[str, Any]) -> Any:
        total, confidence, seeds = part["of_rows"]
        own = dataclasses.replace(
            info,
            policy=part["policy"],
            params=part["params"],
            layer=part["layer"],
            total=total,
            confidence=confidence,
            seeds=seeds,
            heads=heads,
            kind=info.kind,
        )
        tokens = None
        if x is not None:
            absent = dict.fromkeys(("q", "k", "v", "q_pre", "k_pre", "hidden"))
            present: dict[str, Any] = absent | part["arrays"]
            own_model = {name: part[name] for name in ("wo", "sinks")}
            if by_head is not None:
                own_model["project"] = part["project"].among(heads)
            elif project is not None:
                own_model["project"] = _own_heads(project, heads)
            tokens = Heads(**present, softcap=x.softcap, rotate=x.rotate, **own_model)
        return run(own, tokens, part["carry"], *part["rows"])

    values, specs = ({name: pair[i] for name, pair in inputs.items()} for i in (0, 1))
    return mesh.each(local, [values], [specs], out)


def _own_heads(project: Project, heads: AllHeads) -> Project:
    """The queries of a device's heads by a map of which every device has all weights."""

    def own(hidden: Float[Array, "B T D"]) -> Float[Array, "B T N H"]:
        return jnp.moveaxis(heads.local(jnp.moveaxis(project(hidden), 2, 1)), 1, 2)

    return own


def of_learned(policy: Policy, weights: Params) -> Params:
    """How learned weights lie on a mesh: each device has those of its heads.

    Whole on every device are leaves that heads share, and weights that a part reads of all layers together:
    it compares their heads.
    """
    together = {part.place for part in policy.learned if type(part).at_layer is not Part.at_layer}
    whole: dict[str, P] = {place: jax.tree.map(lambda _: WHOLE, weights[place]) for place in together}
    return of_parts(policy.parts, weights) | whole
