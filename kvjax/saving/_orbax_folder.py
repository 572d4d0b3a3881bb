"""A folder of Orbax into which each process writes files of its own.

Orbax's handlers write global arrays of equal shards. Of arrays that one process alone has they write those of
process 0 and drop the others (NumPy), or refuse them (``jax.Array``). Parts of a state are such arrays, each
of its own length, so they have a handler of their own. Orbax does the rest: it makes the folder, waits for
all processes, and renames the folder when all have written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp


class Parts(ocp.CheckpointHandler):
    """Lets every process write its files into the folder."""

    def save(self, directory: Any, args: PartsArgs) -> None:
        args.write(Path(directory))

    def restore(self, directory: Any, args: PartsArgs | None = None) -> list[Path]:
        return sorted(Path(directory).glob("part-*"))


@ocp.args.register_with_handler(Parts, for_save=True, for_restore=True)
@dataclasses.dataclass
class PartsArgs(ocp.args.CheckpointArgs):
    """The function by which this process writes its files into a folder."""

    write: Callable[[Path], None]


def save(folder: Path, write: Callable[[Path], None]) -> None:
    """Makes the folder, once all processes have written into it; they all call this."""
    ocp.Checkpointer(Parts()).save(folder, args=PartsArgs(write))
