"""INT4 pages: two codes per byte, with one scale per channel and page; the ablation of INT8.

Codes range from -7 to 7: half the bytes of INT8's codes for about eighteen times its error. Reads unpack in
plain XLA: no Pallas kernel reads two codes from a byte.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax.numpy as jnp

from kvjax.algebra import Policy, PolicyError
from kvjax.storage.codes import Coded
from pallas_kernels.ragged_decode.api import PAIRED, paired

if TYPE_CHECKING:
    from jaxtyping import Array, Int


@dataclasses.dataclass(frozen=True, repr=False)
class Int4(Coded):
    """Pages in 4 bits, except for the newest ``recent`` retained tokens.

    Attributes:
      recent, hadamard: as in ``int8``.
    """

    name = "int4"
    most = 7

    def dtype(self, model: jnp.dtype) -> jnp.dtype:
        return PAIRED

    def width(self, head_dim: int) -> int:
        if head_dim % 2:
            raise PolicyError(
                f"{self!r} stores two channels in a byte, but this model's heads have {head_dim} channels. "
                "Use int8, or a model with an even head dim."
            )
        return head_dim // 2

    def encoded(self, codes: Int[Array, "... H"]) -> Int[Array, "... H/2"]:
        return paired(codes)


PRESETS = {"int4-hadamard": "int4(hadamard=True)"}

EXAMPLES = (Policy(storage=Int4(recent=16)), Policy(storage=Int4(recent=16, hadamard=True)))
