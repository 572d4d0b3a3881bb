"""FP8 pages: floats of 8 bits (e4m3) with one scale per channel and page.

Three bits of mantissa: about 2.6 % error whatever the range, where INT8 has 0.6 % of the largest. Scales are
powers of two, so that a page whose scale grows loses nothing but its smallest values. Reads decode in plain
XLA.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax.numpy as jnp

from kvjax.algebra import Policy, PolicyError
from kvjax.storage.codes import Coded
from pallas_kernels.ragged_decode.api import FLOATS8, floats8

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Num


@dataclasses.dataclass(frozen=True, repr=False)
class Fp8(Coded):
    """Pages in 8-bit floats, except for the newest ``recent`` retained tokens.

    Attributes:
      recent, hadamard: as in ``int8``.
    """

    name = "fp8"
    most = 448

    def dtype(self, model: jnp.dtype) -> jnp.dtype:
        return FLOATS8

    def width(self, head_dim: int) -> int:
        if head_dim % 2:
            raise PolicyError(
                f"{self!r} stores two channels in a word, but this model's heads have {head_dim} channels. "
                "Use int8, or a model with an even head dim."
            )
        return head_dim // 2

    def scale(self, size: Float[Array, ...]) -> Float[Array, ...]:
        """The least power of two above ``size / 448``, or that itself."""
        fraction, exponent = jnp.frexp(size / self.most)
        return jnp.where(size > 0, jnp.ldexp(jnp.ones_like(size), exponent - (fraction == 0.5)), 0.0)

    def rounded(self, x: Float[Array, "... H"]) -> Num[Array, "... X"]:
        return floats8(jnp.clip(x, -self.most, self.most))


PRESETS = {"fp8": "fp8"}

EXAMPLES = (Policy(storage=Fp8(recent=16)),)
