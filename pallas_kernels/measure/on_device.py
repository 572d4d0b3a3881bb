"""The process that uses the device: it does tasks one by one and sends each result as soon as it has it.

Started and fed by ``device``; it can die or hang without harm to the results it sent before. Of our own
bodies only what a compiler may report (too large, not supported) is caught and recorded. Anything else ends
the process, and the parent reports its last lines.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import compat, dispatch, tuning
from pallas_kernels.measure import candidates, timing
from pallas_kernels.measure.child import answer
from pallas_kernels.measure.work import Check, TimedCall, agreement, work

OURS = (*compat.COMPILER_ERRORS, dispatch.Unsupported)

FASTER = 0.98
"""Blocks other than a body's own are chosen when they take at most this much of its time."""

Send = Callable[[str, str, dict[str, Any]], None]
"""Report (part of the record, name in it, value)."""


class LostError(RuntimeError):
    """The device no longer answers this process."""


def why(error: BaseException) -> str:
    """An error in a line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def ensure_alive() -> None:
    """After an error: does the device still work for this process?

    Raises:
      LostError: it does not.
    """
    try:
        jax.block_until_ready(jnp.ones(8) + 1)
    except jax.errors.JaxRuntimeError as error:
        raise LostError(f"the device is lost to this process: {why(error)}") from error


def run_check(check: Check, impl: str) -> dict[str, Any]:
    """Compares a body with ``ref``, which gets the same numbers in float32.

    A body may refuse a call: the next best one takes it then.
    """
    try:
        results = jax.block_until_ready(jax.jit(check.run(impl))(*check.args))
    except OURS as error:
        ensure_alive()
        if isinstance(error, dispatch.Unsupported):
            return {"left_to_others": why(error)}
        return {"agrees": False, "why": why(error)}
    exact = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, check.args)
    return agreement(results, jax.jit(check.run("ref"))(*exact), check.terms, check.dtype)


def difference(ours: Any, theirs: Any) -> float:
    """Largest difference over the largest value of ours: far above bfloat16's, it is another function."""
    worst = 0.0
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        worst = max(worst, float(np.abs(a - b).max() / np.abs(a).max()))
    return worst


class Deadline:
    """A time limit: True once it is over."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    def __bool__(self) -> bool:
        return time.monotonic() > self.end


def measured(call: TimedCall, impl: str, spend: float) -> tuple[float, Any]:
    """(median seconds, result) of a call."""
    run = jax.jit(call.run(impl))
    out = jax.block_until_ready(run(*call.args))
    return timing.median(lambda: run(*call.args), spend), out


def tune(
    op: str,
    call: TimedCall,
    tried: tuple[tuning.Blocks, ...],
    fixed: tuning.Tuned,
    impl: str,
    over: Deadline,
    send: Send,
) -> tuning.Tuned:
    """``fixed`` and the fastest blocks of the pass that ``call`` tunes; reports all it tried after each."""
    key = tuning.key(call.tunes, *call.key)
    entry: dict[str, Any] = {"job": call.name, "jax": jax.__version__, "chosen": {}, "tried": []}
    spend = 0.0 if dispatch.interpreting() else 0.15
    try:
        with tuning.trying(op, fixed):
            own, out = measured(call, impl, spend)
    except dispatch.Unsupported as error:
        send("blocks", key, entry | {"cannot": why(error)})
        return fixed
    best, chosen = own, fixed
    entry["own_ms"] = float(f"{own * 1e3:.5g}")
    for blocks in tried:
        if over:
            entry["cut_short"] = True
            break
        result: dict[str, Any] = {"blocks": blocks.set_sizes()}
        try:
            with tuning.trying(op, (*fixed, (key, blocks))):
                took, theirs = measured(call, impl, spend)
            result |= {"ms": float(f"{took * 1e3:.5g}"), "differs": float(f"{difference(out, theirs):.3g}")}
            if took < min(best, FASTER * own) and result["differs"] < 0.05:
                best, chosen, entry["chosen"] = took, (*fixed, (key, blocks)), blocks.set_sizes()
        except OURS as error:
            ensure_alive()
            result["cannot"] = why(error)
        entry["tried"].append(result)
        send("blocks", key, entry)
    send("blocks", key, entry)
    return chosen


def numerics(op: str, impl: str, tiny: bool, send: Send, suffix: str = "") -> bool:
    """All checks of an operation."""
    agree = []
    for check in work(op).checks(tiny):
        result = run_check(check, impl)
        agree += [result["agrees"]] if "agrees" in result else []
        send("checks", check.name + suffix, result)
    return bool(agree) and all(agree)


def blocks(op: str, impl: str, tiny: bool, seconds: float, send: Send) -> tuning.Tuned:
    """Chosen in so many seconds; checked, and none where results do not agree with them."""
    over = Deadline(seconds)
    passes = candidates.CANDIDATES.get((op, impl), {})
    chosen: tuning.Tuned = ()
    for call in work(op).searches(tiny):
        if over:
            send("problems", f"tuning {call.name}", {"cut_short": f"{seconds:.0f} s were over"})
            continue
        tried = candidates.TINY[impl] if tiny else passes.get(call.tunes, ())
        if tried:  # otherwise another body's pass, which this one borrows
            chosen = tune(op, call, tried, chosen, impl, over, send)
    with tuning.trying(op, chosen):
        if not chosen or numerics(op, impl, tiny, send, "_tuned"):
            return chosen
    send("blocks", "", {"refused": "with these blocks results disagree; see checks"})
    return ()


Task = dict[str, Any]
"""{"what", "op", "impl", "tiny", "box"}; box: the seconds it may take."""


def _hello(task: Task, send: Send) -> None:
    send("hello", "", {"platform": jax.default_backend(), "kind": jax.devices()[0].device_kind})


def _numerics(task: Task, send: Send) -> None:
    with tuning.trying(task["op"], ()):
        numerics(task["op"], task["impl"], task["tiny"], send)


def _blocks(task: Task, send: Send) -> None:
    blocks(task["op"], task["impl"], task["tiny"], task["box"], send)


TASKS: dict[str, Callable[[Task, Send], None]] = {"hello": _hello, "numerics": _numerics, "blocks": _blocks}


def main(tasks: Mapping[str, Callable[[Task, Send], None]] = TASKS) -> None:
    """Tasks from standard input, a line each; results and "done" to standard output."""
    for line in sys.stdin:
        task = json.loads(line)
        op = task.get("record", task.get("op", ""))
        with dispatch.interpreted(races=False) if task["tiny"] else contextlib.nullcontext():
            tasks[task["what"]](task, lambda *result, op=op: answer([op, *result]))
        answer("done")


if __name__ == "__main__":
    main()
