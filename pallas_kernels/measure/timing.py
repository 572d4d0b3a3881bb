"""One stopwatch: calls timed to the end of their work, and what the compiler took of the time."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

ROUNDS = 5


class CompileTime(NamedTuple):
    """Seconds from a Python function to a program: the sum of tracing, lowering and compiling."""

    tracing: float = 0.0
    lowering: float = 0.0
    compiling: float = 0.0

    @property
    def total(self) -> float:
        """Of all three: what "compile time" means everywhere."""
        return sum(self)

    def since(self, earlier: CompileTime) -> CompileTime:
        return CompileTime(*(now - then for now, then in zip(self, earlier)))


_KINDS = {
    "/jax/core/compile/jaxpr_trace_duration": 0,
    "/jax/core/compile/jaxpr_to_mlir_module_duration": 1,
    "/jax/core/compile/backend_compile_duration": 2,
}
_busy: list[tuple[float, CompileTime]] = []
"""Start and spent time of each stretch, in order."""


def _heard(event: str, duration_secs: float, **_: str | int) -> None:
    """Notes a stretch. One inside another is reported first, and counts as its own kind alone."""
    if event not in _KINDS:
        return
    start, spent = time.perf_counter() - duration_secs, [0.0, 0.0, 0.0]
    while _busy and _busy[-1][0] >= start:
        spent = [x + y for x, y in zip(spent, _busy.pop()[1])]
    spent[_KINDS[event]] += max(0.0, duration_secs - sum(spent))
    _busy.append((start, CompileTime(*spent)))


@functools.cache
def _listen() -> None:
    jax.monitoring.register_event_duration_secs_listener(_heard)


def compile_time() -> CompileTime:
    """Of this process, since this was first called."""
    _listen()
    return CompileTime(*(sum(spent) for spent in zip(*(x for _, x in _busy)))) if _busy else CompileTime()


Wait = Callable[[Any], Any]
"""Returns when the work behind the result of a call is done."""


def laps(call: Callable[[], Any], repeats: int, wait: Wait = jax.block_until_ready) -> list[float]:
    """Seconds of each of ``repeats`` calls; the caller takes the median or the least of them.

    Args:
      call: starts the work; compiled and warm.
      repeats: calls.
      wait: for the work that a call started.
    """
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        wait(call())
        seconds.append(time.perf_counter() - start)
    return seconds


def median(call: Callable[[], Any], spend: float, wait: Wait = jax.block_until_ready) -> float:
    """Median seconds of one ``call`` over five rounds, each of as many calls as fit a fifth of ``spend``.

    Args:
      call, wait: as in ``laps``; within a round only the last call is waited for, as on a busy device.
      spend: seconds in all, about; 0 for one call.
    """
    (first,) = laps(call, 1, wait)
    times = int(spend / ROUNDS / max(first, 1e-6))
    if not times:
        return first

    def round_() -> Any:
        for _ in range(times - 1):
            call()
        return call()

    return statistics.median(laps(round_, ROUNDS, wait)) / times
