"""A Flax NNX module of anybody's as a ``Network`` and its params.

The module has ``embed(tokens, positions)``, ``logits(x)`` and ``layers``; a layer is called
``layer(x, positions, attend)`` and calls ``attend(heads)`` once. docs/flax.md shows one.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.models.hf_config import ModelError
from kvjax.nnx import nnx
from kvjax.types import AttendFn, C, Heads, Params

if TYPE_CHECKING:
    from jaxtyping import Array

SIZES = ("num_heads", "num_kv_heads", "head_dim", "max_positions")
METHODS = ("embed", "layers", "logits")


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """A module without its arrays; compared by what it is, hashed once.

    Attributes:
      graph: of ``nnx.split``.
      structure: of its state.
      names: of the state's arrays, in their order.
    """

    graph: Any
    structure: Any
    names: tuple[str, ...]

    @classmethod
    def of(cls, module: nnx.Module) -> tuple[Split, Params]:
        """The parts of a module, arrays by name."""
        graph, state = nnx.split(module)
        pairs, structure = jax.tree_util.tree_flatten_with_path(state)
        parts = [[str(part.key) for part in path if hasattr(part, "key")] for path, _ in pairs]
        names = tuple(".".join(("self", *part)) for part in parts)  # so that no name is one of our decoder's
        made = cls(graph, structure, names)
        vars(made)["_hash"] = hash((graph, structure, names))
        return made, dict(zip(names, (x for _, x in pairs)))

    def merge(self, arrays: Params) -> Any:
        """The module with these arrays."""
        return nnx.merge(
            self.graph, jax.tree.unflatten(self.structure, [arrays[name] for name in self.names])
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Split) or hash(self) != hash(other):
            return False
        of_self, of_other = ((x.graph, x.structure, x.names) for x in (self, other))
        return self is other or of_self == of_other

    def __hash__(self) -> int:
        return vars(self)["_hash"]  # type: ignore[no-any-return]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnNetwork:
    """The mathematics of an NNX module: a ``kvjax.Network``.

    Attributes:
      name: of its class.
      rest: the module without its layers.
      blocks: its layers.
      embed_name: the array of the rest that is ``params["embed"]``, [V, D].
      num_heads, num_kv_heads, head_dim, max_positions, windows: as in ``kvjax.Network``.
    """

    name: str
    rest: Split
    blocks: tuple[Split, ...]
    embed_name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    windows: tuple[int | None, ...]

    @property
    def num_layers(self) -> int:
        return len(self.blocks)

    def at(self, context: int) -> OwnNetwork:
        del context
        return self

    def _outer(self, params: Params) -> Any:
        return self.rest.merge({**params["rest"], self.embed_name: params["embed"]})

    def embed(self, params: Params, tokens: Array, positions: Array) -> Array:
        return self._outer(params).embed(tokens, positions)  # type: ignore[no-any-return]

    def layer(
        self, params: Params, index: int, x: Array, positions: Array, attend: AttendFn[C], carry: C
    ) -> tuple[Array, C]:
        after: list[C] = []

        def once(heads: Heads) -> Array:
            out, last = attend(index, heads, carry)
            after.append(last)
            return out

        x = self.blocks[index].merge(params)(x, positions, once)
        if len(after) != 1:
            raise ModelError(
                f"{self.name}: layer {index} calls attend {len(after)} times. Call it once, with all heads."
            )
        return x, after[0]

    def logits(self, params: Params, x: Array) -> Array:
        return self._outer(params).logits(x).astype(jnp.float32)  # type: ignore[no-any-return]


def read(model: Any) -> tuple[OwnNetwork, Params]:
    """The network and the params of an NNX module; no array is copied.

    Raises:
      ModelError: not such a module, or one without a part of the protocol.
    """
    name = type(model).__name__
    lacks = [part for part in (*METHODS, *SIZES) if not hasattr(model, part)]
    if not isinstance(model, nnx.Module) or lacks:
        raise ModelError(
            f"load({name}(...)) is neither a name of a model nor an nnx.Module with {', '.join(METHODS)} and "
            f"the sizes {', '.join(SIZES)}"
            + (f": it has no {', '.join(lacks)}. " if lacks else ". ")
            + "docs/flax.md shows a model that has them."
        )
    layers: list[Any] = list(model.layers)  # type: ignore[attr-defined]
    pairs = [Split.of(layer) for layer in layers]
    windows = tuple(getattr(model, "windows", (None,) * len(layers)))
    if len(windows) != len(layers):
        raise ModelError(
            f"load({name}(...)): windows names {len(windows)} layers, the model has {len(layers)}. Give one "
            "window (or None) per layer."
        )
    shell: Any = copy.copy(model)
    del shell.layers
    rest, arrays = Split.of(shell)
    x, embed_name = _entering(model, name, arrays)
    blocks = []
    for index, (window, (block, leaves)) in enumerate(zip(windows, pairs)):
        first = windows.index(window)
        alike = block == pairs[first][0] or (
            block.names == pairs[first][0].names
            and _computes(block, leaves, x) == _computes(*pairs[first], x)
        )
        if not alike:
            raise ModelError(
                f"load({name}(...)): layers {first} and {index} differ in more than their arrays. Make "
                "layers of one window alike, or give them different windows."
            )
        blocks.append(pairs[first][0])
    params: Params = {
        "embed": arrays.pop(embed_name),
        "rest": arrays,
        "layers": [leaves for _, leaves in pairs],
    }
    sizes: dict[str, Any] = {size: getattr(model, size) for size in SIZES}
    parts: dict[str, Any] = {"rest": rest, "blocks": tuple(blocks), "embed_name": embed_name}
    return OwnNetwork(name=name, windows=windows, **parts, **sizes), params


def _computes(block: Split, arrays: Params, x: Any) -> tuple[str, list[Any]]:
    """What a layer computes, as text and constants: modules may hold functions that are alike, not equal."""

    def run(arrays: Params, x: Array, positions: Array) -> Any:
        met: list[Heads] = []

        def attend(heads: Heads) -> Array:
            met.append(heads)
            return heads.q.astype(heads.v.dtype)

        x = block.merge(arrays)(x, positions, attend)
        return x, [(heads.q, heads.k, heads.v, heads.q_pre, heads.k_pre, heads.hidden) for heads in met]

    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), arrays)
    traced = jax.make_jaxpr(run)(shapes, x, jax.ShapeDtypeStruct((1, 1), jnp.int32))
    return re.sub(r" at 0x\w+", "", str(traced.jaxpr)), [
        np.asarray(const).tolist() for const in traced.consts
    ]


def _entering(model: Any, name: str, arrays: Params) -> tuple[Any, str]:
    """The shape of a token's vector, and the array [V, D] that says how many tokens there are."""
    x = jax.eval_shape(lambda: model.embed(jnp.zeros((1, 1), jnp.int32), jnp.zeros((1, 1), jnp.int32)))
    logits = jax.eval_shape(lambda: model.logits(jnp.zeros(x.shape, x.dtype)))
    shape = (logits.shape[-1], x.shape[-1])
    found = [key for key, array in arrays.items() if array.shape == shape]
    if x.shape[:2] != (1, 1) or not found:
        raise ModelError(
            f"load({name}(...)): embed gives {x.shape} for one token and logits {logits.shape}, and outside "
            f"the layers no array is {shape}, [vocabulary, width]. Embed tokens by such a table."
        )
    return x, found[0]
