"""Time, and how much of it the compiler took, to separate speed from the cost of a first call.

Compile time is that of ``pallas_kernels.measure.timing``: tracing, lowering, and compiling or fetching a
compiled program.
"""

from __future__ import annotations

import dataclasses
import time

from pallas_kernels.measure.timing import compile_time


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
    """The current moment."""
    return Moment(time.perf_counter(), compile_time().total)
