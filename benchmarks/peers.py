"""The environment of the peers, transformers and kvpress: a virtual environment of its own.

kvpress 0.5.5 needs torch and transformers below 5.3; ``make`` installs the pinned set. Only
``peer_script.py`` runs there, which imports neither kvjax nor jax.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from kvjax.cli import InputError

TORCH = "torch==2.13.0"
PINS = ("transformers==5.2.0", "kvpress==0.5.5", "safetensors")
"""The versions of the recorded results."""

SCRIPT = Path(__file__).with_name("peer_script.py")


def _python(folder: Path) -> Path:
    windows = folder / "Scripts" / "python.exe"
    return windows if windows.exists() else folder / "bin" / "python"


def make(folder: Path, pip_arguments: tuple[str, ...] = ()) -> None:
    """Creates the peers' environment.

    Args:
      folder: must not exist, or be empty.
      pip_arguments: of ``pip install`` for torch, such as ``--index-url=…/whl/cpu``.

    Raises:
      InputError: a folder in use, or a pip that fails.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"peers --make {folder} will not replace what is there. Remove it, or name another.")
    install = [str(_python(folder)), "-m", "pip", "install", "--disable-pip-version-check"]
    # torch first and alone, so that the others' requirements do not bring a second one.
    steps = [
        [sys.executable, "-m", "venv", str(folder)],
        [*install, TORCH, *pip_arguments],
        [*install, *PINS],
    ]
    for step in steps:
        print("+", " ".join(step), file=sys.stderr, flush=True)
        code = subprocess.run(step, check=False, stdout=sys.stderr).returncode
        if code:
            raise InputError(
                f"peers --make {folder}: {' '.join(step[1:5])} … ended with {code}. See its "
                "message above; remove the folder before the next try."
            )


def command(folder: Path) -> list[str]:
    """The command line of a peer process.

    Raises:
      InputError: no environment there.
    """
    python = _python(folder)
    if not python.is_file() or not os.access(python, os.X_OK):
        raise InputError(
            f"--peers {folder} has no Python interpreter. Make it with: python -m benchmarks peers "
            f"--make {folder}"
        )
    # -I: our modules in the script's folder must not shadow those of libraries.
    return [str(python), "-I", str(SCRIPT)]
