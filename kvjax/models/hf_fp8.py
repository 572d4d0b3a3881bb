"""Checkpoints in FP8 with a scale for each block, as Qwen and DeepSeek publish them.

A matrix ``X.weight`` is stored as F8_E4M3, and beside it ``X.weight_scale_inv``, the factor of each block of
128 by 128 entries. They are widened while they are read; activations stay as they are.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvjax.models.hf_values import ModelError

SCALES = "_scale_inv"
"""What the name of a tensor's scales ends in."""

STORED = "F8_E4M3"

Blocks = tuple[int, int]
"""Outputs and inputs that share a scale."""


def read_quantisation(config: dict[str, Any], file: str) -> Blocks | None:
    """How a checkpoint's FP8 tensors are scaled; None where it is not quantised.

    Args:
      config: config.json as parsed.
      file: its path, for messages.

    Raises:
      ModelError: another quantisation.
    """
    about = config.get("quantization_config")
    if about is None:
        return None
    method = about.get("quant_method") if isinstance(about, dict) else about
    if method != "fp8":
        raise ModelError(
            f"{file} says that the weights are quantised by {method!r}, which kvjax does not read. Take a "
            "GGUF file of the model, or its unquantised checkpoint with --weight-dtype int4 (in Python "
            "weight_dtype='int4')."
        )
    blocks = about.get("weight_block_size")
    whole = isinstance(blocks, list) and len(blocks) == 2 and all(type(n) is int and n > 0 for n in blocks)
    asked = {
        name: about.get(name, usual) for name, usual in (("fmt", "e4m3"), ("activation_scheme", "dynamic"))
    }
    if not whole or asked != {"fmt": "e4m3", "activation_scheme": "dynamic"}:
        raise ModelError(
            f"{file} has FP8 weights with weight_block_size {blocks!r}, fmt {asked['fmt']!r} and "
            f"activation_scheme {asked['activation_scheme']!r}; kvjax reads e4m3 with a scale for each block "
            "of two sizes, and dynamic activations. Take the bfloat16 checkpoint."
        )
    return blocks[0], blocks[1]


class Widened:
    """An FP8 matrix that is widened where it is indexed with a slice of each dimension.

    Attributes:
      stored: the tensor [O, I] in FP8.
      scales: [O / blocks, I / blocks], rounded up; of each block.
      blocks: entries of a block in each dimension.
    """

    def __init__(self, stored: np.ndarray, scales: np.ndarray, blocks: Blocks) -> None:
        self.stored, self.scales, self.blocks = stored, scales.astype(np.float32), blocks

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        """In float32."""
        rows, columns = (
            np.arange(*cut.indices(size)) // block
            for cut, size, block in zip(index, self.stored.shape, self.blocks)
        )
        values = self.stored[index].astype(np.float32)
        by_row = self.scales[:, columns]
        for block in np.unique(rows):
            values[rows == block] *= by_row[block]
        return values
