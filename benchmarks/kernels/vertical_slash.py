"""vertical_slash: CPU benchmark, cases compiled for chips, timings on a device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels import rivals
from benchmarks.kernels.operations import CompiledCase, CpuBench, Target, Timing
from pallas_kernels.blockwise import work as full
from pallas_kernels.blockwise.api import blockwise
from pallas_kernels.gated.work import SelfAttentionSizes
from pallas_kernels.measure.work import size
from pallas_kernels.merge.api import merge
from pallas_kernels.vertical_slash.api import vertical_slash
from pallas_kernels.vertical_slash.work import TIMED, TINY, read, timed_call

DTYPES = ("float32", "bfloat16")

BENCH = {
    "prompt_8k": SelfAttentionSizes(B=1, N=4, K=2, T=8192, H=64, window=64),
}
LARGE = {
    "prompt_32k": SelfAttentionSizes(B=1, N=4, K=2, T=32768, H=64, window=256),
    "llama8b_32k": SelfAttentionSizes(B=1, N=32, K=8, T=32768, H=128, window=256),
}
CHIP = {
    "h128": SelfAttentionSizes(B=1, N=32, K=8, T=16384, H=128, window=256),
    "h128_500k": SelfAttentionSizes(B=1, N=32, K=8, T=524288, H=128, window=256),
    "odd_h64": SelfAttentionSizes(B=2, N=4, K=2, T=1000, H=64, window=64),
    "odd_h96": SelfAttentionSizes(B=1, N=2, K=2, T=513, H=96, window=64),
    "h256": SelfAttentionSizes(B=1, N=8, K=4, T=4096, H=256, window=1024),
}

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


def on_cpu(sizes: SelfAttentionSizes, dtype: str) -> CpuBench:
    """With 5 and 25 % admitted, against full attention and a mask alone; and a chunk behind its ring."""
    q, k, v = full.arrays(sizes.blockwise, dtype)
    pos, draw = full.positions(sizes.blockwise), np.random.default_rng(0).random(k.shape[:3])
    few, many = (jnp.asarray(draw < part) for part in (0.05, 0.25))

    def everything(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
        return blockwise(q, k, v, q_pos=pos, k_pos=pos)

    def masked(q: jax.Array, k: jax.Array, v: jax.Array, admit: jax.Array) -> tuple[jax.Array, ...]:
        return blockwise(q, k, v, q_pos=pos, k_pos=pos, window=sizes.window, admit=admit)

    def sparse(*x: jax.Array) -> tuple[jax.Array, ...]:
        return vertical_slash(*x, window=sizes.window)

    runs: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "full": (everything, (q, k, v)),
        "blockwise, same mask": (masked, (q, k, v, many)),
        "5% admitted": (sparse, (q, k, v, few)),
        "25% admitted": (sparse, (q, k, v, many)),
    }
    last = [x[:, :, -(sizes.window + CHUNK) :] for x in (k, v, many)]
    for name, run in {"in one": _chunk_in_one, "in two": _chunk_in_two}.items():
        fixed = functools.partial(run, window=sizes.window)
        runs[f"ring and chunk {name}"] = fixed, (q[:, :, -CHUNK:], *last)
    return CpuBench(runs, "full", repeats=5)


# Compiled for chips.

BLOCK = 512


def _case(
    sizes: SelfAttentionSizes,
    dtype: str,
    *,
    capacity: int | None = None,
    ragged: bool = False,
    piece: int = 0,
) -> CompiledCase:
    """``piece``: number of queries, if they are a piece of a prompt that is as long as the sizes say."""
    b, n, kv, s, h, window = sizes
    a, held, t = jax.ShapeDtypeStruct, capacity or s, piece or s
    q, k = a((b, n, t, h), dtype), a((b, kv, s, h), dtype)
    args = (q, k, k, a((b, kv, s), bool), *(a((b,), jnp.int32) if x else None for x in (ragged, piece)))
    rows, keys = min(BLOCK, n // kv * t), min(BLOCK, s)
    lanes = -(-h // 128) * 128
    # Padded operands of float32; a piece of bfloat16 has packed keys, a few numbers a key and (Triton) its
    # output before rounding, no more.
    padded = 4 * b * (3 * n * -(-t // BLOCK) * BLOCK + 4 * kv * max(s, held)) * lanes
    least = 2 * b * kv * held * lanes * q.dtype.itemsize + 16 * b * kv * s + 4 * b * n * t * lanes
    return CompiledCase(
        run=lambda impl: read(impl, window, capacity),
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


def cases() -> dict[str, CompiledCase]:
    """A quarter admitted, no bound, rows of differing length; other dtypes and head dims."""
    base = CHIP["h128"]
    return {
        "bfloat16_quarter": _case(base, "bfloat16", capacity=base.T // 4),
        "bfloat16_unbounded": _case(base, "bfloat16", ragged=True),
        "odd_float32": _case(CHIP["odd_h64"], "float32", capacity=200, ragged=True),
        "odd_h96_bfloat16": _case(CHIP["odd_h96"], "bfloat16"),
        "h256_bfloat16": _case(CHIP["h256"], "bfloat16", capacity=1000),
        "piece_bfloat16": _case(base, "bfloat16", piece=2048),
        "piece_bfloat16_500k": _case(CHIP["h128_500k"], "bfloat16", capacity=1 << 17, piece=4096),
    }


def timings(tiny: bool) -> Iterator[Timing]:
    """A quarter admitted, at the length of the target and at a fourth of it."""
    base = TINY if tiny else TIMED
    for t in (base.T,) if tiny else (base.T, base.T // 4):
        sizes = base._replace(T=t)
        call = timed_call(sizes)
        plain = (*call.args[:3], full.positions(sizes.blockwise))
        others = (*rivals.prompt(*call.args[:3]), rivals.ours("full_blockwise", full.causal, plain))
        yield Timing(call, tuple(x._replace(like=None) for x in others if not x.name.startswith("xla")))


def targets(record: dict[str, Any], limits: dict[str, float]) -> list[Target]:
    """Three times as fast as the fastest full attention at 128k tokens."""
    reached = []
    for name, case in record["cases"].items():
        compared = [x for rival, x in record["compared"].items() if rival.startswith(f"{name}/")]
        times = [x["ms"] for x in compared if "ms" in x]
        if name.endswith(str(TIMED.T)) and times:
            text = f"{name}: speed of the fastest full attention"
            reached.append(Target(text, min(times) / case["ms"], 3.0, True))
    return reached


def mosaic_gpu_cases() -> dict[str, CompiledCase]:
    """What the body for Hopper takes, of ``cases``, and small heads."""
    known, small = cases(), CHIP["h128"]._replace(H=64)
    chosen = {name: known[name] for name in ("bfloat16_quarter", "bfloat16_unbounded", "piece_bfloat16")}
    chosen["bfloat16_quarter_h64"] = _case(small, "bfloat16", capacity=small.T // 4)
    return {name: case._replace(impl="mosaic_gpu") for name, case in chosen.items()}
