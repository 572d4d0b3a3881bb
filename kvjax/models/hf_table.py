"""Tables of names: every tensor of a model in HF format and where it lives in our params tree.

A torch Linear is [out, in] with heads flattened into out (or in, for o_proj), a GPT-2 Conv1D [in, out];
ours is [out, in] with heads as axes. A fused tensor is several of ours side by side along its outputs.
Reading and writing both go through ``table``.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import numpy as np

from kvjax.models.decoder import shapes
from kvjax.models.spec import ModelSpec

# same: as it is.  flat: [N, H] -> [N*H].  Linear: out [..., D] -> [flat, D], in [D, ...] -> [D, flat].
# Conv1D: conv_out [..., D] -> [D, flat], conv_in [D, ...] -> [flat, D].
Layout = Literal["same", "flat", "out", "in", "conv_out", "conv_in"]
Path = tuple[str | int, ...]
Row = tuple[str, str, Layout]
"""(name in HF format, our key or keys, layout). Rows whose keys a spec does not have are left out."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Names:
    """The names of a family: ``prefix`` + a row of ``top``, ``prefix`` + ``layer`` + a row of ``rows``."""

    prefix: str = "model."
    layer: str = "layers.{}."
    top: tuple[Row, ...]
    rows: tuple[Row, ...]


HEAD = "lm_head.weight"
_TOP: tuple[Row, ...] = (("embed_tokens.weight", "embed", "same"), ("norm.weight", "final_norm", "same"))
_ATTENTION: tuple[Row, ...] = (
    ("input_layernorm.weight", "attn_norm", "same"),
    ("self_attn.q_proj.weight", "wq", "out"),
    ("self_attn.k_proj.weight", "wk", "out"),
    ("self_attn.v_proj.weight", "wv", "out"),
    ("self_attn.q_proj.bias", "bq", "flat"),
    ("self_attn.k_proj.bias", "bk", "flat"),
    ("self_attn.v_proj.bias", "bv", "flat"),
    ("self_attn.q_norm.weight", "q_norm", "same"),
    ("self_attn.k_norm.weight", "k_norm", "same"),
    ("self_attn.o_proj.weight", "wo", "in"),
)
_MLP: tuple[Row, ...] = (
    ("mlp.gate_proj.weight", "w_gate", "out"),
    ("mlp.up_proj.weight", "w_up", "out"),
    ("mlp.down_proj.weight", "w_down", "out"),
)
_LLAMA = Names(top=_TOP, rows=(*_ATTENTION, ("post_attention_layernorm.weight", "mlp_norm", "same"), *_MLP))
_GEMMA = Names(
    top=_TOP,
    rows=(
        *_ATTENTION,
        ("post_attention_layernorm.weight", "attn_post_norm", "same"),
        ("pre_feedforward_layernorm.weight", "mlp_norm", "same"),
        *_MLP,
        ("post_feedforward_layernorm.weight", "mlp_post_norm", "same"),
    ),
)
_PHI3 = Names(
    top=_TOP,
    rows=(
        ("input_layernorm.weight", "attn_norm", "same"),
        ("self_attn.qkv_proj.weight", "wq wk wv", "out"),
        ("self_attn.o_proj.weight", "wo", "in"),
        ("post_attention_layernorm.weight", "mlp_norm", "same"),
        ("mlp.gate_up_proj.weight", "w_gate w_up", "out"),
        ("mlp.down_proj.weight", "w_down", "out"),
    ),
)
_GPT2 = Names(
    prefix="transformer.",
    layer="h.{}.",
    top=(
        ("wte.weight", "embed", "same"),
        ("wpe.weight", "positions", "same"),
        ("ln_f.weight", "final_norm", "same"),
        ("ln_f.bias", "final_norm_bias", "same"),
    ),
    rows=(
        ("ln_1.weight", "attn_norm", "same"),
        ("ln_1.bias", "attn_norm_bias", "same"),
        ("attn.c_attn.weight", "wq wk wv", "conv_out"),
        ("attn.c_attn.bias", "bq bk bv", "flat"),
        ("attn.c_proj.weight", "wo", "conv_in"),
        ("attn.c_proj.bias", "bo", "same"),
        ("ln_2.weight", "mlp_norm", "same"),
        ("ln_2.bias", "mlp_norm_bias", "same"),
        ("mlp.c_fc.weight", "w_up", "conv_out"),
        ("mlp.c_fc.bias", "b_up", "same"),
        ("mlp.c_proj.weight", "w_down", "conv_in"),
        ("mlp.c_proj.bias", "b_down", "same"),
    ),
)
_NAMES = {"phi3": _PHI3, "gemma2": _GEMMA, "gemma3_text": _GEMMA, "gpt2": _GPT2}
"""Families that do not name their tensors as Llama does."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """One stored tensor in both worlds.

    Attributes:
      name: in the safetensors file.
      paths: keys into the params tree, such as ("layers", 0, "wq"), one for each of ours inside.
      shapes: ours.
      layout: how the file's shape comes from each of ours.
    """

    name: str
    paths: tuple[Path, ...]
    shapes: tuple[tuple[int, ...], ...]
    layout: Layout

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The file's shape."""
        shape = list(self._stored(self.shapes[0]))
        shape[self._axis] = sum(self._stored(one)[self._axis] for one in self.shapes)
        return tuple(shape)

    def ours(self, stored: np.ndarray) -> list[np.ndarray]:
        """The file's array as our arrays."""
        return [self.part(stored, at, (slice(None),) * len(shape)) for at, shape in enumerate(self.shapes)]

    def part(self, stored: Any, at: int, index: tuple[slice, ...]) -> np.ndarray:
        """A part of one of ours.

        Args:
          stored: the file's tensor; an array, or an object that reads only the slices it is indexed with.
          at: which of ours.
          index: a slice of each of its dimensions; of those that the file flattens only the first is cut.
        """
        shape = self.shapes[at]
        cut = [one.indices(n)[:2] for one, n in zip(index, shape)]
        file_index = []
        for axis, group in enumerate(self._groups(len(shape))):
            inner = math.prod(shape[d] for d in group[1:])
            before = sum(self._stored(one)[axis] for one in self.shapes[:at]) if axis == self._axis else 0
            begin, end = cut[group[0]]
            file_index.append(slice(before + begin * inner, before + end * inner))
        piece = stored[tuple(file_index)]
        return (piece.T if self.layout in ("conv_out", "conv_in") else piece).reshape(
            [end - begin for begin, end in cut]
        )

    def theirs(self, arrays: list[np.ndarray]) -> np.ndarray:
        """Our arrays as the file's; contiguous, which safetensors takes for granted unchecked."""
        turned = self.layout in ("conv_out", "conv_in")
        stored = [
            array.reshape(self._stored(shape)[::-1]).T if turned else array.reshape(self._stored(shape))
            for array, shape in zip(arrays, self.shapes)
        ]
        return np.ascontiguousarray(np.concatenate(stored, axis=self._axis))

    @property
    def _axis(self) -> int:
        """The axis of the outputs, along which fused tensors lie side by side."""
        return 1 if self.layout == "conv_out" else 0

    def _stored(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(math.prod(shape[d] for d in group) for group in self._groups(len(shape)))

    def _groups(self, dims: int) -> tuple[tuple[int, ...], ...]:
        """Which of our dimensions each of the file's flattens."""
        every = tuple(range(dims))
        forms: dict[str, tuple[tuple[int, ...], ...]] = {
            "same": tuple((d,) for d in every),
            "flat": (every,),
            "out": (every[:-1], every[-1:]),
            "in": (every[:1], every[1:]),
            "conv_out": (every[-1:], every[:-1]),
            "conv_in": (every[1:], every[:1]),
        }
        return forms[self.layout]


def table(spec: ModelSpec) -> list[Entry]:
    """Every tensor of a model, in the order of computation."""
    tree, names = shapes(spec), _NAMES.get(spec.family, _LLAMA)

    def entry(name: str, row: Row, place: Path, shape: dict[str, tuple[int, ...]]) -> Entry:
        keys = row[1].split()
        return Entry(
            name=name + row[0],
            paths=tuple((*place, key) for key in keys),
            shapes=tuple(shape[key] for key in keys),
            layout=row[2],
        )

    top = [entry(names.prefix, row, (), tree) for row in names.top]
    layers = [
        entry(names.prefix + names.layer.format(i), row, ("layers", i), layer)
        for i, layer in enumerate(tree["layers"])
        for row in names.rows
        if row[1].split()[0] in layer
    ]
    head = [] if spec.tied else [entry("", (HEAD, "head", "out"), (), tree)]
    return [top[0], *layers, *top[1:], *head]


def stored_as(spec: ModelSpec, name: str) -> str:
    """The table's name of a tensor that some checkpoints store under another.

    Base models are stored without the prefix, models with vision have their text model inside.
    """
    names = _NAMES.get(spec.family, _LLAMA)
    for outer in ("language_model.model.", "model.language_model."):
        if name.startswith(outer):
            return names.prefix + name.removeprefix(outer)
    if name == f"language_model.{HEAD}":
        return HEAD
    inner = (names.layer.split("{")[0], *(row[0] for row in names.top))
    return names.prefix + name if name.startswith(inner) else name
