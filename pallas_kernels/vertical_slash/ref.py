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
from pallas_kernels.vertical_slash.compact import loudly

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

    from pallas_kernels.vertical_slash.tiles import Rule


@functools.partial(jax.jit, static_argnames=("rule", "blockwise"))
def vertical_slash(
    q: Array,
    k: Array,
    v: Array,
    admit: Array,
    lengths: Array | None,
    *,
    rule: Rule,
    blockwise: Callable[..., Any] = ref.blockwise,
) -> tuple[Float[Array, "B N T H"], Float[Array, "B N T"], Int[Array, "B K"]]:
    """See ``api.vertical_slash``; ``blockwise`` is any implementation of that."""
    at = jnp.broadcast_to(jnp.arange(q.shape[2]), (q.shape[0], q.shape[2]))
    if lengths is not None:
        at = jnp.where(at < lengths[:, None], at, softmax.EMPTY)
    sight = Sight(rule.window, rule.scale, rule.softcap)
    out, lse = blockwise(q, k, v, Where(at, at, admit), sight=sight)
    count = jnp.sum(admit & (at >= 0)[:, None], axis=-1, dtype=jnp.int32)
    return loudly(out, lse, count, rule.capacity)
