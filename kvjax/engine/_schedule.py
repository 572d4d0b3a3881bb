"""What runs next: the engine's thread asks for one turn after another.

A turn is one segment of one lane, or one unit (a chunk, a layer) of the prompt that is being read; lanes and
the reading take turns. So a running row waits at most for one segment of each other lane and one unit. Where
one lane alone has anything to do, its next segment is begun before the last one's tokens are handed out. A
request goes

  queue -> aside (programs are compiled beside the others) -> reading -> waiting for pages -> a row

in the order of the queue; only those pass it whose lane has a place, or programs, while the first one's has
none. Who has no lane at all is passed by as many as a lane has places, then by nobody.
"""

from __future__ import annotations

import collections
import functools
import time
from collections.abc import Callable

from kvjax.engine._compiler import Compiler
from kvjax.engine._counts import Counts
from kvjax.engine._lane import Lane
from kvjax.engine._looks import of_lane
from kvjax.engine._metrics import Metrics
from kvjax.engine._reader import TOLD, Reader
from kvjax.engine._request import Inspection
from kvjax.engine._settings import Settings
from kvjax.engine._shared import Shared
from kvjax.engine._space import Space
from kvjax.engine._store import Store
from kvjax.engine._work import Job
from kvjax.engine._writer import Writer
from kvjax.types import Weighted


class Scheduler:
    """The queue, and whose turn it is; one thread only."""

    def __init__(
        self,
        model: Weighted,
        settings: Settings,
        store: Store,
        note: Callable[[str], None],
        asked: Callable[[], bool],
    ) -> None:
        """An empty queue; ``asked`` says whether anybody wants something of the engine's thread."""
        self.space, self.counts = Space(model, settings, store), Counts()
        self._settings, self._compiler, self._asked = settings, Compiler(note), asked
        self._shared = shared = Shared(
            model=model,
            settings=settings,
            space=self.space,
            store=store,
            counts=self.counts,
            compiler=self._compiler,
            note=note,
        )
        self._queue: collections.deque[Job] = collections.deque()
        self._reader = Reader(shared)
        self._writer = Writer(shared, self._queue.appendleft, self._quiet)
        self._turn = 0
        self._stuck: int | None = 0  # requests in the queue that were looked at and found no place

    # --- from the door -----------------------------------------------------------------------------------

    @property
    def warm(self) -> bool:
        """Has any row been written?"""
        return self._reader.warm

    @property
    def queued(self) -> int:
        """Requests that wait."""
        return len(self._queue)

    def retry_after(self, waiting: int) -> float:
        """Seconds in which a place in the queue may be free."""
        rate = self.counts.finished_per_second()
        return 1.0 if not rate else min(60.0, max(1.0, waiting / rate / 2))

    def enter(self, job: Job) -> None:
        """Puts a request into the queue."""
        self._queue.append(job)

    def cancel(self, number: int, reason: str = "cancelled") -> None:
        """Ends a request, wherever it is."""
        for job in [job for job in self._queue if job.ticket.id == number]:
            self._queue.remove(job)
            self._shared.end(job, reason)
        self._reader.cancel(number, reason)
        self._writer.cancel(number, reason)

    def close(self) -> None:
        """Compiles nothing more."""
        self._compiler.close()

    # --- a turn ------------------------------------------------------------------------------------------

    def turn(self) -> bool:
        """Does one piece of work; False where there is none."""
        begun, read, waited = time.monotonic(), self._reader.units, self._writer.waited
        running = self.space.running
        done = self._piece()
        stood = time.monotonic() - begun - (self._writer.waited - waited)
        if running and (stood > TOLD or self._reader.units > read):
            self.counts.pauses.add(stood)
        if running and stood > TOLD:
            self._shared.note(f"running rows stood still for {stood:.1f} s, for a row that came or went")
        return done

    def _piece(self) -> bool:
        self._expire()
        if self._reader.begun is None:
            for taken in self._reader.begin(self._queue):
                self._queue.remove(taken)
            self._stuck = len(self._queue) if self._reader.begun is None else None
        if self._reader.begun is not None:
            self._writer.settle()
        work: list[Callable[[], bool]] = [
            functools.partial(self._segment, lane) for lane in self.space.lanes if lane.rows
        ]
        if self._reader.begun is not None:
            work.append(self._reader.read)
        for _ in work:
            self._turn = (self._turn + 1) % len(work)
            if work[self._turn]():
                return True
        return self._reader.wait() or bool(work)

    def _quiet(self) -> bool:
        """Is there nothing to be done but to write on with one lane? Who is stuck waits for a row to end."""
        if self._asked() or self._reader.begun is not None or len(self._queue) != self._stuck:
            return False
        return sum(bool(lane.rows) for lane in self.space.lanes) == 1

    def _segment(self, lane: Lane) -> bool:
        # While a prompt is read a segment is one step: its row joins the others sooner.
        return self._writer.segment(lane, 1 if self._reader.reads else self._settings.segment)

    def _expire(self) -> None:
        """Ends requests whose deadline has come."""
        now, jobs = time.monotonic(), [*self._queue, *self._reader.jobs]
        jobs += [place.job for lane in self.space.lanes for place in lane.places if place is not None]
        for job in jobs:
            deadline = job.ticket.request.deadline
            if deadline is not None and now - job.ticket.submitted > deadline:
                self.cancel(job.ticket.id, "deadline")

    # --- looks -------------------------------------------------------------------------------------------

    def inspect(self, number: int) -> Inspection | None:
        """What a running row holds; None where there is none of that number."""
        return self._writer.inspect(number)

    def metrics(self, waiting: int) -> Metrics:
        """A snapshot; ``waiting`` requests are on their way to the queue."""
        return self.counts.snapshot(
            queued=len(self._queue) + waiting,
            reading=len(self._reader.jobs),
            running=sum(len(lane.rows) for lane in self.space.lanes),
            lanes=tuple(of_lane(lane) for lane in self.space.lanes),
            kv_memory=self._settings.kv_memory,
            kv_allocated=self.space.allocated(),
        )
