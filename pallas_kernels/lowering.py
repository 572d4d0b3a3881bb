"""The device that is traced for, which need not be here: programs are compiled ahead of time for others.

What depends on it while tracing is which implementation runs (``dispatch``). Inside an implementation
``jax.lax.platform_dependent`` decides, which knows the platform even without ``for_device``.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType


@contextlib.contextmanager
def for_device(kind: str, cores: int, platform: str) -> Iterator[None]:
    """Trace and lower for a device that is not here, e.g. ("TPU v5 lite", 1, "tpu").

    Pallas asks the mesh for the device it lowers for; without one it asks the CPU and fails.
    """
    known: dict[str, Any] = {"device_kind": kind, "num_cores": cores}
    with contextlib.suppress(TypeError):  # 0.7 and 0.8 have no field for the platform
        AbstractDevice(**known, platform=platform)
        known["platform"] = platform
    mesh = AbstractMesh(
        (1,), ("_",), axis_types=(AxisType.Explicit,), abstract_device=AbstractDevice(**known)
    )
    with jax.sharding.use_abstract_mesh(mesh):
        yield


def _absent_device() -> Any:
    return getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)


def is_local() -> bool:
    """Whether the device traced for is one of this process."""
    return _absent_device() is None


def kind() -> str:
    """The kind of device being traced for: that of ``for_device``, else of the first one here."""
    device = _absent_device()
    return jax.devices()[0].device_kind if device is None else device.device_kind


def is_hopper(kind: str) -> bool:
    """Whether a kind of device has the instructions of H100 and H200; later GPUs have others."""
    return re.search(r"\bG?H\d{2,3}\b", kind) is not None


def platform() -> str:
    """The platform being traced for: that of ``for_device``, else of the default backend."""
    device = _absent_device()
    if device is None:
        return jax.default_backend()
    return getattr(device, "platform", None) or ("tpu" if device.device_kind.startswith("TPU") else "gpu")
