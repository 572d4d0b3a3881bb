"""What reading, writing and taking turns share: the device's memory, the counters, and how a request ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from kvjax.cache.state import KVState
from kvjax.engine._compiler import Compiler
from kvjax.engine._counts import Counts
from kvjax.engine._looks import inspection
from kvjax.engine._request import Event, KVUsage
from kvjax.engine._settings import Settings
from kvjax.engine._space import Space
from kvjax.engine._store import Store
from kvjax.engine._work import Job
from kvjax.types import Weighted


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Shared:
    """One of it for an engine; its thread only.

    Attributes:
      model, settings: what is served, and its sizes.
      space: what the device holds.
      store: contexts by name.
      counts: what happened.
      compiler: compiles beside what runs.
      note: tells an operator; one line.
    """

    model: Weighted
    settings: Settings
    space: Space
    store: Store
    counts: Counts
    compiler: Compiler
    note: Callable[[str], None]

    def end(self, job: Job, reason: str, kv: KVUsage | None = None) -> None:
        """Ends a request whose last token is out."""
        job.put([Event(None, finish_reason=reason)], kv)
        self.counts.ended(reason, kv)

    def fail(self, job: Job, error: Exception) -> None:
        """Ends a request that raises."""
        job.ticket._fail(error)
        self.counts.ended("error")

    def look(self, job: Job, state: KVState, at: int, kv: KVUsage, allocated: int) -> None:
        """Keeps what a row held at its end, where it was asked for."""
        if job.ticket.request.inspect:
            job.ticket._last = inspection(job, state, at, kv, allocated)
