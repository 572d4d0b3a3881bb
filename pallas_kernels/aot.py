"""Compile for chips that are not here: libtpu holds all of the TPU compiler, the CUDA plug-in that of GPUs.

Needs the wheels of the optional group ``aot`` (libtpu pinned to the jax version; the plug-in with
``--no-deps``), no device, no driver. ``compiled`` gives what a device would run, with its memory
analysis; ``copies`` finds in it what a layout costs: copies of an operand as large as a pool.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
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

from pallas_kernels import compat  # noqa: E402

TPUS = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
"""Chips to the names libtpu knows their smallest topologies by."""

GPUS = {"h200": ("NVIDIA H200", 132)}

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


@functools.cache
def target(chip: str, topology: str | None = None) -> Target:
    """One of ``CHIPS``, or several of them.

    Args:
      chip: its name.
      topology: for several TPUs, libtpu's name, such as "v5e:16x16".

    Raises:
      Missing: its compiler's wheel is not installed, or does not know it.
    """
    try:
        if chip in TPUS:
            found: Any = topologies.get_topology_desc(
                platform="tpu", topology_name=topology or TPUS[chip]
            ).devices
            cores = getattr(found[0], "num_cores", 1) or 1
            return Target(found, found[0].device_kind, cores, "tpu", ("tpu",))
        jax.devices()  # finds plug-ins
        options = {"target_config": _H200, "topology": "1x1x1"}
        found = topologies.get_topology_desc(platform="cuda", topology_name="", **options).devices
        return Target(found, *GPUS[chip], "gpu", ("cuda",))
    except (RuntimeError, NotImplementedError, ValueError) as reason:
        line = (str(reason).splitlines() or [""])[0]
        hint = "pip install 'kvjax[aot]', and set JAX_PLATFORMS=cpu where there is no device"
        raise Missing(f"no compiler for {chip} ({hint}): {line}") from reason


def _lowered(chip: Target, run: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    place = SingleDeviceSharding(chip.devices[0])
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), args)
    with compat.lowering_for(chip.kind, chip.cores, chip.platform):
        return jax.jit(run).trace(*args).lower(lowering_platforms=chip.lowering)


def compiled(chip: Target, run: Callable[..., Any], *args: Any) -> Any:
    """``jax.jit(run)`` compiled for one device of ``chip``; args are shapes (``jax.ShapeDtypeStruct``)."""
    return _lowered(chip, run, args).compile()


def fits_registers(chip: Target, run: Callable[..., Any], *args: Any) -> bool:
    """Whether a GPU's assembler needs no memory to spill registers to, in any kernel of the program."""
    strict = {"xla_gpu_fail_ptx_compilation_on_register_spilling": True}
    try:
        _lowered(chip, run, args).compile(compiler_options=strict)
    except jax.errors.JaxRuntimeError as error:
        if "spill" in str(error).lower():
            return False
        raise
    return True


_OP = re.compile(r"= (\w+)\[([\d,]*)\][^ ]* (copy|copy-start|transpose|pad|fusion|bitcast-convert)\(")


def copies(program: Any, at_least: int) -> list[str]:
    """Operations of a compiled program that write ``at_least`` elements anew by moving them about."""
    found = []
    for dtype, dims, op in _OP.findall(program.as_text()):
        size = 1
        for dim in filter(None, dims.split(",")):
            size *= int(dim)
        if size >= at_least:
            found.append(f"{op} {dtype}[{dims}]")
    return found
