"""A model and learned weights on the devices that a call runs on, in all processes the same."""

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

TOLD = 1.1
"""An imbalance that is worth a word."""


def mesh_for(call: str, model: Weighted, given: Mesh | str | None, rows: int) -> Mesh:
    """The mesh of a call: what it names, else where the model's weights lie.

    Raises:
      MeshError: no mesh, too few devices, or a mesh that does not divide the rows or the model's heads.
    """
    found = mesh_of(model.params) if given is None else mesh(given)
    network = model.network
    found.check(call, rows=rows, heads=network.num_heads, kv_heads=network.num_kv_heads)
    return found


def on_mesh(model: M, policy: Policy, weights: Params, where: Mesh) -> tuple[M, Params]:
    """The model and the policy's learned weights there, by head; what lies there is not moved.

    Raises:
      MeshError: a model that lies on a mesh, for one device; other models in other processes.
    """
    lies = mesh_of(model.params)
    if where == ONE:
        if lies != ONE:
            raise MeshError(
                f"the model lies on {lies}, and one device is asked for. Load it again, without mesh."
            )
        return model, weights
    if lies != where:
        if where.across:
            check_consistent(f"laying the model on {where}", where, {"the model": fingerprint(model)})
        laid: Any = copy.copy(model)
        vars(laid)["params"] = where.put(model.params, where.of_model(model.network, model.params))
        model = laid
    return model, where.put(weights, layer.of_learned(policy, weights))


def tell_of_imbalance(state: KVState) -> None:
    """Warn where devices hold unequally much: memory and time go by the fullest."""
    if state.mesh == ONE:
        return
    found = metrics.imbalance(state)
    if found >= TOLD:
        warnings.warn(
            f"on {state.mesh} the fullest device holds {found:.1f} times the slots of the mean, and all have "
            "pools of its size. kvjax.load(..., heads=kvjax.metrics.balanced(state)) lays KV heads so that "
            "devices hold about as much; rows of unequal length want a like mix on each device.",
            Remark,
            stacklevel=1,
        )


def alike(call: str, where: Mesh, policy: Policy, weights: Params, given: Mapping[str, Any]) -> None:
    """Refuses processes that were given different things.

    Raises:
      MeshError: naming the policy, the learned weights or which of ``given`` differs.
    """
    check_consistent(call, where, {"the policy": repr(policy), "the learned weights": weights, **given})
