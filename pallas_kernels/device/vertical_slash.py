"""vertical_slash on a device: agreement, and its time against full attention over as many tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.blockwise.shapes import Shape as Full
from pallas_kernels.device import blockwise as full
from pallas_kernels.device import rivals
from pallas_kernels.device.work import Check, Job, Target
from pallas_kernels.vertical_slash.api import vertical_slash
from pallas_kernels.vertical_slash.shapes import Shape

CHECK = Shape(B=2, N=8, K=2, T=700, H=128, window=100)
TINY = Shape(B=2, N=4, K=2, T=40, H=32, window=7)
TIMED = Shape(B=1, N=32, K=8, T=131072, H=128, window=256)
ADMITTED = 0.25


def _run(impl: str, window: int, capacity: int | None) -> Callable[..., Any]:
    def run(q: Any, k: Any, v: Any, admit: Any, lengths: Any) -> Any:
        options = {"window": window, "capacity": capacity, "lengths": lengths}
        return vertical_slash(q, k, v, admit, **options, impl=impl)

    return run


def _args(shape: Shape, dtype: str, share: float) -> tuple[Any, ...]:
    b, n, kv, t, h, _ = shape
    admit = np.random.default_rng(1).random((b, kv, t)) < share
    return *full.arrays(Full(b, n, kv, t, t, h), dtype), jnp.asarray(admit)


def checks(tiny: bool) -> Iterator[Check]:
    """Rows of differing length, both dtypes, a small head."""
    base = TINY if tiny else CHECK
    lengths = jnp.asarray([base.T, base.T // 2 + 1], jnp.int32)
    cases = {"bfloat16": (base, "bfloat16")}
    if not tiny:
        cases |= {"float32": (base, "float32"), "h64": (base._replace(H=64), "bfloat16")}
    for name, (shape, dtype) in cases.items():
        run = functools.partial(_run, window=shape.window, capacity=None)
        yield Check(name, run, (*_args(shape, dtype, 0.3), lengths), shape.T, dtype)


def _job(shape: Shape, beside: bool, **more: Any) -> Job:
    b, n, _, t, h, window = shape
    args = _args(shape, "bfloat16", ADMITTED)
    # More than are drawn, by many times their deviation.
    capacity = int(ADMITTED * t + 8 * t**0.5)
    others = rivals.prompt(*args[:3]) if beside else ()
    if beside:
        at = full.positions(Full(b, n, args[1].shape[1], t, t, h))
        others += (rivals.ours("full_blockwise", full.causal, (*args[:3], at)),)
    return Job(
        f"quarter_{t}",
        functools.partial(_run, window=window, capacity=capacity),
        (*args, None),
        flops=int(4 * b * n * h * (t * window + ADMITTED * (t - window) ** 2 / 2)),
        rivals=tuple(x._replace(like=None) for x in others if not x.name.startswith("xla")),
        **more,
    )


def searches(tiny: bool) -> Iterator[Job]:
    """One pass, at a size whose candidates take little time."""
    shape = TINY if tiny else TIMED._replace(T=16384)
    yield _job(shape, False, tunes="forward", key=("bfloat16", shape.H))


def jobs(tiny: bool) -> Iterator[Job]:
    """A quarter admitted, at the length of the target and at a fourth of it."""
    for t in (TINY.T,) if tiny else (TIMED.T, TIMED.T // 4):
        yield _job((TINY if tiny else TIMED)._replace(T=t), True)


def targets(found: dict[str, Any], limits: dict[str, float]) -> list[Target]:
    """Three times as fast as the fastest full attention at 128k tokens."""
    reached = []
    for name, case in found["cases"].items():
        beside = [x for rival, x in found["compared"].items() if rival.startswith(f"{name}/")]
        times = [x["ms"] for x in beside if "ms" in x]
        if name.endswith(str(TIMED.T)) and times:
            text = f"{name}: speed of the fastest full attention"
            reached.append(Target(text, min(times) / case["ms"], 3.0, True))
    return reached
