"""How many rows a suite reads at once on this device, how long it takes and what it costs: before it starts.

Bytes are those of ``kvjax.plan.sizes``, from the model's config alone, so that a model that does not fit is
refused before it is fetched. Speed is what the device does in a second of products and copies, of which a
model reaches about half; the progress bar knows better after the first cells.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.algebra import Policy
from kvjax.eval.errors import EvalError
from kvjax.eval.measure.row import Cell
from kvjax.models.spec import ModelSpec
from kvjax.plan import sizes
from kvjax.plan._deployment import Deployment

COPIES = 3
"""Caches beside each other while answers are measured: compressed, with room for more, after the steps."""

REACHED = 0.5
"""Of the speed of products and copies alone."""

ROWS = 64
"""Most rows of a batch."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """The device at hand, and how many of it.

    Attributes:
      kind: as JAX calls it.
      count: of the mesh.
      memory: bytes of one that a program may have.
    """

    kind: str
    count: int
    memory: int


def device(count: int) -> Device:
    """The device that JAX uses."""
    one = jax.local_devices()[0]
    stats = one.memory_stats()
    if stats and "bytes_limit" in stats:
        memory = int(stats["bytes_limit"])
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return Device(kind=one.device_kind, count=count, memory=int(0.9 * memory))


def speed(dtype: str) -> tuple[float, float]:
    """(products and sums, bytes loaded) a second of one device, measured."""

    def rate(run: jax.stages.Wrapped, x: jax.Array, amount: float) -> float:
        run(x).block_until_ready()
        began, times = time.perf_counter(), 0
        while time.perf_counter() - began < 0.2:
            run(x).block_until_ready()
            times += 1
        return times * amount / (time.perf_counter() - began)

    size = 1024
    square, long = jnp.ones((size, size), dtype), jnp.ones(2**24, jnp.float32)
    flops = rate(jax.jit(lambda x: (x @ x) @ x), square, 4.0 * size**3)
    return flops, rate(jax.jit(lambda x: -x), long, 2.0 * long.nbytes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run needs.

    Attributes:
      rows: of a batch, by length.
      weights: bytes of the model on one device.
      fullest: bytes of one device at most, by length.
      seconds: of reading, and of writing answers; over all cells.
      tokens: read and written over all cells.
    """

    rows: dict[int, int]
    weights: int
    fullest: dict[int, int]
    seconds: tuple[float, float]
    tokens: tuple[int, int]


def cases(
    spec: ModelSpec,
    policies: Iterable[Policy],
    length: int,
    *,
    on: Device,
    dtype: str,
    weight_dtype: str | None,
) -> list[Deployment]:
    """One row of a length under each policy.

    Raises:
      EvalError: no mesh of these devices divides the model's heads.
    """
    made = [
        sizes.deployment(
            spec,
            policy,
            rows=1,
            context=length,
            dtype=dtype,
            weight_dtype=weight_dtype,
            devices=on.count,
        )
        for policy in policies
    ]
    found = [case for case in made if case is not None]
    if len(found) < len(made):
        raise EvalError(
            f"{on.count} devices divide neither the model's KV heads nor one row. Give --mesh another."
        )
    return found


def plan(
    name: str,
    spec: ModelSpec,
    policies: dict[str, Policy],
    cells: Sequence[Cell],
    answers: dict[tuple[str, int], int],
    *,
    on: Device,
    dtype: str,
    weight_dtype: str | None,
    rates: tuple[float, float],
) -> Plan:
    """Rows of every length, and the time of all cells.

    Args:
      name: of the model.
      spec, dtype, weight_dtype: of it.
      policies: by the name that cells have.
      cells: to be measured.
      answers: new tokens of a sample, by task and length.
      on, rates: the device and its speed.

    Raises:
      EvalError: a model, or one row of it, that is too large for the device.
    """
    rows, fullest, weights, seconds, tokens = {}, {}, 0, [0.0, 0.0], [0, 0]
    flops, bandwidth = (REACHED * rate for rate in rates)
    for length in sorted({cell.length for cell in cells}):
        how: dict[str, Any] = {"on": on, "dtype": dtype, "weight_dtype": weight_dtype}
        by_policy = dict(zip(policies, cases(spec, policies.values(), length, **how)))
        most = min(sizes.most_rows(case, on.memory, COPIES) for case in by_policy.values())
        if not most:
            raise EvalError(_too_large(name, by_policy, length, on))
        rows[length] = min(most, ROWS)
        held = [dataclasses.replace(case, rows=rows[length]) for case in by_policy.values()]
        fullest[length] = max(sizes.need(case, COPIES).total for case in held)
        for cell in cells:
            if cell.length != length:
                continue
            case = dataclasses.replace(by_policy[cell.policy], rows=min(rows[length], cell.samples))
            weights = sizes.need(case).weights
            # An answer is written once, and its reference is fed once.
            steps = 2 * answers[cell.task, length]
            batches = -(-cell.samples // case.rows)
            each = sizes.work(case).seconds(steps, flops, bandwidth)
            seconds = [total + batches * own for total, own in zip(seconds, each)]
            tokens = [tokens[0] + cell.samples * length, tokens[1] + cell.samples * steps]
    return Plan(
        rows=rows,
        weights=weights,
        fullest=fullest,
        seconds=(seconds[0], seconds[1]),
        tokens=(tokens[0], tokens[1]),
    )


def _too_large(name: str, by_policy: dict[str, Deployment], length: int, on: Device) -> str:
    """Which of the model's parts do not fit, and what would."""
    policy, case = max(by_policy.items(), key=lambda item: sizes.need(item[1], COPIES).total)
    needed, gib = sizes.need(case, COPIES), 2**30
    ways = []
    if case.weight_dtype is None:
        for kind in ("int8", "int4"):
            if sizes.most_rows(dataclasses.replace(case, weight_dtype=kind), on.memory, COPIES):
                ways.append(f"--weight-dtype {kind}")
                break
    if case.dtype == "float32" and sizes.most_rows(
        dataclasses.replace(case, dtype="bfloat16"), on.memory, COPIES
    ):
        ways.append("--dtype bfloat16")
    ways.append("more devices with --mesh" if ways else "Take a smaller model, or more devices with --mesh")
    return (
        f"{name} does not fit {on.kind} with one row of {length} tokens under {policy!r}: "
        f"{needed.weights / gib:.2f} GiB of weights, {needed.reading / gib:.2f} to read a row, "
        f"{needed.answering / gib:.2f} to answer, and a device has {on.memory / gib:.2f} GiB. "
        f"{'Give ' if len(ways) > 1 else ''}{' or '.join(ways)}."
    )


def lines(plan: Plan, on: Device, price: float | None) -> list[str]:
    """The plan in words, for people."""
    gib, hours = 2**30, sum(plan.seconds) / 3600
    told = [
        f"{on.count} x {on.kind}, {on.memory / gib:.1f} GiB each: {plan.weights / gib:.2f} GiB of weights",
        *(
            f"rows of {length} tokens: {plan.rows[length]} at once, {plan.fullest[length] / gib:.2f} GiB"
            for length in plan.rows
        ),
        f"about {hours:.2f} hours: {plan.tokens[0]:,} tokens read ({plan.seconds[0] / 3600:.2f} h), "
        f"{plan.tokens[1]:,} written or fed ({plan.seconds[1] / 3600:.2f} h)",
    ]
    if price is not None:
        told.append(f"about {price * hours:.2f} at {price:g} an hour")
    return told
