"""Seeded random weights of known sizes, as a folder in HF format that every side of a comparison loads.

Speed does not depend on what a model has learned, but raggedness depends on how attention is spread: keys and
queries are drawn large enough that attention is peaked and heads differ.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import jax
import numpy as np

from kvjax.models import published
from kvjax.models.decoder import shapes
from kvjax.models.layout import drawn
from kvjax.models.spec import ModelSpec, Rope

BASE = ModelSpec(
    family="qwen2",
    vocab_size=4096,
    num_layers=6,
    num_heads=6,
    num_kv_heads=2,
    head_dim=64,
    model_dim=384,
    mlp_dim=1024,
    max_positions=32768,
    rope=Rope(theta=1e6),
    qkv_bias=True,
)
"""The sizes of the ``base`` model, about 11 M parameters, with room for 32768 positions."""

TINY = ModelSpec(
    family="qwen2",
    vocab_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    model_dim=32,
    mlp_dim=48,
    max_positions=1024,
    rope=Rope(theta=1e4),
    qkv_bias=True,
)
"""Small enough for tests."""

PUBLISHED = {"0.5b": published.spec("qwen2.5-0.5b"), "1b": published.spec("llama-3.2-1b")}

SIZES = {"base": BASE, "tiny": TINY, **PUBLISHED}

STORED = {"base": "float32", "tiny": "float32"} | dict.fromkeys(PUBLISHED, "bfloat16")
"""Dtype of the folder that is written, for published models that of their files."""

BYTES = {"float32": 4, "bfloat16": 2}
"""Of a value."""

_GAIN = {"wq": 1.6, "wk": 1.6}
"""Standard deviations of outputs for inputs of 1, if it is not 1."""


def draw(spec: ModelSpec, seed: int, dtype: str = "float32") -> dict[str, Any]:
    """The params tree of ``kvjax.models.decoder``, NumPy arrays, the same for the same seed."""
    random = np.random.default_rng(seed)

    def leaf(name: str, shape: tuple[int, ...]) -> np.ndarray:
        return np.ascontiguousarray(drawn(one, name, shape).astype(dtype))

    def one(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name.endswith("norm"):
            return np.ones(shape, np.float32)
        if name.startswith("b"):
            return random.standard_normal(shape, np.float32) * np.float32(0.5)
        # Tied: an embedding of size 1 would multiply the logits by sqrt(D).
        embed = spec.model_dim if spec.tied else 1
        inputs = {"wo": shape[0] * shape[1], "embed": embed}.get(name, shape[0]) if len(shape) > 1 else 1
        return random.standard_normal(shape, np.float32) * np.float32(_GAIN.get(name, 1.0) * inputs**-0.5)

    tree = shapes(spec)
    params: dict[str, Any] = {name: leaf(name, shape) for name, shape in tree.items() if name != "layers"}
    params["layers"] = [{name: leaf(name, shape) for name, shape in one.items()} for one in tree["layers"]]
    return params


def count(spec: ModelSpec) -> int:
    """Parameters of a model, tied ones once."""
    leaves = jax.tree.leaves(shapes(spec), is_leaf=lambda x: isinstance(x, tuple))
    return sum(math.prod(shape) for shape in leaves)


def write(folder: Path, spec: ModelSpec, seed: int, dtype: str = "float32", **how: Any) -> None:
    """Draws the weights and saves them, as transformers and kvjax load them; ``how`` is for ``hf.save``.

    Raises:
      ModelError: the folder is in use.
    """
    from kvjax.models import hf

    hf.save(folder, spec, draw(spec, seed, dtype), dtype=dtype, metadata={"seed": str(seed)}, **how)
