"""What the engine counts, and what rows hold, in bytes and positions."""

from __future__ import annotations

import bisect
import collections
import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from kvjax import metrics
from kvjax.cache.state import KVState
from kvjax.engine.decoding import Snapshot
from kvjax.engine.request import HeldPositions, KVUsage, Usage

if TYPE_CHECKING:
    from jaxtyping import Float, Int

BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds in seconds, as other servers' Prometheus histograms have them."""


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


LENGTHS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
"""Upper bounds in tokens."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lengths:
    """Numbers of tokens, all that ever were.

    Attributes:
      buckets: how many were at most each of ``LENGTHS`` (cumulative).
      count, sum: of all.
    """

    buckets: tuple[int, ...]
    count: int
    sum: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchMetrics:
    """One running batch.

    Attributes:
      policy: the policy that made it; other rows may differ from it in hyperparameters, and in what cut their
        prompts where that rests since.
      weights: which learned weights its steps read (``kvjax.weights.find(...).label``); "" where none.
      rows, max_rows: rows that are being written, and that there is space for.
      live: bytes of live slots.
      allocated: bytes on the device, weights and programs not included.
      pages, pages_used: of all its pools together.
      slots: live slots of all KV heads, ring included.
    """

    policy: str
    weights: str
    rows: int
    max_rows: int
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
      batches: one entry a running batch.
      requests: ended requests by reason: ``FINISHES`` and "error".
      preempted: rows that were put back to wait.
      prompt_tokens: tokens read from prompts.
      cached_tokens: prompt tokens that did not have to be read.
      completion_tokens: new tokens.
      drafted_tokens, accepted_tokens: tokens that were drafted, and of these accepted.
      tokens_seen: (token, layer, KV head) triples that were fed to rows that have ended.
      tokens_kept: of these, those still held when the row ended.
      tokens_evicted: of these, those that were not admitted, or evicted.
      admitted_ratio: kept / seen of ended rows; 1 where none has ended.
      kv_memory: bytes that all batches and contexts together may have.
      kv_allocated: bytes they have.
      contexts_resting: bytes of contexts in the host's memory.
      contexts_to_host, contexts_from_host: how often one has gone there, and come back.
      pauses: seconds for which running rows stood still while a prompt was read or a batch made.
      time_to_first_token, between_tokens: as clients see them.
      queue_time: from the submission of requests to the first time that their prompt begins to be read.
      total_time: from there to their end, whatever the reason.
      prompt_lengths, completion_lengths: of requests that ended.
    """

    queued: int
    reading: int
    running: int
    batches: tuple[BatchMetrics, ...]
    requests: Mapping[str, int]
    preempted: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    tokens_seen: int
    tokens_kept: int
    tokens_evicted: int
    admitted_ratio: float
    kv_memory: int
    kv_allocated: int
    contexts_resting: int
    contexts_to_host: int
    contexts_from_host: int
    pauses: Seconds
    time_to_first_token: Seconds
    between_tokens: Seconds
    queue_time: Seconds
    total_time: Seconds
    prompt_lengths: Lengths
    completion_lengths: Lengths


# --- counting ------------------------------------------------------------------------------------


class Histogram:
    """Collects durations, or lengths; one thread writes."""

    def __init__(self, bounds: Sequence[float] = BUCKETS) -> None:
        self._bounds, self._counts, self._sum = bounds, [0] * (len(bounds) + 1), 0.0
        self._recent: collections.deque[float] = collections.deque(maxlen=1024)

    def add(self, seconds: float, times: int = 1) -> None:
        self._counts[bisect.bisect_left(self._bounds, seconds)] += times
        self._sum += seconds * times
        self._recent.extend([seconds] * min(times, 64))

    def snapshot(self) -> Seconds:
        *buckets, total = np.cumsum(self._counts).tolist()
        return Seconds(buckets=tuple(buckets), count=total, sum=self._sum, recent=tuple(self._recent.copy()))

    def lengths(self) -> Lengths:
        *buckets, total = np.cumsum(self._counts).tolist()
        return Lengths(buckets=tuple(buckets), count=total, sum=int(self._sum))


class Counters:
    """What has happened since the engine began; its thread writes them."""

    def __init__(self) -> None:
        self.pauses, self.first, self.between = Histogram(), Histogram(), Histogram()
        self.queue, self.total = Histogram(), Histogram()
        self.prompts, self.completions = Histogram(LENGTHS), Histogram(LENGTHS)
        self.prompt_tokens = self.cached_tokens = self.completion_tokens = self.preempted = 0
        self.drafted_tokens = self.accepted_tokens = 0
        self._requests: collections.Counter[str] = collections.Counter()
        self._seen = self._kept = 0
        self._ends: collections.deque[float] = collections.deque(maxlen=32)

    def tokens(self, count: int, took: float, submitted: float, last: float | None) -> float:
        """Counts ``count`` new tokens of a request, which took so many seconds to make; the time now.

        ``last`` is when its tokens before these were handed out; None for its first ones.
        """
        now = time.monotonic()
        self.completion_tokens += count
        if last is not None:
            self.between.add((now - last) / count, count)
            return now
        self.first.add(now - submitted)
        if count > 1:
            self.between.add(took / count, count - 1)
        return now

    def ended(self, reason: str, kv: KVUsage | None = None) -> None:
        """A request ended; ``kv`` is what its row held."""
        self._requests[reason] += 1
        self._ends.append(time.monotonic())
        if kv is not None:
            self._seen += kv.seen * kv.layers.size
            self._kept += int(kv.layers.sum())

    def request_ended(self, usage: Usage) -> None:
        """What a request that ended took."""
        self.total.add(usage.total)
        self.prompts.add(usage.prompt_tokens)
        self.completions.add(usage.completion_tokens)

    def retry_after(self, waiting: int) -> float:
        """Seconds in which there may be space in a queue of so many requests."""
        if len(self._ends) < 2:
            return 1.0
        rate = (len(self._ends) - 1) / max(time.monotonic() - self._ends[0], 1e-3)
        return min(60.0, max(1.0, waiting / rate / 2))

    def snapshot(self, **now: Any) -> Metrics:
        """All counters, with the fields of ``Metrics`` that are not counters."""
        return Metrics(
            requests=dict(self._requests),
            preempted=self.preempted,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            completion_tokens=self.completion_tokens,
            drafted_tokens=self.drafted_tokens,
            accepted_tokens=self.accepted_tokens,
            tokens_seen=self._seen,
            tokens_kept=self._kept,
            tokens_evicted=self._seen - self._kept,
            admitted_ratio=self._kept / self._seen if self._seen else 1.0,
            pauses=self.pauses.snapshot(),
            time_to_first_token=self.first.snapshot(),
            between_tokens=self.between.snapshot(),
            queue_time=self.queue.snapshot(),
            total_time=self.total.snapshot(),
            prompt_lengths=self.prompts.lengths(),
            completion_lengths=self.completions.lengths(),
            **now,
        )


# --- what rows hold ------------------------------------------------------------------------------


def live(state: KVState, known: Snapshot) -> tuple[Int[np.ndarray, "L B K"], Float[np.ndarray, " B"]]:
    """Live slots of every KV head and bytes of every row, from lengths that the host knows.

    With the ring, and in bytes with scales, metadata and φ, as ``kvjax.nbytes`` counts them.
    """
    rows, lists, layers = len(known.seen), iter(known.lists), []
    size = np.zeros(rows)
    for layer in state.layers:
        heads, ring = layer.ring.k.shape[1], np.minimum(known.seen, layer.ring.window)
        size += ring * heads * metrics.ring_slot(layer.ring)
        layers.append(np.broadcast_to(ring[:, None], (rows, heads)))
        for pages in layer.pools:
            held = next(lists)
            layers[-1] = layers[-1] + held.sum(axis=-1)
            slot, page = metrics.page_costs(pages)
            size += held.sum(axis=(1, 2)) * slot + (-(-held // pages.size)).sum(axis=(1, 2)) * page
        fixed = metrics.size((layer.summary, layer.ring.queries))
        size += fixed / rows * (known.seen > 0)
    return np.stack(layers), size


def usages(network: metrics.Network, state: KVState, known: Snapshot) -> list[KVUsage]:
    """What each row holds."""
    layers, size = live(state, known)
    dtype = state.layers[0].ring.k.dtype
    return [
        KVUsage(
            seen=int(seen),
            kept=float(layers[:, row].mean()),
            live=int(size[row]),
            full=metrics.full_bytes(network, int(seen), dtype),
            layers=layers[:, row].copy(),
        )
        for row, seen in enumerate(known.seen)
    ]


def held_positions(state: KVState, row: int) -> tuple[tuple[HeldPositions, ...], ...]:
    """What each KV head of a row holds, by layer; on the host, where nothing has to be compiled."""
    pools = [[(x.pos, x.table, x.length) for x in layer.pools] for layer in state.layers]
    length, pools = jax.device_get((state.length, pools))
    layers, seen = [], int(length[row])
    for layer, arrays in zip(state.layers, pools):
        recent, heads = np.arange(max(0, seen - layer.ring.window), seen, dtype=np.int32), []
        for head in range(layer.ring.k.shape[1]):
            exact, codes = [np.zeros(0, np.int32)], [np.zeros(0, np.int32)]
            for pages, (pos, table, live) in zip(layer.pools, arrays):
                # Ids of pages count within a device, whose KV heads are neighbours.
                own = pos.reshape(state.mesh.pools, -1, pages.size)[
                    head * state.mesh.pools // len(table[row])
                ]
                for ids, many in zip(table[row, head], live[row, head]):
                    slots = own[ids[: -(-many // pages.size)]].reshape(-1)[:many]
                    (exact if pages.scales is None else codes).append(slots)
            in_pages, in_codes = (np.sort(np.concatenate(x)) for x in (exact, codes))
            heads.append(HeldPositions(ring=recent, pages=in_pages, codes=in_codes))
        layers.append(tuple(heads))
    return tuple(layers)
