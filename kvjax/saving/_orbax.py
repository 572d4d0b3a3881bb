"""Files that each process writes of its own, in a folder of Orbax; imported by who saves across processes.

Orbax' own handlers write global arrays of equal shards. Of arrays that one process alone has they write
those of process 0 and drop the others (NumPy), or refuse them (``jax.Array``); parts of a state are such
arrays, each as long as what it holds. So they come with a handler of their own, as positions of data loaders
do, and Orbax does the rest: the folder, the waiting for each other, and the name that appears when all have
written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp


class Parts(ocp.CheckpointHandler):
    """Lets every process write what it has into the folder."""

    def save(self, directory: Any, args: PartsArgs) -> None:
        """By all processes."""
        args.write(Path(directory))

    def restore(self, directory: Any, args: PartsArgs | None = None) -> list[Path]:
        """The files of all."""
        return sorted(Path(directory).glob("part-*"))


@ocp.args.register_with_handler(Parts, for_save=True, for_restore=True)
@dataclasses.dataclass
class PartsArgs(ocp.args.CheckpointArgs):
    """How this process writes its files into a folder."""

    write: Callable[[Path], None]


def save(folder: Path, write: Callable[[Path], None]) -> None:
    """Makes the folder, once all processes have written into it; they all call this."""
    ocp.Checkpointer(Parts()).save(folder, args=PartsArgs(write))
