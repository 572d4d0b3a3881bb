"""``save``: the live part of a state into a file, or into a folder of parts across processes."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from kvjax import catalogue
from kvjax.algebra import Policy
from kvjax.cache.pages import Pages
from kvjax.cache.ring import Ring
from kvjax.cache.state import DONATED, KVState, LayerCache
from kvjax.saving import _device_parts as device_parts
from kvjax.saving._atomic import check_place, replace
from kvjax.saving._file import encoded
from kvjax.saving._format import FORMAT, VERSION, StateError, named_scales, places
from kvjax.sharding.consistency import check_consistent
from kvjax.sharding.mesh import ONE
from kvjax.sharding.reshard import on_host
from kvjax.types import Weighted
from kvjax.weights import fingerprint


def save(
    state: KVState,
    path: str | Path,
    *,
    model: Weighted,
    policy: Policy | str,
    label: str = "",
    extra: dict[str, np.ndarray] | None = None,
    notes: dict[str, str] | None = None,
) -> None:
    """Writes a state; the file appears complete or not at all.

    Args:
      state: not changed.
      path: a file; a state of that name is replaced. For a state across processes a folder that all of them
        reach; all call this, and each writes what its devices hold.
      model: the model that made it.
      policy: the policy that it was made under.
      label: of the policy's learned weights (``kvjax.weights.find(...).label``).
      extra, notes: arrays and words to be saved with it.

    Raises:
      StateError: a state that was donated, or of another policy; a folder that holds other things.
      MeshError: processes that got different arguments.
      OSError: a path that cannot be written, by any of the processes.
    """
    policy, path, beside = catalogue.policy(policy), Path(path), dict(extra or {})
    if state.gone:
        raise StateError(f"save({str(path)!r}): {DONATED}")
    if policy.structure != state.structure:
        raise StateError(
            f"save({str(path)!r}): the state was made under '{state.structure}', not under '{policy!r}'. "
            "Give the policy that made it."
        )
    check_place(path)
    named = {name: getattr(state, name) for name in ("length", "total", "peak", "confidence")}
    arrays = {name: np.asarray(x) for name, x in state.mesh.read(named).items() if x is not None}
    head = {
        "format": FORMAT,
        "version": VERSION,
        "model": fingerprint(model),
        "policy": repr(policy),
        "structure": state.structure,
        "weights": label,
        "dtype": str(state.layers[0].ring.k.dtype),
        "context": state.context,
        "chunk": state.chunk,
        "notes": notes or {},
    }
    if len(state.mesh.processes) > 1:
        compared = {"the path": str(path), "the policy": head["policy"], "the label": label}
        compared |= {
            "the model": head["model"],
            "what is beside it": {"arrays": beside, "words": dict(notes or {})},
        }
        check_consistent("save", state.mesh, compared)
        arrays |= {f"extra.{name}": np.asarray(value) for name, value in beside.items()}
        device_parts.write_together(path, lambda folder: _write_mine(folder, state, arrays, head))
        return
    lead = jax.process_index() == (state.mesh.processes or (0,))[0]
    if lead:
        layers = put_layers(arrays, (on_host(cache, state.mesh) for cache in state.layers))
        arrays |= {f"extra.{name}": np.asarray(value) for name, value in beside.items()}
        _write(path, arrays, head | {"layers": layers})
    if jax.process_count() > 1 and state.mesh == ONE:  # each process has it; after this each finds the file
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices("saved")


def _write_mine(folder: Path, state: KVState, shared: dict[str, np.ndarray], head: dict[str, Any]) -> None:
    """The parts of this process: a file for each of its devices that has a pool of its own."""
    for block in device_parts.blocks(state.mesh, state.rows, state.layers[0].ring.k.shape[1]):
        device = device_parts.writer(state.mesh, block)
        if device.process_index == jax.process_index():
            caches = (device_parts.on_device(cache, state.mesh, device) for cache in state.layers)
            write_part(folder, block, shared, caches, head)


def write_part(
    folder: Path,
    block: device_parts.Block,
    shared: dict[str, np.ndarray],
    caches: Iterable[LayerCache],
    head: dict[str, Any],
) -> None:
    """A file of one device's caches and of the counters of its rows."""
    arrays = device_parts.cut(shared, block)
    layers = put_layers(arrays, caches, int(shared["length"].max()))
    part = dataclasses.asdict(block)
    _write(folder / device_parts.NAME.format(**part), arrays, head | {"layers": layers, "part": part})


def put_layers(
    arrays: dict[str, np.ndarray], caches: Iterable[LayerCache], written: int | None = None
) -> list[dict[str, Any]]:
    """Adds the layers' arrays, one layer at a time; returns their sizes.

    Args:
      arrays: where they are added; holds ``length``.
      caches: in NumPy, or on one device.
      written: most tokens that a row of the whole state has seen; by default those of ``length``.
    """
    most = int(arrays["length"].max()) if written is None else written
    return [_put_layer(arrays, f"{index}", cache, most) for index, cache in enumerate(caches)]


def _write(path: Path, arrays: dict[str, np.ndarray], head: dict[str, Any]) -> None:
    handle, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.writelines(encoded(head, arrays))
            file.flush()
            os.fsync(file.fileno())
        replace(Path(beside), path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise


def _put_layer(arrays: dict[str, np.ndarray], at: str, cache: LayerCache, written: int) -> dict[str, Any]:
    """Adds a layer's arrays; returns its sizes. No row has seen more than ``written`` tokens."""
    _put_ring(arrays, f"{at}.ring", cache.ring, written)
    leaves = jax.tree.leaves(cache.summary)
    for index, leaf in enumerate(leaves):
        arrays[f"{at}.summary.{index}"] = np.asarray(leaf)
    pools = [_put_pages(arrays, f"{at}.pages.{kind}", pages) for kind, pages in enumerate(cache.pools)]
    return {"window": cache.ring.window, "pools": pools, "summary": len(leaves)}


def _put_ring(arrays: dict[str, np.ndarray], at: str, ring: Ring, written: int) -> None:
    named = {"k": ring.k, "v": ring.v, "admit": ring.admit} | {f"meta.{n}": x for n, x in ring.meta.items()}
    named |= {f"queries.{name}": q for name, q in ring.queries.items()}
    arrays |= {f"{at}.{name}": np.asarray(value)[:, :, :written] for name, value in named.items()}


def _put_pages(arrays: dict[str, np.ndarray], at: str, pages: Pages) -> dict[str, Any]:
    """Live slots of all per-head caches one after the other, and the lengths of their lists."""
    page, slot = places(np.asarray(pages.length), np.asarray(pages.table), pages.size)
    owned = _owned(np.asarray(pages.length), np.asarray(pages.table), pages.size)
    arrays[f"{at}.length"] = np.asarray(pages.length)
    for name in ("k", "v", "pos"):
        arrays[f"{at}.{name}"] = np.asarray(getattr(pages, name))[page, slot]
    for name, value in pages.meta.items():
        arrays[f"{at}.meta.{name}"] = np.asarray(value)[page, slot]
    arrays |= {f"{at}.{name}": np.asarray(x)[owned] for name, x in named_scales(pages.scales).items()}
    for name, value in pages.summary.items():
        arrays[f"{at}.summary.{name}"] = np.asarray(value)[owned]
    return {"size": pages.size, "entries": pages.table.shape[-1]}


def _owned(length: np.ndarray, table: np.ndarray, size: int) -> np.ndarray:
    """Ids of the owned pages, list after list."""
    inside = np.arange(table.shape[-1]) < (-(-length // size))[..., None]
    return table[inside]
