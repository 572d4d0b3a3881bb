"""The peers' environment: transformers and kvpress beside us, never in our own environment.

kvpress 0.5.5 wants transformers below 5.3 and torch; ``make`` puts the pinned set into a virtual environment
of its own, on request. Whatever runs there is ``peer_script.py``, which knows nothing of kvjax or jax.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from kvjax.cli import InputError

TORCH = "torch==2.13.0"
PINS = ("transformers==5.2.0", "kvpress==0.5.5", "safetensors")
"""The versions PEERS.md's findings and the known figures were taken with."""

SCRIPT = Path(__file__).with_name("peer_script.py")


def python_of(folder: Path) -> Path:
    """The interpreter of a virtual environment."""
    windows = folder / "Scripts" / "python.exe"
    return windows if windows.exists() else folder / "bin" / "python"


def make(folder: Path, pip_arguments: tuple[str, ...] = ()) -> None:
    """Create the peers' environment.

    Args:
      folder: must not exist, or be empty.
      pip_arguments: put behind ``pip install`` for torch, such as ``--index-url=…/whl/cpu``.

    Raises:
      InputError: a folder in use, or a pip that fails.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"peers --make {folder} will not replace what is there. Remove it, or name another.")
    install = [str(python_of(folder)), "-m", "pip", "install", "--disable-pip-version-check"]
    # torch first and alone: with it installed, the others' ranges bring no second one.
    steps = [
        [sys.executable, "-m", "venv", str(folder)],
        [*install, TORCH, *pip_arguments],
        [*install, *PINS],
    ]
    for step in steps:
        print("+", " ".join(step), file=sys.stderr, flush=True)
        done = subprocess.run(step, check=False, stdout=sys.stderr)
        if done.returncode:
            raise InputError(
                f"peers --make {folder}: {' '.join(step[1:5])} … ended with {done.returncode}. See its "
                "message above; remove the folder before the next try."
            )


def command(folder: Path) -> list[str]:
    """The command line of a peer process.

    Raises:
      InputError: no environment there.
    """
    python = python_of(folder)
    if not python.is_file() or not os.access(python, os.X_OK):
        raise InputError(
            f"--peers {folder} holds no Python interpreter. Make it with: python -m benchmarks peers "
            f"--make {folder}"
        )
    # Isolated: the script's own folder, with our modules in it, must not shadow anybody's.
    return [str(python), "-I", str(SCRIPT)]
