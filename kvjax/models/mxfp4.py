"""MXFP4 (Open Compute Project, Microscaling Formats 1.0), as gpt-oss stores its experts.

A tensor NAME lies in the files as NAME_blocks, uint8 [E, Y, X / 32, 16], and NAME_scales, uint8
[E, Y, X / 32]. A byte holds two numbers of four bits, the lower one first; a block of 32 shares a power of
two. Read, it is NAME [E, X, Y], the layout of checkpoints that are not quantised.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Float, UInt8

BLOCKS, SCALES = "_blocks", "_scales"
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = np.array([*_POSITIVE, *(-x for x in _POSITIVE)], np.float32)
_PAIRS = _VALUES[np.stack([np.arange(256) & 15, np.arange(256) >> 4], axis=-1)]
"""The two numbers of each byte."""
_BIAS = 127
"""Of the exponents."""


def is_mxfp4(quantization: Any) -> bool:
    """Does a config.json's ``quantization_config`` name this format?"""
    return isinstance(quantization, dict) and quantization.get("quant_method") == "mxfp4"


def dequantised(
    blocks: UInt8[np.ndarray, "E Y G 16"], scales: UInt8[np.ndarray, "E Y G"]
) -> Float[np.ndarray, "E Y X"]:
    """The numbers, float32; each is exact in bfloat16."""
    values = _PAIRS[blocks].reshape(*scales.shape, 32)
    exact = np.ldexp(values, scales.astype(np.int32)[..., None] - _BIAS)
    return exact.reshape(*scales.shape[:2], -1)


class Packed:
    """Some experts of a tensor, dequantised where it is indexed: [E, X, Y]."""

    def __init__(self, blocks: np.ndarray, scales: np.ndarray) -> None:
        self._blocks, self._scales = blocks, scales

    def __getitem__(self, index: tuple[slice, slice, slice]) -> np.ndarray:
        experts, inputs, outputs = index
        values = dequantised(self._blocks[experts, outputs], self._scales[experts, outputs])
        return values[..., inputs].swapaxes(1, 2)


class Mxfp4:
    """Files of a folder as one in which packed tensors are read as what they stand for."""

    def __init__(self, files: Sequence[Any]) -> None:
        self._where = {name: file for file in files for name in file.names}
        self.path, self.header_size = files[0].path, files[0].header_size
        self.fits, self.mend = files[0].fits, files[0].mend
        self.types: Collection[str] = (*files[0].types, "MXFP4")
        ends = (BLOCKS, SCALES)
        self._packed = {
            name.removesuffix(BLOCKS)
            for name in self._where
            if name.endswith(BLOCKS) and name.removesuffix(BLOCKS) + SCALES in self._where
        }
        parts = {name + end for name in self._packed for end in ends}
        stored = [name for file in files for name in file.names if name not in parts]
        self.names = [*stored, *sorted(self._packed)]

    def header(self, name: str) -> tuple[tuple[int, ...], str]:
        if name not in self._packed:
            return self._where[name].header(name)
        (experts, outputs, groups, half), kind = self._where[name + BLOCKS].header(name + BLOCKS)
        scales = self._where[name + SCALES].header(name + SCALES)
        whole = (half, kind, *scales) == (16, "U8", (experts, outputs, groups), "U8")
        return (experts, 32 * groups, outputs), "MXFP4" if whole else f"MXFP4 with scales {scales}"

    def slices(self, name: str) -> Any:
        return self.tensor(name) if name in self._packed else self._where[name].slices(name)

    def tensor(self, name: str, begin: int = 0, end: int | None = None) -> Any:
        if name not in self._packed:
            return self._where[name].tensor(name, begin, end)
        parts = (name + BLOCKS, name + SCALES)
        return Packed(*(self._where[part].tensor(part, begin, end) for part in parts))
