"""``open(..., host="file")``: which arrays of a file are mapped, and a layer's pages in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from kvjax.algebra import Policy, Storage
from kvjax.cache import hosted as hosting
from kvjax.cache import mapped as mapping
from kvjax.cache.hosted import Hosted, Near
from kvjax.cache.pages import Pages
from kvjax.saving._file import ALIGNED, EACH, StateFile
from kvjax.saving._format import StateError, named_scales
from kvjax.sharding.mesh import ONE, Mesh
from kvjax.types import EMPTY

OF_PAGES = ("scales", "summary.")
"""How the names of arrays begin that have a value for each page."""


def mapped(call: str, host: str, files: Sequence[StateFile], policy: Policy, mesh: Mesh) -> list[str]:
    """Names of the arrays that stay in the file.

    Raises:
      StateError: a file or a place for which they cannot.
    """
    call, head = f"{call[:-1]}, host={host!r})", files[0].head
    if host != "file":
        raise StateError(f"{call}: host is 'file', to map pages from the file, or None, to read them.")
    if (platform := jax.default_backend()) != "cpu" or mesh != ONE:
        where = "a mesh" if mesh != ONE else platform
        raise StateError(f"{call} maps pages for one CPU, and this is {where}. Leave host out.")
    if "part" in head:
        raise StateError(f"{call} is a folder of parts, and pages are mapped from one file. Leave host out.")
    if not policy.storage.hosted:
        raise StateError(
            f"{call} was made under '{policy!r}', whose pages belong on the device. Leave host out, or read "
            f"the text under '{policy!r} + host'."
        )
    if why := hosting.absent():
        raise StateError(f"{call}: nothing can be mapped here: {why}. Leave host out.")
    if head["version"] < EACH:
        raise StateError(
            f"{call} has format {head['version']}, whose arrays cannot be mapped. Open it without host, and "
            "save it again."
        )
    names = [
        f"{layer}.pages.0.{name}"
        for layer in range(len(head["layers"]))
        if head["layers"][layer]["pools"] and policy.near(head["context"], layer) is not None
        for name in ("k", "v")
    ]
    names = [name for name in names if files[0].size(name)]
    for name in names:
        if files[0].begins[name] % ALIGNED:
            raise StateError(
                f"{call} has keys and values whose bytes are no multiple of {ALIGNED}, and those cannot be "
                "mapped. Leave host out."
            )
    return names


def full_pages(arrays: Mapping[str, np.ndarray], size: int) -> np.ndarray:
    """Full pages of the list that a selection chooses from, of each KV head [B, K]."""
    return arrays["length"][:, :, -1] // size


def without(arrays: Mapping[str, np.ndarray], size: int) -> dict[str, np.ndarray]:
    """The arrays of a pool without the full pages that a selection chooses among."""
    slots, pages = _stays(arrays["length"], size), _stays(arrays["length"], size, of_pages=True)
    of_slots = {name: arrays[name][slots] for name in ("k", "v", "pos")}
    of_pages = {name: x[pages] for name, x in arrays.items() if name.startswith(OF_PAGES)}
    length = arrays["length"].copy()
    length[:, :, -1] %= size
    return {**arrays, **of_slots, **of_pages, "length": length}


def _stays(length: np.ndarray, size: int, of_pages: bool = False) -> np.ndarray:
    """Which slots, or pages, of all lists are not of full pages of a last list."""
    kept = []
    for (*_, at), n in np.ndenumerate(length):
        last = at == length.shape[2] - 1
        count, full = (-(-n // size), n // size) if of_pages else (n, n // size * size)
        kept.append(np.arange(count) >= (full if last else 0))
    return np.concatenate(kept)


def hosted(arrays: Mapping[str, np.ndarray], pages: Pages, near: Near, storage: Storage) -> Hosted:
    """The full pages, mapped: list after list, as they lie in the file.

    Args:
      arrays: of the pool; ``k`` and ``v`` are mapped.
      pages: the others, ``without`` them.
      near: what the device has of them.
      storage: how a slot is stored.
    """
    size, length = pages.size, arrays["length"]
    ends = length.ravel().cumsum().reshape(length.shape)
    owned = full_pages(arrays, size)
    entry = np.arange(pages.table.shape[3])
    is_owned = entry < owned[..., None]
    table = np.full(is_owned.shape, EMPTY, np.int32)
    table[is_owned] = np.arange(int(owned.sum()))
    begins = ((ends - length)[:, :, -1, None] + entry * size)[is_owned]
    far = ~_stays(length, size, of_pages=True)
    scales = storage.scales(size, pages.head_dim)
    stored: dict[str, Any] = {name: arrays[name] for name in ("k", "v", "pos")}
    stored["scales"] = jax.tree.unflatten(
        jax.tree.structure(scales), [arrays[name][far] for name in named_scales(scales)]
    )
    stored["summary"] = {
        name: arrays[f"summary.{name}"][far].astype(x.dtype) for name, x in pages.summary.items()
    }
    return mapping.of_file(pages, near, stored, table, begins.astype(np.int32))
