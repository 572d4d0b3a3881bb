"""``open``: a state from a file, in pools just large enough for it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import catalogue
from kvjax.algebra import Policy
from kvjax.cache import pool
from kvjax.cache.pages import Pages
from kvjax.cache.ring import Ring
from kvjax.cache.state import KVState, LayerCache, reshard
from kvjax.saving import _device_parts as device_parts
from kvjax.saving._atomic import PARTS
from kvjax.saving._format import FORMAT, VERSION, StateError, check, digest, places
from kvjax.sharding.consistency import check_consistent
from kvjax.sharding.mesh import ONE, Mesh, mesh_of
from kvjax.sharding.mesh import mesh as a_mesh
from kvjax.types import EMPTY, Weighted


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saved:
    """A state that was read.

    Attributes:
      state: as it was saved, in pools just large enough for it.
      policy: the policy it was made under.
      label: of the policy's learned weights.
      extra, notes: arrays and words that were saved with it.
    """

    state: KVState
    policy: Policy
    label: str
    extra: dict[str, np.ndarray]
    notes: dict[str, str]


def open(
    path: str | Path,
    *,
    model: Weighted,
    policy: Policy | str | None = None,
    label: str | None = None,
    mesh: Mesh | str | None = None,
) -> Saved:
    """Reads a state that ``save`` wrote, for the model that made it.

    Args:
      path: the file or folder.
      model: whose state it must be.
      policy: the policy that will continue it, checked; None takes the one it was made under.
      label: of the learned weights that will be used, checked if given.
      mesh: devices to shard it over, whatever it was saved from; by default those of the model.

    Raises:
      StateError: no such file; one that is not a state, is cut off, or of a newer format; a folder that lacks
        a part; a state of another model, dtype, policy structure, or of other learned weights.
      MeshError: a mesh that does not divide its rows, or the model's heads; processes that were given
        different things.
    """
    policy = None if policy is None else catalogue.policy(policy)
    target, network = mesh_of(model.params) if mesh is None else a_mesh(mesh), model.network
    compared: dict[str, Any] = {"the policy": repr(policy), "the label": label}
    try:
        arrays, head = _read(Path(path))
    except StateError as error:
        check_consistent("open", target, compared | {"the file": str(error)})  # others may have read theirs
        raise
    check_consistent("open", target, compared | {"the file": head["digest"]})
    saved_policy = check(str(path), head, model, policy, label)
    rows = len(arrays["length"])
    target.check(f"open({str(path)!r})", rows=rows, heads=network.num_heads, kv_heads=network.num_kv_heads)
    layers = []
    for index, sizes in enumerate(head["layers"]):
        own = _under(arrays, f"{index}.")
        ring = _take_ring(_under(own, "ring."), sizes["window"])
        kv, dim = ring.k.shape[1], ring.k.shape[3]
        empty = saved_policy.completion.empty(rows, kv, dim, head["context"]) if sizes["summary"] else None
        leaves = [own[f"summary.{i}"] for i in range(sizes["summary"])]
        pools = [_take_pages(_under(own, f"pages.{kind}."), size) for kind, size in enumerate(sizes["pools"])]
        bare = LayerCache(
            ring=ring, pages=None, summary=jax.tree.unflatten(jax.tree.structure(empty), leaves)
        )
        layers.append(bare.with_pools(pools))
    named: dict[str, Any] = {n: arrays.get(n) for n in ("length", "total", "peak", "confidence")}
    state = KVState(
        layers=tuple(layers),
        **named,
        context=head["context"],
        chunk=head["chunk"],
        structure=head["structure"],
    )
    state = jax.device_put(state) if target == ONE else reshard(state, target)
    extra = _under(arrays, "extra.")
    return Saved(state=state, policy=saved_policy, label=head["weights"], extra=extra, notes=head["notes"])


def _under(arrays: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    """The arrays whose names begin with ``prefix``, by the rest of their names."""
    return {name.removeprefix(prefix): x for name, x in arrays.items() if name.startswith(prefix)}


def _take_ring(arrays: Mapping[str, np.ndarray], window: int) -> Ring:
    def whole(x: np.ndarray) -> Any:
        wide = np.zeros((*x.shape[:2], window, *x.shape[3:]), x.dtype)
        wide[:, :, : x.shape[2]] = x
        return wide

    meta = {name: whole(x) for name, x in _under(arrays, "meta.").items()}
    return Ring(k=whole(arrays["k"]), v=whole(arrays["v"]), admit=whole(arrays["admit"]), meta=meta)


def _take_pages(arrays: Mapping[str, np.ndarray], sizes: Mapping[str, int]) -> Pages:
    """A pool just large enough for what was saved, on the host: pages in the order of the lists."""
    length, size, entries = arrays["length"], sizes["size"], sizes["entries"]
    used = -(-length // size)
    count = pool.size_class(max(1, int(used.sum())))
    inside = np.arange(entries) < used[..., None]
    table = np.full((*length.shape, entries), EMPTY, np.int32)
    table[inside] = np.arange(int(used.sum()))
    page, slot = places(length, table, size)
    owned = np.arange(count) < used.sum()

    def slots(x: np.ndarray, empty: int = 0) -> Any:
        filled = np.full((count, size, *x.shape[1:]), empty, x.dtype)
        filled[page, slot] = x
        return filled

    def paged(x: np.ndarray) -> Any:
        filled = np.zeros((count, *x.shape[1:]), x.dtype)
        filled[: int(used.sum())] = x
        return filled

    n_free = count - int(used.sum())
    free = np.where(np.arange(count) < n_free, count - 1 - np.arange(count), 0)
    rest: dict[str, Any] = {
        "table": table,
        "length": length,
        "refs": owned.astype(np.int32),
        "free": free.astype(np.int32),
        "n_free": np.int32(n_free),
        "overflow": np.False_,
    }
    return Pages(
        k=slots(arrays["k"]),
        v=slots(arrays["v"]),
        scales=paged(arrays["scales"]) if "scales" in arrays else None,
        pos=slots(arrays["pos"], EMPTY),
        meta={name: slots(x) for name, x in _under(arrays, "meta.").items()},
        summary={name: paged(x) for name, x in _under(arrays, "summary.").items()},
        **rest,
    )


def _read(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The arrays and the head of a state that is whole, in a file or in parts."""
    if path.is_dir():
        return _read_parts(path)
    arrays, head = _read_file(f"open({str(path)!r})", path)
    if "part" in head:
        raise StateError(
            f"open({str(path)!r}) is one part of a state, of {head['part']['of']}. Open its folder."
        )
    return arrays, head


def _read_parts(folder: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """``_read`` of a folder."""
    call, files = f"open({str(folder)!r})", sorted(folder.glob(PARTS))
    parts = [_read_file(call, file) for file in files]
    heads = [head for _, head in parts]
    if not heads or any("part" not in head for head in heads):
        raise StateError(f"{call} is a folder without a saved state. Give one that save wrote.")
    blocks = [device_parts.Block(**head["part"]) for head in heads]
    if [block.at for block in blocks] != list(range(blocks[0].of)):
        raise StateError(
            f"{call} has {len(blocks)} of its {blocks[0].of} parts. Save the state again, into a folder that "
            "all processes reach."
        )
    shared = [{name: head[name] for name in head if name not in ("part", "digest")} for head in heads]
    if any(one != shared[0] for one in shared):
        raise StateError(f"{call} holds parts of different states. Save the state again.")
    whole = hashlib.sha256("".join(head["digest"] for head in heads).encode()).hexdigest()
    arrays = device_parts.join(
        [(block, arrays) for block, (arrays, _) in zip(blocks, parts)], heads[0]["layers"]
    )
    return arrays, shared[0] | {"digest": whole}


def _read_file(call: str, path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The arrays and the head of one file that is whole."""
    import safetensors.numpy

    try:
        content = path.read_bytes()
    except OSError as error:
        raise StateError(f"{call} cannot be read ({error.strerror}). Give a file that save wrote.") from error
    try:
        size = int.from_bytes(content[:8], "little")
        metadata = json.loads(content[8 : 8 + size])["__metadata__"]
        head, shapes = json.loads(metadata["head"]), json.loads(metadata["shapes"])
        ours = head["format"] == FORMAT
    except (ValueError, KeyError, TypeError) as error:
        raise StateError(f"{call} is not a saved state. Give a file that save wrote.") from error
    if not ours:
        raise StateError(f"{call} is not a saved state. Give a file that save wrote.")
    if head["version"] > VERSION:
        raise StateError(
            f"{call} has format {head['version']}, this kvjax reads up to {VERSION}. Use a newer kvjax."
        )
    try:
        raw = safetensors.numpy.load(content)
    except safetensors.SafetensorError as error:
        raise StateError(f"{call} was cut off or damaged ({error}). Save the state again.") from None
    if digest(raw) != metadata["digest"]:
        raise StateError(f"{call} was damaged: its content is not what was written. Save the state again.")
    return {name: _array(raw[name], *shapes[name]) for name in shapes}, head | {"digest": metadata["digest"]}


def _array(raw: np.ndarray, dtype: str, shape: list[int]) -> np.ndarray:
    return np.frombuffer(raw.tobytes(), jnp.dtype(dtype)).reshape(shape)
