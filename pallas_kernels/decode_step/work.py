"""The check of decode_step on a device, and the call that chooses its blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.decode_step.api import Cache, decode_step
from pallas_kernels.measure.work import Check, TimedCall, size


class DecodeStepSizes(NamedTuple):
    """Rows, query heads, KV heads, head dim; slots of a ring; pages, slots of a page, entries of a list."""

    B: int
    N: int
    K: int
    H: int
    W: int
    P: int
    S: int
    M: int

    @property
    def slots(self) -> int:
        """Of all rings and lists."""
        return self.B * self.K * (self.W + self.M * self.S)


CHECKED = DecodeStepSizes(B=4, N=8, K=2, H=128, W=128, P=144, S=64, M=16)
TINY = DecodeStepSizes(B=2, N=4, K=2, H=128, W=32, P=18, S=16, M=4)
TIMED_ONE_ROW = DecodeStepSizes(B=1, N=32, K=8, H=128, W=256, P=1024, S=64, M=128)

STEPS = 16
"""Of a timed call: its cache is copied once, since it is not donated, and written in place from then on."""


def step(impl: str) -> Callable[..., Any]:
    """One step."""

    def run(q: Any, k: Any, v: Any, cache: Any, table: Any, length: Any, seen: Any, enters: Any) -> Any:
        return decode_step(q, k, v, cache, table, length, seen=seen, enters=enters, impl=impl)

    return run


def steps(impl: str | None) -> Callable[..., Any]:
    """The same step ``STEPS`` times: (out, lse) of the last."""

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


def arrays(sizes: DecodeStepSizes, dtype: str, length: np.ndarray, seen: np.ndarray) -> tuple[Any, ...]:
    """Pages in random order, none of them twice; the leaving token of every other KV head enters its list."""
    b, n, heads, h, window, pool, slots, m = sizes
    keys = iter(jax.random.split(jax.random.PRNGKey(5), 7))
    q, k, v = (jax.random.normal(next(keys), (b, x, h), dtype) for x in (n, heads, heads))
    rings = (jax.random.normal(next(keys), (b, heads, window, h), dtype) for _ in "kv")
    pools = (jax.random.normal(next(keys), (pool, slots, h), dtype) for _ in "kv")
    table = np.random.default_rng(0).permutation(pool)[: b * heads * m].reshape(b, heads, m)
    enters = (np.arange(b * heads).reshape(b, heads) % 2 == 0) & (seen >= window)[:, None]
    lists = (jnp.asarray(x, jnp.int32) for x in (table, length, seen))
    return q, k, v, Cache(*rings, *pools), *lists, jnp.asarray(enters)


def full_lists(sizes: DecodeStepSizes, dtype: str) -> tuple[Any, ...]:
    """``arrays`` whose lists have room for one more token."""
    most = sizes.M * sizes.S
    return arrays(sizes, dtype, np.full((sizes.B, sizes.K), most - 1), np.full(sizes.B, most))


def _live(impl: str) -> Callable[..., Any]:
    """A step's answer and cache, with zeros in dead slots: those may hold anything."""

    def run(q: Any, k: Any, v: Any, cache: Any, table: Any, length: Any, seen: Any, enters: Any) -> Any:
        out, lse, after = step(impl)(q, k, v, cache, table, length, seen, enters)
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
    sizes = TINY if tiny else CHECKED
    most = sizes.M * sizes.S
    edges = [most - 1, 0, sizes.S - 1, sizes.S, sizes.S + 1, 1, most // 2, most]
    length = np.resize(edges, (sizes.B, sizes.K))
    seen = np.resize([3 * sizes.W + 5, sizes.W, -1, 7], sizes.B)
    yield Check("bfloat16", _live, arrays(sizes, "bfloat16", length, seen), most + sizes.W, "bfloat16")


def timed_call(name: str, sizes: DecodeStepSizes, **more: Any) -> TimedCall:
    """``STEPS`` steps over full lists."""
    args = full_lists(sizes, "bfloat16")
    moves = STEPS * 2 * sizes.slots * sizes.H * 2 + 2 * size(args[3])
    return TimedCall(name, steps, args, moves=moves, **more)


def searches(tiny: bool) -> Iterator[TimedCall]:
    """The step of one row: for eight rows and more, any blocks do."""
    sizes = TINY if tiny else TIMED_ONE_ROW
    yield timed_call("bfloat16", sizes, tunes="step", key=("bfloat16", sizes.H))
