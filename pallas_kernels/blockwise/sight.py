"""What a call of blockwise or column_mass has besides its queries, keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from pallas_kernels import softmax

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int

Partial = tuple["Float[Array, 'B N T H']", "Float[Array, 'B N T']"]
"""(out, lse)."""


class Sight(NamedTuple):
    """What a call is compiled for, as in ``api.blockwise``."""

    window: int | None
    scale: float
    softcap: float | None
    dtype: Any = np.dtype("float32")
    """Of ``out``."""


class Where(NamedTuple):
    """Where queries and keys lie, as in ``api.blockwise``; nothing of it is differentiated."""

    q_pos: Int[Array, "B T"]
    k_pos: Int[Array, "B S"]
    admit: Bool[Array, "B K S"] | None

    def within_reach(self, window: int | None) -> Where:
        """Keys after every query of the row, or before all windows and admitted by no head, are padding too.

        So nothing that they hold can reach a result: 0 times NaN is NaN.
        """
        q_pos, k_pos, admit = self
        far = jnp.iinfo(jnp.int32).max
        there = k_pos <= jnp.max(q_pos, axis=1, keepdims=True)
        if window is not None:
            oldest = jnp.min(jnp.where(q_pos >= 0, q_pos, far), axis=1, keepdims=True)
            near = (oldest - k_pos < window) & (window > 0)
            there &= near if admit is None else near | jnp.any(admit, axis=1)
        return Where(q_pos, jnp.where(there, k_pos, softmax.EMPTY), admit)


class Above(NamedTuple):
    """What a backward pass starts from; delta and up are 0 for queries that saw nothing.

    Attributes:
      up: gradient of out.
      lse: what the forward pass returned.
      delta: sum(out * up) of each query, less the gradient of its lse.
    """

    up: Float[Array, "B N T H"]
    lse: Float[Array, "B N T"]
    delta: Float[Array, "B N T"]
