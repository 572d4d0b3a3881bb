"""KV memory: running batches, prefixes and contexts under one budget, and which of them make room.

Why: kvjax/DESIGN.md, 17.
"""

from __future__ import annotations

import math

import numpy as np

from kvjax import decode
from kvjax.algebra import Policy
from kvjax.cache import pool
from kvjax.cache.state import KVState
from kvjax.decode import RequestError
from kvjax.engine import pages as paging
from kvjax.engine.batch import RunningBatch
from kvjax.engine.contexts import Contexts
from kvjax.engine.decoding import Snapshot
from kvjax.engine.errors import MemoryFull
from kvjax.engine.prefix import Prefix, Prefixes
from kvjax.engine.settings import EngineSettings
from kvjax.engine.ticket import EngineRequest
from kvjax.types import Weighted

ROWS = 64
"""Most policies whose empty rows are kept."""


class Memory:
    """Everything that takes KV memory; the engine's thread only."""

    def __init__(self, model: Weighted, settings: EngineSettings, contexts: Contexts) -> None:
        self.model, self.settings, self.contexts = model, settings, contexts
        self.batches: list[RunningBatch] = []
        self.prefixes = Prefixes(settings.kv_memory // 4)  # the first to make room
        # Batches of requests that are being read, or wait for programs; they are not dropped.
        self.promised: list[RunningBatch] = []
        self._rows: dict[str, KVState] = {}

    @property
    def running(self) -> bool:
        """Is any row being written?"""
        return any(batch.taken for batch in self.batches)

    def empty_row(self, policy: Policy) -> KVState:
        """An empty row of the policy."""
        key = repr(policy)
        if key not in self._rows:
            while len(self._rows) >= ROWS:
                del self._rows[next(iter(self._rows))]
            sizes = self.settings
            self._rows[key] = paging.empty_row(
                self.model, policy, context=sizes.context, chunk=sizes.chunk, page=sizes.page
            )
        return self._rows[key]

    # --- batches -------------------------------------------------------------------------------------

    def batch(self, request: EngineRequest, row: KVState) -> RunningBatch | None:
        """The batch of a request, made where there is none; None while too many others run."""
        label, policy = request.learned.label, request.policy
        serving = [batch for batch in self.batches if batch.serves(policy, label, row)]
        if serving:
            return next((batch for batch in serving if None in batch.rows), serving[0])
        while len(self.batches) >= self.settings.max_lanes:
            if not self._drop_batch():
                return None
        batch = RunningBatch(self.model, policy, label, request.learned.weights, row, self.settings.max_rows)
        if not self.room(batch.allocated):
            if self.running:
                return None
            raise self.refusal(
                batch.allocated,
                f"a running batch of '{policy!r}' with {self.settings.max_rows} rows needs {batch.allocated} "
                f"bytes before it holds a token, and kv_memory is {self.settings.kv_memory}. Raise it, or "
                "lower max_rows.",
            )
        self.batches.append(batch)
        # Where a prompt decides what is kept, the first one that is read says how much that is.
        if not policy.whole_prompt and decode.most_slots(policy, self.settings.context, 1) is not None:
            counts = self.first_counts(batch, self._first_need(batch, request, row))
            if counts is not None:
                batch.resize(counts)
        return batch

    def _first_need(self, batch: RunningBatch, request: EngineRequest, row: KVState) -> list[int]:
        """Pages of a row: what its budget bounds, if all rows may have that; else all of the first one."""
        policy = request.policy
        if policy.admission.rejects_all or policy.budget.limited:
            most = paging.most_pages(policy, row, self.settings.context, 1)
            every = [max(1, pages * len(batch.rows)) for pages in most]
            if self.room(batch.bytes_of(every), besides=batch):
                return most
        return paging.most_pages(policy, row, len(request.tokens) + max(request.left, 0), 1)

    def first_counts(self, batch: RunningBatch, need: list[int]) -> list[int] | None:
        """Pages of a new batch: for as many rows, each of which needs so many, as there is memory for.

        No more than that: a read on a CPU walks the whole pool.
        """
        most = paging.most_pages(batch.policy, batch.state, self.settings.context, 1)
        for rows in range(len(batch.rows), 0, -1):
            limits = [max(1, rows * pages) for pages in most]
            for ladder in (pool.size_class, int):  # of the sizes that are often met, else as few as possible
                counts = [min(max(1, ladder(rows * pages)), all) for pages, all in zip(need, limits)]
                if self.affordable(batch, counts, exactly=True) is not None:
                    return counts
        return None

    def _drop_batch(self, besides: RunningBatch | None = None) -> bool:
        """Drops the idle batch that was not used for longest; False where all have rows."""
        idle = [x for x in self.batches if not x.taken and x is not besides and x not in self.promised]
        if not idle:
            return False
        self.batches.remove(min(idle, key=lambda batch: batch.used))
        return True

    # --- reservations --------------------------------------------------------------------------------

    def coming(self, request: EngineRequest, state: KVState, known: Snapshot) -> int:
        """Tokens that the row is expected to store from here on."""
        left, share = max(request.left - 1, 0), self.settings.share
        if request.ticket.usage.preempted:
            return left  # once is enough
        if share is None:
            if decode.most_slots(request.policy, state.context, 1) is not None:
                return left
            stored = [lists.sum(axis=-1).mean() for lists in known.lists]
            window = min((layer.ring.window for layer in state.layers if layer.pools), default=0)
            share = float(np.mean(stored)) / max(1, int(known.seen[0]) - window) if stored else 0.0
        return math.ceil(min(share, 1.0) * left)

    def affordable(self, batch: RunningBatch, counts: list[int], exactly: bool = False) -> list[int] | None:
        """Page counts of at least these that memory has room for: a coarse class, else as few as possible."""
        for wanted in [counts] if exactly else batch.larger(counts):
            extra = batch.bytes_of([new - old for new, old in zip(wanted, batch.counts)])
            if self.room(extra, besides=batch):
                return wanted
        return None

    def allocated(self) -> int:
        """Device bytes of batches, prefixes and contexts."""
        batches = sum(batch.allocated for batch in self.batches)
        return batches + self.prefixes.allocated + self.contexts.allocated

    def room(self, extra: int, besides: RunningBatch | None = None) -> bool:
        """Is there memory for so many bytes more? Prefixes and idle batches make room."""
        while self.allocated() + extra > self.settings.kv_memory:
            if not self.prefixes.drop() and not self._drop_batch(besides):
                return False
        return True

    def refusal(self, size: int, message: str) -> MemoryFull | RequestError:
        """The error of a request for which there is no room for so many bytes, although no row is written.

        Alone it might fit: then it is the server that is full, and not the request that is wrong.
        """
        if size > self.settings.kv_memory:
            return RequestError(message)
        return MemoryFull(
            f"contexts and other texts hold {self.allocated()} of the {self.settings.kv_memory} bytes of "
            "kv_memory, which leaves too little for this request. Ask again later, or delete contexts."
        )

    def remember(self, key: tuple[str, str], tokens: np.ndarray, state: KVState) -> Prefix:
        """Keeps the state of a text, for later ones that begin so, where older prefixes make room."""
        prefix = Prefix(key=key, tokens=tokens, state=state)
        while self.allocated() + prefix.bytes > self.settings.kv_memory and self.prefixes.drop():
            pass
        if self.allocated() + prefix.bytes <= self.settings.kv_memory:
            self.prefixes.keep(prefix)
        return prefix


def batch_bytes(
    model: Weighted,
    policy: Policy,
    *,
    rows: int,
    tokens: int,
    context: int,
    max_rows: int,
    chunk: int = decode.CHUNK,
) -> int:
    """Device bytes of a running batch that holds so many rows of so many tokens.

    Args:
      model, policy: as ``Engine`` takes them.
      rows: that are held at once.
      tokens: of each, prompt and answer.
      context: most tokens of a row; it decides the length of page lists.
      max_rows: most rows of the batch.
      chunk: prompt tokens read at a time.
    """
    policy = paging.paged(policy, context)
    row = paging.empty_row(model, policy, context=context, chunk=chunk, page=None)
    batch = RunningBatch(model, policy, "", {}, row, max_rows)
    need = paging.most_pages(policy, row, tokens, 1)
    return batch.allocated + batch.bytes_of([rows * pages - 1 for pages in need])
