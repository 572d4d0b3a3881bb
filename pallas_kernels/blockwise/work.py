"""Checks of blockwise and column_mass on a device, and the calls that choose their blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.blockwise.api import OFFERED_MASS, blockwise, column_mass
from pallas_kernels.measure.work import Check, TimedCall, gradient_of_sum


class BlockwiseSizes(NamedTuple):
    """q [B, N, T, H] against k, v [B, K, S, H]."""

    B: int
    N: int
    K: int
    T: int
    S: int
    H: int


CHECKED = BlockwiseSizes(B=2, N=8, K=2, T=300, S=300, H=128)
"""Sizes that divide no block."""

TINY = BlockwiseSizes(B=1, N=4, K=2, T=40, S=40, H=32)
TIMED = BlockwiseSizes(B=1, N=32, K=8, T=8192, S=8192, H=128)
WINDOW = 20


def arrays(sizes: BlockwiseSizes, dtype: str) -> tuple[jax.Array, ...]:
    """q, k, v of normal numbers."""
    b, n, kv, t, s, h = sizes
    keys = jax.random.split(jax.random.PRNGKey(0), 3)
    shapes = [(b, n, t, h), (b, kv, s, h), (b, kv, s, h)]
    q, k, v = (jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes))
    return q, k, v


def positions(sizes: BlockwiseSizes) -> jax.Array:
    """0, 1, 2, ... of the keys of every row; queries are the last T of them."""
    return jnp.broadcast_to(jnp.arange(sizes.S, dtype=jnp.int32), (sizes.B, sizes.S))


def _everything(impl: str, window: int | None) -> Callable[..., Any]:
    """Output, lse, gradients through both, and column mass (of ``xla`` where a body has none)."""

    def run(q: Any, k: Any, v: Any, pos: Any, admit: Any) -> Any:
        where = {"q_pos": pos, "k_pos": pos, "window": window, "admit": admit}
        (out, lse), back = jax.vjp(lambda *x: blockwise(*x, **where, impl=impl), q, k, v)
        grads = back((jnp.cos(out), jnp.sin(lse)))
        weights, by = jnp.cos(pos.astype(jnp.float32)), impl if impl in OFFERED_MASS else "xla"
        return out, lse, grads, column_mass(q, k, jax.lax.stop_gradient(lse), weights, **where, impl=by)

    return run


def checks(tiny: bool) -> Iterator[Check]:
    """A window with admitted keys, plain causal, other head dims; both dtypes."""
    base = TINY if tiny else CHECKED
    admit = jnp.asarray(np.random.default_rng(1).random((base.B, base.K, base.T)) < 0.2)
    windowed = functools.partial(_everything, window=WINDOW)
    for dtype in ("bfloat16",) if tiny else ("bfloat16", "float32"):
        args = (*arrays(base, dtype), positions(base), admit)
        yield Check(f"{dtype}_admitted", windowed, args, base.S * base.N, dtype)
    if tiny:
        return
    for h in (64, 80):
        sizes = base._replace(H=h)
        plain = (*arrays(sizes, "bfloat16"), positions(sizes), None)
        causal = functools.partial(_everything, window=None)
        yield Check(f"bfloat16_h{h}", causal, plain, base.S * base.N, "bfloat16")


def causal(impl: str) -> Callable[..., Any]:
    """The output alone of full causal attention."""

    def run(q: Any, k: Any, v: Any, pos: Any) -> Any:
        return blockwise(q, k, v, q_pos=pos, k_pos=pos, impl=impl)[0]

    return run


def causal_gradient(impl: str) -> Callable[..., Any]:
    """Its gradient in queries, keys and values."""
    return gradient_of_sum(causal(impl))


def timed_call(sizes: BlockwiseSizes, gradient: bool, **more: Any) -> TimedCall:
    """Full causal attention, or its gradient."""
    return TimedCall(
        f"{'gradient' if gradient else 'forward'}_{sizes.T}",
        causal_gradient if gradient else causal,
        (*arrays(sizes, "bfloat16"), positions(sizes)),
        # The gradient by convention: 5 products of the forward pass's size beside its 2, made again or not.
        flops=(7 if gradient else 2) * sizes.B * sizes.N * sizes.H * sizes.T**2,
        **more,
    )


def searches(tiny: bool) -> Iterator[TimedCall]:
    """Forward, backward, and forward of small heads."""
    sizes = TINY if tiny else TIMED._replace(T=4096, S=4096)
    for what, gradient in (("forward", False), ("backward", True)):
        yield timed_call(sizes, gradient, tunes=what, key=("bfloat16", sizes.H))
    if not tiny:
        yield timed_call(sizes._replace(H=64), False, tunes="forward", key=("bfloat16", 64))
