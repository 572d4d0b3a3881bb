"""The machine under the measurement: its CPUs, how a process is pinned to some of them, its memory."""

from __future__ import annotations

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
    mine = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    if threads > len(mine):
        raise InputError(f"--threads {threads} exceeds the {len(mine)} CPUs of this process. Ask for fewer.")
    return list(mine)[-threads:]


def pin(to: list[int]) -> None:
    """Keep this process, and every thread it starts from now on, on these CPUs (where the system can)."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, to)


def environment(threads: int, devices: int = 1) -> dict[str, str]:
    """What a measured process must find in its environment before it imports anything.

    ``devices`` are virtual ones, which share the threads. Programs are compiled, never fetched: seconds of
    compiling are the compiler's own.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if threads == 1:
        flags += " --xla_cpu_multi_thread_eigen=false"
    if devices > 1:
        flags += f" --xla_force_host_platform_device_count={devices}"
    known = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "JAX_PLATFORMS": "cpu"}
    return (
        dict(os.environ)
        | known
        | {
            "XLA_FLAGS": flags.strip(),
            "HF_HUB_OFFLINE": "1",
            "JAX_ENABLE_COMPILATION_CACHE": "false",
        }
    )


def cpu_name() -> str:
    """The CPU's own name for itself."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()


def commit() -> str | None:
    """The commit of this checkout, "+" behind it when files differ; None outside of one."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    try:
        git = ["git", "-C", str(root)]
        name = subprocess.run(
            [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        )
        state = subprocess.run(
            [*git, "status", "--porcelain", "-uno", "kvjax", "pallas_kernels"], capture_output=True, text=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return name.stdout.strip() + ("+" if state.stdout.strip() else "")


def facts(threads: int) -> dict[str, str | int | None]:
    """What a result must say about where it was taken."""
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
    """Bytes of memory this process holds, and the most it held since ``forget_peak``; empty elsewhere."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return {}
    names = {"rss": "VmRSS", "peak_rss": "VmHWM"}
    found = {name: re.search(rf"^{key}:\s*(\d+) kB", status, re.MULTILINE) for name, key in names.items()}
    return {name: int(match[1]) * 1024 for name, match in found.items() if match}


def forget_peak() -> None:
    """Let the peak start again from what is held now, where the system can."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return
