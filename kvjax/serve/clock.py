"""Time, and how much of it the compiler took, so that speed can be told apart from a first call's cost."""

from __future__ import annotations

import dataclasses
import functools
import time

import jax

_busy: list[tuple[float, float]] = []
"""Stretches of time (start, end) spent tracing, lowering and compiling; apart and in order."""


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
    _busy.append((start, end))


@functools.cache
def _listen() -> None:
    jax.monitoring.register_event_duration_secs_listener(_heard)


@dataclasses.dataclass(frozen=True)
class Moment:
    """A point in time.

    Attributes:
      wall: seconds of a clock that only runs forward.
      compiling: seconds of it spent tracing, lowering and compiling since the first moment was taken.
    """

    wall: float
    compiling: float


def now() -> Moment:
    """This moment."""
    _listen()
    return Moment(time.perf_counter(), sum(end - start for start, end in _busy))


def timings(start: Moment, first: Moment, end: Moment, tokens: int) -> dict[str, float | None]:
    """Seconds ``first_token`` and ``total``, of which ``compile``; and ``tokens_per_second``, of the tokens
    after the first and without compilation, None where there was only one."""
    pure = (end.wall - first.wall) - (end.compiling - first.compiling)
    return {
        "first_token": first.wall - start.wall,
        "total": end.wall - start.wall,
        "compile": end.compiling - start.compiling,
        "tokens_per_second": (tokens - 1) / pure if tokens > 1 else None,
    }
