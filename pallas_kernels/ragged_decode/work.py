"""Checks of ragged_decode on a device, and the calls that choose its blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.measure.work import Check, TimedCall
from pallas_kernels.ragged_decode.api import ragged_decode

CODES = ("int8", "uint8")
"""Dtypes of pools with scales."""


class RaggedDecodeSizes(NamedTuple):
    """q [B, N, T, H] against pools [P, S, H] through table [B, K, M]."""

    B: int
    N: int
    K: int
    T: int
    H: int
    P: int
    S: int
    M: int


CHECKED = RaggedDecodeSizes(B=2, N=8, K=2, T=1, H=128, P=72, S=64, M=16)
TINY = RaggedDecodeSizes(B=2, N=4, K=2, T=1, H=32, P=18, S=8, M=4)
TIMED_8K = RaggedDecodeSizes(B=16, N=32, K=8, T=1, H=128, P=16 * 8 * 256, S=64, M=256)


def read(impl: str, **options: Any) -> Callable[..., Any]:
    """``ragged_decode`` with the optional arrays of a call as its last argument."""

    def run(q: Any, k: Any, v: Any, table: Any, length: Any, more: Any) -> Any:
        return ragged_decode(q, k, v, table, length, **options, impl=impl, **more)

    return run


def stored_width(h: int, dtype: str) -> int:
    """Numbers of a slot in a pool: uint8 has two codes a byte."""
    return h // 2 if dtype == "uint8" else h


def _pools(sizes: RaggedDecodeSizes, dtype: str) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    shape, keys = (sizes.P, sizes.S, stored_width(sizes.H, dtype)), jax.random.split(jax.random.PRNGKey(1))
    if dtype not in CODES:
        k, v = (jax.random.normal(key, shape, dtype) for key in keys)
        return k, v, None
    limits = jnp.iinfo(dtype)
    k, v = (
        jax.random.randint(key, shape, limits.min, limits.max + 1, jnp.int32).astype(dtype) for key in keys
    )
    return k, v, jax.random.uniform(keys[0], (sizes.P, 2, sizes.H), jnp.float32, 0.01, 0.02)


def _args(sizes: RaggedDecodeSizes, dtype: str, length: np.ndarray, **more: Any) -> tuple[Any, ...]:
    """Lists of pages in random order, none of them twice."""
    wide = "float32" if dtype == "float32" else "bfloat16"
    q = jax.random.normal(jax.random.PRNGKey(2), (sizes.B, sizes.N, sizes.T, sizes.H), wide)
    k, v, scales = _pools(sizes, dtype)
    pages = np.random.default_rng(0).permutation(sizes.P)[: sizes.B * sizes.K * sizes.M]
    table = jnp.asarray(pages.reshape(sizes.B, sizes.K, sizes.M), jnp.int32)
    return q, k, v, table, jnp.asarray(length, jnp.int32), {"scales": scales, **more}


def _edges(sizes: RaggedDecodeSizes) -> np.ndarray:
    """Lengths of the lists in turn: empty, one, around a page, all."""
    most = sizes.M * sizes.S
    return np.resize([0, 1, sizes.S - 1, sizes.S, sizes.S + 1, most, most // 2], (sizes.B, sizes.K))


def checks(tiny: bool) -> Iterator[Check]:
    """All dtypes, with mass; many queries; selected pages and slots; other head dims."""
    base, run = TINY if tiny else CHECKED, functools.partial(read, mass=True)
    terms = base.M * base.S
    for dtype in ("bfloat16",) if tiny else ("bfloat16", "int8", "uint8", "float32"):
        yield Check(dtype, run, _args(base, dtype, _edges(base)), terms, dtype)
    if tiny:
        return
    for name, sizes in {"chunk": base._replace(T=40), "h64": base._replace(H=64)}.items():
        yield Check(name, run, _args(sizes, "float32", _edges(sizes)), terms, "float32")
    rng, count = np.random.default_rng(3), 5
    pages = np.stack([rng.permutation(base.M)[:count] for _ in range(base.B * base.K)])
    selection = {
        "pages": jnp.asarray(pages.reshape(base.B, base.K, count), jnp.int32),
        "slots": jnp.asarray(rng.random((base.B, base.K, count, base.S)) < 0.5),
    }
    yield Check("selected", run, _args(base, "float32", _edges(base), **selection), terms, "float32")


def timed_call(name: str, sizes: RaggedDecodeSizes, dtype: str, ragged: bool, **more: Any) -> TimedCall:
    """Lists that are half full, or of any length."""
    most = sizes.M * sizes.S
    length = np.full((sizes.B, sizes.K), most // 2)
    if ragged:
        length = np.random.default_rng(4).uniform(0, most, size=length.shape).astype(int)
    args = _args(sizes, dtype, length)
    moves = 2 * int(length.sum()) * args[1].shape[-1] * args[1].dtype.itemsize
    return TimedCall(name, read, args, moves=moves, **more)


def searches(tiny: bool) -> Iterator[TimedCall]:
    """The pass over pages, for the pools that are served most."""
    sizes = TINY if tiny else TIMED_8K
    for dtype in ("bfloat16",) if tiny else ("bfloat16", "int8", "uint8"):
        yield timed_call(dtype, sizes, dtype, True, tunes="read", key=(dtype, sizes.H))
