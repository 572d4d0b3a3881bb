"""Replaces a file or folder by another in one step."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from kvjax.saving._format import StateError

PARTS = "part-*.safetensors"
"""Files of a state that lies in a folder."""

_OURS = (PARTS, "_CHECKPOINT_METADATA", "commit_success.txt")
"""All that such a folder may hold: parts, and the marks of Orbax."""


def check_place(path: Path) -> None:
    """Raises StateError for a folder that holds something else, which a state would replace."""
    if path.is_dir() and not all(any(file.match(name) for name in _OURS) for file in path.iterdir()):
        raise StateError(
            f"save({str(path)!r}): that is a folder, and holds more than a state. Name a file in it, or "
            "another place."
        )


def replace(fresh: Path, path: Path) -> None:
    """Renames a new file or folder to ``path``, in place of the state there."""
    if not (fresh.is_dir() or path.is_dir()):
        os.replace(fresh, path)  # in one go; folders need two
        return
    old = path.with_name(f".{path.name}.old")
    clear(old)
    if path.exists():
        path.rename(old)
    fresh.rename(path)
    clear(old)


def clear(path: Path) -> None:
    """Removes a file or folder, and an unfinished one of Orbax."""
    for one in path.parent.iterdir():
        if one.name == path.name or one.name.startswith(f"{path.name}.orbax-checkpoint-tmp"):
            shutil.rmtree(one) if one.is_dir() else one.unlink()
