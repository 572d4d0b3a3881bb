"""What the engine counts, as one consistent snapshot."""

from __future__ import annotations

import bisect
import collections
import dataclasses
from collections.abc import Mapping

BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds in seconds, as Prometheus histograms of peers have them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seconds:
    """Durations, all that ever were.

    Attributes:
      buckets: how many were at most each of ``BUCKETS`` (cumulative).
      count, sum: of all.
      recent: the last of them, up to 1,024, oldest first.
    """

    buckets: tuple[int, ...]
    count: int
    sum: float
    recent: tuple[float, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaneMetrics:
    """One running batch.

    Attributes:
      policy: its structure, and the policy that made it.
      rows: rows that are being written.
      places: rows there is a place for.
      live: bytes of live slots.
      allocated: bytes on the device, weights and programs not included.
      pages, pages_used: of all its pools together.
      slots: live slots of all streams, ring included.
    """

    policy: str
    rows: int
    places: int
    live: int
    allocated: int
    pages: int
    pages_used: int
    slots: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Metrics:
    """The engine at one moment; counters only grow.

    Attributes:
      queued: requests that wait.
      reading: requests whose prompt is being read, or whose programs are being compiled.
      running: rows that are being written.
      lanes: one entry a lane.
      requests: ended requests by reason: ``FINISHES`` and "error".
      preempted: rows that were put back to wait.
      prompt_tokens: tokens read from prompts.
      cached_tokens: prompt tokens that did not have to be read.
      completion_tokens: new tokens.
      tokens_seen: (token, layer, KV head) triples that were fed to rows that have ended.
      tokens_kept: of these, those still held when the row ended.
      tokens_evicted: of these, those rejected at the door or evicted.
      admitted_ratio: kept / seen of ended rows; 1 where none has ended.
      kv_memory: bytes that all lanes and contexts together may have.
      kv_allocated: bytes they have.
      pauses: longest pauses of running rows while a prompt was read or a lane made, in seconds.
      time_to_first_token, between_tokens: as clients see them.
    """

    queued: int
    reading: int
    running: int
    lanes: tuple[LaneMetrics, ...]
    requests: Mapping[str, int]
    preempted: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    tokens_seen: int
    tokens_kept: int
    tokens_evicted: int
    admitted_ratio: float
    kv_memory: int
    kv_allocated: int
    pauses: Seconds
    time_to_first_token: Seconds
    between_tokens: Seconds


class Histogram:
    """Collects durations; one thread writes."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BUCKETS) + 1)
        self._sum = 0.0
        self._recent: collections.deque[float] = collections.deque(maxlen=1024)

    def add(self, seconds: float, times: int = 1) -> None:
        """So many durations of that length."""
        self._counts[bisect.bisect_left(BUCKETS, seconds)] += times
        self._sum += seconds * times
        self._recent.extend([seconds] * min(times, 64))

    def snapshot(self) -> Seconds:
        """As it is."""
        total, found = 0, []
        for count in self._counts:
            total += count
            found.append(total)
        return Seconds(buckets=tuple(found[:-1]), count=total, sum=self._sum, recent=tuple(self._recent))
