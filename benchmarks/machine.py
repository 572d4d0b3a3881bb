"""The machine under the measurement: its CPUs, how a process is pinned to some of them, its memory."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import subprocess
from pathlib import Path

from kvjax.cli import InputError


def cpus(threads: int) -> list[int]:
    """The CPUs every measured process is pinned to: the last ``threads`` this process may use.

    Raises:
      InputError: more threads than CPUs.
    """
    known = hasattr(os, "sched_getaffinity")
    usable = sorted(os.sched_getaffinity(0)) if known else list(range(os.cpu_count() or 1))
    if threads > len(usable):
        raise InputError(
            f"--threads {threads} exceeds the {len(usable)} CPUs of this process. Ask for fewer."
        )
    return usable[-threads:]


def pin(to: list[int]) -> None:
    """Keeps this process, and every thread it starts from now on, on these CPUs (if the system can)."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, to)


def environment(threads: int, devices: int = 1) -> dict[str, str]:
    """The environment of a measured process, which must be there before it imports anything.

    ``devices`` are virtual and share the threads. Programs are compiled, never fetched from a cache.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if threads == 1:
        flags += " --xla_cpu_multi_thread_eigen=false"
    if devices > 1:
        flags += f" --xla_force_host_platform_device_count={devices}"
    return dict(os.environ) | {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": flags.strip(),
        "HF_HUB_OFFLINE": "1",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
    }


WIDEST = ("amx_bf16", "avx512_bf16", "avx512f", "avx2")
"""Instructions that decide how fast products are, the fastest first, as Linux names them."""


def cpu_name() -> str:
    """The model name of the CPU, and the fastest of ``WIDEST`` that it has."""
    try:
        about = Path("/proc/cpuinfo").read_text()
    except OSError:
        about = ""
    name = re.search(r"^model name\s*:\s*(.+)$", about, re.MULTILINE)
    widest = [f", {one}" for one in WIDEST if re.search(rf"\b{one}\b", about)]
    return (name[1].strip() if name else platform.processor() or platform.machine()) + "".join(widest[:1])


def commit() -> str | None:
    """The commit of this checkout, with "+" if the code differs from it; None outside of a checkout."""
    root = Path(__file__).parents[1]
    if not (root / ".git").exists():
        return None
    try:
        git = ["git", "-C", str(root)]
        name = subprocess.run(
            [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        )
        state = subprocess.run(
            [*git, "status", "--porcelain", "-uno", "kvjax", "pallas_kernels", "benchmarks"],
            capture_output=True,
            text=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return name.stdout.strip() + ("+" if state.stdout.strip() else "")


def facts(threads: int) -> dict[str, str | int | None]:
    """What a result says about the machine."""
    import jax

    return {
        "cpu": cpu_name(),
        "cpus": os.cpu_count(),
        "threads": threads,
        "python": platform.python_version(),
        "jax": jax.__version__,
        "commit": commit(),
    }


def resident() -> dict[str, int]:
    """Bytes of memory of this process, and the most since ``forget_peak``; empty without /proc."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return {}
    names = {"rss": "VmRSS", "peak_rss": "VmHWM"}
    matches = {name: re.search(rf"^{key}:\s*(\d+) kB", status, re.MULTILINE) for name, key in names.items()}
    return {name: int(match[1]) * 1024 for name, match in matches.items() if match}


def forget_peak() -> None:
    """Lets the peak start again from what is held now, if the system can."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
