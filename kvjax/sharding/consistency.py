"""What the processes of one program must have alike, compared by digest before anything runs.

Each process gives what it was given; SHA-256 of it goes round once, and every process raises the same error
where they differ. One process, or a mesh within one, compares nothing and costs nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from kvjax.sharding.mesh import Mesh, MeshError

MOST = 15
"""Things that one comparison takes: all have one shape, so that processes in different calls still meet."""


def check_consistent(call: str, mesh: Mesh, given: Mapping[str, Any]) -> None:
    """Refuses processes that give a call different things.

    Args:
      call: what they call, for the error.
      mesh: whose processes are compared.
      given: up to ``MOST`` things by their names: pytrees of arrays, numbers and words. Of an array that
        lies across processes, which is one thing by itself, the shape alone counts.

    Raises:
      MeshError: in every process, naming all that differs.
    """
    if mesh.across:
        compare(call, {"the mesh": repr(mesh), **given}, mesh.processes)


def compare(call: str, given: Mapping[str, Any], processes: Sequence[int]) -> None:
    """``check_consistent``, between these processes."""
    if len(processes) == 1:
        return
    whole = [call, *given], *given.values()
    mine = np.zeros((MOST + 1, 8), np.uint32)
    mine[: len(whole)] = [np.frombuffer(digest(one), np.uint32) for one in whole]
    found = _of_all(mine, processes)
    for process, theirs in zip(processes, found):
        off = (theirs != found[0]).any(axis=1)
        if off[0]:
            raise MeshError(
                f"{call}: process {process} is in another call than process {processes[0]}. Run the same "
                "program in all processes."
            )
        if off.any():
            names = [name for name, other in zip(given, off[1:]) if other]
            raise MeshError(
                f"{call}: process {process} was given other things than process {processes[0]}, namely "
                f"{_listed(names)}{_own(given, names)}. Give all processes the same."
            )


def digest(tree: Any) -> bytes:
    """SHA-256 of a pytree of arrays, numbers and words, wherever the arrays lie."""
    found = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        found.update(f"{jax.tree_util.keystr(path)}:{getattr(leaf, 'shape', '')}".encode())
        if isinstance(leaf, bytes | str | int | float | bool):
            found.update(leaf if isinstance(leaf, bytes) else repr(leaf).encode())
        elif not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
            found.update(np.asarray(leaf).tobytes())
    return found.digest()


def _of_all(mine: np.ndarray, processes: Sequence[int]) -> np.ndarray:
    """Everybody's digests, by one device of each: the same ones, whatever mesh a process was given."""
    firsts = [min(_devices_of(process), key=lambda device: device.id) for process in processes]
    grid = jax.sharding.Mesh(np.asarray(firsts), ("process",))
    shape, apart = (len(firsts), *mine.shape), NamedSharding(grid, P("process"))
    laid = jax.make_array_from_callback(shape, apart, lambda _: mine[None])
    return np.asarray(jax.jit(lambda x: x, out_shardings=NamedSharding(grid, P()))(laid))


def _devices_of(process: int) -> list[Any]:
    return [device for device in jax.devices() if device.process_index == process]


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _own(given: Mapping[str, Any], names: Sequence[str]) -> str:
    """What this process has, where it can be said in a few words."""
    short = [f"{given[name]!r}" for name in names if isinstance(given[name], str | int | float | tuple)]
    said = ", ".join(word for word in short if len(word) <= 60)
    return f" (here {said})" if said else ""
