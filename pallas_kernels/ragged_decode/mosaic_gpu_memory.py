"""References of the first kernel of ragged_decode on Hopper by name, and how much fits shared memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from pallas_kernels.hopper import ROWS, SHARED, WIDE, plgpu, tiled
from pallas_kernels.ragged_decode.mosaic_gpu_plan import COLUMNS, TILE, Plan


class Given(NamedTuple):
    """References a kernel is given: lists, pools, queries; results last."""

    q: Any
    k: Any
    v: Any
    table: Any
    length: Any
    scales: Any
    o: Any
    stats: Any
    scores: Any


class Shared(NamedTuple):
    """Shared memory of a program: buffers, and barriers over them."""

    q: Any
    ring: Any
    weights: Any
    staged: Any
    scales: Any
    out: Any
    stats: Any
    q_full: Any
    full: Any
    free: Any


def shared_memory(plan: Plan, dtype: Any) -> list[Any]:
    """What ``Shared`` names."""
    smem, exact, n = plgpu.SMEM, jnp.bfloat16, plan.readers
    wide = tiled(plan.h, exact)
    staged = plan.terms > 1 or plan.codes
    return [
        smem((plan.terms, ROWS, plan.h), exact, transforms=wide),
        smem((plan.stages, TILE, plan.h), dtype, transforms=tiled(COLUMNS, dtype)),
        smem((n, plan.terms, ROWS, TILE), exact, transforms=tiled(TILE, exact)),
        *[smem((n, plan.terms, TILE, plan.h), exact, transforms=wide)] * staged,
        *[smem((plan.stages, plan.units, plan.h), jnp.float32)] * plan.codes,
        smem((n, ROWS, WIDE), jnp.float32, transforms=tiled(WIDE, jnp.float32)),
        smem((n, 2, ROWS), jnp.float32),
        plgpu.Barrier(num_arrivals=plan.terms),
        plgpu.Barrier(num_arrivals=plan.units * (1 + plan.codes), num_barriers=plan.stages),
        plgpu.Barrier(num_barriers=plan.stages),
    ]


def buffers(plan: Plan, itemsize: int) -> int:
    """How many of ``plan.stages`` fit beside what else ``shared_memory`` has, in whole turns of the readers.

    A buffer is one reader's always, because its barrier counts that reader's turns.
    """
    staged = plan.terms > 1 or plan.codes
    terms = plan.terms * ROWS * (plan.h + plan.readers * (TILE + staged * plan.h))
    fixed = 2 * terms + 4 * plan.readers * ROWS * (WIDE + 2)
    each = TILE * plan.h * itemsize + plan.codes * plan.units * plan.h * 4
    turn = 2 * plan.readers if plan.readers > 1 else 1
    return min(plan.stages, (SHARED - fixed) // each) // turn * turn


def named(plan: Plan, refs: tuple[Any, ...]) -> tuple[Given, Shared]:
    """References by name; None for those a call does not have."""
    left = list(refs)

    def take(there: bool = True) -> Any:
        return left.pop(0) if there else None

    staged = plan.terms > 1 or plan.codes
    lists = (take(), take(), take(), take(), take())
    given = Given(*lists, take(plan.codes), take(), take(), take(plan.options.mass))
    tiles_of, rest = (take(), take(), take()), (take(staged), take(plan.codes))
    memory = Shared(*tiles_of, *rest, take(), take(), take(), take(), take())
    return given, memory
