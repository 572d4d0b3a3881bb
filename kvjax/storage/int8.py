"""INT8 pages: symmetric codes with one scale per channel and page.

Measured on Gaussian data: 0.6 % error quantised at once, 0.75 % grown token by token.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax.numpy as jnp

from kvjax.algebra import Policy
from kvjax.storage.codes import Coded

if TYPE_CHECKING:
    from jaxtyping import Array, Int


@dataclasses.dataclass(frozen=True, repr=False)
class Int8(Coded):
    """Pages in INT8, except for the newest ``recent`` retained tokens.

    Attributes:
      recent: tokens stored in the model's own dtype: in the ring and, if a budget that acts while decoding
        may evict them, in pages of their own.
      hadamard: turn keys and values by a Hadamard matrix before they are coded, and back where they are read.
    """

    name = "int8"
    most = 127

    def dtype(self, model: jnp.dtype) -> jnp.dtype:
        return jnp.dtype(jnp.int8)

    def encoded(self, codes: Int[Array, "... H"]) -> Int[Array, "... H"]:
        return codes


PRESETS = {"int8": "int8"}

EXAMPLES = (Policy(storage=Int8(recent=16)),)
