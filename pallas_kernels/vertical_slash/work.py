"""Checks of vertical_slash on a device, and the call that chooses its blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.blockwise import work as blockwise
from pallas_kernels.gated.work import SelfAttentionSizes
from pallas_kernels.measure.work import Check, TimedCall
from pallas_kernels.vertical_slash.api import vertical_slash

CHECKED = SelfAttentionSizes(B=2, N=8, K=2, T=700, H=128, window=100)
TINY = SelfAttentionSizes(B=2, N=4, K=2, T=40, H=32, window=7)
TIMED = SelfAttentionSizes(B=1, N=32, K=8, T=131072, H=128, window=256)

ADMITTED = 0.25
"""Part of the keys that a timed call admits."""


def read(impl: str, window: int, capacity: int | None) -> Callable[..., Any]:
    """Out comes in the keys' dtype; the last argument is where queries begin, if they are a piece."""

    def run(q: Any, k: Any, v: Any, admit: Any, lengths: Any, offset: Any = None) -> Any:
        options = {"window": window, "capacity": capacity, "lengths": lengths, "impl": impl}
        return vertical_slash(q, k, v, admit, offset=offset, dtype=k.dtype, **options)

    return run


def _args(sizes: SelfAttentionSizes, dtype: str, admitted: float) -> tuple[Any, ...]:
    admit = np.random.default_rng(1).random((sizes.B, sizes.K, sizes.T)) < admitted
    return *blockwise.arrays(sizes.blockwise, dtype), jnp.asarray(admit)


def checks(tiny: bool) -> Iterator[Check]:
    """Rows of differing length, both dtypes, a small head; a piece of a prompt."""
    base = TINY if tiny else CHECKED
    lengths = jnp.asarray([base.T, base.T // 2 + 1], jnp.int32)
    cases = {"bfloat16": (base, "bfloat16")}
    if not tiny:
        cases |= {"float32": (base, "float32"), "h64": (base._replace(H=64), "bfloat16")}
    run = functools.partial(read, window=base.window, capacity=None)
    for name, (sizes, dtype) in cases.items():
        yield Check(name, run, (*_args(sizes, dtype, 0.3), lengths), sizes.T, dtype)
    args, start = _args(base, "bfloat16", 0.3), base.T // 3
    piece, offset = args[0][:, :, : base.T // 2], jnp.asarray([start, start + 1], jnp.int32)
    yield Check("piece", run, (piece, *args[1:], lengths, offset), base.T, "bfloat16")


def timed_call(sizes: SelfAttentionSizes, **more: Any) -> TimedCall:
    """A quarter admitted."""
    b, n, _, t, h, window = sizes
    # More than are drawn, by many times their deviation.
    capacity = int(ADMITTED * t + 8 * t**0.5)
    return TimedCall(
        f"quarter_{t}",
        functools.partial(read, window=window, capacity=capacity),
        (*_args(sizes, "bfloat16", ADMITTED), None),
        flops=int(4 * b * n * h * (t * window + ADMITTED * (t - window) ** 2 / 2)),
        **more,
    )


def searches(tiny: bool) -> Iterator[TimedCall]:
    """One pass, at a size whose candidates take little time."""
    sizes = TINY if tiny else TIMED._replace(T=16384)
    yield timed_call(sizes, tunes="forward", key=("bfloat16", sizes.H))
