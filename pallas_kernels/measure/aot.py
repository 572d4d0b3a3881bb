"""Compile for chips that are not here: libtpu holds all of the TPU compiler, the CUDA plug-in that of GPUs.

Needs the wheels of the optional group ``aot`` (both pinned to the jax version) and for GPUs CUDA's
assembler, no device, no driver. ``compiled`` gives what a device would run, with its memory analysis. What is
not installed raises ``Missing``.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from importlib import metadata
from typing import Any, NamedTuple

# Read once, when libtpu loads: no look-ups of a cloud's metadata, and more than one process at a time.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("TPU_LOG_DIR", "disabled")

import jax  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import SingleDeviceSharding  # noqa: E402

from pallas_kernels import lowering  # noqa: E402

TPUS = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
"""Chips to the names libtpu knows their smallest topologies by."""

GPUS = {"h200": ("NVIDIA H200", 132)}
"""Chips to the kind of device that jax says they are, and their multiprocessors."""

CHIPS = (*TPUS, *GPUS)

_H200 = """gpu_device_info { threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
 shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
 memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 150000000000
 shared_memory_per_block_optin: 232448 cuda_compute_capability { major: 9 minor: 0 }
 registers_per_core_limit: 65536 registers_per_block_limit: 65536 }
platform_name: "CUDA" dnn_version_info { major: 9 minor: 5 } device_description_str: "NVIDIA H200" """


class Missing(ValueError):  # noqa: N818, an absence, not an error
    """The compiler for a chip is not installed."""


class Target(NamedTuple):
    """A chip to compile for: its devices, what Pallas asks about it, and the platform to lower to."""

    devices: Any
    kind: str
    cores: int
    platform: str
    lowering: tuple[str, ...]

    @property
    def impl(self) -> str:
        """The Pallas implementation written for it."""
        return "mosaic_tpu" if self.platform == "tpu" else "triton"


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def wheels() -> dict[str, str]:
    """Versions of what compiles."""
    names = ("jax", "jaxlib", "libtpu", *_PLUGINS)
    return {name: version for name in names if (version := _installed(name))}


_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")


def _missing(chip: str, what: str) -> Missing:
    return Missing(f"no compiler for {chip}: {what}. Install with: pip install 'kvjax[aot]'")


def _assembles(chip: Target) -> None:
    """Raises ``Missing`` when there is no CUDA assembler, which the plug-in does not bring."""
    try:
        compiled(chip, lambda x: x + 1, jax.ShapeDtypeStruct((8,), "float32"))
    except jax.errors.JaxRuntimeError as error:
        if "PTX compilation provider" not in str(error):
            raise
        what = "no ptxas, which a CUDA toolkit has and the wheel nvidia-cuda-nvcc-cu12"
        raise _missing("GPUs", what) from error


def _meet_older_libtpu() -> None:
    """Colab's libtpu is older than its jax 0.7.2 asks for (0.0.21.1, 0.0.23).

    On a device jax sees that and writes kernels in the older form; without one it has to be told. Such a
    libtpu does not know the layouts of a topology: jaxlib is killed where it asks for them.
    """
    if jax.__version_info__ < (0, 8):
        from jax._src import xla_bridge
        from jax._src.interpreters import pxla

        xla_bridge.FORCE_FORWARD_COMPAT_LOWERING_PLATFORMS.add("tpu")  # type: ignore[attr-defined]
        pxla.is_default_layout = lambda *_: True


def _topology(chip: str, name: str) -> Any:
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=name)
    except jax.errors.JaxRuntimeError as error:
        if "Invalid TPU external name" not in str(error):
            raise
        raise Missing(f"no compiler for {chip}: libtpu {_installed('libtpu')} is older than it") from error


@functools.cache
def target(chip: str, topology: str | None = None) -> Target:
    """One of ``CHIPS``, or several of them.

    Args:
      chip: its name.
      topology: of several TPUs, libtpu's name, such as "v5e:16x16"; of several GPUs of one host, "h200:8".

    Raises:
      Missing: its compiler is not installed, or is of another version than jax.
      ValueError, RuntimeError: no such topology.
    """
    if chip in TPUS:
        if _installed("libtpu") is None:
            raise _missing(chip, "libtpu is not installed")
        _meet_older_libtpu()
        devices: Any = _topology(chip, topology or TPUS[chip]).devices
        cores = getattr(devices[0], "num_cores", 1) or 1
        return Target(devices, devices[0].device_kind, cores, "tpu", ("tpu",))
    known = [version for name in _PLUGINS if (version := _installed(name))]
    if metadata.version("jaxlib") not in known:
        what = f"no CUDA plug-in of jaxlib {metadata.version('jaxlib')} is installed, only {known or 'none'}"
        raise _missing(chip, what)
    jax.devices()  # finds plug-ins; without a device it fails, unless JAX_PLATFORMS=cpu
    count = int(topology.partition(":")[2]) if topology else 1
    options = {
        "target_config": _H200.replace("NVIDIA H200", GPUS[chip][0]),
        "topology": f"1x1x{count}",  # slices x hosts x devices of a host
    }
    devices = topologies.get_topology_desc(platform="cuda", topology_name="", **options).devices
    gpu = Target(devices, *GPUS[chip], "gpu", ("cuda",))
    _assembles(gpu)
    return gpu


def lowered(chip: Target, run: Callable[..., Any], *args: Any, donated: tuple[int, ...] = ()) -> Any:
    """``jax.jit(run)`` lowered for one device of ``chip``; args are shapes (``jax.ShapeDtypeStruct``)."""
    place = SingleDeviceSharding(chip.devices[0])
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), args)
    with lowering.for_device(chip.kind, chip.cores, chip.platform):
        traced = jax.jit(run, donate_argnums=donated).trace(*args)
        return traced.lower(lowering_platforms=chip.lowering)


def compiled(chip: Target, run: Callable[..., Any], *args: Any, donated: tuple[int, ...] = ()) -> Any:
    """What ``lowered`` gives, compiled."""
    return lowered(chip, run, *args, donated=donated).compile()
