"""The process of the device benchmark: the tasks of ``kvjax.tune``, ceilings and times.

Of other libraries every error that they may raise where they cannot run is caught and recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.kernels.operations import Rival, module
from pallas_kernels import tuning
from pallas_kernels.measure import on_device, timing
from pallas_kernels.measure.on_device import Deadline, Send, Task, difference, ensure_alive, why
from pallas_kernels.measure.work import TimedCall

OTHERS = (ImportError, RuntimeError, ValueError, TypeError, AttributeError, AssertionError)
"""They are of many versions, refuse calls in many ways, and their names move."""


def _rates(call: TimedCall, took: float) -> dict[str, float]:
    """Milliseconds, GB/s and TFLOP/s."""
    rates = {"ms": took * 1e3}
    if call.moves:
        rates["gb_s"] = call.moves / took / 1e9
    if call.flops:
        rates["tflop_s"] = call.flops / took / 1e12
    return {name: float(f"{x:.5g}") for name, x in rates.items()}


def compare(call: TimedCall, rival: Rival, out: Any, impl: str, spend: float) -> dict[str, Any]:
    """The time of a rival, and how far its result is from ours; or why it cannot run."""
    try:
        run = rival.prepare(impl)
        row: dict[str, Any] = _rates(call, timing.median(run, spend, rival.wait))
        if rival.like is not None:
            first = out[0] if isinstance(out, tuple) and len(out) == 2 else out
            row["differs"] = float(f"{difference(first, rival.like(run())):.3g}")
    except OTHERS as error:
        ensure_alive()
        return {"cannot": why(error)}
    return row


def _speed(task: Task, send: Send) -> None:
    """Blocks are chosen in half of the time and used for the timings."""
    op, impl, tiny, seconds = (task[x] for x in ("op", "impl", "tiny", "box"))
    over = Deadline(seconds)
    with tuning.trying(op, on_device.blocks(op, impl, tiny, seconds / 2, send)):
        _times(op, impl, tiny, over, send)


def _times(op: str, impl: str, tiny: bool, over: Deadline, send: Send) -> None:
    spend = 0.0 if tiny else 0.5
    for call, rivals in module(op).timings(tiny):
        if over:
            send("problems", f"timing {call.name}", {"cut_short": "the operation's time was over"})
            continue
        try:
            took, out = on_device.measured(call, impl, spend)
        except on_device.OURS as error:
            ensure_alive()
            send("cases", call.name, {"cannot": why(error)})
            continue
        send("cases", call.name, _rates(call, took))
        for rival in rivals:
            late = {"cannot": "the operation's time was over"}
            row = late if over else compare(call, rival, out, impl, spend)
            send("compared", f"{call.name}/{rival.name}", row)


def _seconds(run: Callable[..., Any], x: jax.Array, spend: float) -> float:
    compiled = jax.jit(run)
    jax.block_until_ready(compiled(x))
    return timing.median(lambda: compiled(x), spend)


def _ceilings(task: Task, send: Send) -> None:
    """Measured GB/s of a copy (read and write) and TFLOP/s of a bfloat16 product, of random numbers."""
    n, spend = (256, 0.0) if task["tiny"] else (8192, 0.5)
    x = jnp.ones((1 << (16 if task["tiny"] else 29),), jnp.uint8)
    y = jax.random.normal(jax.random.PRNGKey(0), (n, n), jnp.bfloat16)
    copy, product = _seconds(lambda x: x ^ 1, x, spend), _seconds(lambda y: y @ y, y, spend)
    limits = {"copy_gb_s": 2 * x.size / copy / 1e9, "matmul_tflop_s": 2 * n**3 / product / 1e12}
    send("limits", "", limits)


if __name__ == "__main__":
    on_device.main({**on_device.TASKS, "speed": _speed, "ceilings": _ceilings})
