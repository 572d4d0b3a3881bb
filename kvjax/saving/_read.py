"""``open``: a state from a file, in pools just large enough for it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from kvjax import catalogue
from kvjax.algebra import Native, Policy, Storage
from kvjax.cache import hosted as hosting
from kvjax.cache import pool
from kvjax.cache.pages import Pages
from kvjax.cache.ring import Ring
from kvjax.cache.state import KVState, LayerCache, reshard, with_host
from kvjax.saving import _device_parts as device_parts
from kvjax.saving import _mapping
from kvjax.saving._atomic import PARTS
from kvjax.saving._file import StateFile, open_file
from kvjax.saving._format import StateError, check, named_scales, places
from kvjax.saving._sizes import GIVE, Expected, check_content, check_head, check_shapes, expected
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
    most_bytes: int | None = None,
    host: str | None = None,
) -> Saved:
    """Reads a state that ``save`` wrote, for the model that made it.

    With ``host="file"`` keys and values of full pages stay where a selection chooses among them, in the file,
    which is mapped and not read: a step reads what it chose. That is for CPUs, for a state of one file, made
    under a policy with ``host``. The file must stay as it is while the state lives (a file that ``save``
    puts in its place is another one); damage in what is mapped is not noticed. What is written later lies in
    memory, and so do the keys, or their codes, of a selection that ranks by keys: they are read once.

    Args:
      path: the file or folder.
      model: whose state it must be.
      policy: the policy that will continue it, checked; None takes the one it was made under.
      label: of the learned weights that will be used, checked if given.
      mesh: devices to shard it over, whatever it was saved from; by default those of the model.
      most_bytes: that its caches may take in memory, checked before they are made.
      host: "file", or None to read everything.

    Raises:
      StateError: no such file; one that is not a state, is cut off, damaged, or of a newer format; a folder
        that lacks a part; a state of another model, dtype, policy structure, or of other learned weights;
        sizes that no state of this model has, or that need more than ``most_bytes``; a state, device or
        ``host`` for which nothing can be mapped.
      MeshError: a mesh that does not divide its rows, or the model's heads; processes that were given
        different things.
    """
    policy = None if policy is None else catalogue.policy(policy)
    target, network = mesh_of(model.params) if mesh is None else a_mesh(mesh), model.network
    call, compared = f"open({str(path)!r})", {"the policy": repr(policy), "the label": label}
    try:
        files = _files(call, Path(path))
    except StateError as error:
        check_consistent("open", target, compared | {"the file": str(error)})  # others may have read theirs
        raise
    digests = [file.digest for file in files]
    check_consistent("open", target, compared | {"the file": digests})
    head = files[0].head
    saved_policy = check(str(path), head, model, policy, label)
    parts, rows = _parts(files, saved_policy, model)
    far = [] if host is None else _mapping.mapped(call, host, files, saved_policy, target)
    experts = getattr(network, "num_experts", None)
    target.check(call, rows=rows, heads=network.num_heads, kv_heads=network.num_kv_heads, experts=experts)
    try:
        arrays = _arrays(parts, saved_policy, most_bytes, far)
    except StateError as error:
        check_consistent("open", target, {"the content": str(error)})
        raise
    check_consistent("open", target, {"the content": digests})
    layers = []
    for index, sizes in enumerate(head["layers"]):
        own = _under(arrays, f"{index}.")
        ring = _take_ring(_under(own, "ring."), sizes["window"], saved_policy.queries)
        kv, dim = ring.k.shape[1], ring.k.shape[3]
        shapes = functools.partial(saved_policy.completion.empty, rows, kv, dim, head["context"])
        empty = jax.eval_shape(shapes) if sizes["summary"] else None
        leaves = [own[f"summary.{i}"] for i in range(sizes["summary"])]
        storages = (Native(), saved_policy.storage)[-len(sizes["pools"]) :]
        kept = [_under(own, f"pages.{kind}.") for kind in range(len(sizes["pools"]))]
        page = sizes["pools"][0]["size"] if kept else 0
        is_mapped = f"{index}.pages.0.k" in far and _mapping.full_pages(kept[0], page).any()
        taken = [_mapping.without(kept[0], page)] if is_mapped else kept
        pools = [
            _take_pages(of_pool, size, storage, dim, ring.k.dtype)
            for of_pool, size, storage in zip(taken, sizes["pools"], storages)
        ]
        bare = LayerCache(
            ring=ring, pages=None, summary=jax.tree.unflatten(jax.tree.structure(empty), leaves)
        )
        layer = bare.with_pools(pools)
        if is_mapped:
            near = saved_policy.near(head["context"], index)
            assert near is not None
            hosted = _mapping.hosted(kept[0], pools[0], near, storages[0])
            layer = dataclasses.replace(layer, hosted=hosted)
        layers.append(layer)
    named: dict[str, Any] = {n: arrays.get(n) for n in ("length", "total", "peak", "confidence")}
    state = KVState(
        layers=tuple(layers),
        **named,
        context=head["context"],
        chunk=head["chunk"],
        structure=head["structure"],
    )
    state = jax.device_put(state) if target == ONE else reshard(state, target)
    storage = saved_policy.storage
    if storage.hosted and (why := hosting.absent(codes=not storage.exact)):
        raise StateError(f"{call} has pages for host memory, and none can lie there: {why}.")
    state = dataclasses.replace(
        state,
        layers=tuple(
            with_host(layer, saved_policy.near(head["context"], at), target)
            for at, layer in enumerate(state.layers)
        ),
    )
    extra = _under(arrays, "extra.")
    return Saved(state=state, policy=saved_policy, label=head["weights"], extra=extra, notes=head["notes"])


def _under(arrays: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    """The arrays whose names begin with ``prefix``, by the rest of their names."""
    return {name.removeprefix(prefix): x for name, x in arrays.items() if name.startswith(prefix)}


def _take_ring(arrays: Mapping[str, np.ndarray], window: int, queries: Mapping[str, int]) -> Ring:
    def whole(x: np.ndarray, slots: int = window) -> Any:
        wide = np.zeros((*x.shape[:2], slots, *x.shape[3:]), x.dtype)
        wide[:, :, : x.shape[2]] = x
        return wide

    meta = {name: whole(x) for name, x in _under(arrays, "meta.").items()}
    asked = {name: whole(x, queries[name]) for name, x in _under(arrays, "queries.").items()}
    return Ring(
        k=whole(arrays["k"]), v=whole(arrays["v"]), admit=whole(arrays["admit"]), meta=meta, queries=asked
    )


def _take_pages(
    arrays: Mapping[str, np.ndarray], sizes: Mapping[str, int], storage: Storage, head_dim: int, dtype: Any
) -> Pages:
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

    scales = storage.scales(size, head_dim)
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
        scales=jax.tree.unflatten(
            jax.tree.structure(scales), [paged(arrays[n]) for n in named_scales(scales)]
        ),
        pos=slots(arrays["pos"], EMPTY),
        meta={name: slots(x) for name, x in _under(arrays, "meta.").items()},
        summary={
            name: paged(x.astype(storage.read_dtype(dtype))) for name, x in _under(arrays, "summary.").items()
        },
        turned=storage.turned,
        **rest,
    )


@dataclasses.dataclass(frozen=True)
class _Part:
    """A file, and what its arrays must be; a whole state has no block."""

    file: StateFile
    block: device_parts.Block | None
    wanted: Expected


def _files(call: str, path: Path) -> list[StateFile]:
    """The file of a state, or the files of its parts in order; their heads are sound and of one state."""
    if not path.is_dir():
        file = open_file(call, path)
        check_head(call, file.head)
        if "part" in file.head:
            parts = device_parts.block_of(call, file.head["part"]).of
            raise StateError(f"{call} is one part of a state, of {parts}. Open its folder.")
        return [file]
    files = [open_file(call, file) for file in sorted(path.glob(PARTS))]
    if not files or any("part" not in file.head for file in files):
        raise StateError(f"{call} is a folder without a saved state. Give one that save wrote.")
    for file in files:
        check_head(call, file.head)
    blocks = [device_parts.block_of(call, file.head["part"]) for file in files]
    if len(blocks) != blocks[0].of or [block.at for block in blocks] != list(range(len(blocks))):
        raise StateError(
            f"{call} has {len(blocks)} of its {blocks[0].of} parts. Save the state again, into a folder that "
            "all processes reach."
        )
    shared = [{name: file.head[name] for name in file.head if name != "part"} for file in files]
    if any(one != shared[0] for one in shared) or not device_parts.complete(blocks):
        raise StateError(f"{call} holds parts of different states. Save the state again.")
    return files


def _parts(files: Sequence[StateFile], policy: Policy, model: Weighted) -> tuple[list[_Part], int]:
    """The files with the shapes that the head and the model name, and the rows of the state."""
    network, dtype, parts = model.network, model.params["embed"].dtype, []
    for file in files:
        block = device_parts.block_of(file.call, file.head["part"]) if "part" in file.head else None
        if block is None:
            [rows, *more] = file.shapes.get("length", (None, ()))[1] or (0,)
            whole = rows, network.num_kv_heads
            if more or rows < 1:
                raise StateError(f"{file.call} holds no rows. {GIVE}")
        else:
            whole = block.whole
            if whole[1] != network.num_kv_heads:
                raise StateError(f"{file.call} has parts of {whole[1]} KV heads, not of this model. {GIVE}")
        size = whole if block is None else (block.rows[1] - block.rows[0], block.heads[1] - block.heads[0])
        wanted = expected(
            file.call,
            file.head,
            policy,
            network,
            dtype,
            rows=size[0],
            heads=size[1],
            first=block is None or block.at == 0,
        )
        check_shapes(file.call, file.shapes, wanted)
        parts.append(_Part(file, block, wanted))
    return parts, whole[0]


def _arrays(
    parts: Sequence[_Part], policy: Policy, most_bytes: int | None, far: Sequence[str] = ()
) -> dict[str, np.ndarray]:
    """The arrays of the whole state, which are what the head says; those that stay ``far`` are mapped."""
    call, head = parts[0].file.call, parts[0].file.head
    stays = sum(part.file.size(name) for part in parts for name in far)
    stored = sum(part.file.nbytes for part in parts) - stays
    _check_room(call, stored, most_bytes)
    read = [part.file.arrays(far) for part in parts]
    written = max(int(arrays["length"].max()) for arrays in read)
    sizes = [
        check_content(call, arrays, part.wanted, head, policy, written) for part, arrays in zip(parts, read)
    ]
    _check_room(call, sum(sizes) - stays, most_bytes)
    blocks = [(part.block, arrays) for part, arrays in zip(parts, read) if part.block is not None]
    return device_parts.join(blocks, head["layers"]) if blocks else read[0]


def _check_room(call: str, size: int, most_bytes: int | None) -> None:
    if most_bytes is not None and size > most_bytes:
        raise StateError(f"{call} needs {size} bytes, and may take {most_bytes}. Give it more memory.")
