"""Files of weights: which a folder holds, and tensors read from them a slice at a time."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes  # noqa: F401  teaches NumPy the name "bfloat16"
import numpy as np

from kvjax.models.hf_fp8 import SCALES, STORED, Blocks, Widened
from kvjax.models.hf_table import stored_as
from kvjax.models.hf_values import ModelError, aligned
from kvjax.models.spec import ModelSpec

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

FLOATS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Numbers that need no scales: safetensors' name to NumPy's."""
_DTYPES = {**FLOATS, STORED: "float8_e4m3fn", "U8": "uint8"}


class TensorFile(Protocol):
    """One file of weights, its header read; tensors go by the names of ``hf_table``.

    Attributes:
      path: of the file.
      header_size: bytes before the tensors.
      names: of its tensors.
      types: of stored tensors, as ``header`` names them, that can be read.
      fits, mend: what the tensors must fit, and the way out where they do not, for messages.
    """

    path: Path
    header_size: int
    names: list[str]
    types: Collection[str]
    fits: str
    mend: str

    def header(self, name: str) -> tuple[tuple[int, ...], str]:
        """Shape and stored type, without reading the data."""

    def slices(self, name: str) -> Any:
        """The tensor as an object that reads only the slices it is indexed with."""

    def tensor(self, name: str, begin: int = 0, end: int | None = None) -> Any:
        """The tensor, or what stands from ``begin`` to ``end`` in its first dimension."""


def open_folder(folder: Path, spec: ModelSpec, blocks: Blocks | None = None) -> list[TensorFile]:
    """The safetensors files of a folder: model.safetensors, or shards and their index.

    Args:
      folder: of the model.
      spec: its sizes.
      blocks: how FP8 tensors are scaled, if there are any.

    Raises:
      ModelError: no such files, some of them missing, or damaged ones.
    """
    names = _file_names(folder)
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise ModelError(
            f"{folder} lacks {len(missing)} of the {len(names)} files that {INDEX} names: "
            f"{', '.join(missing)}. Download them into the folder."
        )
    files = [_Safetensors(folder / name, spec) for name in names]
    return [_Fp8(file, files, blocks) for file in files] if blocks else [*files]


class _Safetensors:
    """One safetensors file, opened and its header checked once."""

    fits = "its config.json"
    mend = "Use the config.json that came with these weights, or download the folder again."
    types: Collection[str] = FLOATS

    def __init__(self, path: Path, spec: ModelSpec) -> None:
        from safetensors import SafetensorError, safe_open

        self.path = path
        try:
            self._file = safe_open(path, framework="np")
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"{path} is not a whole safetensors file ({error}). Copy or download it again; a file of a "
                "few hundred bytes may be a git-lfs pointer, then run `git lfs pull`."
            ) from error
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            self.header_size, self._header = 8 + length, json.loads(file.read(length))
        self._stored = {stored_as(spec, name): name for name in self._file.keys()}  # noqa: SIM118
        self.names: list[str] = list(self._stored)

    def header(self, name: str) -> tuple[tuple[int, ...], str]:
        piece = self._file.get_slice(self._stored[name])
        return tuple(piece.get_shape()), piece.get_dtype()

    def slices(self, name: str) -> Any:
        return self._file.get_slice(self._stored[name])

    def tensor(self, name: str, begin: int = 0, end: int | None = None) -> np.ndarray:
        """In memory of its own: the pages of a mapped file would count as the process' until it is closed."""
        about = self._header[self._stored[name]]
        first, *rest = about["shape"]
        end = first if end is None else end
        tensor = aligned((end - begin, *rest), _DTYPES[about["dtype"]])
        memory = tensor.reshape(-1).view(np.uint8).data
        with open(self.path, "rb", buffering=0) as file:
            before = begin * tensor.dtype.itemsize * math.prod(rest)
            file.seek(self.header_size + about["data_offsets"][0] + before)
            while memory and (count := file.readinto(memory)):  # a call reads 2 GiB at most
                memory = memory[count:]
        if memory:
            raise ModelError(f"{self.path} has become shorter while it was read. Load it again.")
        return tensor


class _Fp8:
    """A file of a checkpoint in FP8: its tensors widened, their scales hidden."""

    fits, mend = _Safetensors.fits, _Safetensors.mend
    types: Collection[str] = (*FLOATS, STORED)

    def __init__(self, file: _Safetensors, files: Sequence[_Safetensors], blocks: Blocks) -> None:
        self.path, self.header_size = file.path, file.header_size
        self._file, self._files, self._blocks = file, files, blocks
        self.names = [name for name in file.names if not name.endswith(SCALES)]

    def header(self, name: str) -> tuple[tuple[int, ...], str]:
        shape, dtype = self._file.header(name)
        if dtype == STORED:
            self._scales(name, shape)
        return shape, dtype

    def slices(self, name: str) -> Any:
        return self._widened(name) if self._file.header(name)[1] == STORED else self._file.slices(name)

    def tensor(self, name: str, begin: int = 0, end: int | None = None) -> Any:
        if self._file.header(name)[1] != STORED:
            return self._file.tensor(name, begin, end)
        widened = self._widened(name)
        return widened if begin == 0 and end is None else widened[(slice(begin, end),)]

    def _widened(self, name: str) -> Widened:
        # The whole tensor even where a part is read: safetensors cannot slice FP8 with NumPy.
        shape, _ = self._file.header(name)
        return Widened(self._file.tensor(name), self._scales(name, shape), self._blocks)

    def _scales(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """They may be in another file."""
        wanted = tuple(-(-size // block) for size, block in zip(shape, self._blocks))
        scales = name + SCALES
        holder = next((file for file in self._files if scales in file.names), None)
        kept = None if holder is None else holder.header(scales)
        if holder is None or kept is None or kept[0] != wanted or kept[1] not in FLOATS or len(shape) != 2:
            what = "is missing" if kept is None else f"is {kept[1]} {list(kept[0])}"
            raise ModelError(
                f"{self.path} stores {name} {list(shape)} in FP8, and {scales} {what}; it must be "
                f"{list(wanted)}, a scale for each block of {' x '.join(map(str, self._blocks))}. Download "
                "the folder again."
            )
        return holder.tensor(scales)


def _file_names(folder: Path) -> list[str]:
    if (folder / SINGLE).is_file():
        return [SINGLE]
    if not (folder / INDEX).is_file():
        raise ModelError(
            f"{folder} holds neither {SINGLE} nor {INDEX}; kvjax reads safetensors only. Convert other files "
            "with transformers: AutoModelForCausalLM.from_pretrained(...).save_pretrained(folder)."
        )
    index = read_json(folder / INDEX)
    names = index.get("weight_map")
    if not isinstance(names, dict) or not all(
        isinstance(n, str) and n == Path(n).name for n in names.values()
    ):
        raise ModelError(
            f"{folder / INDEX} has no weight_map of tensor names to files beside it; download it again."
        )
    return sorted(set(names.values()))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that must hold an object; ModelError names the file when it does not."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is not readable JSON ({error}). Download or write it again.") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds {type(value).__name__} instead of an object. Download it again.")
    return value


def stamp(files: Sequence[TensorFile]) -> dict[str, bytes]:
    """Bytes of each file that identify the weights without reading them all.

    Its length, its header and 4 KiB at each of 256 places.
    """
    stamps = {}
    for one in files:
        with open(one.path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            pieces = [size.to_bytes(8, "little"), file.read(one.header_size)]
            for at in range(256):
                file.seek(size * at // 256)
                pieces.append(file.read(4096))
        stamps[one.path.name] = b"".join(pieces)
    return stamps
