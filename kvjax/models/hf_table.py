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
# alternating: see ``Alternating``. A name with "{}" stands for a tensor of each expert.
Layout = Literal["same", "flat", "out", "in", "conv_out", "conv_in", "alternating"]
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
_OLMO2 = Names(
    top=_TOP,
    rows=(
        *(row for row in _ATTENTION if row[1] not in ("attn_norm", "q_norm", "k_norm")),
        ("self_attn.q_norm.weight", "q_joint_norm", "flat"),
        ("self_attn.k_norm.weight", "k_joint_norm", "flat"),
        ("post_attention_layernorm.weight", "attn_post_norm", "same"),
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
_QWEN3_MOE = dataclasses.replace(
    _LLAMA,
    rows=(
        *_LLAMA.rows,
        ("mlp.gate.weight", "router", "same"),
        ("mlp.experts.{}.gate_proj.weight", "experts_gate", "out"),
        ("mlp.experts.{}.up_proj.weight", "experts_up", "out"),
        ("mlp.experts.{}.down_proj.weight", "experts_down", "out"),
    ),
)
_MIXTRAL = dataclasses.replace(
    _LLAMA,
    rows=(
        *_LLAMA.rows,
        ("block_sparse_moe.gate.weight", "router", "same"),
        ("block_sparse_moe.experts.{}.w1.weight", "experts_gate", "out"),
        ("block_sparse_moe.experts.{}.w3.weight", "experts_up", "out"),
        ("block_sparse_moe.experts.{}.w2.weight", "experts_down", "out"),
    ),
)
_GPT_OSS = dataclasses.replace(
    _LLAMA,
    rows=(
        *_LLAMA.rows,
        ("self_attn.o_proj.bias", "bo", "same"),
        ("self_attn.sinks", "sinks", "same"),
        ("mlp.router.weight", "router", "same"),
        ("mlp.router.bias", "router_bias", "same"),
        ("mlp.experts.gate_up_proj", "experts_gate experts_up", "alternating"),
        ("mlp.experts.gate_up_proj_bias", "experts_gate_bias experts_up_bias", "alternating"),
        ("mlp.experts.down_proj", "experts_down", "alternating"),
        ("mlp.experts.down_proj_bias", "experts_down_bias", "same"),
    ),
)
_EXPERTS = {"qwen3_moe": _QWEN3_MOE, "mixtral": _MIXTRAL, "gpt_oss": _GPT_OSS}
_GEMMAS = {"gemma2": _GEMMA, "gemma3_text": _GEMMA}
_NAMES = {**_EXPERTS, **_GEMMAS, "phi3": _PHI3, "gpt2": _GPT2, "olmo2": _OLMO2}
"""Families that do not name their tensors as Llama does."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """One stored tensor in both worlds.

    Attributes:
      name: in the safetensors file.
      paths: keys into the params tree, such as ("layers", 0, "wq"), one for each of ours inside; of one
        expert ("layers", 0, "experts_up", 3).
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Alternating(Entry):
    """Matrices of experts with outputs last, those of n of ours by turns: ``ours[0][0], ours[1][0]``, ...

    Ours are [E, Y, X], the file's tensor [E, X, n Y]; of biases [E, Y] and [E, n Y].
    """

    @property
    def stored_shape(self) -> tuple[int, ...]:
        e, y, *x = self.shapes[0]
        return (e, *x, y * len(self.shapes))

    def part(self, stored: Any, at: int, index: tuple[slice, ...]) -> np.ndarray:
        """As of any entry; ``stored`` may hold some of the experts, which ``index`` then counts."""
        experts, outputs, *inputs = index
        begin, end = outputs.indices(self.shapes[at][1])[:2]
        n = len(self.shapes)
        piece: np.ndarray = stored[(experts, *inputs, slice(n * begin + at, n * end, n))]
        return piece.swapaxes(1, -1)

    def theirs(self, arrays: list[np.ndarray]) -> np.ndarray:
        turned = [array.swapaxes(1, -1) for array in arrays]
        return np.ascontiguousarray(np.stack(turned, axis=-1).reshape(self.stored_shape))


def table(spec: ModelSpec) -> list[Entry]:
    """Every tensor of a model, in the order of computation."""
    tree, names = shapes(spec), _NAMES.get(spec.family, _LLAMA)

    def entry(name: str, row: Row, place: Path, shape: dict[str, tuple[int, ...]]) -> Entry:
        keys = row[1].split()
        kind = Alternating if row[2] == "alternating" else Entry
        return kind(
            name=name + row[0],
            paths=tuple((*place, key) for key in keys),
            shapes=tuple(shape[key] for key in keys),
            layout=row[2],
        )

    def entries(name: str, row: Row, place: Path, shape: dict[str, tuple[int, ...]]) -> list[Entry]:
        if "{}" not in row[0]:
            return [entry(name, row, place, shape)]
        key, (count, *of_one) = row[1], shape[row[1]]
        return [
            Entry(
                name=name + row[0].format(expert),
                paths=((*place, key, expert),),
                shapes=(tuple(of_one),),
                layout=row[2],
            )
            for expert in range(count)
        ]

    top = [entry(names.prefix, row, (), tree) for row in names.top]
    layers = [
        one
        for i, layer in enumerate(tree["layers"])
        for row in names.rows
        if row[1].split()[0] in layer
        for one in entries(names.prefix + names.layer.format(i), row, ("layers", i), layer)
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
