"""Rows that are being written: a segment of a lane, pages for it, and what is left of a row at its end."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from kvjax.decode import RequestError
from kvjax.engine import _prefix as prefixes
from kvjax.engine._lane import Lane
from kvjax.engine._looks import inspection
from kvjax.engine._reader import PATIENCE
from kvjax.engine._request import Inspection, KVUsage
from kvjax.engine._shared import Shared
from kvjax.engine._usage import usages
from kvjax.engine._work import Job


class Writer:
    """Writes on the rows of all lanes; the engine's thread only.

    Attributes:
      waited: seconds that this thread has waited for segments.
    """

    def __init__(self, shared: Shared, put_back: Callable[[Job], None], quiet: Callable[[], bool]) -> None:
        """Writes nothing yet.

        Args:
          shared: with the scheduler and the reader.
          put_back: takes a request whose row made room for older ones.
          quiet: is there nothing to be done but to write on with one lane?
        """
        self._shared, self._put_back, self._quiet = shared, put_back, quiet
        self.waited = 0.0

    def cancel(self, number: int, reason: str) -> None:
        """Ends the request of that number, if it has a row."""
        found = self._row(number)
        if found is not None:
            lane, at = found
            self._finish(lane, at, reason)
            lane.release([at])

    def segment(self, lane: Lane, now: int) -> bool:
        """At most ``now`` steps of a lane; False where it waits for larger pools."""
        if not lane.flying:
            if not self._enough(lane, now):
                return False
            lane.step(self._shared.settings.segment, now)
        self._land(lane, goes_on=True)
        return True

    def settle(self) -> None:
        """Hands out what is under way; rows may come and go then."""
        for lane in self._shared.space.lanes:
            if lane.flying:
                self._land(lane)

    def _land(self, lane: Lane, goes_on: bool = False) -> None:
        """Hands out a segment's tokens.

        Where the lane ``goes_on`` as it is, the next segment is begun before: the device need not wait for
        usage, events and whoever they wake. Where a row ends, or somebody wants something, rows come and go
        first.
        """
        waits = time.monotonic()
        drawn, took = lane.land()
        self.waited += time.monotonic() - waits
        taken = [(at, place.job) for at, place in enumerate(lane.places) if place is not None]
        fresh = [(at, job, job.write(drawn, at)) for at, job in taken]
        gone = [at for at, _, events in fresh if events and events[-1].finish_reason is not None]
        steps = self._shared.settings.segment
        if goes_on and not gone and self._quiet() and not any(lack > 0 for lack in lane.short_by(steps)):
            lane.step(steps, steps)
        kv = usages(self._shared.model.network, lane.state, lane.known)
        for at, job, events in fresh:
            self._shared.counts.drawn(job, events, took)
            job.put(events, kv[at])
        for at in gone:
            self._finish(lane, at, None, kv[at])
        lane.release(gone)

    def _enough(self, lane: Lane, steps: int) -> bool:
        """Are there pages for whatever the next steps store? Else pools grow, or the youngest row goes."""
        shared, space = self._shared, self._shared.space
        while any(lack > 0 for lack in lane.short_by(steps)):
            lack = lane.short_by(steps)
            wanted = space.affordable(lane, [have + max(0, n) for have, n in zip(lane.counts, lack)])
            if wanted is not None:
                larger = [lane.program(shared.settings.segment, wanted)]
                if not shared.compiler.ready(larger, PATIENCE, urgent=True):
                    return False
                lane.resize(wanted)
                continue
            at = max(lane.rows, key=lambda at: lane.places[at].job.ticket.id)  # type: ignore[union-attr]
            place = lane.places[at]
            assert place is not None  # noqa: S101
            lane.release([at])
            if not lane.rows and not space.running:
                error = RequestError(
                    f"the text outgrew kv_memory ({shared.settings.kv_memory} bytes) after "
                    f"{len(place.job.written)} new tokens. Raise it, or ask for fewer tokens."
                )
                shared.fail(place.job, error)
                return False
            place.job.again()
            self._put_back(place.job)
            shared.counts.preempted += 1
            shared.note(f"request {place.job.ticket.id} made room for older ones and will be read again")
        return bool(lane.rows)

    def _finish(self, lane: Lane, at: int, reason: str | None, kv: KVUsage | None = None) -> None:
        """What is left to do for a row before it is released."""
        place = lane.places[at]
        assert place is not None  # noqa: S101
        job = place.job
        kv = kv or usages(self._shared.model.network, lane.state, lane.known)[at]
        self._shared.look(job, lane.state, at, kv, lane.allocated)
        if reason is not None:
            self._shared.end(job, reason, kv)
        else:
            self._shared.counts.ended(job.ticket.finish_reason or "error", kv)
        if prefixes.generated_too(job.policy) and not job.continues:
            fed = np.concatenate([job.tokens, np.asarray(job.written, np.int32)])[: kv.seen]
            if self._shared.space.welcome():
                self._shared.space.remember(job.prefix_key, fed, lane.cut(at))

    def inspect(self, number: int) -> Inspection | None:
        """What a running row holds; None where there is none of that number."""
        found = self._row(number)
        if found is None:
            return None
        lane, at = found
        place = lane.places[at]
        assert place is not None  # noqa: S101
        kv = usages(self._shared.model.network, lane.state, lane.known)[at]
        return inspection(place.job, lane.state, at, kv, lane.allocated)

    def _row(self, number: int) -> tuple[Lane, int] | None:
        """Where the request of that number is written, once nothing of it is under way."""
        self.settle()
        for lane in self._shared.space.lanes:
            for at, place in enumerate(lane.places):
                if place is not None and place.job.ticket.id == number:
                    return lane, at
        return None
