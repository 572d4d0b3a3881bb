"""Small networks of a model's heads trained side by side: one axis for all of them, cut over the devices."""

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
    """Agents spread over the devices: of a batch each has what its agents see."""

    def batch(self, batch: dict[str, Any]) -> dict[str, Any]:
        """A batch on the mesh: by agent what has agents, everything else on every device."""
        spec = lambda value: mesh.P(None, TENSOR) if value.ndim > 2 else mesh.P()  # noqa: E731
        return {name: shard(value, self.of(spec(value))) for name, value in batch.items()}


def make_layout(devices: int, agents: int, of: Sequence[Any] | None = None) -> AgentLayout:
    """So many devices, of this machine unless others are given.

    Raises:
      ConfigError: too few of them, or agents that do not divide over them.
    """
    if agents % devices:
        raise ConfigError(f"devices: {devices} does not divide {agents} agents. Make it a divisor of them.")
    found = len(jax.devices() if of is None else of)
    if found < devices:
        raise ConfigError(
            f"devices: {devices} needs as many, {found} are here. Make it smaller; on a CPU, "
            "XLA_FLAGS=--xla_force_host_platform_device_count=N makes more."
        )
    return AgentLayout(mesh.layout(1, devices, of).mesh)
