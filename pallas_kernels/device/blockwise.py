"""blockwise and column_mass on a device: agreement with gradients, TFLOP/s beside the vendor's attention."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.blockwise.api import blockwise, column_mass
from pallas_kernels.blockwise.shapes import Shape
from pallas_kernels.device import rivals
from pallas_kernels.device.work import Check, Job, Target

CHECK = Shape(B=2, N=8, K=2, T=300, S=300, H=128)
TINY = Shape(B=1, N=4, K=2, T=40, S=40, H=32)
TIMED = Shape(B=1, N=32, K=8, T=8192, S=8192, H=128)
WINDOW = 20


def arrays(shape: Shape, dtype: str) -> tuple[jax.Array, ...]:
    """q, k, v of normal numbers."""
    sizes = [(shape.B, heads, shape.T, shape.H) for heads in (shape.N, shape.K, shape.K)]
    keys = jax.random.split(jax.random.PRNGKey(0), 3)
    q, k, v = (jax.random.normal(key, size, dtype) for key, size in zip(keys, sizes))
    return q, k, v


def positions(shape: Shape) -> jax.Array:
    """0, 1, 2, ... of every row."""
    return jnp.broadcast_to(jnp.arange(shape.T, dtype=jnp.int32), (shape.B, shape.T))


def _everything(impl: str, window: int | None) -> Callable[..., Any]:
    """Output, lse, gradients through both, and column mass."""

    def run(q: Any, k: Any, v: Any, pos: Any, admit: Any) -> Any:
        where = {"q_pos": pos, "k_pos": pos, "window": window, "admit": admit, "impl": impl}
        (out, lse), back = jax.vjp(lambda *x: blockwise(*x, **where), q, k, v)
        grads = back((jnp.cos(out), jnp.sin(lse)))
        weights = jnp.cos(pos.astype(jnp.float32))
        return out, lse, grads, column_mass(q, k, jax.lax.stop_gradient(lse), weights, **where)

    return run


def checks(tiny: bool) -> Iterator[Check]:
    """A window with admitted keys, plain causal, other head dims; both dtypes."""
    base = TINY if tiny else CHECK
    admit = jnp.asarray(np.random.default_rng(1).random((base.B, base.K, base.T)) < 0.2)
    windowed = functools.partial(_everything, window=WINDOW)
    for dtype in ("bfloat16",) if tiny else ("bfloat16", "float32"):
        args = (*arrays(base, dtype), positions(base), admit)
        yield Check(f"{dtype}_admitted", windowed, args, base.S * base.N, dtype)
    if tiny:
        return
    for h in (64, 80):
        shape = base._replace(H=h)
        plain = (*arrays(shape, "bfloat16"), positions(shape), None)
        causal = functools.partial(_everything, window=None)
        yield Check(f"bfloat16_h{h}", causal, plain, base.S * base.N, "bfloat16")


def causal(impl: str) -> Callable[..., Any]:
    """The output alone of full causal attention."""

    def run(q: Any, k: Any, v: Any, pos: Any) -> Any:
        return blockwise(q, k, v, q_pos=pos, k_pos=pos, impl=impl)[0]

    return run


def _gradient(impl: str) -> Callable[..., Any]:
    return rivals.summed(causal(impl))


def _job(shape: Shape, gradient: bool, beside: bool, **more: Any) -> Job:
    args = (*arrays(shape, "bfloat16"), positions(shape))
    return Job(
        f"{'gradient' if gradient else 'forward'}_{shape.T}",
        _gradient if gradient else causal,
        args,
        # The gradient by convention: 5 products of the forward pass's size beside its 2, made again or not.
        flops=(7 if gradient else 2) * shape.B * shape.N * shape.H * shape.T**2,
        rivals=rivals.prompt(*args[:3], gradient=gradient) if beside else (),
        **more,
    )


def searches(tiny: bool) -> Iterator[Job]:
    """Forward, backward, and forward of small heads."""
    shape = TINY if tiny else TIMED._replace(T=4096, S=4096)
    for what, gradient in (("forward", False), ("backward", True)):
        yield _job(shape, gradient, False, tunes=what, key=("bfloat16", shape.H))
    if not tiny:
        small = shape._replace(H=64)
        yield _job(small, False, False, tunes="forward", key=("bfloat16", 64))


def jobs(tiny: bool) -> Iterator[Job]:
    """Prompts, forward and with gradients."""
    for t in (TINY.T,) if tiny else (8192, 2048):
        shape = (TINY if tiny else TIMED)._replace(T=t, S=t)
        for gradient in (False, True):
            yield _job(shape, gradient, True)


def targets(found: dict[str, Any], limits: dict[str, float]) -> list[Target]:
    """60 % of cuDNN's speed forward."""
    reached = []
    for name, case in found["cases"].items():
        theirs = found["compared"].get(f"{name}/cudnn", {})
        if name.startswith("forward") and "ms" in theirs:
            reached.append(Target(f"{name}: speed of cuDNN's", theirs["ms"] / case["ms"], 0.6, True))
    return reached
