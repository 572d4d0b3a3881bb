"""What the device holds: lanes, prefixes and contexts under one budget, and who makes room for whom."""

from __future__ import annotations

import math

import numpy as np

from kvjax import decode
from kvjax.algebra import Policy
from kvjax.cache import pool
from kvjax.cache.state import KVState
from kvjax.decode import RequestError
from kvjax.engine import _layout as layout
from kvjax.engine._lane import Lane
from kvjax.engine._prefix import Prefix, Prefixes
from kvjax.engine._segment import Lengths
from kvjax.engine._settings import Settings
from kvjax.engine._store import Store
from kvjax.engine._work import Job
from kvjax.types import Weighted

ROWS = 64
"""Most policies whose empty rows are kept."""


class Space:
    """Everything that takes KV memory; the engine's thread only.

    Attributes:
      lanes: running batches.
      prefixes: states of texts that were read before; the first to make room.
      promised: lanes of requests that are being read, or wait for programs; they are not dropped.
    """

    def __init__(self, model: Weighted, settings: Settings, store: Store) -> None:
        self.model, self.settings, self.store = model, settings, store
        self.lanes: list[Lane] = []
        self.prefixes = Prefixes(settings.kv_memory // 4)
        self.promised: list[Lane] = []
        self._rows: dict[str, KVState] = {}

    @property
    def running(self) -> bool:
        """Is any row being written?"""
        return any(lane.rows for lane in self.lanes)

    def row(self, job: Job) -> KVState:
        """An empty row of the request's policy."""
        key = repr(job.policy)
        if key not in self._rows:
            while len(self._rows) >= ROWS:
                del self._rows[next(iter(self._rows))]
            sizes = self.settings
            self._rows[key] = layout.empty_row(
                self.model, job.policy, context=sizes.context, chunk=sizes.chunk, page=sizes.page
            )
        return self._rows[key]

    def lane(self, job: Job, row: KVState) -> Lane | None:
        """The lane of a request, made where there is none; None while too many others run."""
        label = job.learned.label
        found = [lane for lane in self.lanes if lane.serves(job.policy, label, row)]
        if found:
            return next((lane for lane in found if lane.free_place is not None), found[0])
        while len(self.lanes) >= self.settings.max_lanes:
            if not self.drop_lane():
                return None
        lane = Lane(self.model, job.policy, label, job.learned.weights, row, self.settings.max_rows)
        if not self.room(lane.allocated):
            if self.running:
                return None
            raise RequestError(
                f"a lane of '{job.policy!r}' with {self.settings.max_rows} rows needs {lane.allocated} bytes "
                f"before it holds a token, and kv_memory is {self.settings.kv_memory}. Raise it, or lower "
                "max_rows."
            )
        self.lanes.append(lane)
        # Where a prompt decides what is kept, the first one that is read says how much that is.
        if (
            not job.policy.whole_prompt
            and decode.most_slots(job.policy, self.settings.context, 1) is not None
        ):
            counts = self.beginning_with(lane, self._foreseen(lane, job, row))
            if counts is not None:
                lane.resize(counts)
        return lane

    def _foreseen(self, lane: Lane, job: Job, row: KVState) -> list[int]:
        """Pages of a row: what its budget bounds, if all places may have that; else all of the first one."""
        policy, nothing = job.policy, layout.nothing(row)
        if policy.admission.rejects_all or policy.budget.limited:
            most = layout.most_pages(policy, row, nothing, self.settings.context, 1)
            every = [max(1, pages * len(lane.places)) for pages in most]
            if self.room(lane.bytes_of(every), besides=lane):
                return most
        return layout.most_pages(policy, row, nothing, len(job.tokens) + max(job.left, 0), 1)

    def beginning_with(self, lane: Lane, need: list[int]) -> list[int] | None:
        """Pages of a new lane: for as many rows as have places and memory, each of which needs so many.

        No more than that: a read on a CPU walks the whole pool.
        """
        nothing = layout.nothing(lane.state)
        most = layout.most_pages(lane.policy, lane.state, nothing, self.settings.context, 1)
        for rows in range(len(lane.places), 0, -1):
            limits = [max(1, rows * pages) for pages in most]
            for ladder in (pool.size_class, int):  # of the sizes that are often met, else as few as possible
                counts = [min(max(1, ladder(rows * pages)), all) for pages, all in zip(need, limits)]
                if self.affordable(lane, counts, exactly=True) is not None:
                    return counts
        return None

    def drop_lane(self, besides: Lane | None = None) -> bool:
        """Drops the idle lane that was not used for longest; False where all have rows."""
        idle = [x for x in self.lanes if not x.rows and x is not besides and x not in self.promised]
        if not idle:
            return False
        self.lanes.remove(min(idle, key=lambda lane: lane.used))
        return True

    def coming(self, job: Job, state: KVState, known: Lengths) -> int:
        """Tokens that the row is expected to store from here on."""
        left, share = max(job.left - 1, 0), self.settings.share
        if job.ticket.usage.preempted:
            return left  # once is enough
        if share is None:
            bounded = decode.most_slots(job.policy, state.context, 1) is not None
            if bounded:
                return left
            paged = [lists.sum(axis=-1).mean() for lists in known.lists]
            window = min((layer.ring.window for layer in state.layers if layer.pools), default=0)
            share = float(np.mean(paged)) / max(1, int(known.seen[0]) - window) if paged else 0.0
        return math.ceil(min(share, 1.0) * left)

    def affordable(self, lane: Lane, counts: list[int], exactly: bool = False) -> list[int] | None:
        """Page counts of at least these that memory has room for: a coarse class, else as few as possible."""
        for wanted in [counts] if exactly else lane.larger(counts):
            extra = lane.bytes_of([new - old for new, old in zip(wanted, lane.counts)])
            if self.room(extra, besides=lane):
                return wanted
        return None

    def allocated(self) -> int:
        """Device bytes of lanes, prefixes and contexts."""
        lanes = sum(lane.allocated for lane in self.lanes)
        return lanes + self.prefixes.allocated + self.store.allocated

    def room(self, extra: int, besides: Lane | None = None) -> bool:
        """Is there memory for so many bytes more? Prefixes and idle lanes make room."""
        while self.allocated() + extra > self.settings.kv_memory:
            if not self.prefixes.drop() and not self.drop_lane(besides):
                return False
        return True

    def remember(self, key: tuple[str, str], tokens: np.ndarray, state: KVState) -> Prefix:
        """Keeps the state of a text for those that begin alike, where there is room; older ones make it."""
        prefix = Prefix.of(key, tokens, state)
        while self.allocated() + prefix.bytes > self.settings.kv_memory and self.prefixes.drop():
            pass
        if self.allocated() + prefix.bytes <= self.settings.kv_memory:
            self.prefixes.keep(prefix)
        return prefix

    def welcome(self) -> bool:
        """Is there memory to keep the state of a text that ended?"""
        return self.allocated() < 0.9 * self.settings.kv_memory


def lane_bytes(
    model: Weighted,
    policy: Policy,
    *,
    rows: int,
    tokens: int,
    context: int,
    places: int,
    chunk: int = decode.CHUNK,
) -> int:
    """Device bytes of a lane that holds so many rows of so many tokens.

    Args:
      model, policy: as ``Engine`` takes them.
      rows: that are held at once.
      tokens: of each, prompt and answer.
      context: most tokens of a row; it decides the length of page lists.
      places: of the lane (``max_rows``).
      chunk: prompt tokens read at a time.
    """
    mine = layout.paged(policy, context)
    row = layout.empty_row(model, mine, context=context, chunk=chunk, page=None)
    lane = Lane(model, mine, "", {}, row, places)
    need = layout.most_pages(mine, row, layout.nothing(row), tokens, 1)
    return lane.allocated + lane.bytes_of([rows * pages - 1 for pages in need])
