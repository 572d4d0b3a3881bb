"""Where a training step's arrays live: a mesh of two axes, the same program on one device or many.

  fsdp     rows of the batch; weights are cut along D and gathered where they are used
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
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from kvjax.models.decoder import shapes
from kvjax.models.spec import ModelSpec
from kvjax.types import Params

ROWS, HEADS = "fsdp", "tensor"

STREAM = P(ROWS, HEADS, None)
"""The residual stream [B, T, D] between layers."""

BY_HEAD = P(ROWS, HEADS)
"""Whatever begins with [B, N or K]."""

# Of the stacked layers' leaves [L, ...]; norms and what is not named here is on every device.
_LAYERS = {
    **dict.fromkeys(("wq", "wk", "wv", "w_gate", "w_up"), P(None, ROWS, HEADS)),
    "wo": P(None, HEADS, None, ROWS),
    "w_down": P(None, HEADS, ROWS),
    **dict.fromkeys(("bq", "bk", "bv", "b_up"), P(None, HEADS)),
}
_TABLES = {"embed": P(None, (ROWS, HEADS)), "positions": P(None, (ROWS, HEADS))}


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh and how trees are laid on it.

    Attributes:
      mesh: axes ``fsdp`` and ``tensor``.
    """

    mesh: Mesh

    def of(self, spec: P) -> NamedSharding:
        """A sharding of this mesh."""
        return NamedSharding(self.mesh, spec)

    def backbone(self, tree: Any) -> Any:
        """The sharding of every leaf of ``train.distill.stacked`` weights."""

        def one(path: Any, _: Any) -> NamedSharding:
            name = path[-1].key
            return self.of(_LAYERS.get(name, P()) if len(path) > 1 else _TABLES.get(name, P()))

        return jax.tree_util.tree_map_with_path(one, tree)

    def frozen(self, params: Params, dtype: str) -> Params:
        """A model's weights, ``stacked`` and on the mesh; no device ever holds them all."""
        tree = stacked(params, dtype)
        return jax.device_put(tree, self.backbone(tree))

    def gates(self, tree: Any) -> Any:
        """The sharding of gates, or of a training state: leaves begin with [K], but norms and counters."""

        def one(path: Any, leaf: Any) -> NamedSharding:
            shared = leaf.ndim == 0 or getattr(path[-1], "key", None) == "norm"
            return self.of(P() if shared else P(HEADS))

        return jax.tree_util.tree_map_with_path(one, tree)

    def batch(self, batch: dict[str, Any]) -> dict[str, Any]:
        """A batch on the mesh: ``tokens`` by rows, everything else on every device."""
        spec = lambda name: self.of(P(ROWS) if name == "tokens" else P())  # noqa: E731
        return {name: jax.device_put(value, spec(name)) for name, value in batch.items()}

    def settle(self, tree: Any) -> Any:
        """What is not on the mesh yet (counters of an optimiser), on every device of it."""

        def one(leaf: Any) -> Any:
            there = getattr(leaf, "sharding", None)
            placed = isinstance(there, NamedSharding) and there.mesh == self.mesh
            return leaf if placed else jax.device_put(leaf, self.of(P()))

        return jax.tree.map(one, tree)


def layout(fsdp: int, tensor: int, devices: Sequence[Any] | None = None) -> Layout:
    """A mesh over the first fsdp x tensor devices.

    Args:
      fsdp, tensor: the axes' sizes.
      devices: this machine's by default; those of a topology when compiling for chips that are not here.

    Raises:
      ValueError: fewer devices than the mesh needs.
    """
    found = list(jax.devices() if devices is None else devices)
    if len(found) < fsdp * tensor:
        raise ValueError(
            f"mesh: {{fsdp: {fsdp}, tensor: {tensor}}} needs {fsdp * tensor} devices, {len(found)} are here. "
            "Make the axes smaller; on a CPU, XLA_FLAGS=--xla_force_host_platform_device_count=N makes more."
        )
    grid = np.asarray(found[: fsdp * tensor]).reshape(fsdp, tensor)
    return Layout(Mesh(grid, (ROWS, HEADS), axis_types=(AxisType.Auto, AxisType.Auto)))


def stacked(params: Params, dtype: str) -> Params:
    """Backbone weights as the walk takes them: layers [L, ...], no output projection; on the host."""
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
