"""Checks that all processes of a program make a call with the same arguments, before anything runs.

Each process computes SHA-256 of its arguments; the digests are exchanged once, and every process raises the
same error where they differ. One process, or a mesh within one, compares nothing and costs nothing.
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
"""Most arguments of one comparison. All have one shape, so that processes in different calls still meet."""


def check_consistent(call: str, mesh: Mesh, arguments: Mapping[str, Any]) -> None:
    """Refuses processes that make a call with different arguments.

    Args:
      call: the call, for the error.
      mesh: whose processes are compared.
      arguments: up to ``MOST`` by name: pytrees of arrays, numbers and words. Of an array that lies across
        processes only the shape is compared.

    Raises:
      MeshError: in every process, naming all that differs.
    """
    if mesh.across:
        compare(call, {"the mesh": repr(mesh), **arguments}, mesh.processes)


def compare(call: str, arguments: Mapping[str, Any], processes: Sequence[int]) -> None:
    """``check_consistent``, between these processes."""
    if len(processes) == 1:
        return
    whole = [call, *arguments], *arguments.values()
    digests = np.zeros((MOST + 1, 8), np.uint32)
    digests[: len(whole)] = [np.frombuffer(digest(one), np.uint32) for one in whole]
    all_digests = _of_all(digests, processes)
    for process, theirs in zip(processes, all_digests):
        differs = (theirs != all_digests[0]).any(axis=1)
        if differs[0]:
            raise MeshError(
                f"{call}: process {process} is in another call than process {processes[0]}. Run the same "
                "program in all processes."
            )
        if differs.any():
            names = [name for name, other in zip(arguments, differs[1:]) if other]
            raise MeshError(
                f"{call}: process {process} got other arguments than process {processes[0]}: "
                f"{_listed(names)}{_own(arguments, names)}. Give all processes the same."
            )


def digest(tree: Any) -> bytes:
    """SHA-256 of a pytree of arrays, numbers and words, wherever the arrays lie."""
    sha = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        sha.update(f"{jax.tree_util.keystr(path)}:{getattr(leaf, 'shape', '')}".encode())
        if isinstance(leaf, bytes | str | int | float | bool):
            sha.update(leaf if isinstance(leaf, bytes) else repr(leaf).encode())
        elif not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
            sha.update(np.asarray(leaf).tobytes())
    return sha.digest()


def _of_all(digests: np.ndarray, processes: Sequence[int]) -> np.ndarray:
    """The digests of all processes, exchanged over one device of each."""
    firsts = [min(_devices_of(process), key=lambda device: device.id) for process in processes]
    grid = jax.sharding.Mesh(np.asarray(firsts), ("process",))
    shape, per_process = (len(firsts), *digests.shape), NamedSharding(grid, P("process"))
    sharded = jax.make_array_from_callback(shape, per_process, lambda _: digests[None])
    return np.asarray(jax.jit(lambda x: x, out_shardings=NamedSharding(grid, P()))(sharded))


def _devices_of(process: int) -> list[Any]:
    return [device for device in jax.devices() if device.process_index == process]


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _own(arguments: Mapping[str, Any], names: Sequence[str]) -> str:
    """This process's arguments, where they are short."""
    plain = [arguments[name] for name in names if isinstance(arguments[name], str | int | float | tuple)]
    listed = ", ".join(repr(value) for value in plain if len(repr(value)) <= 60)
    return f" (here {listed})" if listed else ""
