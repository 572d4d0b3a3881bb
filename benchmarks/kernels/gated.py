"""gated: CPU benchmark, cases compiled for chips, timings on a device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.kernels import rivals
from benchmarks.kernels.operations import CompiledCase, CpuBench, Target, Timing
from pallas_kernels.blockwise import work as blockwise
from pallas_kernels.gated.api import gated
from pallas_kernels.gated.work import (
    TIMED,
    TINY,
    SelfAttentionSizes,
    arrays,
    output,
    output_gradient,
    timed_call,
)
from pallas_kernels.measure.work import gradient_of_sum, size

DTYPES = ("float32", "bfloat16")

BENCH = {
    "small_512": SelfAttentionSizes(B=8, N=4, K=2, T=512, H=64, window=64),
    "small_2k": SelfAttentionSizes(B=2, N=4, K=2, T=2048, H=64, window=64),
}
LARGE = {"llama8b_8k": TIMED}
CHIP = {
    "h128": SelfAttentionSizes(B=1, N=32, K=8, T=4096, H=128, window=256),
    "odd_h64": SelfAttentionSizes(B=2, N=4, K=2, T=1000, H=64, window=64),
    "odd_h96": SelfAttentionSizes(B=1, N=2, K=2, T=513, H=96, window=64),
    "h256": SelfAttentionSizes(B=1, N=8, K=4, T=2048, H=256, window=256),
}


def _dense(window: int, q: jax.Array, k: jax.Array, v: jax.Array, log_gate: jax.Array) -> jax.Array:
    b, n, t, h = q.shape
    q = q.reshape(b, k.shape[1], -1, t, h)
    age = jnp.arange(t)[:, None] - jnp.arange(t)[None, :]
    s = jnp.einsum("bkgth,bksh->bkgts", q, k, preferred_element_type=jnp.float32) * h**-0.5
    s = jnp.where(age < 0, -jnp.inf, s + jnp.where(age < window, 0, log_gate[:, :, None, None, :]))
    p = jax.nn.softmax(s, axis=-1).astype(v.dtype)
    return jnp.einsum("bkgts,bksh->bkgth", p, v, preferred_element_type=jnp.float32)


def on_cpu(sizes: SelfAttentionSizes, dtype: str) -> CpuBench:
    """With its gradient, against a dense softmax."""
    dense = functools.partial(_dense, sizes.window)
    runs: dict[str, Callable[..., Any]] = {
        "dense": dense,
        "gated": output(None, sizes.window),
        "dense gradient": gradient_of_sum(dense, (0, 1, 2, 3)),
        "gated gradient": output_gradient(None, sizes.window),
    }
    args = arrays(sizes, dtype)
    return CpuBench({name: (run, args) for name, run in runs.items()}, "dense", repeats=7)


# Compiled for chips.

BLOCK = 512


def _forward(impl: str, window: int) -> Callable[..., Any]:
    def run(q: Any, k: Any, v: Any, log_gate: Any, lengths: Any) -> Any:
        return gated(q, k, v, log_gate, lengths=lengths, window=window, impl=impl)

    return run


def _gradient(impl: str, window: int) -> Callable[..., Any]:
    def run(q: Any, k: Any, v: Any, log_gate: Any, lengths: Any) -> Any:
        def loss(*x: Any) -> Any:
            out, lse = _forward(impl, window)(*x, lengths)
            return jnp.sum(out * out) + jnp.sum(lse)

        return jax.grad(loss, argnums=(0, 1, 2, 3))(q, k, v, log_gate)

    return run


def _case(
    sizes: SelfAttentionSizes, dtype: str, *, gradient: bool = False, ragged: bool = False
) -> CompiledCase:
    b, n, kv, t, h, window = sizes
    a = jax.ShapeDtypeStruct
    q, k = a((b, n, t, h), dtype), a((b, kv, t, h), dtype)
    args = (q, k, k, a((b, kv, t), jnp.float32), a((b,), jnp.int32) if ragged else None)
    run, products = (_gradient, 2 + 7) if gradient else (_forward, 2)
    tile = min(BLOCK, t)
    # Padded to whole tiles and lanes: a float32 array of every head's outputs.
    wide = 4 * b * n * -(-t // BLOCK) * BLOCK * -(-h // 128) * 128
    return CompiledCase(
        run=lambda impl: run(impl, window),
        args=args,
        moves=size(args) * (2 if gradient else 1) + 4 * b * n * t * h,
        flops=products * b * n * t * t * h,
        temp=(8 << 20) + (10 if gradient else 3) * wide,
        whole=b * kv * t * h if h % 128 == 0 and t % BLOCK == 0 and not gradient and not ragged else 0,
        step=(2 * tile * h * jnp.dtype(dtype).itemsize, 4 * tile * tile * h),
        kernel="gated_forward",
    )


def cases() -> dict[str, CompiledCase]:
    """Forward and gradient at training size; rows of differing length; other dtypes and head dims."""
    base = CHIP["h128"]
    return {
        "bfloat16": _case(base, "bfloat16"),
        "bfloat16_gradient": _case(base, "bfloat16", gradient=True),
        "bfloat16_ragged_gradient": _case(base, "bfloat16", gradient=True, ragged=True),
        "odd_float32_gradient": _case(CHIP["odd_h64"], "float32", gradient=True),
        "odd_h96_bfloat16_gradient": _case(CHIP["odd_h96"], "bfloat16", gradient=True, ragged=True),
        "h256_bfloat16_gradient": _case(CHIP["h256"], "bfloat16", gradient=True),
    }


def timings(tiny: bool) -> Iterator[Timing]:
    """Forward and with gradients, beside attention without gates."""
    for gradient in (False, True):
        sizes = TINY if tiny else TIMED
        call, plain = timed_call(sizes, gradient), blockwise.causal_gradient if gradient else blockwise.causal
        others = (
            *rivals.prompt(*call.args[:3], gradient=gradient),
            rivals.ours("plain_blockwise", plain, (*call.args[:3], blockwise.positions(sizes.blockwise))),
        )
        yield Timing(call, tuple(x._replace(like=None) for x in others if x.name != "xla"))


def targets(record: dict[str, Any], limits: dict[str, float]) -> list[Target]:
    """A backward pass (gradient less forward) of at most twice the time of the fastest plain one."""
    cases, compared, reached = record["cases"], record["compared"], []
    for name in [x for x in cases if x.startswith("gradient")]:
        ahead = name.replace("gradient", "forward")
        backward = []
        for rival, x in compared.items():
            case, name_of_rival = rival.split("/")
            forward = compared.get(f"{ahead}/{name_of_rival}", {})
            if case == name and "ms" in x and "ms" in forward:
                backward.append(x["ms"] - forward["ms"])
        if ahead in cases and backward:
            ratio = (cases[name]["ms"] - cases[ahead]["ms"]) / min(backward)
            reached.append(Target(f"{name}: backward over a plain one's", ratio, 2.0, False))
    return reached
