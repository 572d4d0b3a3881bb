"""Compile for chips that are not here: libtpu holds all of the TPU compiler, the CUDA plug-in that of GPUs.

Needs the wheels of the optional group ``aot`` (both pinned to the jax version) and for GPUs CUDA's
assembler, no device, no driver. ``compiled`` gives what a device would run, with its memory analysis;
``copies`` finds in it what a layout costs: copies of an operand as large as a pool. What is not
installed raises ``Missing``; what is installed and fails, fails.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
import re
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
        found: Any = topologies.get_topology_desc(
            platform="tpu", topology_name=topology or TPUS[chip]
        ).devices
        cores = getattr(found[0], "num_cores", 1) or 1
        return Target(found, found[0].device_kind, cores, "tpu", ("tpu",))
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
    found = topologies.get_topology_desc(platform="cuda", topology_name="", **options).devices
    gpu = Target(found, *GPUS[chip], "gpu", ("cuda",))
    _assembles(gpu)
    return gpu


def lowered(chip: Target, run: Callable[..., Any], *args: Any, donated: tuple[int, ...] = ()) -> Any:
    """``jax.jit(run)`` lowered for one device of ``chip``; args are shapes (``jax.ShapeDtypeStruct``)."""
    place = SingleDeviceSharding(chip.devices[0])
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), args)
    with lowering.for_device(chip.kind, chip.cores, chip.platform):
        traced = jax.jit(run, donate_argnums=donated).trace(*args)
        return traced.lower(lowering_platforms=chip.lowering)


def digest(program: Any) -> str:
    """A lowered program's name: the same for the same program and the same compilers."""
    text = program.as_text() + repr(sorted(wheels().items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def compiled(chip: Target, run: Callable[..., Any], *args: Any, donated: tuple[int, ...] = ()) -> Any:
    """What ``lowered`` gives, compiled."""
    return lowered(chip, run, *args, donated=donated).compile()


class SpillsError(ValueError):
    """A GPU's assembler ran out of registers."""


def compiled_without_spills(
    chip: Target, run: Callable[..., Any], *args: Any, donated: tuple[int, ...] = ()
) -> Any:
    """``compiled``, where on a GPU no kernel may spill registers to memory.

    The CUDA assembler itself counts (``ptxas``: "bytes spill stores"); on a TPU nothing is checked.

    Raises:
      SpillsError: a kernel spills; XLA does not say which one, ``static.registers`` does.
    """
    if chip.platform != "gpu":
        return compiled(chip, run, *args, donated=donated)
    strict = {"xla_gpu_fail_ptx_compilation_on_register_spilling": True}
    try:
        return lowered(chip, run, *args, donated=donated).compile(compiler_options=strict)
    except jax.errors.JaxRuntimeError as error:
        if "spill" not in str(error).lower():
            raise
        raise SpillsError(" ".join(str(error).split())[:300]) from error


NOTHING_MOVES = {
    *(
        "parameter",
        "constant",
        "bitcast",
        "tuple",
        "get-tuple-element",
        "opt-barrier",
        "optimization-barrier",
    ),
    # Kernels; and what only holds other operations or ends one, which are seen where they begin.
    *("custom-call", "call", "while", "conditional", "copy-done", "async-done", "after-all"),
}
# Of tuples that hold sources too: (destination, source, ...) and ((source), destination, ...).
_DESTINATION = {"copy-start": slice(0, 1), "slice-start": slice(1, 2)}
_HEAD = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*{$")
_OP = re.compile(r"^\s*(?:ROOT )?%?[\w.-]+ = (.+?) ([a-z][\w-]*)\(")
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]((?:\{[^}]*\})?)")


def launches(program: Any) -> int:
    """Kernels that one call of a compiled GPU program starts; those of a loop count once."""
    inside, looping = "", set(re.findall(r"(?:body|condition)=%?([\w.-]+)", program.as_text()))
    count = 0
    for line in program.as_text().splitlines():
        head, op = _HEAD.match(line), _OP.match(line)
        inside = ("ENTRY" if line.startswith("ENTRY") else head.group(1)) if head else inside
        if op and (inside == "ENTRY" or inside in looping):
            count += op.group(2) == "custom-call" or op.group(2) not in NOTHING_MOVES
    return count


def copies(program: Any, at_least: int, *, vmem: bool = False) -> list[str]:
    """Operations of a compiled program, kernels apart, whose result has ``at_least`` elements in memory.

    What is inside a fusion is not in memory, the fusion's result is. What XLA brings to a TPU's VMEM
    (memory space 1) for its readers is read once and written nowhere: ``vmem`` asks for that instead, of
    operands of which a kernel reads parts.
    """
    text = program.as_text()
    fused = set(re.findall(r" fusion\(.*?calls=%?([\w.-]+)", text))
    found, inside = [], ""
    for line in text.splitlines():
        head, op = _HEAD.match(line), _OP.match(line)
        inside = head.group(1) if head else inside
        if op is None or inside in fused or op.group(2) in NOTHING_MOVES:
            continue
        for dtype, dims, layout in _SHAPE.findall(op.group(1))[_DESTINATION.get(op.group(2), slice(None))]:
            if ("S(1)" in layout) is vmem and math.prod(int(x) for x in dims.split(",") if x) >= at_least:
                found.append(f"{op.group(2)} {dtype}[{dims}]")
                break
    return found
