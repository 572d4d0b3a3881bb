"""What is tested, compiled for chips, checked and timed of decode_step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.decode_step.api import Cache, decode_step
from pallas_kernels.measure.work import Bench, Case, Check, Job, Shapes, Target, size

DTYPES = ("float32", "bfloat16")


class Shape(NamedTuple):
    """Rows, query heads, KV heads, head dim; slots of a ring; pages, slots of a page, entries of a list."""

    B: int
    N: int
    K: int
    H: int
    W: int
    P: int
    S: int
    M: int


SHAPES = Shapes(
    ("test check", "check", Shape(B=4, N=8, K=2, H=128, W=128, P=144, S=64, M=16)),
    ("bench", "one_row", Shape(B=1, N=10, K=5, H=64, W=64, P=640, S=64, M=128)),
    ("bench", "rows_8k", Shape(B=4, N=16, K=4, H=64, W=64, P=2048, S=64, M=128)),
    # Llama-3.1-8B's heads, and others.
    ("chip", "one_8k", Shape(B=1, N=32, K=8, H=128, W=256, P=1024, S=64, M=128)),
    ("chip", "8k", Shape(B=8, N=32, K=8, H=128, W=256, P=8192, S=64, M=128)),
    ("chip", "128k", Shape(B=8, N=32, K=8, H=128, W=256, P=16384, S=64, M=2048)),
    ("chip", "short_ring", Shape(B=8, N=32, K=8, H=128, W=32, P=8192, S=64, M=128)),
    ("chip", "h256", Shape(B=8, N=16, K=8, H=256, W=1024, P=4096, S=64, M=64)),
    ("tiny", "tiny", Shape(B=2, N=4, K=2, H=128, W=32, P=18, S=16, M=4)),
    ("timed", "timed_8k", Shape(B=8, N=32, K=8, H=128, W=256, P=8192, S=64, M=128)),
    ("timed", "timed_one_8k", Shape(B=1, N=32, K=8, H=128, W=256, P=1024, S=64, M=128)),
)

STEPS = 16
"""Of a timed call: its cache is copied once, since it is not donated, and written in place from then on."""


def _slots(shape: Shape) -> int:
    """Of all streams, rings and pages."""
    return shape.B * shape.K * (shape.W + shape.M * shape.S)


def _shapes(shape: Shape, dtype: str) -> tuple[Any, ...]:
    def of(*dims: int, dtype: Any = dtype) -> Any:
        return jax.ShapeDtypeStruct(dims, dtype)

    b, n, heads, h, window, pool, slots, m = shape
    cache = Cache(*[of(b, heads, window, h)] * 2, *[of(pool, slots, h)] * 2)
    lists = of(b, heads, m, dtype="int32"), of(b, heads, dtype="int32"), of(b, dtype="int32")
    return of(b, n, h), of(b, heads, h), of(b, heads, h), cache, *lists, of(b, heads, dtype="bool")


def _run(impl: str) -> Callable[..., Any]:
    def run(q: Any, k: Any, v: Any, cache: Any, table: Any, length: Any, seen: Any, enters: Any) -> Any:
        return decode_step(q, k, v, cache, table, length, seen=seen, enters=enters, impl=impl)

    return run


def _steps(impl: str | None) -> Callable[..., Any]:
    """The same step again and again, of which only what it answers is looked at."""

    def run(q: Any, k: Any, v: Any, cache: Any, table: Any, length: Any, seen: Any, enters: Any) -> Any:
        def one(_: Any, carry: Any) -> Any:
            cache, (out, _) = carry
            out, lse, cache = decode_step(
                q + 0 * out, k, v, cache, table, length, seen=seen, enters=enters, impl=impl
            )
            return cache, (out, lse)

        nothing = jnp.zeros_like(q), jnp.zeros(q.shape[:2], jnp.float32)
        return jax.lax.fori_loop(0, STEPS, one, (cache, nothing))[1]

    return run


def _args(shape: Shape, dtype: str, length: np.ndarray, seen: np.ndarray) -> tuple[Any, ...]:
    """Lists of pages in random order, none of them twice; every other stream's leaving token goes there."""
    b, n, heads, h, window, pool, slots, m = shape
    keys = iter(jax.random.split(jax.random.PRNGKey(5), 7))
    q, k, v = (jax.random.normal(next(keys), (b, x, h), dtype) for x in (n, heads, heads))
    rings = (jax.random.normal(next(keys), (b, heads, window, h), dtype) for _ in "kv")
    pools = (jax.random.normal(next(keys), (pool, slots, h), dtype) for _ in "kv")
    table = np.random.default_rng(0).permutation(pool)[: b * heads * m].reshape(b, heads, m)
    enters = (np.arange(b * heads).reshape(b, heads) % 2 == 0) & (seen >= window)[:, None]
    lists = (jnp.asarray(x, jnp.int32) for x in (table, length, seen))
    return q, k, v, Cache(*rings, *pools), *lists, jnp.asarray(enters)


# On this CPU.


def _dense(q: jax.Array, k: jax.Array, v: jax.Array, cache: Any, at: jax.Array) -> Any:
    """The step of a dense cache [B, K, C, H]: a slot is written, all are read."""

    def one(_: Any, carry: Any) -> Any:
        keys, values, out = carry
        keys, values = (
            jax.lax.dynamic_update_slice(x, new[:, :, None], (0, 0, at, 0))
            for x, new in ((keys, k), (values, v))
        )
        x = (q + 0 * out).reshape(*k.shape[:2], -1, k.shape[2])
        s = jnp.einsum("bkrh,bksh->bkrs", x, keys, preferred_element_type=jnp.float32) * k.shape[2] ** -0.5
        p = jax.nn.softmax(s, axis=-1).astype(values.dtype)
        out = jnp.einsum("bkrs,bksh->bkrh", p, values, preferred_element_type=jnp.float32)
        return keys, values, out.reshape(q.shape).astype(q.dtype)

    return jax.lax.fori_loop(0, STEPS, one, (*cache, jnp.zeros_like(q)))[2]


def bench(shape: Shape, dtype: str) -> Bench:
    """Beside a cache without pages, as anyone would write it; ``STEPS`` steps a line."""
    full, seen = np.full((shape.B, shape.K), shape.M * shape.S - 1), np.full(shape.B, shape.M * shape.S)
    args = _args(shape, dtype, full, seen)
    keys, values = (
        jnp.zeros((shape.B, shape.K, shape.M * shape.S + shape.W, shape.H), dtype) + x[0, 0, 0]
        for x in args[3][:2]
    )
    dense = *args[:3], (keys, values), jnp.int32(7)
    return Bench({"dense": (_dense, dense), "decode_step": (_steps(None), args)}, "dense", repeats=5)


# Compiled for chips.

ITEM = 1024
"""Slots of an item of the TPU body."""

PARTS = 128
"""Partials of a stream at most, on a GPU."""


def _case(shape: Shape, dtype: str) -> Case:
    args, g = _shapes(shape, dtype), shape.N // shape.K
    width, item = jnp.dtype(dtype).itemsize, min(ITEM, shape.W + shape.M * shape.S)
    return Case(
        run=_run,
        args=args,
        moves=2 * _slots(shape) * shape.H * width + 2 * size(args[0]),
        flops=4 * _slots(shape) * shape.H * g,
        temp=(8 << 20) + 4 * shape.B * shape.N * PARTS * (shape.H + 2),
        whole=args[3].ring_k.size,
        step=(2 * item * shape.H * width, 4 * item * shape.H * g),
        kernel="decode_step",
        donated=(3,),
    )


def cases() -> dict[str, Case]:
    """By rows and slots of a list, by head dim."""
    return {f"bfloat16_{name}": _case(shape, "bfloat16") for name, shape in SHAPES.tagged("chip").items()}


# On a device.


def _live(impl: str) -> Callable[..., Any]:
    """What a step answers and leaves, without what is dead: that may be anything."""

    def run(q: Any, k: Any, v: Any, cache: Any, table: Any, length: Any, seen: Any, enters: Any) -> Any:
        out, lse, after = _run(impl)(q, k, v, cache, table, length, seen, enters)
        window, m, slots = cache.ring_k.shape[2], table.shape[2], cache.k_pages.shape[1]
        there = (seen >= 0)[:, None]
        held = (jnp.arange(window) <= seen[:, None])[:, None, :, None]
        paged = jnp.arange(m * slots).reshape(m, slots) < (length + enters)[..., None, None]
        return (
            jnp.where(there[..., None], out, 0),
            jnp.where(there, lse, 0),
            *(jnp.where(held, ring, 0) for ring in after[:2]),
            *(jnp.where(paged[..., None], pool[table], 0) for pool in after[2:]),
        )

    return run


def checks(tiny: bool) -> Iterator[Check]:
    """Lists that are empty, full, end at a page's end; rings that are not full; a row without a token."""
    shape = SHAPES["tiny" if tiny else "check"]
    most = shape.M * shape.S
    edges = [most - 1, 0, shape.S - 1, shape.S, shape.S + 1, 1, most // 2, most]
    length = np.resize(edges, (shape.B, shape.K))
    seen = np.resize([3 * shape.W + 5, shape.W, -1, 7], shape.B)
    yield Check("bfloat16", _live, _args(shape, "bfloat16", length, seen), most + shape.W, "bfloat16")


def _job(name: str, shape: Shape, **more: Any) -> Job:
    length = np.full((shape.B, shape.K), shape.M * shape.S - 1)
    args = _args(shape, "bfloat16", length, np.full(shape.B, shape.M * shape.S))
    moves = 2 * _slots(shape) * shape.H * 2
    return Job(name, _steps, args, moves=STEPS * moves + 2 * size(args[3]), **more)


def searches(tiny: bool) -> Iterator[Job]:
    """The step of one row: of eight, and more, any blocks do."""
    shape = SHAPES["tiny" if tiny else "timed_one_8k"]
    yield _job("bfloat16", shape, tunes="step", key=("bfloat16", shape.H))


def jobs(tiny: bool) -> Iterator[Job]:
    """``STEPS`` steps of one row, and of eight."""
    for name in ("tiny",) if tiny else SHAPES.tagged("timed"):
        yield _job(name, SHAPES[name])


def targets(found: dict[str, Any], limits: dict[str, float]) -> list[Target]:
    """80 % of a copy's bandwidth for eight rows."""
    case = found["cases"].get("timed_8k")
    if case is None:
        return []
    return [Target("8k: bandwidth of a copy's", case["gb_s"] / limits["copy_gb_s"], 0.8, True)]
