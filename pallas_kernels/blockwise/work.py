"""What is tested, compiled for chips, checked and timed of blockwise and column_mass."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.blockwise.api import OFFERED_MASS, blockwise, column_mass
from pallas_kernels.measure import rivals
from pallas_kernels.measure.work import Bench, Case, Check, Job, Shapes, Target, size

DTYPES = ("float32", "bfloat16")


class Shape(NamedTuple):
    """q [B, N, T, H] against k, v [B, K, S, H]."""

    B: int
    N: int
    K: int
    T: int
    S: int
    H: int


SHAPES = Shapes(
    ("test", "g1_h32", Shape(B=2, N=2, K=2, T=5, S=17, H=32)),
    ("test", "g4_h64", Shape(B=1, N=8, K=2, T=33, S=64, H=64)),
    ("test", "g8_h80", Shape(B=1, N=8, K=1, T=3, S=31, H=80)),
    ("test", "g4_h96", Shape(B=2, N=4, K=1, T=1, S=65, H=96)),
    ("test", "g1_h128", Shape(B=1, N=2, K=2, T=1, S=63, H=128)),
    ("test", "g2_h256", Shape(B=1, N=2, K=1, T=2, S=33, H=256)),
    # One past a block on both axes, so that the last block of each is all padding but one.
    ("blocked", "blocked", Shape(B=2, N=4, K=2, T=257, S=513, H=32)),
    ("bench", "ring", Shape(B=8, N=16, K=4, T=1, S=1024, H=64)),
    ("bench", "full_cache", Shape(B=1, N=10, K=5, T=1, S=8192, H=64)),
    ("bench", "chunk", Shape(B=1, N=4, K=2, T=256, S=2048, H=64)),
    ("bench", "prompt", Shape(B=1, N=4, K=2, T=2048, S=2048, H=64)),
    ("bench", "prompt_8k", Shape(B=1, N=4, K=2, T=8192, S=8192, H=64)),
    ("bench", "late_chunk", Shape(B=1, N=4, K=2, T=512, S=8192, H=64)),
    # Llama-3.1-8B's heads, and sizes that divide no block.
    ("chip", "ring_h128", Shape(B=8, N=32, K=8, T=1, S=1024, H=128)),
    ("chip", "prompt_h128", Shape(B=1, N=32, K=8, T=2048, S=2048, H=128)),
    ("chip", "odd_h64", Shape(B=1, N=8, K=8, T=1000, S=3000, H=64)),
    ("chip", "odd_h80", Shape(B=2, N=8, K=4, T=3, S=700, H=80)),
    ("chip", "h256", Shape(B=1, N=8, K=4, T=2048, S=2048, H=256)),
    ("check", "check", Shape(B=2, N=8, K=2, T=300, S=300, H=128)),
    ("tiny", "tiny", Shape(B=1, N=4, K=2, T=40, S=40, H=32)),
    ("timed", "timed", Shape(B=1, N=32, K=8, T=8192, S=8192, H=128)),
)


def arrays(shape: Shape, dtype: str) -> tuple[jax.Array, ...]:
    """q, k, v of normal numbers."""
    b, n, kv, t, s, h = shape
    keys = jax.random.split(jax.random.PRNGKey(0), 3)
    sizes = [(b, n, t, h), (b, kv, s, h), (b, kv, s, h)]
    q, k, v = (jax.random.normal(key, size, dtype) for key, size in zip(keys, sizes))
    return q, k, v


def positions(shape: Shape) -> jax.Array:
    """0, 1, 2, ... of the keys of every row; queries are the last T of them."""
    return jnp.broadcast_to(jnp.arange(shape.S, dtype=jnp.int32), (shape.B, shape.S))


# On this CPU.

BLOCK = 256
MOST = 1.3
"""The most a prompt may take, in times of the dense one in blocks."""


def _dense(q: jax.Array, k: jax.Array, v: jax.Array, q_pos: jax.Array, k_pos: jax.Array) -> jax.Array:
    b, n, t, h = q.shape
    q = q.reshape(b, k.shape[1], -1, t, h)
    s = jnp.einsum("bkgth,bksh->bkgts", q, k, preferred_element_type=jnp.float32) * h**-0.5
    s = jnp.where((k_pos[:, None, :] <= q_pos[:, :, None])[:, None, None], s, -jnp.inf)
    p = jax.nn.softmax(s, axis=-1).astype(v.dtype)
    return jnp.einsum("bkgts,bksh->bkgth", p, v, preferred_element_type=jnp.float32)


def _in_blocks(q: jax.Array, k: jax.Array, v: jax.Array, q_pos: jax.Array, k_pos: jax.Array) -> jax.Array:
    """Queries are the last T of S positions."""
    t, s = q.shape[2], k.shape[2]
    parts = []
    for at in range(0, t, BLOCK):
        end = min(at + BLOCK, t)
        mine, seen = slice(at, end), slice(0, s - t + end)
        parts.append(_dense(q[:, :, mine], k[:, :, seen], v[:, :, seen], q_pos[:, mine], k_pos[:, seen]))
    return jnp.concatenate(parts, axis=3)


def bench(shape: Shape, dtype: str) -> Bench:
    """Against dense attention over the same keys and values.

    "dense" is one einsum, softmax, einsum; "dense in blocks" the same for blocks of queries, each over the
    keys up to its end, which is what a prompt is held against.
    """
    q, k, v = arrays(shape, dtype)
    k_pos = positions(shape)
    q_pos = k_pos[:, shape.S - shape.T :]
    ones = jnp.ones(q_pos.shape, jnp.float32)
    lse = jax.jit(blockwise)(q, k, v, q_pos=q_pos, k_pos=k_pos)[1]
    runs: dict[str, Callable[..., Any]] = {
        "dense": _dense,
        "dense in blocks": _in_blocks,
        "blockwise": lambda q, k, v, i, j: blockwise(q, k, v, q_pos=i, k_pos=j),
        "window S/8": lambda q, k, v, i, j: blockwise(q, k, v, q_pos=i, k_pos=j, window=shape.S // 8),
        "column_mass": lambda q, k, v, i, j: column_mass(q, k, lse, ones, q_pos=i, k_pos=j),
    }
    if shape.N * shape.T * shape.S > 1 << 26:
        del runs["dense"]  # a quarter of a gigabyte of scores, and as much again
    base, most = ("dense in blocks", {"blockwise": MOST}) if shape.T > BLOCK else ("dense", {})
    args = (q, k, v, q_pos, k_pos)
    return Bench({name: (run, args) for name, run in runs.items()}, base, most)


# Compiled for chips.

CASE_WINDOW = 256
TILE = 512


def _forward(impl: str, window: int | None) -> Callable[..., Any]:
    """Out comes in the keys' dtype."""

    def run(q: Any, k: Any, v: Any, q_pos: Any, k_pos: Any, admit: Any) -> Any:
        options = {"q_pos": q_pos, "k_pos": k_pos, "admit": admit, "window": window, "impl": impl}
        return blockwise(q, k, v, dtype=k.dtype, **options)

    return run


def _gradients(impl: str, window: int | None) -> Callable[..., Any]:
    def run(q: Any, k: Any, v: Any, *where: Any) -> Any:
        loss = lambda *x: _forward(impl, window)(*x, *where)[0].sum()  # noqa: E731
        return jax.grad(loss, argnums=(0, 1, 2))(q, k, v)

    return run


def _mass(impl: str, window: int | None) -> Callable[..., Any]:
    def run(q: Any, k: Any, lse: Any, weights: Any, q_pos: Any, k_pos: Any, admit: Any) -> Any:
        options = {"q_pos": q_pos, "k_pos": k_pos, "admit": admit, "window": window, "impl": impl}
        return column_mass(q, k, lse, weights, **options)

    return run


def _case(shape: Shape, dtype: str, what: str = "forward", *, admitted: bool = False) -> Case:
    b, n, kv, t, s, h = shape
    a, window = jax.ShapeDtypeStruct, CASE_WINDOW if admitted else None
    q, k = a((b, n, t, h), dtype), a((b, kv, s, h), dtype)
    where = (a((b, t), jnp.int32), a((b, s), jnp.int32), a((b, kv, s), bool) if admitted else None)
    pairs = b * n * (t * (s - t) + t * t // 2)
    mass = (q, k, a((b, n, t), jnp.float32), a((b, t), jnp.float32), *where)
    run, args, products = {
        "forward": (_forward, (q, k, k, *where), 2),
        "gradient": (_gradients, (q, k, k, *where), 2 + 8),
        "mass": (_mass, mass, 1),
    }[what]
    rows, keys = min(TILE, n // kv * t), min(TILE, s)
    # Padded to whole blocks and lanes: a float32 array of all queries and one of all keys.
    queries = 4 * b * kv * -(-n // kv * t // rows) * rows * max(h, 128)
    wide = queries + 4 * b * kv * -(-s // keys) * keys * max(h, 128)
    return Case(
        run=lambda impl: run(impl, window),
        args=args,
        moves=size(args) + q.dtype.itemsize * b * n * t * h,
        flops=2 * products * pairs * h,
        # Backward also holds the output again and its gradient as it came, both before padding.
        temp=(8 << 20) + (4 * wide + 2 * queries if what == "gradient" else 2 * wide),
        whole=b * kv * s * h if h % 128 == 0 and s % TILE == 0 and what == "forward" else 0,
        step=(2 * keys * h * jnp.dtype(dtype).itemsize, 4 * rows * keys * h),
        kernel="column_mass" if what == "mass" else "blockwise",
    )


def cases() -> dict[str, Case]:
    """Reading a ring, a prompt, its gradient, its column mass; other dtypes and head dims."""
    prompt = SHAPES["prompt_h128"]
    return {
        "ring_bfloat16": _case(SHAPES["ring_h128"], "bfloat16"),
        "prompt_bfloat16": _case(prompt, "bfloat16"),
        "prompt_bfloat16_admitted": _case(prompt, "bfloat16", admitted=True),
        "prompt_bfloat16_gradient": _case(prompt, "bfloat16", "gradient"),
        "prompt_bfloat16_admitted_gradient": _case(prompt, "bfloat16", "gradient", admitted=True),
        "prompt_bfloat16_mass": _case(prompt, "bfloat16", "mass", admitted=True),
        "odd_float32_gradient": _case(SHAPES["odd_h64"], "float32", "gradient"),
        "odd_bfloat16_mass": _case(SHAPES["odd_h80"], "bfloat16", "mass"),
        "h256_bfloat16_gradient": _case(SHAPES["h256"], "bfloat16", "gradient"),
    }


# On a device.

WINDOW = 20


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
    base = SHAPES["tiny" if tiny else "check"]
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


def causal_gradient(impl: str) -> Callable[..., Any]:
    """Its gradient in queries, keys and values."""
    return rivals.summed(causal(impl))


def _job(shape: Shape, gradient: bool, beside: bool, **more: Any) -> Job:
    args = (*arrays(shape, "bfloat16"), positions(shape))
    return Job(
        f"{'gradient' if gradient else 'forward'}_{shape.T}",
        causal_gradient if gradient else causal,
        args,
        # The gradient by convention: 5 products of the forward pass's size beside its 2, made again or not.
        flops=(7 if gradient else 2) * shape.B * shape.N * shape.H * shape.T**2,
        rivals=rivals.prompt(*args[:3], gradient=gradient) if beside else (),
        **more,
    )


def searches(tiny: bool) -> Iterator[Job]:
    """Forward, backward, and forward of small heads."""
    shape = SHAPES["tiny"] if tiny else SHAPES["timed"]._replace(T=4096, S=4096)
    for what, gradient in (("forward", False), ("backward", True)):
        yield _job(shape, gradient, False, tunes=what, key=("bfloat16", shape.H))
    if not tiny:
        small = shape._replace(H=64)
        yield _job(small, False, False, tunes="forward", key=("bfloat16", 64))


def jobs(tiny: bool) -> Iterator[Job]:
    """Prompts, forward and with gradients."""
    base = SHAPES["tiny" if tiny else "timed"]
    for t in (base.T,) if tiny else (8192, 2048):
        for gradient in (False, True):
            yield _job(base._replace(T=t, S=t), gradient, True)


def targets(found: dict[str, Any], limits: dict[str, float]) -> list[Target]:
    """60 % of cuDNN's speed forward."""
    reached = []
    for name, case in found["cases"].items():
        theirs = found["compared"].get(f"{name}/cudnn", {})
        if name.startswith("forward") and "ms" in theirs:
            reached.append(Target(f"{name}: speed of cuDNN's", theirs["ms"] / case["ms"], 0.6, True))
    return reached


# In Mosaic GPU.


def beside() -> dict[str, Case]:
    """What the body for Hopper takes, of ``cases``, and a prompt of small heads."""
    known, small = cases(), SHAPES["prompt_h128"]._replace(H=64)
    found = {name: known[name] for name in ("ring_bfloat16", "prompt_bfloat16", "prompt_bfloat16_admitted")}
    found["prompt_bfloat16_h64"] = _case(small, "bfloat16")
    return {name: case._replace(impl="mosaic_gpu") for name, case in found.items()}
