"""Puts a model and learned weights on the devices of a call; all processes must make the same call."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Any, TypeVar

from kvjax import layer, metrics
from kvjax.algebra import Policy
from kvjax.cache.state import KVState
from kvjax.decode._checks import Remark
from kvjax.sharding.consistency import check_consistent
from kvjax.sharding.mesh import ONE, Mesh, MeshError, mesh, mesh_of
from kvjax.types import Params, Weighted
from kvjax.weights import fingerprint

M = TypeVar("M", bound=Weighted)

UNEVEN = 1.1
"""An imbalance from which on ``warn_of_imbalance`` warns."""


def mesh_for(call: str, model: Weighted, named: Mesh | str | None, rows: int) -> Mesh:
    """The mesh that a call names, else the one on which the model's weights lie.

    Raises:
      MeshError: no mesh, too few devices, or a mesh that does not divide the rows or the model's heads or
        experts.
    """
    where = mesh_of(model.params) if named is None else mesh(named)
    network = model.network
    experts = getattr(network, "num_experts", None)
    where.check(call, rows=rows, heads=network.num_heads, kv_heads=network.num_kv_heads, experts=experts)
    return where


def on_mesh(model: M, policy: Policy, weights: Params, where: Mesh) -> tuple[M, Params]:
    """The model and the policy's learned weights on a mesh, cut by head; what lies there is not moved.

    Raises:
      MeshError: the model lies on a mesh and ``where`` is one device; processes have different models.
    """
    source = mesh_of(model.params)
    if where == ONE:
        if source != ONE:
            raise MeshError(
                f"the model lies on {source}, and one device is asked for. Load it again, without mesh."
            )
        return model, weights
    if source != where:
        if where.across:
            check_consistent(f"moving the model to {where}", where, {"the model": fingerprint(model)})
        sharded: Any = copy.copy(model)
        vars(sharded)["params"] = where.put(model.params, where.of_model(model.network, model.params))
        if hasattr(model.network, "on"):
            vars(sharded)["network"] = model.network.on(where)
        model = sharded
    return model, where.put(weights, layer.of_learned(policy, weights))


def warn_of_imbalance(state: KVState) -> None:
    """Warn where devices hold unequally much: memory and time go by the fullest."""
    if state.mesh == ONE:
        return
    imbalance = metrics.imbalance(state)
    if imbalance >= UNEVEN:
        warnings.warn(
            f"on {state.mesh} the fullest device holds {imbalance:.1f} times the slots of the mean, and all "
            "have pools of its size. kvjax.load(..., heads=kvjax.metrics.balanced(state)) orders KV heads so "
            "that devices hold about as much; mix long and short rows on every device.",
            Remark,
            stacklevel=1,
        )


def check_same_call(
    call: str, where: Mesh, policy: Policy, weights: Params, arguments: Mapping[str, Any]
) -> None:
    """Refuses processes that make a call with different arguments.

    Raises:
      MeshError: naming the policy, the learned weights or the arguments that differ.
    """
    check_consistent(call, where, {"the policy": repr(policy), "the learned weights": weights, **arguments})
