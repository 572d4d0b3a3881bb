"""gated on a device: agreement with all gradients, and what its backward pass costs beside a plain one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.blockwise.shapes import Shape as Full
from pallas_kernels.device import blockwise as full
from pallas_kernels.device import rivals
from pallas_kernels.device.work import Check, Job, Target
from pallas_kernels.gated.api import gated
from pallas_kernels.gated.shapes import Shape

CHECK = Shape(B=2, N=8, K=2, T=300, H=128, window=50)
TINY = Shape(B=2, N=4, K=2, T=40, H=32, window=7)
TIMED = Shape(B=1, N=32, K=8, T=8192, H=128, window=256)


def _everything(impl: str, window: int) -> Callable[..., Any]:
    def run(q: Any, k: Any, v: Any, log_gate: Any, lengths: Any) -> Any:
        options = {"window": window, "lengths": lengths, "impl": impl}
        (out, lse), back = jax.vjp(lambda *x: gated(*x, **options), q, k, v, log_gate)
        seen = jnp.isfinite(lse)
        return out, lse, back((jnp.cos(out), jnp.where(seen, jnp.sin(jnp.where(seen, lse, 0.0)), 0.0)))

    return run


def _args(shape: Shape, dtype: str) -> tuple[Any, ...]:
    b, n, kv, t, h, _ = shape
    log_gate = np.log(np.random.default_rng(1).random((b, kv, t)))
    return *full.arrays(Full(b, n, kv, t, t, h), dtype), jnp.asarray(log_gate, jnp.float32)


def checks(tiny: bool) -> Iterator[Check]:
    """Rows of differing length, both dtypes, a small head."""
    base = TINY if tiny else CHECK
    lengths = jnp.asarray([base.T, base.T // 2 + 1], jnp.int32)
    cases = {"bfloat16": (base, "bfloat16")}
    if not tiny:
        cases |= {"float32": (base, "float32"), "h64": (base._replace(H=64), "bfloat16")}
    for name, (shape, dtype) in cases.items():
        run = functools.partial(_everything, window=shape.window)
        yield Check(name, run, (*_args(shape, dtype), lengths), shape.T * shape.N, dtype)


def _forward(impl: str, window: int) -> Callable[..., Any]:
    return lambda *x: gated(*x, window=window, impl=impl)[0]


def _gradient(impl: str, window: int) -> Callable[..., Any]:
    return rivals.summed(_forward(impl, window), (0, 1, 2, 3))


def _job(shape: Shape, gradient: bool, beside: bool, **more: Any) -> Job:
    b, n, kv, t, h, window = shape
    args = _args(shape, "bfloat16")
    others: tuple[rivals.Rival, ...] = ()
    if beside:
        at = full.positions(Full(b, n, kv, t, t, h))
        plain = (lambda impl: rivals.summed(full.causal(impl))) if gradient else full.causal
        others = (
            *rivals.prompt(*args[:3], gradient=gradient),
            rivals.ours("plain_blockwise", plain, (*args[:3], at)),
        )
    return Job(
        f"{'gradient' if gradient else 'forward'}_{t}",
        functools.partial(_gradient if gradient else _forward, window=window),
        args,
        flops=(7 if gradient else 2) * b * n * h * t * t,
        rivals=tuple(x._replace(like=None) for x in others if x.name != "xla"),
        **more,
    )


def searches(tiny: bool) -> Iterator[Job]:
    """Forward, then backward."""
    shape = TINY if tiny else TIMED._replace(T=4096)
    for what, gradient in (("forward", False), ("backward", True)):
        yield _job(shape, gradient, False, tunes=what, key=("bfloat16", shape.H))


def jobs(tiny: bool) -> Iterator[Job]:
    """Forward and with gradients, beside attention without gates."""
    for gradient in (False, True):
        yield _job(TINY if tiny else TIMED, gradient, True)


def targets(found: dict[str, Any], limits: dict[str, float]) -> list[Target]:
    """A backward pass (gradient less forward) of at most twice the plain one's time, whosever is fastest."""
    cases, beside, reached = found["cases"], found["compared"], []
    for name in [x for x in cases if x.startswith("gradient")]:
        ahead = name.replace("gradient", "forward")
        backward = []
        for rival, x in beside.items():
            case, who = rival.split("/")
            forward = beside.get(f"{ahead}/{who}", {})
            if case == name and "ms" in x and "ms" in forward:
                backward.append(x["ms"] - forward["ms"])
        if ahead in cases and backward:
            ratio = (cases[name]["ms"] - cases[ahead]["ms"]) / min(backward)
            reached.append(Target(f"{name}: backward over a plain one's", ratio, 2.0, False))
    return reached
