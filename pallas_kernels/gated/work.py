"""What is tested, compiled for chips, checked and timed of gated."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.blockwise import work as full
from pallas_kernels.gated.api import gated
from pallas_kernels.measure import rivals
from pallas_kernels.measure.work import Bench, Case, Check, Job, Rival, Shapes, Target, size

DTYPES = ("float32", "bfloat16")


class Shape(NamedTuple):
    """Self-attention: q [B, N, T, H], k, v [B, K, T, H]; the ``window`` latest keys need no gate."""

    B: int
    N: int
    K: int
    T: int
    H: int
    window: int

    @property
    def ungated(self) -> full.Shape:
        """The shape of blockwise with the same arrays."""
        return full.Shape(self.B, self.N, self.K, self.T, self.T, self.H)


SHAPES = Shapes(
    ("test", "g1_h32", Shape(B=2, N=2, K=2, T=17, H=32, window=5)),
    ("test", "g4_h64", Shape(B=1, N=8, K=2, T=33, H=64, window=1)),
    ("test", "g8_h96", Shape(B=2, N=8, K=1, T=9, H=96, window=0)),
    ("test", "g1_h128", Shape(B=1, N=2, K=2, T=63, H=128, window=62)),
    ("test", "g2_h80", Shape(B=1, N=4, K=2, T=16, H=80, window=4)),
    ("test", "g1_h256", Shape(B=1, N=1, K=1, T=16, H=256, window=3)),
    # One past a block of queries and of keys; the window ends inside blocks.
    ("blocked", "blocked", Shape(B=2, N=4, K=2, T=513, H=32, window=100)),
    ("bench", "small_512", Shape(B=8, N=4, K=2, T=512, H=64, window=64)),
    ("bench", "small_2k", Shape(B=2, N=4, K=2, T=2048, H=64, window=64)),
    ("large timed", "llama8b_8k", Shape(B=1, N=32, K=8, T=8192, H=128, window=256)),
    ("chip", "h128", Shape(B=1, N=32, K=8, T=4096, H=128, window=256)),
    ("chip", "odd_h64", Shape(B=2, N=4, K=2, T=1000, H=64, window=64)),
    ("chip", "odd_h96", Shape(B=1, N=2, K=2, T=513, H=96, window=64)),
    ("chip", "h256", Shape(B=1, N=8, K=4, T=2048, H=256, window=256)),
    ("check", "check", Shape(B=2, N=8, K=2, T=300, H=128, window=50)),
    ("tiny", "tiny", Shape(B=2, N=4, K=2, T=40, H=32, window=7)),
)


def _args(shape: Shape, dtype: str) -> tuple[Any, ...]:
    log_gate = np.log(np.random.default_rng(1).random((shape.B, shape.K, shape.T)))
    return *full.arrays(shape.ungated, dtype), jnp.asarray(log_gate, jnp.float32)


def _out(impl: str | None, window: int) -> Callable[..., Any]:
    return lambda *x: gated(*x, window=window, impl=impl)[0]


def _out_gradient(impl: str | None, window: int) -> Callable[..., Any]:
    return rivals.summed(_out(impl, window), (0, 1, 2, 3))


# On this CPU.


def _dense(window: int, q: jax.Array, k: jax.Array, v: jax.Array, log_gate: jax.Array) -> jax.Array:
    b, n, t, h = q.shape
    q = q.reshape(b, k.shape[1], -1, t, h)
    age = jnp.arange(t)[:, None] - jnp.arange(t)[None, :]
    s = jnp.einsum("bkgth,bksh->bkgts", q, k, preferred_element_type=jnp.float32) * h**-0.5
    s = jnp.where(age < 0, -jnp.inf, s + jnp.where(age < window, 0, log_gate[:, :, None, None, :]))
    p = jax.nn.softmax(s, axis=-1).astype(v.dtype)
    return jnp.einsum("bkgts,bksh->bkgth", p, v, preferred_element_type=jnp.float32)


def bench(shape: Shape, dtype: str) -> Bench:
    """With its gradient, against a dense softmax."""
    dense = functools.partial(_dense, shape.window)
    runs: dict[str, Callable[..., Any]] = {
        "dense": dense,
        "gated": _out(None, shape.window),
        "dense gradient": rivals.summed(dense, (0, 1, 2, 3)),
        "gated gradient": _out_gradient(None, shape.window),
    }
    args = _args(shape, dtype)
    return Bench({name: (run, args) for name, run in runs.items()}, "dense", repeats=7)


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


def _case(shape: Shape, dtype: str, *, gradient: bool = False, ragged: bool = False) -> Case:
    b, n, kv, t, h, window = shape
    a = jax.ShapeDtypeStruct
    q, k = a((b, n, t, h), dtype), a((b, kv, t, h), dtype)
    args = (q, k, k, a((b, kv, t), jnp.float32), a((b,), jnp.int32) if ragged else None)
    run, products = (_gradient, 2 + 7) if gradient else (_forward, 2)
    tile = min(BLOCK, t)
    # Padded to whole tiles and lanes: a float32 array of every head's outputs.
    wide = 4 * b * n * -(-t // BLOCK) * BLOCK * -(-h // 128) * 128
    return Case(
        run=lambda impl: run(impl, window),
        args=args,
        moves=size(args) * (2 if gradient else 1) + 4 * b * n * t * h,
        flops=products * b * n * t * t * h,
        temp=(8 << 20) + (10 if gradient else 3) * wide,
        whole=b * kv * t * h if h % 128 == 0 and t % BLOCK == 0 and not gradient and not ragged else 0,
        step=(2 * tile * h * jnp.dtype(dtype).itemsize, 4 * tile * tile * h),
        kernel="gated_forward",
    )


def cases() -> dict[str, Case]:
    """Forward and gradient at training size; rows of differing length; other dtypes and head dims."""
    base = SHAPES["h128"]
    return {
        "bfloat16": _case(base, "bfloat16"),
        "bfloat16_gradient": _case(base, "bfloat16", gradient=True),
        "bfloat16_ragged_gradient": _case(base, "bfloat16", gradient=True, ragged=True),
        "odd_float32_gradient": _case(SHAPES["odd_h64"], "float32", gradient=True),
        "odd_h96_bfloat16_gradient": _case(SHAPES["odd_h96"], "bfloat16", gradient=True, ragged=True),
        "h256_bfloat16_gradient": _case(SHAPES["h256"], "bfloat16", gradient=True),
    }


# On a device.


def _everything(impl: str, window: int) -> Callable[..., Any]:
    def run(q: Any, k: Any, v: Any, log_gate: Any, lengths: Any) -> Any:
        options = {"window": window, "lengths": lengths, "impl": impl}
        (out, lse), back = jax.vjp(lambda *x: gated(*x, **options), q, k, v, log_gate)
        seen = jnp.isfinite(lse)
        return out, lse, back((jnp.cos(out), jnp.where(seen, jnp.sin(jnp.where(seen, lse, 0.0)), 0.0)))

    return run


def checks(tiny: bool) -> Iterator[Check]:
    """Rows of differing length, both dtypes, a small head; all gradients."""
    base = SHAPES["tiny" if tiny else "check"]
    lengths = jnp.asarray([base.T, base.T // 2 + 1], jnp.int32)
    cases = {"bfloat16": (base, "bfloat16")}
    if not tiny:
        cases |= {"float32": (base, "float32"), "h64": (base._replace(H=64), "bfloat16")}
    for name, (shape, dtype) in cases.items():
        run = functools.partial(_everything, window=shape.window)
        yield Check(name, run, (*_args(shape, dtype), lengths), shape.T * shape.N, dtype)


def _job(shape: Shape, gradient: bool, beside: bool, **more: Any) -> Job:
    args = _args(shape, "bfloat16")
    others: tuple[Rival, ...] = ()
    if beside:
        plain = full.causal_gradient if gradient else full.causal
        others = (
            *rivals.prompt(*args[:3], gradient=gradient),
            rivals.ours("plain_blockwise", plain, (*args[:3], full.positions(shape.ungated))),
        )
    return Job(
        f"{'gradient' if gradient else 'forward'}_{shape.T}",
        functools.partial(_out_gradient if gradient else _out, window=shape.window),
        args,
        flops=(7 if gradient else 2) * shape.B * shape.N * shape.H * shape.T**2,
        rivals=tuple(x._replace(like=None) for x in others if x.name != "xla"),
        **more,
    )


def searches(tiny: bool) -> Iterator[Job]:
    """Forward, then backward."""
    shape = SHAPES["tiny"] if tiny else SHAPES["llama8b_8k"]._replace(T=4096)
    for what, gradient in (("forward", False), ("backward", True)):
        yield _job(shape, gradient, False, tunes=what, key=("bfloat16", shape.H))


def jobs(tiny: bool) -> Iterator[Job]:
    """Forward and with gradients, beside attention without gates."""
    for gradient in (False, True):
        yield _job(SHAPES["tiny" if tiny else "llama8b_8k"], gradient, True)


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
