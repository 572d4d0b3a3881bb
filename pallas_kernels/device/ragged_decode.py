"""ragged_decode on a device: agreement on ragged lists, bandwidth at 8k and 32k live slots a stream."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.device import rivals
from pallas_kernels.device.work import Check, Job, Target
from pallas_kernels.ragged_decode.api import ragged_decode
from pallas_kernels.ragged_decode.shapes import Shape

CHECK = Shape(B=2, N=8, K=2, T=1, H=128, P=72, S=64, M=16)
TINY = Shape(B=2, N=4, K=2, T=1, H=32, P=18, S=8, M=4)
TIMED = {
    "8k": Shape(B=16, N=32, K=8, T=1, H=128, P=16 * 8 * 256, S=64, M=256),
    "32k": Shape(B=4, N=32, K=8, T=1, H=128, P=4 * 8 * 1024, S=64, M=1024),
}


def _run(impl: str, options: dict[str, Any]) -> Callable[..., Any]:
    def run(q: Any, k: Any, v: Any, table: Any, length: Any, scales: Any, *lists: Any) -> Any:
        more = dict(zip(("pages", "slots"), lists))
        return ragged_decode(q, k, v, table, length, scales=scales, **more, **options, impl=impl)

    return run


def _pools(shape: Shape, dtype: str) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    size, keys = (shape.P, shape.S, shape.H), jax.random.split(jax.random.PRNGKey(1))
    if dtype != "int8":
        k, v = (jax.random.normal(key, size, dtype) for key in keys)
        return k, v, None
    k, v = (jax.random.randint(key, size, -127, 128, jnp.int8) for key in keys)
    scales = jax.random.uniform(keys[0], (shape.P, 2, shape.H), jnp.float32, 0.01, 0.02)
    return k, v, scales


def _lists(shape: Shape, length: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """Pages in random order, none of them twice."""
    pages = np.random.default_rng(0).permutation(shape.P)[: shape.B * shape.K * shape.M]
    table = pages.reshape(shape.B, shape.K, shape.M)
    return jnp.asarray(table, jnp.int32), jnp.asarray(length, jnp.int32)


def _args(shape: Shape, dtype: str, length: np.ndarray) -> tuple[Any, ...]:
    wide = "float32" if dtype == "float32" else "bfloat16"
    q = jax.random.normal(jax.random.PRNGKey(2), (shape.B, shape.N, shape.T, shape.H), wide)
    k, v, scales = _pools(shape, dtype)
    return q, k, v, *_lists(shape, length), scales


def _edges(shape: Shape) -> np.ndarray:
    """Empty, one, around a page, all: over the streams in turn."""
    edges = [0, 1, shape.S - 1, shape.S, shape.S + 1, shape.M * shape.S, shape.M * shape.S // 2]
    return np.resize(edges, (shape.B, shape.K))


def checks(tiny: bool) -> Iterator[Check]:
    """All dtypes, with mass; many queries; selected pages and slots; other head dims."""
    base = TINY if tiny else CHECK
    terms, mass = base.M * base.S, {"mass": True}
    for dtype in ("bfloat16",) if tiny else ("bfloat16", "int8", "float32"):
        run = functools.partial(_run, options=mass)
        yield Check(dtype, run, _args(base, dtype, _edges(base)), terms, dtype)
    if tiny:
        return
    for name, shape in {"chunk": base._replace(T=40), "h64": base._replace(H=64)}.items():
        run = functools.partial(_run, options=mass)
        yield Check(name, run, _args(shape, "float32", _edges(shape)), terms, "float32")
    rng, some = np.random.default_rng(3), 5
    pages = np.stack([rng.permutation(base.M)[:some] for _ in range(base.B * base.K)])
    lists = (
        jnp.asarray(pages.reshape(base.B, base.K, some), jnp.int32),
        jnp.asarray(rng.random((base.B, base.K, some, base.S)) < 0.5),
    )
    args = (*_args(base, "float32", _edges(base)), *lists)
    yield Check("selected", functools.partial(_run, options=mass), args, terms, "float32")


def _job(name: str, shape: Shape, dtype: str, ragged: bool, **more: Any) -> Job:
    most = shape.M * shape.S
    length = np.full((shape.B, shape.K), most // 2)
    if ragged:
        length = np.random.default_rng(4).uniform(0, most, size=length.shape).astype(int)
    args = _args(shape, dtype, length)
    moves = 2 * int(length.sum()) * shape.H * args[1].dtype.itemsize
    beside = () if ragged else rivals.decode(*args)
    return Job(name, functools.partial(_run, options={}), args, moves=moves, rivals=beside, **more)


def searches(tiny: bool) -> Iterator[Job]:
    """The pass over pages, for the pools that are served most."""
    shape = TINY if tiny else TIMED["8k"]
    for dtype in ("bfloat16",) if tiny else ("bfloat16", "int8"):
        yield _job(dtype, shape, dtype, True, tunes="read", key=(dtype, shape.H))


def jobs(tiny: bool) -> Iterator[Job]:
    """Uniform and ragged lists of about as many live slots."""
    shapes = {"tiny": TINY} if tiny else TIMED
    for name, shape in reversed(shapes.items()):
        for ragged in (False, True):
            yield _job(f"{name}_bfloat16{'_ragged' * ragged}", shape, "bfloat16", ragged)
    if not tiny:
        yield _job("8k_int8", TIMED["8k"], "int8", False)


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
