"""Where a training step's arrays live: on the mesh that models and states lie on (``kvjax.mesh``).

  data     rows of the batch; weights are cut along D and gathered where they are used (FSDP)
  tensor   heads and F; between layers the residual stream is cut along T

Everything else follows by the compiler's propagation. One device is a mesh of 1 x 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from kvjax.models.decoder import LETTERS, shapes
from kvjax.models.quantised import refuse
from kvjax.models.spec import ModelSpec
from kvjax.sharding.mesh import Mesh, shard
from kvjax.sharding.mesh import mesh as a_mesh
from kvjax.sharding.specs import ROWS, TENSOR, TRAINED, WHOLE
from kvjax.types import Params


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh and how trees are sharded over it; in several processes, each with its own devices' part.

    Attributes:
      mesh: of ``layout``.
    """

    mesh: Mesh

    def of(self, spec: P) -> NamedSharding:
        """A sharding of this mesh."""
        return self.mesh.sharding(spec)

    def put(self, tree: Any, where: Any) -> Any:
        """Arrays at their shardings; the same values are given in every process."""
        return jax.tree.map(shard, tree, where)

    def backbone(self, tree: Any) -> Any:
        """The sharding of every leaf of a model's weights, ``stacked`` or not, or of their training state."""

        def one(path: Any, leaf: Any) -> NamedSharding:
            letters = LETTERS.get(getattr(path[-1], "key", ""), "")  # stacked leaves begin with [L]
            return self.of(self.mesh.spec(letters.rjust(len(leaf.shape)), leaf.shape, TRAINED))

        return jax.tree_util.tree_map_with_path(one, tree)

    def frozen(self, params: Params, dtype: str) -> Params:
        """A model's weights, ``stacked`` and on the mesh; no device ever holds them all."""
        tree = stacked(params, dtype)
        return self.put(tree, self.backbone(tree))

    def gates(self, tree: Any) -> Any:
        """The sharding of gates, or of a training state: leaves begin with [K], but norms and counters."""

        def one(path: Any, leaf: Any) -> NamedSharding:
            shared = leaf.ndim == 0 or getattr(path[-1], "key", None) == "norm"
            return self.of(WHOLE if shared else P(TENSOR))

        return jax.tree_util.tree_map_with_path(one, tree)

    def batch(self, batch: dict[str, Any]) -> dict[str, Any]:
        """A batch on the mesh: ``tokens`` by rows, everything else on every device."""
        return {
            name: shard(value, self.of(ROWS if name == "tokens" else WHOLE)) for name, value in batch.items()
        }

    def settle(self, tree: Any) -> Any:
        """What is not on the mesh yet (counters of an optimiser), on every device of it."""

        def one(leaf: Any) -> Any:
            there = getattr(leaf, "sharding", None)
            placed = isinstance(there, NamedSharding) and there.mesh == self.mesh.grid
            return leaf if placed else shard(leaf, self.of(WHOLE))

        return jax.tree.map(one, tree)

    def whole(self, tree: Any) -> Any:
        """Every leaf whole, on one device of this process."""
        everywhere = jax.jit(lambda x: x, out_shardings=self.of(WHOLE))(tree)
        return jax.tree.map(lambda leaf: leaf.addressable_data(0), everywhere)


def layout(data: int, tensor: int, devices: Sequence[Any] | None = None) -> Layout:
    """A mesh over the first data x tensor devices.

    Args:
      data, tensor: the axes' sizes.
      devices: all there are by default; those of a topology when compiling for chips that are not here.

    Raises:
      ValueError: fewer devices than the mesh needs.
    """
    devices = list(jax.devices() if devices is None else devices)
    if len(devices) < data * tensor:
        raise ValueError(
            f"mesh: {{data: {data}, tensor: {tensor}}} needs {data * tensor} devices, {len(devices)} are "
            "here. Make the axes smaller; on a CPU, XLA_FLAGS=--xla_force_host_platform_device_count=N makes "
            "more."
        )
    return Layout(a_mesh(data=data, tensor=tensor, devices=devices))


def stacked(params: Params, dtype: str) -> Params:
    """Backbone weights as ``distill.forward`` takes them: layers [L, ...], no output head; on the host."""
    refuse(params, "training")
    kept = {name: leaf for name, leaf in params.items() if name not in ("layers", "head")}
    layers = jax.tree.map(lambda *leaves: np.stack([np.asarray(x) for x in leaves]), *params["layers"])
    return jax.tree.map(lambda leaf: np.asarray(leaf).astype(jnp.dtype(dtype)), kept | {"layers": layers})


def stacked_shapes(spec: ModelSpec, dtype: str) -> Params:
    """The shapes ``stacked`` gives for a model that is not here."""
    tree = shapes(spec)
    layer, count = tree.pop("layers")[0], spec.num_layers
    tree.pop("head", None)
    whole = tree | {"layers": {name: (count, *shape) for name, shape in layer.items()}}
    as_shape = lambda shape: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    return jax.tree.map(as_shape, whole, is_leaf=lambda x: isinstance(x, tuple))
