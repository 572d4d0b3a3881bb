"""Files of weights to the params tree and back, through the names of ``hf_table``."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  teaches NumPy the name "bfloat16"
import numpy as np

from kvjax.models.decoder import LETTERS, shapes
from kvjax.models.hf_files import FLOATS, INDEX, SINGLE, TensorFile
from kvjax.models.hf_table import HEAD, Alternating, Entry, table
from kvjax.models.hf_values import ModelError, aligned, cast
from kvjax.models.mxfp4 import Mxfp4
from kvjax.models.quantised import INPUTS, quantised
from kvjax.models.spec import ModelSpec
from kvjax.sharding.mesh import ONE, Mesh
from kvjax.types import Params

# Old checkpoints carry the rope's frequencies and GPT-2's causal mask as buffers, which are computed from
# the spec; and a model that also sees has parts that text never meets.
_IGNORED = re.compile(
    r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq|transformer\.h\.\d+\.attn\.(masked_)?bias"
)
_VISION = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\..+")


Piece = Callable[[int, tuple[slice, ...]], np.ndarray]
"""(expert, a slice of each further dimension) to that part of the expert."""
OnValues = Callable[[tuple[str | int, ...], np.ndarray], None]
"""Called with a leaf's keys in the params tree, and its values as the file has them."""


def read_weights(
    place: Path,
    files: Sequence[TensorFile],
    spec: ModelSpec,
    dtype: str | None,
    mesh: Mesh = ONE,
    weight_dtype: str | None = None,
    on_values: OnValues | None = None,
) -> Params:
    """The params tree of a model, read one tensor at a time; on a mesh each process reads its part of it.

    Args:
      place: the folder or file that ``files`` are of, for messages.
      files: hold its tensors; buffers of old checkpoints and the vision of a gemma3 are ignored, and an
        ``lm_head.weight`` of a tied model must equal the embedding.
      spec: what the tensors must be.
      dtype: of the result, or None for the embedding's stored one.
      mesh: the devices they are sharded over.
      weight_dtype: of matrices ("int8", "int4"), or None for ``dtype``. A scale may count inputs that lie on
        several devices, so each process quantises whole matrices and keeps its part.
      on_values: called with each matrix before it is quantised.

    Raises:
      ModelError: missing, unknown, twice stored or wrongly shaped tensors, all named.
    """
    entries = table(spec)
    files = [Mxfp4(files)] if spec.family == "gpt_oss" else files
    holder = _locate(place, files, entries, spec)
    embed = entries[0].name
    dtype = dtype or FLOATS[holder[embed].header(embed)[1]]
    params: Params = {"layers": [{} for _ in range(spec.num_layers)]}
    for path, shape, stored, pieces in _stacks(entries, holder, spec):
        name = str(path[-1])
        if weight_dtype and name in INPUTS:
            values = _stacked(shape, stored, pieces, (slice(None),) * len(shape))
            leaf = _quantised(path, values, weight_dtype, dtype, mesh, on_values)
        else:
            how = mesh.spec(LETTERS[name], shape)
            leaf = mesh.build(shape, how, functools.partial(_stacked, shape, dtype, pieces))
        _node(params, path)[path[-1]] = leaf
    for entry in entries:
        if _of_experts(entry):
            continue
        file = holder[entry.name]
        whole = mesh == ONE or (weight_dtype and str(entry.paths[0][-1]) in INPUTS)
        tensor = file.tensor(entry.name) if whole else file.slices(entry.name)
        for at, (path, shape) in enumerate(zip(entry.paths, entry.shapes)):
            name = str(path[-1])
            if weight_dtype and name in INPUTS:
                values = entry.part(tensor, at, (slice(None),) * len(shape))
                leaf = _quantised(path, values, weight_dtype, dtype, mesh, on_values)
            else:
                how = mesh.spec(LETTERS.get(name, ""), shape)
                leaf = mesh.build(shape, how, functools.partial(_part, entry, tensor, at, dtype))
            _node(params, path)[path[-1]] = leaf
    twice = spec.tied and HEAD in holder
    if twice and not np.array_equal(holder[HEAD].tensor(HEAD), holder[embed].tensor(embed)):
        raise ModelError(
            f"{place} says tie_word_embeddings but stores an lm_head.weight that is not the embedding. "
            "Set tie_word_embeddings to false in config.json if the head was trained, else remove the tensor."
        )
    return params


def _quantised(
    path: tuple[str | int, ...],
    values: np.ndarray,
    weight_dtype: str,
    dtype: str,
    mesh: Mesh,
    on_values: OnValues | None,
) -> Any:
    """A leaf of codes and scales where it belongs."""
    name = str(path[-1])
    if on_values:
        on_values(path, values)
    return mesh.place(quantised(values, name, weight_dtype, dtype), LETTERS[name])


def _of_experts(entry: Entry) -> bool:
    """Is it read expert by expert?"""
    return isinstance(entry, Alternating) or isinstance(entry.paths[0][-1], int)


def _stacks(
    entries: Sequence[Entry], holder: Mapping[str, TensorFile], spec: ModelSpec
) -> Iterator[tuple[tuple[str | int, ...], tuple[int, ...], str, Piece]]:
    """Path, shape and stored dtype of each leaf [E, ...], and how to read a part of one expert."""

    def stored(entry: Entry) -> str:
        return FLOATS.get(holder[entry.name].header(entry.name)[1], "bfloat16")  # exact of what is packed

    single: dict[tuple[str | int, ...], list[Entry]] = {}
    for entry in filter(_of_experts, entries):
        if isinstance(entry, Alternating):
            for at, (path, shape) in enumerate(zip(entry.paths, entry.shapes)):
                piece = functools.partial(_piece_of_stack, entry, holder[entry.name], at)
                yield path, shape, stored(entry), piece
        else:
            single.setdefault(entry.paths[0][:-1], []).append(entry)
    for path, of_experts in single.items():
        shape = (len(of_experts), *of_experts[0].shapes[0])
        yield path, shape, stored(of_experts[0]), functools.partial(_piece_of_one, of_experts, holder)


def _piece_of_stack(
    entry: Entry, file: TensorFile, at: int, expert: int, index: tuple[slice, ...]
) -> np.ndarray:
    stored = file.tensor(entry.name, expert, expert + 1)
    return entry.part(stored, at, (slice(None), *index))[0]  # type: ignore[no-any-return]


def _piece_of_one(
    entries: Sequence[Entry], holder: Mapping[str, TensorFile], expert: int, index: tuple[slice, ...]
) -> np.ndarray:
    entry = entries[expert]
    return entry.part(holder[entry.name].tensor(entry.name), 0, index)


def _stacked(shape: tuple[int, ...], dtype: str, piece: Piece, index: tuple[slice, ...]) -> np.ndarray:
    """A part of a leaf [E, ...]; in memory are that part and one expert."""
    cut = [range(*one.indices(n)) for one, n in zip(index, shape)]
    whole = aligned(tuple(map(len, cut)), dtype)
    for at, expert in enumerate(cut[0]):
        whole[at] = cast(piece(expert, index[1:]), dtype, "a tensor of experts")
    return whole


def _part(entry: Entry, stored: Any, at: int, dtype: str, index: tuple[slice, ...]) -> np.ndarray:
    return cast(entry.part(stored, at, index), dtype, entry.name)


def write_weights(
    folder: Path, spec: ModelSpec, params: Params, dtype: str, max_shard_bytes: int, metadata: dict[str, str]
) -> None:
    """Writes model.safetensors, or shards and their index; at most one shard is in memory at a time."""
    from safetensors.numpy import save_file

    entries = table(spec)
    check_params(spec, params)
    size = {e.name: math.prod(e.stored_shape) * np.dtype(dtype).itemsize for e in entries}
    shards = list(_shards(entries, size, max_shard_bytes))
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {}
        for e in shard:
            arrays = [_array(params, path) for path in e.paths]
            tensors[e.name] = e.theirs([cast(array, dtype, e.name) for array in arrays])
            index[e.name] = file
        # transformers refuses a file without a format.
        save_file(tensors, folder / file, metadata={"format": "pt", **metadata})
        (folder / file).chmod(0o644)  # safetensors writes for the owner alone
    if len(shards) > 1:
        whole = {"metadata": {"total_size": sum(size.values())}, "weight_map": index}
        (folder / INDEX).write_text(json.dumps(whole, indent=2) + "\n")


def _array(params: Params, path: tuple[str | int, ...]) -> np.ndarray:
    *_, last = path
    if isinstance(last, int):  # one expert; as NumPy's, because jax would compile a slice of each
        return np.asarray(_node(params, path))[last]  # type: ignore[no-any-return]
    return np.asarray(_node(params, path)[last])


def check_params(spec: ModelSpec, params: Params) -> None:
    """Raises one ModelError that lists every difference between a params tree and its spec."""
    wanted = dict(_leaves(shapes(spec), ()))
    present = {path: tuple(np.shape(leaf)) for path, leaf in _leaves(params, ())}
    faults = [f"{_dotted(p)} is missing" for p in wanted.keys() - present.keys()]
    faults += [f"{_dotted(p)} is unknown" for p in present.keys() - wanted.keys()]
    faults += [
        f"{_dotted(p)} is {list(present[p])} instead of {list(shape)}"
        for p, shape in wanted.items()
        if p in present and present[p] != shape
    ]
    if faults:
        raise ModelError(
            f"params do not fit the spec: {'; '.join(sorted(faults))}. Give the tree of decoder.shapes(spec)."
        )


def _locate(
    place: Path, files: Sequence[TensorFile], entries: list[Entry], spec: ModelSpec
) -> dict[str, TensorFile]:
    """Tensor name to the file that holds it, every fault of names, shapes and dtypes in one error."""
    wanted = {entry.name: entry.stored_shape for entry in entries}
    if spec.tied:
        wanted[HEAD] = wanted[entries[0].name]
    where: dict[str, TensorFile] = {}
    faults: list[str] = []
    for file in files:
        for name in file.names:
            if name in where:
                faults.append(f"{name} is stored twice")
            where[name] = file
            if name not in wanted:
                ignored = _IGNORED.fullmatch(name) or (
                    spec.family == "gemma3_text" and _VISION.fullmatch(name)
                )
                faults += [] if ignored else [f"{name} is unknown"]
                continue
            shape, dtype = file.header(name)
            if shape != wanted[name]:
                faults.append(f"{name} is {list(shape)} instead of {list(wanted[name])}")
            if dtype.startswith("F8_") and dtype not in file.types:
                raise ModelError(
                    f"{place} stores {name} as {dtype}, and nothing in its config.json says how FP8 numbers "
                    "are scaled. Use the config.json that came with these weights, or their bfloat16 version."
                )
            if dtype not in file.types:
                faults.append(f"{name} is stored as {dtype}, not as one of {', '.join(file.types)}")
    faults += [f"{entry.name} is missing" for entry in entries if entry.name not in where]
    if faults:
        raise ModelError(
            f"the tensors in {place} do not fit {files[0].fits}: {'; '.join(faults)}. {files[0].mend}"
        )
    return where


def _shards(entries: list[Entry], size: dict[str, int], limit: int) -> Iterator[list[Entry]]:
    shard: list[Entry] = []
    used = 0
    for entry in entries:
        if shard and used + size[entry.name] > limit:
            yield shard
            shard, used = [], 0
        shard.append(entry)
        used += size[entry.name]
    yield shard


def _node(params: Params, path: tuple[str | int, ...]) -> Any:
    node: Any = params
    for key in path[:-1]:
        node = node[key]
    return node


def _leaves(node: Any, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Path and leaf of each leaf; the shapes of ``decoder.shapes`` are leaves."""
    if isinstance(node, dict | list):
        for key, child in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _leaves(child, (*path, key))
    else:
        yield path, node


def _dotted(path: tuple[str | int, ...]) -> str:
    return ".".join(str(key) for key in path)
