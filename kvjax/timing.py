"""Time, and how much of it the compiler took, so that speed can be told apart from a first call's cost.

Compiling is what JAX reports as such: tracing, lowering, and compiling or fetching what was compiled before.
"""

from __future__ import annotations

import dataclasses
import functools
import time

import jax

_busy: list[tuple[float, float, float]] = []
"""Stretches of time spent tracing, lowering and compiling, apart and in order: start, end, seconds so far."""


def _heard(event: str, duration_secs: float, **_: str | int) -> None:
    """Notes one event. A trace may run inside another: it is swallowed by the longer one, reported later."""
    if "/compile/" not in event:
        return
    end = time.perf_counter()
    start = end - duration_secs
    while _busy and _busy[-1][0] >= start:
        _busy.pop()
    if _busy:
        start = max(start, _busy[-1][1])
    _busy.append((start, end, _spent() + end - start))


def _spent() -> float:
    return _busy[-1][2] if _busy else 0.0


@functools.cache
def _listen() -> None:
    jax.monitoring.register_event_duration_secs_listener(_heard)


@dataclasses.dataclass(frozen=True)
class Moment:
    """A point in time, or the time between two (their difference).

    Attributes:
      wall: seconds of a clock that only runs forward.
      compiling: seconds of it spent tracing, lowering and compiling since the first moment was taken.
    """

    wall: float
    compiling: float

    def __sub__(self, before: Moment) -> Moment:
        return Moment(self.wall - before.wall, self.compiling - before.compiling)

    @property
    def running(self) -> float:
        """Seconds without those of the compiler."""
        return self.wall - self.compiling


def now() -> Moment:
    """This moment."""
    _listen()
    return Moment(time.perf_counter(), _spent())
