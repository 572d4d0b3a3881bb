"""Data-parallel training of a small model: each device takes a part of the rows and holds all weights.

``train.mesh`` shards the weights too, for large models. On a CPU, where one thread is one core,
XLA_FLAGS=--xla_force_host_platform_device_count=N makes N devices.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax

from kvjax.sharding.mesh import shard
from kvjax.sharding.specs import DATA
from kvjax.types import Params
from train import loop
from train.mesh import Layout, P, layout

if TYPE_CHECKING:
    from jaxtyping import Array, Float


@dataclasses.dataclass(frozen=True)
class DataParallel(Layout):
    """One part of a batch a device, and all weights on every device."""

    def backbone(self, tree: Any) -> Any:
        """The sharding of every leaf of a model's weights."""
        return jax.tree.map(lambda _: self.of(P()), tree)

    def batch(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Leaves [parts, ...], each part on its device."""
        return {name: shard(value, self.of(P(DATA))) for name, value in batch.items()}


def make_layout(count: int) -> DataParallel:
    """Over the first ``count`` devices.

    Raises:
      ValueError: there are fewer.
    """
    return DataParallel(layout(count, 1).mesh)


def mean_loss(loss: loop.Loss, where: DataParallel) -> loop.Loss:
    """The mean of ``loss`` over the parts of a batch; its gradient is summed over the devices."""

    def whole(params: Params, batch: dict[str, Array]) -> tuple[Float[Array, ""], dict[str, Array]]:
        def one(params: Params, batch: dict[str, Array]) -> Any:
            results = loss(params, jax.tree.map(lambda leaf: leaf[0], batch))
            return jax.tree.map(lambda leaf: jax.lax.pmean(leaf, DATA), results)

        return where.mesh.each(one, (params, batch), (P(), P(DATA)), P())  # type: ignore[no-any-return]

    return whole
