"""What has happened since the engine began."""

from __future__ import annotations

import collections
import time
from typing import Any

from kvjax.engine._metrics import Histogram, Metrics
from kvjax.engine._request import Event, KVUsage
from kvjax.engine._work import Job


class Counts:
    """Counters that only grow; the engine's thread writes them."""

    def __init__(self) -> None:
        self.pauses, self.first, self.between = Histogram(), Histogram(), Histogram()
        self.prompt_tokens = self.cached_tokens = self.completion_tokens = self.preempted = 0
        self._requests: collections.Counter[str] = collections.Counter()
        self._seen = self._kept = 0
        self._ends: collections.deque[float] = collections.deque(maxlen=32)

    def drawn(self, job: Job, events: list[Event], took: float = 0.0) -> None:
        """New tokens of a request, about to be handed out; they took so many seconds to make."""
        if not events:
            return
        now = time.monotonic()
        many = len(events)
        self.completion_tokens += many
        if not job.given:
            self.first.add(now - job.ticket.submitted)
            many -= 1
            if many:
                self.between.add(took / (many + 1), many)
        else:
            self.between.add((now - job.given) / many, many)
        job.given = now

    def ended(self, reason: str, kv: KVUsage | None = None) -> None:
        """A request ended; ``kv`` is what its row held."""
        self._requests[reason] += 1
        self._ends.append(time.monotonic())
        if kv is not None:
            self._seen += kv.seen * kv.layers.size
            self._kept += int(kv.layers.sum())

    def finished_per_second(self) -> float:
        """Of late; 0 where too few have ended."""
        if len(self._ends) < 2:
            return 0.0
        return (len(self._ends) - 1) / max(time.monotonic() - self._ends[0], 1e-3)

    def snapshot(self, **now: Any) -> Metrics:
        """With what is there now."""
        return Metrics(
            requests=dict(self._requests),
            preempted=self.preempted,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            completion_tokens=self.completion_tokens,
            tokens_seen=self._seen,
            tokens_kept=self._kept,
            tokens_evicted=self._seen - self._kept,
            admitted_ratio=self._kept / self._seen if self._seen else 1.0,
            pauses=self.pauses.snapshot(),
            time_to_first_token=self.first.snapshot(),
            between_tokens=self.between.snapshot(),
            **now,
        )
