"""vertical_slash by definition: blockwise attention at positions 0 .. T - 1 with admitted keys."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from pallas_kernels import softmax
from pallas_kernels.blockwise import ref
from pallas_kernels.blockwise.sight import Sight, Where
from pallas_kernels.vertical_slash.compact import Inputs, loudly, rows_of
from pallas_kernels.vertical_slash.tiles import Rule

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


@functools.partial(jax.jit, static_argnames=("rule", "blockwise"))
def vertical_slash(
    x: Inputs, *, rule: Rule, blockwise: Callable[..., Any] = ref.blockwise
) -> tuple[Float[Array, "B N T H"], Float[Array, "B N T"], Int[Array, "B K"]]:
    """See ``api.vertical_slash``; ``blockwise`` is any implementation of that."""
    q, k, v, admit, *_ = x
    (b, _, t, _), rows = q.shape, rows_of(x)
    end = rows.end[:, None]
    at = rows.start[:, None] + jnp.arange(t, dtype=jnp.int32)
    own = jnp.broadcast_to(jnp.arange(k.shape[2], dtype=jnp.int32), (b, k.shape[2]))
    at, own = (jnp.where(x < end, x, softmax.EMPTY) for x in (at, own))
    sight = Sight(rule.window, rule.scale, rule.softcap)
    out, lse = blockwise(q, k, v, Where(at, own, admit), sight=sight)
    count = jnp.sum(admit & (own >= 0)[:, None], axis=-1, dtype=jnp.int32)
    lost = count > rule.capacity if rule.capacity < k.shape[2] else None
    out, lse = loudly(out, lse, lost)
    return out.astype(rule.dtype), lse, count
