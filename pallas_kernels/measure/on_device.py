"""The process that uses the device: it does tasks one by one and says each result as soon as it has it.

Started and fed by ``device``; it can die or hang without harm to what it said before.
Of our own bodies only what a compiler may say of one (too large, not supported) is caught, of others'
code what it may raise where it cannot run; both are reported. Anything else ends the process, and the
parent reports its last words.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import dispatch, tuning
from pallas_kernels.measure import candidates, timing
from pallas_kernels.measure.child import answer
from pallas_kernels.measure.work import Check, Job, Rival, agreement, work

OURS = (jax.errors.JaxRuntimeError, NotImplementedError, dispatch.Unsupported)
OTHERS = (ImportError, RuntimeError, ValueError, TypeError, AttributeError, AssertionError)
"""They are of many versions, refuse calls in many ways, and their names move; every error is reported."""

FASTER = 0.98
"""Blocks other than a body's own are chosen when they take at most this much of its time."""

Say = Callable[[str, str, dict[str, Any]], None]
"""Report (part of the record, name in it, value)."""


class LostError(RuntimeError):
    """The device no longer answers this process."""


def why(error: BaseException) -> str:
    """An error in a line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _alive() -> None:
    """After an error: does the device still work for this process?

    Raises:
      LostError: it does not.
    """
    try:
        jax.block_until_ready(jnp.ones(8) + 1)
    except jax.errors.JaxRuntimeError as error:
        raise LostError(f"the device is lost to this process: {why(error)}") from error


def _exact(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, args)


def check(case: Check, impl: str) -> dict[str, Any]:
    """One agreement with ``ref``, which gets the same numbers in float32.

    A body besides the main one may refuse a call: the main one takes it then.
    """
    try:
        found = jax.block_until_ready(jax.jit(case.run(impl))(*case.args))
    except OURS as error:
        _alive()
        if isinstance(error, dispatch.Unsupported) and impl not in dispatch.MAIN:
            return {"left_to_others": why(error)}
        return {"agrees": False, "why": why(error)}
    wanted = jax.jit(case.run("ref"))(*_exact(case.args))
    return agreement(found, wanted, case.terms, case.dtype)


def _rates(job: Job, took: float) -> dict[str, float]:
    """Milliseconds, GB/s and TFLOP/s."""
    found = {"ms": took * 1e3}
    if job.moves:
        found["gb_s"] = job.moves / took / 1e9
    if job.flops:
        found["tflop_s"] = job.flops / took / 1e12
    return {name: float(f"{x:.5g}") for name, x in found.items()}


def _difference(ours: Any, theirs: Any) -> float:
    """Largest difference over the largest value of ours: far above bfloat16's, it is another function."""
    worst = 0.0
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        worst = max(worst, float(np.abs(a - b).max() / np.abs(a).max()))
    return worst


def beside(job: Job, rival: Rival, out: Any, impl: str, spend: float) -> dict[str, Any]:
    """The time of a rival, and how far its result is from ours; or why it cannot run."""
    try:
        call = rival.prepare(impl)
        took = timing.median(call, spend, rival.wait)
        found: dict[str, Any] = _rates(job, took)
        if rival.like is not None:
            first = out[0] if isinstance(out, tuple) and len(out) == 2 else out
            found["differs"] = float(f"{_difference(first, rival.like(call())):.3g}")
    except OTHERS as error:
        _alive()
        return {"cannot": why(error)}
    return found


class Box:
    """A time limit: True once it is over."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    def __bool__(self) -> bool:
        return time.monotonic() > self.end


def _measured(job: Job, impl: str, spend: float) -> tuple[float, Any]:
    run = jax.jit(job.run(impl))
    out = jax.block_until_ready(run(*job.args))
    return timing.median(lambda: run(*job.args), spend), out


def tune(
    op: str, job: Job, tried: tuple[tuning.Blocks, ...], fixed: tuning.Tuned, impl: str, over: Box, say: Say
) -> tuning.Tuned:
    """``fixed`` and the fastest blocks of the pass that ``job`` tunes; says all it tried after each."""
    key = tuning.key(job.tunes, *job.key)
    entry: dict[str, Any] = {"job": job.name, "jax": jax.__version__, "chosen": {}, "tried": []}
    spend = 0.0 if dispatch.interpreting() else 0.15
    try:
        with tuning.trying(op, fixed):
            own, out = _measured(job, impl, spend)
    except dispatch.Unsupported as error:
        say("blocks", key, entry | {"cannot": why(error)})
        return fixed
    best, found = own, fixed
    entry["own_ms"] = float(f"{own * 1e3:.5g}")
    for blocks in tried:
        if over:
            entry["cut_short"] = True
            break
        result: dict[str, Any] = {"blocks": blocks.said()}
        try:
            with tuning.trying(op, (*fixed, (key, blocks))):
                took, theirs = _measured(job, impl, spend)
            result |= {"ms": float(f"{took * 1e3:.5g}"), "differs": float(f"{_difference(out, theirs):.3g}")}
            if took < min(best, FASTER * own) and result["differs"] < 0.05:
                best, found, entry["chosen"] = took, (*fixed, (key, blocks)), blocks.said()
        except OURS as error:
            _alive()
            result["cannot"] = why(error)
        entry["tried"].append(result)
        say("blocks", key, entry)
    say("blocks", key, entry)
    return found


def numerics(op: str, impl: str, tiny: bool, say: Say, suffix: str = "") -> bool:
    """All checks of an operation."""
    good = []
    for case in work(op).checks(tiny):
        found = check(case, impl)
        good += [found["agrees"]] if "agrees" in found else []
        say("checks", case.name + suffix, found)
    return bool(good) and all(good)


def blocks(op: str, impl: str, tiny: bool, box: float, say: Say) -> tuning.Tuned:
    """Chosen in so many seconds; checked, and none where results do not agree with them."""
    over = Box(box)
    passes = candidates.CANDIDATES.get((op, impl), {})
    found: tuning.Tuned = ()
    for job in work(op).searches(tiny):
        if over:
            say("problems", f"tuning {job.name}", {"cut_short": f"{box:.0f} s were over"})
            continue
        tried = candidates.TINY[impl] if tiny else passes.get(job.tunes, ())
        if not tried:  # another body's pass, which this one borrows
            continue
        found = tune(op, job, tried, found, impl, over, say)
    with tuning.trying(op, found):
        if not found or numerics(op, impl, tiny, say, "_tuned"):
            return found
    say("blocks", "", {"refused": "with these blocks results disagree; see checks"})
    return ()


def speed(op: str, impl: str, tiny: bool, box: float, say: Say) -> None:
    """Blocks are chosen in half of the time and used for the timings."""
    over = Box(box)
    with tuning.trying(op, blocks(op, impl, tiny, box / 2, say)):
        _times(op, impl, tiny, over, say)


def _times(op: str, impl: str, tiny: bool, over: Box, say: Say) -> None:
    spend = 0.0 if tiny else 0.5
    for job in work(op).jobs(tiny):
        if over:
            say("problems", f"timing {job.name}", {"cut_short": "the operation's time was over"})
            continue
        try:
            took, out = _measured(job, impl, spend)
        except OURS as error:
            _alive()
            say("cases", job.name, {"cannot": why(error)})
            continue
        say("cases", job.name, _rates(job, took))
        for rival in job.rivals:
            found = (
                {"cannot": "the operation's time was over"} if over else beside(job, rival, out, impl, spend)
            )
            say("compared", f"{job.name}/{rival.name}", found)


def _seconds(run: Callable[..., Any], x: jax.Array, spend: float) -> float:
    compiled = jax.jit(run)
    jax.block_until_ready(compiled(x))
    return timing.median(lambda: compiled(x), spend)


def ceilings(tiny: bool) -> dict[str, float]:
    """Measured GB/s of a copy (read and write) and TFLOP/s of a bfloat16 product, of random numbers."""
    n, spend = (256, 0.0) if tiny else (8192, 0.5)
    x = jnp.ones((1 << (16 if tiny else 29),), jnp.uint8)
    y = jax.random.normal(jax.random.PRNGKey(0), (n, n), jnp.bfloat16)
    copy, product = _seconds(lambda x: x ^ 1, x, spend), _seconds(lambda y: y @ y, y, spend)
    return {"copy_gb_s": 2 * x.size / copy / 1e9, "matmul_tflop_s": 2 * n**3 / product / 1e12}


def run(task: dict[str, Any], say: Say) -> None:
    """One task: {"what", "op", "impl", "tiny", "box"}; what: hello, ceilings, numerics, blocks or speed."""
    tiny = task["tiny"]
    with dispatch.interpreted(races=False) if tiny else contextlib.nullcontext():
        if task["what"] == "hello":
            say("hello", "", {"platform": jax.default_backend(), "kind": jax.devices()[0].device_kind})
        elif task["what"] == "ceilings":
            say("limits", "", ceilings(tiny))
        elif task["what"] == "numerics":
            with tuning.trying(task["op"], ()):
                numerics(task["op"], task["impl"], tiny, say)
        else:
            make = {"blocks": blocks, "speed": speed}[task["what"]]
            make(task["op"], task["impl"], tiny, task["box"], say)


def main() -> None:
    """Tasks from standard input, a line each; results and "done" to standard output."""
    for line in sys.stdin:
        task = json.loads(line)
        op = task.get("record", task.get("op", ""))
        run(task, lambda *result, op=op: answer([op, *result]))
        answer("done")


if __name__ == "__main__":
    main()
