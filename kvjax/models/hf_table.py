"""One table of names: every tensor of a model in HF format and where it lives in our params tree.

A linear map in HF format is [out, in] with heads flattened into out (or in, for o_proj); ours is
[in, out] with heads as axes. Reading and writing both go through ``table``.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import numpy as np

from kvjax.models.decoder import shapes
from kvjax.models.spec import ModelSpec

# same: as it is.  flat: [N, H] -> [N*H].  out: [D, ...] -> [..., D].  in: [..., D] -> [D, ...].
Layout = Literal["same", "flat", "out", "in"]
_TOP: tuple[tuple[str, str, Layout], ...] = (
    ("model.embed_tokens.weight", "embed", "same"),
    ("model.norm.weight", "final_norm", "same"),
    ("lm_head.weight", "head", "out"),
)
_LAYER: tuple[tuple[str, str, Layout], ...] = (
    ("input_layernorm.weight", "attn_norm", "same"),
    ("self_attn.q_proj.weight", "wq", "out"),
    ("self_attn.k_proj.weight", "wk", "out"),
    ("self_attn.v_proj.weight", "wv", "out"),
    ("self_attn.q_proj.bias", "bq", "flat"),
    ("self_attn.k_proj.bias", "bk", "flat"),
    ("self_attn.v_proj.bias", "bv", "flat"),
    ("self_attn.o_proj.weight", "wo", "in"),
    ("post_attention_layernorm.weight", "mlp_norm", "same"),
    ("mlp.gate_proj.weight", "w_gate", "out"),
    ("mlp.up_proj.weight", "w_up", "out"),
    ("mlp.down_proj.weight", "w_down", "out"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """One tensor in both worlds.

    Attributes:
      name: in the safetensors file.
      path: keys into the params tree, such as ("layers", 0, "wq").
      shape: ours.
      layout: how the file's shape comes from ours.
    """

    name: str
    path: tuple[str | int, ...]
    shape: tuple[int, ...]
    layout: Layout

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The file's shape."""
        first, last = self.shape[0], self.shape[-1]
        return {
            "same": self.shape,
            "flat": (math.prod(self.shape),),
            "out": (math.prod(self.shape[1:]), first),
            "in": (last, math.prod(self.shape[:-1])),
        }[self.layout]

    def ours(self, stored: np.ndarray) -> np.ndarray:
        """The file's array in our shape."""
        return (stored if self.layout in ("same", "flat") else stored.T).reshape(self.shape)

    def theirs(self, array: np.ndarray) -> np.ndarray:
        """Our array in the file's shape; contiguous, which safetensors takes for granted unchecked."""
        if self.layout in ("same", "flat"):
            return np.ascontiguousarray(array.reshape(self.stored_shape))
        return np.ascontiguousarray(array.reshape(self.stored_shape[::-1]).T)


def table(spec: ModelSpec) -> list[Entry]:
    """Every tensor of a model, in the order of computation."""
    tree = shapes(spec)
    layers = [
        Entry(name=f"model.layers.{i}.{name}", path=("layers", i, key), shape=layer[key], layout=layout)
        for i, layer in enumerate(tree["layers"])
        for name, key, layout in _LAYER
        if key in layer
    ]
    top = [
        Entry(name=name, path=(key,), shape=tree[key], layout=layout)
        for name, key, layout in _TOP
        if key in tree
    ]
    return [top[0], *layers, *top[1:]]
