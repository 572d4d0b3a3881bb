"""Checks of gated on a device, and the calls that choose its blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.blockwise import work as blockwise
from pallas_kernels.gated.api import gated
from pallas_kernels.measure.work import Check, TimedCall, gradient_of_sum


class SelfAttentionSizes(NamedTuple):
    """q [B, N, T, H], k, v [B, K, T, H]; the ``window`` latest keys need no gate and no admission."""

    B: int
    N: int
    K: int
    T: int
    H: int
    window: int

    @property
    def blockwise(self) -> blockwise.BlockwiseSizes:
        """The same arrays for blockwise."""
        return blockwise.BlockwiseSizes(self.B, self.N, self.K, self.T, self.T, self.H)


CHECKED = SelfAttentionSizes(B=2, N=8, K=2, T=300, H=128, window=50)
TINY = SelfAttentionSizes(B=2, N=4, K=2, T=40, H=32, window=7)
TIMED = SelfAttentionSizes(B=1, N=32, K=8, T=8192, H=128, window=256)


def arrays(sizes: SelfAttentionSizes, dtype: str) -> tuple[Any, ...]:
    """q, k, v of normal numbers and log gates."""
    log_gate = np.log(np.random.default_rng(1).random((sizes.B, sizes.K, sizes.T)))
    return *blockwise.arrays(sizes.blockwise, dtype), jnp.asarray(log_gate, jnp.float32)


def output(impl: str | None, window: int) -> Callable[..., Any]:
    """The output alone."""
    return lambda *x: gated(*x, window=window, impl=impl)[0]


def output_gradient(impl: str | None, window: int) -> Callable[..., Any]:
    """Its gradient in queries, keys, values and log gates."""
    return gradient_of_sum(output(impl, window), (0, 1, 2, 3))


def _everything(impl: str, window: int) -> Callable[..., Any]:
    def run(q: Any, k: Any, v: Any, log_gate: Any, lengths: Any) -> Any:
        options = {"window": window, "lengths": lengths, "impl": impl}
        (out, lse), back = jax.vjp(lambda *x: gated(*x, **options), q, k, v, log_gate)
        seen = jnp.isfinite(lse)
        return out, lse, back((jnp.cos(out), jnp.where(seen, jnp.sin(jnp.where(seen, lse, 0.0)), 0.0)))

    return run


def checks(tiny: bool) -> Iterator[Check]:
    """Rows of differing length, both dtypes, a small head; all gradients."""
    base = TINY if tiny else CHECKED
    lengths = jnp.asarray([base.T, base.T // 2 + 1], jnp.int32)
    cases = {"bfloat16": (base, "bfloat16")}
    if not tiny:
        cases |= {"float32": (base, "float32"), "h64": (base._replace(H=64), "bfloat16")}
    for name, (sizes, dtype) in cases.items():
        run = functools.partial(_everything, window=sizes.window)
        yield Check(name, run, (*arrays(sizes, dtype), lengths), sizes.T * sizes.N, dtype)


def timed_call(sizes: SelfAttentionSizes, gradient: bool, **more: Any) -> TimedCall:
    """The output, or its gradient."""
    return TimedCall(
        f"{'gradient' if gradient else 'forward'}_{sizes.T}",
        functools.partial(output_gradient if gradient else output, window=sizes.window),
        arrays(sizes, "bfloat16"),
        flops=(7 if gradient else 2) * sizes.B * sizes.N * sizes.H * sizes.T**2,
        **more,
    )


def searches(tiny: bool) -> Iterator[TimedCall]:
    """Forward, then backward."""
    sizes = TINY if tiny else TIMED._replace(T=4096)
    for what, gradient in (("forward", False), ("backward", True)):
        yield timed_call(sizes, gradient, tunes=what, key=("bfloat16", sizes.H))
