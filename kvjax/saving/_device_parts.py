"""A state across processes on disk: a folder, in which each process writes what its devices hold.

A part holds some rows and KV heads of every layer, those of one device with a pool of its own, in the layout
of
a whole state: live slots in the order of the per-head caches, no tables. So a part is as long as its content,
nothing goes from process to process, and joined they are the arrays of the one file that a single process
would have written. The part's head names its rows and heads.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from kvjax.saving._atomic import clear, replace
from kvjax.saving._format import StateError
from kvjax.sharding.mesh import Mesh
from kvjax.sharding.specs import DATA, TENSOR, of_state

NAME = "part-{at:05d}-of-{of:05d}.safetensors"
"""Of a part's file."""

_KINDS = (
    ("once", r"extra\..+|peak"),
    ("rows", r"length|total|confidence"),
    ("heads", r"\d+\.(ring|summary)\..+|\d+\.pages\.\d+\.length"),
    ("pages", r"\d+\.pages\.\d+\.(scales(\..+)?|summary\..+)"),
    ("slots", r"\d+\.pages\.\d+\..+"),
)
"""The kind of an array's first axes, by its name; the first pattern that fits counts."""


@dataclasses.dataclass(frozen=True)
class Block:
    """The rows and KV heads of one device.

    Attributes:
      at: its index among all blocks, in the order of pools.
      of: how many blocks there are.
      rows, heads: from and to.
      whole: B and K of the state.
    """

    at: int
    of: int
    rows: tuple[int, int]
    heads: tuple[int, int]
    whole: tuple[int, int]

    @property
    def index(self) -> tuple[slice, slice]:
        """Its place in arrays [B, K, ...]."""
        return slice(*self.rows), slice(*self.heads)


Part = tuple[Block, dict[str, np.ndarray]]
"""A block, and its arrays by name."""


def block_of(call: str, part: Any) -> Block:
    """The block that a head names; its numbers are whole.

    Raises:
      StateError: it names none.
    """
    try:
        block = Block(part["at"], part["of"], *(tuple(part[name]) for name in ("rows", "heads", "whole")))
        numbers = [block.at, block.of, *block.rows, *block.heads, *block.whole]
    except (KeyError, TypeError) as error:
        raise StateError(f"{call} has a part of no place. Save the state again.") from error
    if len(numbers) != 8 or not all(type(number) is int and number >= 0 for number in numbers):
        raise StateError(f"{call} has a part at {numbers}. Save the state again.")
    return block


def complete(parts: Sequence[Block]) -> bool:
    """Are these all blocks of one grid, in order?"""
    rows, heads = parts[0].whole
    high, wide = (end - begin for begin, end in (parts[0].rows, parts[0].heads))
    if high < 1 or wide < 1 or rows % high or heads % wide or rows // high * (heads // wide) != len(parts):
        return False
    grid = itertools.product(range(0, rows, high), range(0, heads, wide))
    return list(parts) == [
        Block(at, len(parts), (row, row + high), (head, head + wide), (rows, heads))
        for at, (row, head) in enumerate(grid)
    ]


def blocks(mesh: Mesh, rows: int, heads: int) -> Iterator[Block]:
    """The blocks of a state of so many rows and KV heads."""
    high, wide = rows // mesh.size(DATA), heads // mesh.size(TENSOR)
    for at in range(mesh.pools):
        row, head = divmod(at, mesh.size(TENSOR))
        bounds = (row * high, row * high + high), (head * wide, head * wide + wide)
        yield Block(at, mesh.pools, *bounds, (rows, heads))


def writer(mesh: Mesh, block: Block) -> Any:
    """The device whose process writes a block: along ``context``, where all hold the same, the first."""
    assert mesh.grid is not None
    return mesh.grid.devices[(*divmod(block.at, mesh.size(TENSOR)), 0)]


def on_device(tree: Any, mesh: Mesh, device: Any) -> Any:
    """The part of caches on the mesh that a device of this process holds, in NumPy; page ids are its own."""

    def local_shard(x: jax.Array, spec: Any) -> np.ndarray:
        if not x.sharding.is_equivalent_to(mesh.sharding(spec), x.ndim):
            raise AssertionError(
                f"a cache's array has sharding {x.sharding}, not {spec}"
            )  # never the user's fault
        [shard] = [shard for shard in x.addressable_shards if shard.device == device]
        return np.asarray(shard.data)

    return jax.tree.map(local_shard, tree, of_state(tree))


def cut(arrays: dict[str, np.ndarray], block: Block) -> dict[str, np.ndarray]:
    """A part's share of the arrays that belong to rows, or to the whole state."""
    kinds = {name: _kind(name) for name in arrays}
    rows = {name: x[slice(*block.rows)] for name, x in arrays.items() if kinds[name] == "rows"}
    return rows | {name: x for name, x in arrays.items() if kinds[name] == "once" and block.at == 0}


def join(parts: Sequence[Part], layers: Sequence[dict[str, Any]]) -> dict[str, np.ndarray]:
    """The arrays of the whole state.

    Args:
      parts: all blocks, and the arrays of each.
      layers: sizes of each layer's caches, as heads have them.
    """
    names = parts[0][1]

    @functools.cache
    def lengths(pool: str) -> np.ndarray:
        return _per_head(parts, f"{pool}.length")

    def whole(name: str) -> np.ndarray:
        kind = _kind(name)
        if kind == "once":
            return names[name]
        if kind == "rows":
            rows = [x[name] for block, x in parts if block.heads[0] == 0]
            return np.concatenate(rows)
        if kind == "heads":
            return _per_head(parts, name)
        layer, _, pool, _ = name.split(".", 3)
        counts, size = lengths(f"{layer}.pages.{pool}"), layers[int(layer)]["pools"][int(pool)]["size"]
        return _listed(parts, name, counts if kind == "slots" else -(-counts // size))

    return {name: whole(name) for name in names}


def _kind(name: str) -> str:
    return next(kind for kind, pattern in _KINDS if re.fullmatch(pattern, name))


def _per_head(parts: Sequence[Part], name: str) -> np.ndarray:
    """An array [B, K, ...] of the whole state, or [B, N, ...] with a group's query heads together."""
    first = parts[0][1][name]
    rows, heads = parts[0][0].whole
    own = parts[0][0].heads
    group = first.shape[1] // (own[1] - own[0])
    array = np.zeros((rows, heads, group, *first.shape[2:]), first.dtype)
    for block, arrays in parts:
        part = arrays[name]
        array[block.index] = part.reshape(len(part), -1, group, *part.shape[2:])
    return array.reshape(rows, heads * group, *first.shape[2:])


def _listed(parts: Sequence[Part], name: str, counts: np.ndarray) -> np.ndarray:
    """An array of the whole state whose items lie list after list; ``counts`` [B, K, R] are their numbers."""
    first = parts[0][1][name]
    array = np.zeros((int(counts.sum()), *first.shape[1:]), first.dtype)
    begins = (counts.cumsum() - counts.ravel()).reshape(counts.shape)
    for block, arrays in parts:
        many, begin = counts[block.index].ravel(), begins[block.index].ravel()
        before = many.cumsum() - many  # of this part's items
        array[np.repeat(begin - before, many) + np.arange(many.sum())] = arrays[name]
    return array


# --- all processes together ----------------------------------------------------------------------


def write_together(path: Path, write: Callable[[Path], None]) -> None:
    """Writes a folder with Orbax; it appears when every process has written its part, or not at all.

    Args:
      path: of the folder, the same in all processes.
      write: puts this process' files into a folder.

    Raises:
      OSError: in all processes, where one could not write.
    """
    from jax.experimental import multihost_utils

    from kvjax.saving import _orbax_folder  # by those who need it: Orbax takes seconds to import

    beside = path.absolute().with_name(f".{path.name}.parts")

    def by_first(act: Callable[..., None], *paths: Path) -> None:
        _all_or_none(path, lambda: act(*paths) if jax.process_index() == 0 else None)

    by_first(clear, beside)  # of a save that was killed
    try:
        _orbax_folder.save(beside, lambda folder: _all_or_none(path, functools.partial(write, folder)))
        by_first(replace, beside, path)
    finally:
        if jax.process_index() == 0:
            clear(beside)
    multihost_utils.sync_global_devices("saved")  # after this every process finds the folder


def _all_or_none(path: Path, act: Callable[[], None]) -> None:
    """Acts in every process; if it fails in one, all raise."""
    from jax.experimental import multihost_utils

    error = None
    try:
        act()
    except OSError as reason:
        error = reason
    failed = np.flatnonzero(multihost_utils.process_allgather(np.asarray(error is not None)))
    if error is not None:
        raise error
    if failed.size:
        raise OSError(
            f"save({str(path)!r}): process {failed[0]} could not write its part; see its own error."
        )
