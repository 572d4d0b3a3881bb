"""What is tested, compiled for chips, checked and timed of ragged_decode."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import products, tuning
from pallas_kernels.measure import rivals
from pallas_kernels.measure.work import Bench, Case, Check, Job, Shapes, Target, size
from pallas_kernels.ragged_decode import mosaic_tpu
from pallas_kernels.ragged_decode.api import ragged_decode

DTYPES = ("float32", "bfloat16", "int8")


class Shape(NamedTuple):
    """q [B, N, T, H] against pools [P, S, H] through table [B, K, M]."""

    B: int
    N: int
    K: int
    T: int
    H: int
    P: int
    S: int
    M: int


SHAPES = Shapes(
    ("test", "g1_h32", Shape(B=3, N=2, K=2, T=1, H=32, P=40, S=8, M=5)),
    ("test", "g4_h64", Shape(B=3, N=8, K=2, T=2, H=64, P=70, S=16, M=4)),
    ("test", "g8_h80", Shape(B=3, N=16, K=2, T=1, H=80, P=24, S=8, M=3)),
    ("test", "g4_h96", Shape(B=3, N=8, K=2, T=1, H=96, P=24, S=8, M=3)),
    ("test", "g1_h128", Shape(B=3, N=2, K=2, T=3, H=128, P=130, S=4, M=6)),
    ("test", "g1_h256", Shape(B=3, N=2, K=2, T=1, H=256, P=20, S=8, M=3)),
    ("test", "many_queries", Shape(B=3, N=8, K=2, T=40, H=32, P=150, S=8, M=12)),
    ("test", "page128", Shape(B=3, N=8, K=2, T=1, H=64, P=26, S=128, M=4)),
    ("bench", "one_row", Shape(B=1, N=10, K=5, T=1, H=64, P=640, S=64, M=128)),
    ("bench", "one_row_p256", Shape(B=1, N=10, K=5, T=1, H=64, P=160, S=256, M=32)),
    ("bench", "rows_8k", Shape(B=4, N=16, K=4, T=1, H=64, P=2048, S=64, M=128)),
    ("bench", "rows_8k_p256", Shape(B=4, N=16, K=4, T=1, H=64, P=512, S=256, M=32)),
    ("bench", "one_row_32k", Shape(B=1, N=10, K=5, T=1, H=64, P=2560, S=64, M=512)),
    ("bench", "batch", Shape(B=8, N=32, K=8, T=1, H=64, P=2048, S=64, M=32)),
    ("bench", "chunk", Shape(B=1, N=4, K=2, T=256, H=64, P=64, S=64, M=32)),
    # Llama-3.1-8B's heads at 8k slots a stream, and other head dims.
    ("chip", "h128", Shape(B=32, N=32, K=8, T=1, H=128, P=16384, S=64, M=128)),
    ("chip", "h128_page128", Shape(B=32, N=32, K=8, T=1, H=128, P=8192, S=128, M=64)),
    ("chip", "small_h128", Shape(B=8, N=8, K=8, T=1, H=128, P=4096, S=128, M=64)),
    ("chip", "lists_500k", Shape(B=8, N=32, K=8, T=1, H=128, P=16384, S=64, M=7813)),
    ("chip", "page16", Shape(B=32, N=32, K=8, T=1, H=128, P=16384, S=16, M=128)),
    ("chip", "page32", Shape(B=32, N=32, K=8, T=1, H=128, P=16384, S=32, M=128)),
    ("chip", "chunk_h128", Shape(B=1, N=32, K=8, T=512, H=128, P=16384, S=64, M=128)),
    ("chip", "h256", Shape(B=8, N=16, K=8, T=1, H=256, P=4096, S=64, M=64)),
    ("chip", "h64", Shape(B=32, N=32, K=8, T=1, H=64, P=16384, S=64, M=128)),
    ("chip", "h64_page128", Shape(B=32, N=32, K=8, T=1, H=64, P=8192, S=128, M=64)),
    ("chip", "h80", Shape(B=32, N=32, K=8, T=1, H=80, P=2048, S=128, M=64)),
    ("chip", "h96", Shape(B=32, N=32, K=8, T=1, H=96, P=2048, S=128, M=64)),
    ("check", "check", Shape(B=2, N=8, K=2, T=1, H=128, P=72, S=64, M=16)),
    ("tiny", "tiny", Shape(B=2, N=4, K=2, T=1, H=32, P=18, S=8, M=4)),
    ("timed", "8k", Shape(B=16, N=32, K=8, T=1, H=128, P=16 * 8 * 256, S=64, M=256)),
    ("timed", "32k", Shape(B=4, N=32, K=8, T=1, H=128, P=4 * 8 * 1024, S=64, M=1024)),
)


def _run(impl: str, **options: Any) -> Callable[..., Any]:
    def run(q: Any, k: Any, v: Any, table: Any, length: Any, more: Any) -> Any:
        return ragged_decode(q, k, v, table, length, **options, impl=impl, **more)

    return run


# On this CPU.

SELECTED = 8
"""One page in this many is read by the selections."""

MOST = {64: 1.5, 256: 1.3}
"""Slots of a page to the most a read may take, in times of "dense": of one new token against 8k live slots a
stream and more, in bfloat16."""


def _dense(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    s = jnp.einsum("bkrh,bksh->bkrs", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    p = jax.nn.softmax(s, axis=-1).astype(v.dtype)
    return jnp.einsum("bkrs,bksh->bkrh", p, v, preferred_element_type=jnp.float32)


def _tuned(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    p = jax.nn.softmax(products.scores(q, k, q.shape[-1] ** -0.5), axis=-1)
    return products.mix(p, v)


def bench(shape: Shape, dtype: str) -> Bench:
    """Against the same keys and values contiguously, which no ragged cache can have.

    "dense" reads them as anyone would write it (einsum, softmax, einsum), "dense, tuned" by the products of
    ``products.py``. int8 is compared with dense float32: four times its bytes.
    """
    rng = np.random.default_rng(0)
    b, n, kv, t, h, pool, slots, m = shape
    wide = "float32" if dtype == "int8" else dtype
    q = jnp.asarray(rng.normal(size=(b, n, t, h)), wide)
    k, v = (jnp.asarray(rng.normal(size=(pool, slots, h)) * 30, dtype) for _ in range(2))
    scales = jnp.full((pool, 2, h), 1 / 30, jnp.float32) if dtype == "int8" else None
    table = jnp.asarray(rng.permutation(pool)[: b * kv * m].reshape(b, kv, m), jnp.int32)
    length = jnp.full((b, kv), m * slots, jnp.int32)
    some = jnp.asarray(rng.permuted(np.broadcast_to(np.arange(m), (b, kv, m)), axis=2)[..., : m // SELECTED])
    rows = [x[: b * kv * m].reshape(b, kv, m * slots, h).astype(wide) for x in (k, v)]
    contiguous, paged = (q.reshape(b, kv, -1, h), *rows), (q, k, v, table, length)

    def read(**more: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return functools.partial(ragged_decode, scales=scales, **more), paged

    runs = {
        "dense": (_dense, contiguous),
        "dense, tuned": (_tuned, contiguous),
        "ragged": read(),
        "with mass": read(mass=True),
        f"1/{SELECTED} of pages": read(pages=some),
    }
    judged = dtype == "bfloat16" and t == 1 and m * slots >= 8192
    return Bench(runs, "dense", {"ragged": MOST[slots]} if judged else {})


# Compiled for chips.

CODES = ("int8", "uint8")
"""Dtypes of pools with scales."""


def _stored(h: int, dtype: str) -> int:
    """Numbers of a slot as it lies: two codes a byte in uint8."""
    return h // 2 if dtype == "uint8" else h


def _case(shape: Shape, dtype: str, *, mass: bool = False, pages: int = 0) -> Case:
    b, n, kv, t, h, pool, slots, m = shape
    a, width, stored = jax.ShapeDtypeStruct, jnp.dtype(dtype).itemsize, _stored(h, dtype)
    q = a((b, n, t, h), jnp.float32 if dtype == "float32" else jnp.bfloat16)
    pages_of = a((pool, slots, stored), dtype)
    more: dict[str, Any] = {"scales": a((pool, 2, h), jnp.float32)} if dtype in CODES else {}
    if pages:
        more["pages"], more["slots"] = a((b, kv, pages), jnp.int32), a((b, kv, pages, slots), bool)
    read = b * kv * (pages or m) * slots
    rows = n // kv * t
    out = a((b, n, t, h), jnp.float32)
    received = 4 * b * n * m * slots if mass else 0
    # Tiles of mass. GPU: at least 16 rows for G heads, summed over blocks of 64 queries. TPU: whole tiles of
    # 8 rows, in the kernel's order, in the lists' order, and summed.
    gpu = max(16, n // kv) * kv // n * max(1, rows // 64)
    tiles = max(3 * -(-n // kv // 8) * 8 * kv // n, gpu)
    # TPU: pools of short heads and short pages are copied to rows of whole lanes, scales of short heads too.
    in_place, wide = stored % 128 == 0 or slots % 128 == 0, -(-h // 128) * 128
    copies = 0 if in_place else 2 * pool * slots * -(-stored // 128) * 128 * width
    copies += 0 if h % 128 == 0 else 2 * pool * 4 * 128
    _, held = mosaic_tpu.pages_of(rows, pages or m, slots, 2 * slots * stored * width, tuning.Blocks())
    item, asked = held * slots, min(rows, mosaic_tpu.ROWS)
    return Case(
        run=lambda impl: _run(impl, mass=mass),
        args=(q, pages_of, pages_of, a((b, kv, m), jnp.int32), a((b, kv), jnp.int32), more),
        moves=2 * read * stored * width
        + (8 * read // slots * h if dtype in CODES else 0)
        + size(q, out)
        + received,
        flops=4 * read * h * rows,
        temp=(8 << 20) + 64 * size(q) * wide // h + copies + tiles * received,
        whole=pool * slots * stored if in_place else 0,
        step=(2 * item * stored * width, 4 * item * h * asked),
        kernel="ragged_decode_read",
        pages=held,
    )


def cases() -> dict[str, Case]:
    """By dtype, by what is asked for, by head dim."""
    base = SHAPES["h128"]
    return {
        "bfloat16": _case(base, "bfloat16"),
        "int8": _case(base, "int8"),
        "bfloat16_page128": _case(SHAPES["h128_page128"], "bfloat16"),
        "int8_page128": _case(SHAPES["h128_page128"], "int8"),
        "float32": _case(SHAPES["small_h128"], "float32"),
        "int8_mass": _case(base, "int8", mass=True),
        "bfloat16_selected_mass": _case(base, "bfloat16", mass=True, pages=16),
        "bfloat16_page16": _case(SHAPES["page16"], "bfloat16"),
        "int8_page32": _case(SHAPES["page32"], "int8"),
        "bfloat16_chunk_mass": _case(SHAPES["chunk_h128"], "bfloat16", mass=True),
        "bfloat16_h256": _case(SHAPES["h256"], "bfloat16"),
        "bfloat16_h64": _case(SHAPES["h64"], "bfloat16"),
        "bfloat16_h64_page128_mass": _case(SHAPES["h64_page128"], "bfloat16", mass=True),
        "int8_h96": _case(SHAPES["h96"], "int8"),
        "bfloat16_500k": _case(SHAPES["lists_500k"], "bfloat16"),
        "int4": _case(SHAPES["h128_page128"], "uint8"),
        "int4_mass": _case(SHAPES["h128_page128"], "uint8", mass=True),
        "int4_page64": _case(base, "uint8"),
        "int4_h80": _case(SHAPES["h80"], "uint8"),
        "int4_h256": _case(SHAPES["h256"], "uint8"),
        "bfloat16_h80": _case(SHAPES["h80"], "bfloat16"),
    }


# On a device.


def _pools(shape: Shape, dtype: str) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    size, keys = (shape.P, shape.S, _stored(shape.H, dtype)), jax.random.split(jax.random.PRNGKey(1))
    if dtype not in CODES:
        k, v = (jax.random.normal(key, size, dtype) for key in keys)
        return k, v, None
    some = jnp.iinfo(dtype)
    k, v = (jax.random.randint(key, size, some.min, some.max + 1, jnp.int32).astype(dtype) for key in keys)
    scales = jax.random.uniform(keys[0], (shape.P, 2, shape.H), jnp.float32, 0.01, 0.02)
    return k, v, scales


def _args(shape: Shape, dtype: str, length: np.ndarray, **more: Any) -> tuple[Any, ...]:
    """Lists of pages in random order, none of them twice."""
    wide = "float32" if dtype == "float32" else "bfloat16"
    q = jax.random.normal(jax.random.PRNGKey(2), (shape.B, shape.N, shape.T, shape.H), wide)
    k, v, scales = _pools(shape, dtype)
    pages = np.random.default_rng(0).permutation(shape.P)[: shape.B * shape.K * shape.M]
    table = jnp.asarray(pages.reshape(shape.B, shape.K, shape.M), jnp.int32)
    return q, k, v, table, jnp.asarray(length, jnp.int32), {"scales": scales, **more}


def _edges(shape: Shape) -> np.ndarray:
    """Empty, one, around a page, all: over the streams in turn."""
    edges = [0, 1, shape.S - 1, shape.S, shape.S + 1, shape.M * shape.S, shape.M * shape.S // 2]
    return np.resize(edges, (shape.B, shape.K))


def checks(tiny: bool) -> Iterator[Check]:
    """All dtypes, with mass; many queries; selected pages and slots; other head dims."""
    base, run = SHAPES["tiny" if tiny else "check"], functools.partial(_run, mass=True)
    terms = base.M * base.S
    for dtype in ("bfloat16",) if tiny else ("bfloat16", "int8", "uint8", "float32"):
        yield Check(dtype, run, _args(base, dtype, _edges(base)), terms, dtype)
    if tiny:
        return
    for name, shape in {"chunk": base._replace(T=40), "h64": base._replace(H=64)}.items():
        yield Check(name, run, _args(shape, "float32", _edges(shape)), terms, "float32")
    rng, some = np.random.default_rng(3), 5
    pages = np.stack([rng.permutation(base.M)[:some] for _ in range(base.B * base.K)])
    lists = {
        "pages": jnp.asarray(pages.reshape(base.B, base.K, some), jnp.int32),
        "slots": jnp.asarray(rng.random((base.B, base.K, some, base.S)) < 0.5),
    }
    yield Check("selected", run, _args(base, "float32", _edges(base), **lists), terms, "float32")


def _job(name: str, shape: Shape, dtype: str, ragged: bool, **more: Any) -> Job:
    most = shape.M * shape.S
    length = np.full((shape.B, shape.K), most // 2)
    if ragged:
        length = np.random.default_rng(4).uniform(0, most, size=length.shape).astype(int)
    args = _args(shape, dtype, length)
    moves = 2 * int(length.sum()) * args[1].shape[-1] * args[1].dtype.itemsize
    q, k, v, table, lengths, lists = args
    bare = ragged or dtype == "uint8"  # rivals read what has a number a channel
    beside = () if bare else rivals.decode(q, k, v, table, lengths, lists["scales"])
    return Job(name, _run, args, moves=moves, rivals=beside, **more)


def searches(tiny: bool) -> Iterator[Job]:
    """The pass over pages, for the pools that are served most."""
    shape = SHAPES["tiny" if tiny else "8k"]
    for dtype in ("bfloat16",) if tiny else ("bfloat16", "int8", "uint8"):
        yield _job(dtype, shape, dtype, True, tunes="read", key=(dtype, shape.H))


def jobs(tiny: bool) -> Iterator[Job]:
    """Uniform and ragged lists of about as many live slots."""
    for name in ("tiny",) if tiny else ("32k", "8k"):
        for ragged in (False, True):
            yield _job(f"{name}_bfloat16{'_ragged' * ragged}", SHAPES[name], "bfloat16", ragged)
    if not tiny:
        yield _job("8k_int8", SHAPES["8k"], "int8", False)
        yield _job("8k_int4", SHAPES["8k"], "uint8", False)


def targets(found: dict[str, Any], limits: dict[str, float]) -> list[Target]:
    """80 % of a copy's bandwidth at 32k, and a cost that follows live pages within 10 %."""
    cases, reached = found["cases"], []
    for name, case in cases.items():
        if name.startswith("32k"):
            ratio = case["gb_s"] / limits["copy_gb_s"]
            reached.append(Target(f"{name}: bandwidth of a copy's", ratio, 0.8, True))
        even = cases.get(name.removesuffix("_ragged"))
        if name.endswith("_ragged") and even:
            ratio = even["gb_s"] / case["gb_s"]
            reached.append(Target(f"{name}: cost of a live byte over that of even lists", ratio, 1.1, False))
    return reached


# In Mosaic GPU.


def beside() -> dict[str, Case]:
    """What the body for Hopper takes, of ``cases``."""
    names = ("bfloat16", "int8", "float32", "int8_mass", "bfloat16_page16", "bfloat16_h64")
    known = cases()
    return {
        name: known[name]._replace(impl="mosaic_gpu", temp=known[name].temp + (16 << 20)) for name in names
    }
