"""GGUF files: their metadata, and their tensors under the names of ``hf_table``.

The header is read here and not by the ``gguf`` package's reader, which takes seconds and hundreds of MB for a
large vocabulary, and believes every size it finds. The package dequantises.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import re
import struct
from collections.abc import Collection
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  teaches NumPy the name "bfloat16"
import numpy as np

from kvjax.models.hf_values import ModelError, aligned, cast
from kvjax.models.spec import ModelSpec

KINDS = (
    *("F32", "F16", "BF16"),
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    "IQ4_NL",  # of tensors in Q2_K and Q3_K files whose rows are not a multiple of 256
)
"""The quantisations that are read."""

FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that belong to the rope, which ``gguf_config`` reads."""

_PIECE = 1 << 22
"""Entries that are dequantised at once."""

# Types of values by their number in the file; 8 is a string, 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tensor:
    """Where a tensor lies.

    Attributes:
      shape: rows first, as NumPy and the HF format have it.
      kind: its quantisation.
      offset: of its first byte in the file.
      row_bytes: of one row, the last dimension.
    """

    shape: tuple[int, ...]
    kind: str
    offset: int
    row_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Header:
    """What a GGUF file says about itself.

    Attributes:
      path: the file.
      metadata: values by key; strings, numbers, lists of strings and arrays of numbers.
      tensors: by the file's own names.
      size: bytes before the tensors.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]
    size: int


def is_gguf(path: Path) -> bool:
    """Whether a file begins as GGUF files do."""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return file.read(4) == b"GGUF"


def read_header(path: Path) -> Header:
    """The header of a GGUF file, every size in it checked against the file's.

    Raises:
      ModelError: not a GGUF file, one that is cut off, split or damaged, a quantisation kvjax does not read,
        or no ``gguf`` package.
    """
    if not is_gguf(path):
        raise ModelError(
            f"{path} is a file and not GGUF; kvjax reads GGUF files, and folders in Hugging Face's format. "
            "Give a GGUF file, or the folder that holds config.json."
        )
    try:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    except ImportError as error:
        raise ModelError(
            f"load({str(path)!r}) needs the gguf package, which dequantises the weights. "
            "Run: pip install 'kvjax[gguf]'"
        ) from error
    blocks = {int(kind): (kind.name, *GGML_QUANT_SIZES[kind]) for kind in GGMLQuantizationType}
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parsed(path, data, blocks)
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{path} cannot be read as a GGUF file ({error}). Download it again.") from error


def factors(header: Header, name: str) -> list[float] | None:
    """A tensor of rope factors; None if the file has none of that name."""
    tensor = header.tensors.get(name)
    if tensor is None:
        return None
    if tensor.kind != "F32" or len(tensor.shape) != 1:
        raise ModelError(
            f"{header.path} has {name} as {tensor.kind} {list(tensor.shape)}; it is a list of F32."
        )
    return np.fromfile(header.path, np.float32, tensor.shape[0], offset=tensor.offset).tolist()


class GgufWeights:
    """The tensors of a GGUF file by the names, and in the layout, of the HF format.

    A ``hf_files.TensorFile``. Tensors are dequantised a few rows at a time, straight to ``dtype``.
    """

    fits = "its metadata"
    mend = "Download the file again, or give one that llama.cpp converted."
    types: Collection[str] = KINDS

    def __init__(self, header: Header, spec: ModelSpec, dtype: str) -> None:
        self.path = header.path
        self.header_size = header.size
        self._spec, self._dtype = spec, dtype
        self._tensors = {
            _hf_name(name, spec): tensor for name, tensor in header.tensors.items() if name not in FACTORS
        }
        self.names = list(self._tensors)

    def header(self, name: str) -> tuple[tuple[int, ...], str]:
        """Shape and quantisation, without reading the data."""
        tensor = self._tensors[name]
        return tensor.shape, tensor.kind

    def slices(self, name: str) -> _Rows:
        """The tensor as an object that dequantises only the slices it is indexed with."""
        spec, heads = self._spec, 0
        # llama.cpp turns neighbouring channels of a llama's heads, and its files hold them in that order.
        if spec.family in ("llama", "mistral") and ".self_attn." in name:
            heads = {"q_proj": spec.num_heads, "k_proj": spec.num_kv_heads}.get(name.split(".")[-2], 0)
        plus_one = spec.norm == "rms_plus_one" and name.endswith("norm.weight")
        turned = spec.head_dim if heads else None
        return _Rows(self.path, self._tensors[name], name, self._dtype, turned=turned, plus_one=plus_one)

    def tensor(self, name: str, begin: int = 0, end: int | None = None) -> _Rows:
        """As ``slices``; no family that is read from GGUF has stacks of experts to be read in part."""
        del begin, end
        return self.slices(name)


class _Rows:
    """One tensor; indexed with a slice of each dimension it gives an array.

    Attributes:
      turned: the channels of a head, whose two halves the file holds interleaved; or None.
      plus_one: the file holds a scale where we hold the scale minus one.
    """

    def __init__(
        self, path: Path, tensor: Tensor, name: str, dtype: str, *, turned: int | None, plus_one: bool
    ) -> None:
        self.path, self.tensor, self.name, self.dtype = path, tensor, name, dtype
        self.turned, self.plus_one = turned, plus_one

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        """Whole heads, where ``turned``."""
        shape = self.tensor.shape
        flat = len(shape) == 1
        begin, end = (0, 1) if flat else index[0].indices(shape[0])[:2]
        unit = self.turned or 1
        step = max(_PIECE // shape[-1] // unit, 1) * unit
        whole = aligned((end - begin, len(range(shape[-1])[index[-1]])), self.dtype)
        with open(self.path, "rb") as file:
            for first in range(begin, end, step):
                rows = self._rows(file, first, min(step, end - first))[:, index[-1]]
                whole[first - begin : first - begin + len(rows)] = cast(rows, self.dtype, self.name)
        return whole[0] if flat else whole

    def _rows(self, file: Any, first: int, count: int) -> np.ndarray:
        """Rows as float32 [count, length]."""
        from gguf import GGMLQuantizationType, quants

        t = self.tensor
        file.seek(t.offset + first * t.row_bytes)
        raw = np.frombuffer(file.read(count * t.row_bytes), np.uint8)
        if raw.size != count * t.row_bytes:
            raise ModelError(f"{self.path} has become shorter while it was read. Load it again.")
        rows = quants.dequantize(raw.reshape(count, t.row_bytes), GGMLQuantizationType[t.kind])
        if self.turned:
            rows = rows.reshape(-1, self.turned // 2, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)
        return rows - np.float32(1) if self.plus_one else rows


_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def _hf_name(name: str, spec: ModelSpec) -> str:
    """A tensor's name in the HF format; one that no family has stays as it is."""
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if layer is None:
        return _TOP.get(name, name)
    index, part, leaf = layer.groups()
    names = {**_LAYER, **(_GEMMA if spec.post_norms else {})}
    if spec.family == "phi3":
        names["ffn_up"] = "mlp.gate_up_proj"
    return f"model.layers.{index}.{names[part]}.{leaf}" if part in names else name


class _Cursor:
    """Reads values one behind the other, and nothing beyond the end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at = path, data, 0

    def skip(self, size: int, what: str) -> int:
        """Where the next ``size`` bytes begin."""
        begin = self.at
        if size > len(self.data) - begin:
            raise ModelError(
                f"{self.path} ends at byte {len(self.data):,}, inside {what} of {size:,} bytes at {begin:,}; "
                "the file is cut off or damaged. Download it again."
            )
        self.at += size
        return begin

    def number(self, code: str, what: str) -> Any:
        return struct.unpack_from(f"<{code}", self.data, self.skip(struct.calcsize(f"<{code}"), what))[0]

    def string(self, what: str) -> str:
        length = self.number("Q", what)
        begin = self.skip(length, what)
        try:
            return self.data[begin : begin + length].decode("utf-8")
        except UnicodeDecodeError as error:
            raise ModelError(
                f"{self.path} has {what} at byte {begin:,} that is not UTF-8. Download it again."
            ) from error

    def value(self, kind: int, what: str) -> Any:
        if kind in _SCALARS:
            number = self.number(_SCALARS[kind], what)
            # The shortest decimal that is this float32: what the model's own config says (1e-05).
            return float(str(np.float32(number))) if kind == 6 else number
        if kind == _STRING:
            return self.string(what)
        item = self.number("I", what) if kind == _ARRAY else None
        if item in _SCALARS:
            dtype = np.dtype(f"<{_SCALARS[item]}")
            count = self.number("Q", what)
            return np.frombuffer(self.data, dtype, count, self.skip(count * dtype.itemsize, what)).copy()
        if item == _STRING:
            return [self.string(what) for _ in range(self.count(8, what))]
        raise ModelError(f"{self.path} has {what} of a type that GGUF does not have ({kind}, {item}).")

    def count(self, least: int, what: str) -> int:
        """A number of things of at least so many bytes each."""
        count = self.number("Q", what)
        if count * least > len(self.data) - self.at:
            raise ModelError(
                f"{self.path} claims {count:,} entries of {what}, more than its {len(self.data):,} bytes "
                "hold; the file is cut off or damaged. Download it again."
            )
        return count


def _parsed(path: Path, data: mmap.mmap, blocks: dict[int, tuple[str, int, int]]) -> Header:
    cursor = _Cursor(path, data)
    cursor.at = 4
    version = cursor.number("I", "the version")
    if version not in (2, 3):
        raise ModelError(
            f"{path} is GGUF of version {version}; kvjax reads little-endian files of version 2 and 3. "
            "Convert it again with a newer llama.cpp."
        )
    count = cursor.count(24, "tensors")
    metadata: dict[str, Any] = {}
    for _ in range(cursor.count(13, "metadata")):
        key = cursor.string("a key")
        if key in metadata:
            raise ModelError(f"{path} has the key {key!r} twice. Download it again.")
        metadata[key] = cursor.value(cursor.number("I", key), key)
    parts = metadata.get("split.count", 1)
    if parts != 1:
        raise ModelError(
            f"{path} is one of {parts} parts of a model. Join them with llama.cpp's "
            "`llama-gguf-split --merge FIRST-PART WHOLE`, and give the whole."
        )
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ModelError(f"{path} has general.alignment {alignment!r}; it must be a power of two.")
    infos = [_tensor_info(cursor) for _ in range(count)]
    size = -(-cursor.at // alignment) * alignment
    tensors: dict[str, Tensor] = {}
    for name, shape, number, offset in infos:
        if name in tensors:
            raise ModelError(f"{path} has the tensor {name} twice. Download it again.")
        kind, block, block_bytes = blocks.get(number, (f"type {number}", 1, 1))
        if kind not in KINDS:
            raise ModelError(
                f"{path} stores {name} as {kind}; kvjax reads {', '.join(KINDS)}. "
                "Choose a file in one of these."
            )
        if shape[-1] % block:
            raise ModelError(
                f"{path} has {name} {list(shape)}, whose rows are not a multiple of {kind}'s {block}."
            )
        tensor = Tensor(
            shape=shape, kind=kind, offset=size + offset, row_bytes=shape[-1] // block * block_bytes
        )
        cursor.at = tensor.offset
        cursor.skip(tensor.row_bytes * math.prod(shape[:-1]), name)
        tensors[name] = tensor
    return Header(path=path, metadata=metadata, tensors=tensors, size=size)


def _tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Name, shape, number of the quantisation, and offset behind the header."""
    name = cursor.string("a tensor's name")
    dims = cursor.number("I", name)
    shape = tuple(cursor.number("Q", name) for _ in range(dims if dims <= 4 else 0))[::-1]
    if not shape or 0 in shape:
        raise ModelError(f"{cursor.path} has {name} with {dims} dimensions {list(shape)}. Download it again.")
    return name, shape, cursor.number("I", name), cursor.number("Q", name)
