"""What is tested, compiled for chips, checked and timed of vertical_slash."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.blockwise import work as full
from pallas_kernels.blockwise.api import blockwise
from pallas_kernels.gated.work import SHAPES as GATED
from pallas_kernels.gated.work import Shape
from pallas_kernels.measure import rivals
from pallas_kernels.measure.work import Bench, Case, Check, Job, Shapes, Target, size
from pallas_kernels.merge.api import merge
from pallas_kernels.vertical_slash.api import vertical_slash

DTYPES = ("float32", "bfloat16")

SHAPES = Shapes(
    *(("test", name, shape) for name, shape in GATED.tagged("test").items()),
    # One query past two blocks; the window begins inside a block of keys.
    ("blocked", "blocked", Shape(B=2, N=4, K=2, T=1025, H=32, window=300)),
    ("bench", "prompt_8k", Shape(B=1, N=4, K=2, T=8192, H=64, window=64)),
    ("large", "prompt_32k", Shape(B=1, N=4, K=2, T=32768, H=64, window=256)),
    ("large", "llama8b_32k", Shape(B=1, N=32, K=8, T=32768, H=128, window=256)),
    ("chip", "h128", Shape(B=1, N=32, K=8, T=16384, H=128, window=256)),
    ("chip", "h128_500k", Shape(B=1, N=32, K=8, T=524288, H=128, window=256)),
    ("chip", "odd_h64", Shape(B=2, N=4, K=2, T=1000, H=64, window=64)),
    ("chip", "odd_h96", Shape(B=1, N=2, K=2, T=513, H=96, window=64)),
    ("chip", "h256", Shape(B=1, N=8, K=4, T=4096, H=256, window=1024)),
    ("check", "check", Shape(B=2, N=8, K=2, T=700, H=128, window=100)),
    ("tiny", "tiny", Shape(B=2, N=4, K=2, T=40, H=32, window=7)),
    ("timed", "timed", Shape(B=1, N=32, K=8, T=131072, H=128, window=256)),
)


def _run(impl: str, window: int, capacity: int | None) -> Callable[..., Any]:
    """Out comes in the keys' dtype; the last argument is where queries begin, if they are a piece."""

    def run(q: Any, k: Any, v: Any, admit: Any, lengths: Any, offset: Any = None) -> Any:
        options = {"window": window, "capacity": capacity, "lengths": lengths, "impl": impl}
        return vertical_slash(q, k, v, admit, offset=offset, dtype=k.dtype, **options)

    return run


# On this CPU.

CHUNK = 2048


def _chunk_in_one(q: jax.Array, k: jax.Array, v: jax.Array, admit: jax.Array, window: int) -> Any:
    """The last of T keys behind a ring of ``window``, as kvjax reads them."""
    offset = jnp.full(q.shape[0], window, jnp.int32)
    return vertical_slash(q, k, v, admit, window=window, offset=offset)[:2]


def _chunk_in_two(q: jax.Array, k: jax.Array, v: jax.Array, admit: jax.Array, window: int) -> Any:
    """The same as two reads and a merge."""
    at = jnp.broadcast_to(jnp.arange(k.shape[2], dtype=jnp.int32), (len(k), k.shape[2]))
    old, new = ([x[:, :, part] for x in (k, v, admit)] for part in (slice(window), slice(window, None)))
    q_pos, k_pos = at[:, window:], at[:, :window]
    ring = blockwise(q, old[0], old[1], q_pos=q_pos, k_pos=k_pos, window=window, admit=old[2])
    return merge([ring, vertical_slash(q, new[0], new[1], new[2], window=window)[:2]])


def bench(shape: Shape, dtype: str) -> Bench:
    """With 5 and 25 % admitted, against full attention and a mask alone; and a chunk behind its ring."""
    q, k, v = full.arrays(shape.ungated, dtype)
    pos, draw = full.positions(shape.ungated), np.random.default_rng(0).random(k.shape[:3])
    few, many = (jnp.asarray(draw < share) for share in (0.05, 0.25))

    def everything(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
        return blockwise(q, k, v, q_pos=pos, k_pos=pos)

    def masked(q: jax.Array, k: jax.Array, v: jax.Array, admit: jax.Array) -> tuple[jax.Array, ...]:
        return blockwise(q, k, v, q_pos=pos, k_pos=pos, window=shape.window, admit=admit)

    def sparse(*x: jax.Array) -> tuple[jax.Array, ...]:
        return vertical_slash(*x, window=shape.window)

    runs: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "full": (everything, (q, k, v)),
        "blockwise, same mask": (masked, (q, k, v, many)),
        "5% admitted": (sparse, (q, k, v, few)),
        "25% admitted": (sparse, (q, k, v, many)),
    }
    last = [x[:, :, -(shape.window + CHUNK) :] for x in (k, v, many)]
    for name, run in {"in one": _chunk_in_one, "in two": _chunk_in_two}.items():
        fixed = functools.partial(run, window=shape.window)
        runs[f"ring and chunk {name}"] = fixed, (q[:, :, -CHUNK:], *last)
    return Bench(runs, "full", repeats=5)


# Compiled for chips.

BLOCK = 512


def _case(
    shape: Shape, dtype: str, *, capacity: int | None = None, ragged: bool = False, piece: int = 0
) -> Case:
    """``piece``: so many queries, of a prompt that is as long as the shape says."""
    b, n, kv, s, h, window = shape
    a, held, t = jax.ShapeDtypeStruct, capacity or s, piece or s
    q, k = a((b, n, t, h), dtype), a((b, kv, s, h), dtype)
    args = (q, k, k, a((b, kv, s), bool), *(a((b,), jnp.int32) if x else None for x in (ragged, piece)))
    rows, keys = min(BLOCK, n // kv * t), min(BLOCK, s)
    lanes = -(-h // 128) * 128
    # Padded operands of float32; a piece of bfloat16 has packed keys, a few numbers a key and (Triton) its
    # output before rounding, no more.
    padded = 4 * b * (3 * n * -(-t // BLOCK) * BLOCK + 4 * kv * max(s, held)) * lanes
    least = 2 * b * kv * held * lanes * q.dtype.itemsize + 16 * b * kv * s + 4 * b * n * t * lanes
    return Case(
        run=lambda impl: _run(impl, window, capacity),
        args=args,
        moves=size(args) + q.dtype.itemsize * b * n * t * h,
        # Packed keys are visible to half of a prompt's queries, and to nearly all of its last piece.
        flops=4 * b * n * t * (window + held - held * t // (2 * s)) * h,
        temp=(8 << 20) + (least if piece else padded),
        # Packed keys are copies, meant to be there; of queries and output there are none.
        whole=b * n * t * h if h % 128 == 0 and t % BLOCK == 0 and not (ragged or piece) else 0,
        step=(2 * keys * h * jnp.dtype(dtype).itemsize, 4 * rows * keys * h),
        kernel="vertical_slash",
    )


def cases() -> dict[str, Case]:
    """A quarter admitted, no bound, rows of differing length; other dtypes and head dims."""
    base = SHAPES["h128"]
    return {
        "bfloat16_quarter": _case(base, "bfloat16", capacity=base.T // 4),
        "bfloat16_unbounded": _case(base, "bfloat16", ragged=True),
        "odd_float32": _case(SHAPES["odd_h64"], "float32", capacity=200, ragged=True),
        "odd_h96_bfloat16": _case(SHAPES["odd_h96"], "bfloat16"),
        "h256_bfloat16": _case(SHAPES["h256"], "bfloat16", capacity=1000),
        "piece_bfloat16": _case(base, "bfloat16", piece=2048),
        "piece_bfloat16_500k": _case(SHAPES["h128_500k"], "bfloat16", capacity=1 << 17, piece=4096),
    }


# On a device.

ADMITTED = 0.25


def _args(shape: Shape, dtype: str, share: float) -> tuple[Any, ...]:
    admit = np.random.default_rng(1).random((shape.B, shape.K, shape.T)) < share
    return *full.arrays(shape.ungated, dtype), jnp.asarray(admit)


def checks(tiny: bool) -> Iterator[Check]:
    """Rows of differing length, both dtypes, a small head."""
    base = SHAPES["tiny" if tiny else "check"]
    lengths = jnp.asarray([base.T, base.T // 2 + 1], jnp.int32)
    cases = {"bfloat16": (base, "bfloat16")}
    if not tiny:
        cases |= {"float32": (base, "float32"), "h64": (base._replace(H=64), "bfloat16")}
    for name, (shape, dtype) in cases.items():
        run = functools.partial(_run, window=shape.window, capacity=None)
        yield Check(name, run, (*_args(shape, dtype, 0.3), lengths), shape.T, dtype)
    args, start = _args(base, "bfloat16", 0.3), base.T // 3
    piece, offset = args[0][:, :, : base.T // 2], jnp.asarray([start, start + 1], jnp.int32)
    run = functools.partial(_run, window=base.window, capacity=None)
    yield Check("piece", run, (piece, *args[1:], lengths, offset), base.T, "bfloat16")


def _job(shape: Shape, beside: bool, **more: Any) -> Job:
    b, n, _, t, h, window = shape
    args = _args(shape, "bfloat16", ADMITTED)
    # More than are drawn, by many times their deviation.
    capacity = int(ADMITTED * t + 8 * t**0.5)
    others = rivals.prompt(*args[:3]) if beside else ()
    if beside:
        plain = (*args[:3], full.positions(shape.ungated))
        others += (rivals.ours("full_blockwise", full.causal, plain),)
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
    shape = SHAPES["tiny"] if tiny else SHAPES["timed"]._replace(T=16384)
    yield _job(shape, False, tunes="forward", key=("bfloat16", shape.H))


def jobs(tiny: bool) -> Iterator[Job]:
    """A quarter admitted, at the length of the target and at a fourth of it."""
    base = SHAPES["tiny" if tiny else "timed"]
    for t in (base.T,) if tiny else (base.T, base.T // 4):
        yield _job(base._replace(T=t), True)


def targets(found: dict[str, Any], limits: dict[str, float]) -> list[Target]:
    """Three times as fast as the fastest full attention at 128k tokens."""
    reached = []
    for name, case in found["cases"].items():
        beside = [x for rival, x in found["compared"].items() if rival.startswith(f"{name}/")]
        times = [x["ms"] for x in beside if "ms" in x]
        if name.endswith(str(SHAPES["timed"].T)) and times:
            text = f"{name}: speed of the fastest full attention"
            reached.append(Target(text, min(times) / case["ms"], 3.0, True))
    return reached


# In Mosaic GPU.


def beside() -> dict[str, Case]:
    """What the body for Hopper takes, of ``cases``, and small heads."""
    known, small = cases(), SHAPES["h128"]._replace(H=64)
    found = {name: known[name] for name in ("bfloat16_quarter", "bfloat16_unbounded", "piece_bfloat16")}
    found["bfloat16_quarter_h64"] = _case(small, "bfloat16", capacity=small.T // 4)
    return {name: case._replace(impl="mosaic_gpu") for name, case in found.items()}
