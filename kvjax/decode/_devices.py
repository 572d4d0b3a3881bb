"""A model and learned weights on the devices that a call runs on."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

from kvjax.cache.mesh import ONE, Mesh, MeshError, mesh, mesh_of
from kvjax.types import Params, Weighted

M = TypeVar("M", bound=Weighted)


def mesh_for(call: str, model: Weighted, given: Mesh | str | None, rows: int) -> Mesh:
    """The mesh of a call: what it names, else where the model's weights lie.

    Raises:
      MeshError: no mesh, too few devices, or a mesh that does not divide the rows or the model's heads.
    """
    found = mesh_of(model.params) if given is None else mesh(given)
    network = model.network
    found.check(call, rows=rows, heads=network.num_heads, kv_heads=network.num_kv_heads)
    return found


def on_mesh(model: M, weights: Params, where: Mesh) -> tuple[M, Params]:
    """The model and the policy's learned weights there; what lies there is not moved.

    Raises:
      MeshError: a model that lies on a mesh, for one device.
    """
    lies = mesh_of(model.params)
    if where == ONE:
        if lies != ONE:
            raise MeshError(
                f"the model lies on {lies}, and one device is asked for. Load it again, without mesh."
            )
        return model, weights
    if lies != where:
        laid: Any = copy.copy(model)
        vars(laid)["params"] = where.put(model.params, where.of_model(model.network, model.params))
        model = laid
    return model, where.put(weights)
