"""Shards small networks that are trained side by side, one for each KV head, along one axis."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from kvjax.sharding.mesh import shard
from kvjax.sharding.specs import TENSOR
from train import mesh
from train.config import ConfigError


@dataclasses.dataclass(frozen=True)
class AgentLayout(mesh.Layout):
    """Shards agents over the devices."""

    def batch(self, batch: dict[str, Any]) -> dict[str, Any]:
        """A batch on the mesh: arrays with an axis of agents are sharded by it, all others replicated."""
        spec = lambda value: mesh.P(None, TENSOR) if value.ndim > 2 else mesh.P()  # noqa: E731
        return {name: shard(value, self.of(spec(value))) for name, value in batch.items()}


def make_layout(count: int, agents: int, devices: Sequence[Any] | None = None) -> AgentLayout:
    """A layout over the first ``count`` devices, by default of this machine.

    Raises:
      ConfigError: too few devices, or agents that do not divide over them.
    """
    if agents % count:
        raise ConfigError(f"devices: {count} does not divide {agents} agents. Make it a divisor of them.")
    available = len(jax.devices() if devices is None else devices)
    if available < count:
        raise ConfigError(
            f"devices: {count} needs as many, {available} are here. Make it smaller; on a CPU, "
            "XLA_FLAGS=--xla_force_host_platform_device_count=N makes more."
        )
    return AgentLayout(mesh.layout(1, count, devices).mesh)
