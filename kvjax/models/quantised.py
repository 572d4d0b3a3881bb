"""Weights of 8 or 4 bits: how they lie, how a file's values become them, and products of rows by them.

int8 has a scale for each output channel, int4 one for each group of 32 to 128 inputs. Activations stay as
they are: only weights are quantised. DESIGN.md section 33 says why so.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.models.hf_values import ModelError, aligned
from kvjax.types import Params, pytree

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

INPUTS = {
    **dict.fromkeys(("wq", "wk", "wv", "w_gate", "w_up", "w_down", "embed", "head"), 1),
    **dict.fromkeys(("experts_gate", "experts_up", "experts_down"), 1),
    "wo": 2,
}
"""Leaves that are quantised, and how many of their last axes are inputs."""

EIGHT_BITS = ("embed", "head")
"""Of these, the ones that keep 8 bits beside int4."""

TILE = 1 << 18
"""Entries that a step on a CPU widens at once, 1 MB: a core's second cache holds them."""

_BLOCK = 1 << 19
"""Entries that are quantised at once."""


@pytree(static=("cut",))
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Quantised:
    """A weight [..., X] whose last axis, or last two, are inputs.

    Codes and scales have the axes of the weight, so both are cut and reordered by head as it would be.

    Attributes:
      codes: int8 [..., X]; or uint8 [..., X / 2], a group's first half in the low bits, both plus 8.
      scales: in the dtype of activations; [..., 1] of each output channel, or [..., X / group].
      cut: lies on a mesh, where a loop over tiles would gather it.
    """

    codes: Any
    scales: Any
    cut: bool = False

    @property
    def group(self) -> int | None:
        """Inputs that share a scale; None where a whole output channel does."""
        return 2 * self.codes.shape[-1] // self.scales.shape[-1] if self.codes.dtype == np.uint8 else None

    @property
    def shape(self) -> tuple[int, ...]:
        *outer, last = self.codes.shape
        return (*outer, 2 * last if self.group else last)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def dtype(self) -> Any:
        """Of the values it stands for, and so of activations and of the cache."""
        return self.scales.dtype

    def reshape(self, *shape: int) -> Quantised:
        """As a matrix [outputs, inputs]; one of the two sizes may be -1."""
        rows, width = shape
        rows = self.size // width if rows == -1 else rows
        codes, scales = (x.reshape(rows, -1) for x in (self.codes, self.scales))
        return dataclasses.replace(self, codes=codes, scales=scales)

    def on_mesh(self) -> Quantised:
        """The same once it is cut over devices."""
        return dataclasses.replace(self, cut=True)


def refuse(params: Params, call: str) -> None:
    """Raises ModelError where weights are quantised; ``call`` needs the model's own."""
    kinds = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, Quantised))
    if any(isinstance(leaf, Quantised) for leaf in kinds):
        raise ModelError(f"{call} takes no quantised weights. Load the model without weight_dtype.")


def group_of(inputs: int) -> int | None:
    """Inputs that share a scale of int4; None where no even number from 32 to 128 divides them."""
    return next((group for group in range(32, 129, 2) if inputs % group == 0), None)


def quantised(x: np.ndarray, name: str, weight_dtype: str, dtype: str) -> Quantised:
    """The leaf ``name`` of a decoder; scales in ``dtype``, the codes are taken against the rounded ones.

    Rows that no group of int4 divides get 8 bits.
    """
    outputs = x.shape[: -INPUTS[name]]
    group = None if weight_dtype == "int8" or name in EIGHT_BITS else group_of(x.shape[-1])
    rows = x.reshape(math.prod(outputs), -1)
    count, width = rows.shape
    codes = aligned((count, width // 2) if group else rows.shape, "uint8" if group else "int8")
    scales = aligned((count, width // group if group else 1), dtype)
    step = max(_BLOCK // width, 1)
    for begin in range(0, count, step):
        block = rows[begin : begin + step].astype(np.float32)
        values = block.reshape(len(block), -1, group or width)
        high, low = values.max(axis=-1), values.min(axis=-1)
        # The largest value of a group of int4 takes -8, whatever its sign, so that no code is idle.
        most = np.where(high > -low, high / -8, low / -8) if group else np.maximum(high, -low) / 127
        scales[begin : begin + step] = most.astype(dtype)
        divisor = scales[begin : begin + step].astype(np.float32)[..., None]
        code = values / np.where(divisor == 0, 1, divisor)
        np.rint(code, out=code)
        if group:
            np.clip(code, -8, 7, out=code)
            pairs = (code + 8).astype(np.uint8).reshape(len(block), -1, 2, group // 2)
            codes[begin : begin + step] = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(len(block), -1)
        else:
            codes[begin : begin + step] = np.clip(code, -127, 127).reshape(len(block), width)
    inner = x.shape[-INPUTS[name] :]
    last = inner[:-1] if group else (1,) * (len(inner) - 1)
    return Quantised(
        codes=codes.reshape(*outputs, *inner[:-1], -1), scales=scales.reshape(*outputs, *last, -1)
    )


def shapes(shape: tuple[int, ...], name: str, weight_dtype: str, dtype: Any) -> Quantised:
    """The shapes of what ``quantised`` gives for a leaf of that shape."""
    group = None if weight_dtype == "int8" or name in EIGHT_BITS else group_of(shape[-1])
    if group:
        codes, scales = (*shape[:-1], shape[-1] // 2), (*shape[:-1], shape[-1] // group)
    else:
        codes, scales = shape, (*shape[: -INPUTS[name]], *(1,) * INPUTS[name])
    return Quantised(
        codes=jax.ShapeDtypeStruct(codes, jnp.uint8 if group else jnp.int8),
        scales=jax.ShapeDtypeStruct(scales, jnp.dtype(dtype)),
    )


def widened(weight: Quantised) -> Float[Array, "... X"]:
    """All of the values it stands for, in the dtype of activations."""
    codes = weight.codes
    if weight.group:
        halves = _halves(codes.reshape(*codes.shape[:-1], -1, weight.group // 2))
        scaled = jnp.stack(halves, axis=-2) * weight.scales[..., None, None].astype(jnp.float32)
        return scaled.reshape(weight.shape).astype(weight.dtype)
    return (codes.astype(jnp.float32) * weight.scales.astype(jnp.float32)).astype(weight.dtype)


def rows_of(weight: Quantised, index: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """Rows of a table with a scale each."""
    codes, scales = weight.codes[index].astype(jnp.float32), weight.scales[index].astype(jnp.float32)
    return (codes * scales).astype(weight.dtype)


def times(x: Float[Array, "... X"], weight: Quantised) -> Float[Array, "... O"]:
    """x times a weight [..., X], in float32; ``x`` is [B, X] or [B, T, X].

    With one token of each row a CPU widens a tile of the weight at a time. XLA would write the whole weight
    out before it multiplies. Other devices widen codes as they read them.
    """
    rows, matrix = x.reshape(-1, x.shape[-1]), weight.reshape(-1, x.shape[-1])
    if weight.cut or (x.ndim > 2 and x.shape[1] > 1):
        y = _at_once(rows, matrix)
    else:
        y = jax.lax.platform_dependent(rows, matrix, cpu=by_tiles, default=_at_once)
    return y.reshape(*x.shape[:-1], *weight.shape[:-1])


def times_one(x: Float[Array, "M X"], stack: Quantised, at: Int[Array, ""]) -> Float[Array, "M Y"]:
    """x times the matrix ``at`` of a stack [E, Y, X], in float32; the stack is whole where this runs.

    A CPU reads that matrix where it lies, by tiles for any number of rows; other devices cut it out.
    """
    _, outputs, width = stack.shape

    def where_it_lies(x: Array, stack: Quantised) -> Array:
        return by_tiles(x, stack.reshape(-1, width), at * outputs, outputs)

    def cut_out(x: Array, stack: Quantised) -> Array:
        return _at_once(x, dataclasses.replace(stack, codes=stack.codes[at], scales=stack.scales[at]))

    y: Array = jax.lax.platform_dependent(x, stack, cpu=where_it_lies, default=cut_out)
    return y


def _at_once(x: Float[Array, "R X"], weight: Quantised) -> Float[Array, "R O"]:
    group, in_float32 = weight.group, jnp.float32
    if group is None:  # the codes are exact in bfloat16
        y = jnp.einsum("rx,ox->ro", x, weight.codes.astype(x.dtype), preferred_element_type=in_float32)
        return y * weight.scales[:, 0].astype(in_float32)
    low, high = _halves(weight.codes.reshape(len(weight.codes), -1, group // 2))
    scaled = jnp.stack([low, high], axis=2) * weight.scales[:, :, None, None].astype(in_float32)
    values = scaled.reshape(len(scaled), -1).astype(x.dtype)
    return jnp.einsum("rx,ox->ro", x, values, preferred_element_type=in_float32)


def by_tiles(
    x: Float[Array, "R X"], weight: Quantised, first: Any = 0, count: int | None = None
) -> Float[Array, "R O"]:
    """x times a matrix, or its ``count`` outputs from ``first`` on; one tile of it is widened at a time."""
    outputs, group = count or weight.codes.shape[0], weight.group
    tile = min(outputs, max(TILE // x.shape[-1], 8))
    x = x.astype(jnp.float32)
    if group:
        pairs = x.reshape(len(x), -1, 2, group // 2)
        parts = [pairs[:, :, half].reshape(len(x), -1) for half in range(2)]

    def one(turn: Int[Array, ""], y: Float[Array, "R O"]) -> Float[Array, "R O"]:
        begin = jnp.minimum(turn * tile, outputs - tile)  # the last tile may begin in the one before it
        codes, scales = (
            jax.lax.dynamic_slice_in_dim(of, first + begin, tile) for of in (weight.codes, weight.scales)
        )
        scales = scales.astype(jnp.float32)
        if group:
            widened = [
                (half * scales[:, :, None]).reshape(tile, -1)
                for half in _halves(codes.reshape(tile, -1, group // 2))
            ]
            z = sum(jnp.einsum("rx,ox->ro", part, half) for part, half in zip(parts, widened))
        else:
            z = jnp.einsum("rx,ox->ro", x, codes.astype(jnp.float32)) * scales[:, 0]
        return jax.lax.dynamic_update_slice_in_dim(y, z, begin, axis=1)

    return jax.lax.fori_loop(0, -(-outputs // tile), one, jnp.zeros((len(x), outputs), jnp.float32))


def _halves(codes: Int[Array, "O G J"]) -> tuple[Array, Array]:
    """Values without their scale: of the low bits, and of the high ones."""
    low, high = (codes & 15).astype(jnp.int8) - 8, (codes >> 4).astype(jnp.int8) - 8
    return low.astype(jnp.float32), high.astype(jnp.float32)
