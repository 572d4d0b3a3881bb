"""KV memory: running batches, prefixes and contexts under one budget, and which of them make room.

Why: kvjax/DESIGN.md, 17.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable

import jax
import numpy as np

from kvjax import decode, metrics
from kvjax.algebra import Policy
from kvjax.cache import pool
from kvjax.cache.state import KVState
from kvjax.decode import RequestError
from kvjax.engine import pages as paging
from kvjax.engine.batch import RunningBatch
from kvjax.engine.contexts import Contexts
from kvjax.engine.decoding import Snapshot
from kvjax.engine.drafted import DraftedBatch
from kvjax.engine.errors import MemoryFull
from kvjax.engine.guided import GuidedBatch
from kvjax.engine.prefix import HeldKeys, Key, Prefix, Prefixes
from kvjax.engine.programs import CommonPrograms
from kvjax.engine.request import LearnedWeights, WeightCache
from kvjax.engine.settings import EngineSettings
from kvjax.engine.structure import READS, Structure
from kvjax.engine.ticket import EngineRequest
from kvjax.sharding.mesh import ONE, mesh_of
from kvjax.types import Weighted

SHAPES = 256
"""Most policies whose rows' shapes are remembered."""


class Memory:
    """Everything that takes KV memory, and the structures it is for; the engine's thread only."""

    def __init__(
        self, model: Weighted, settings: EngineSettings, contexts: Contexts, weights: WeightCache
    ) -> None:
        self.model, self.settings, self.contexts, self._learned = model, settings, contexts, weights
        self.batches: list[RunningBatch] = []
        self.structures: list[Structure] = []  # the least recently used first
        self.common = CommonPrograms(ahead=mesh_of(model.params) == ONE)
        self.prefixes = Prefixes(settings.kv_memory // 4)  # the first to make room
        # Of requests that are being read, or wait for programs; they are not dropped.
        self.promised: list[RunningBatch] = []
        self.wanted: list[Structure] = []
        self.reading: Callable[[], int] = lambda: 0  # bytes of rows that are read
        self.coming: Callable[[], int] = lambda: 0  # bytes that reading the largest of the next ones takes
        self._shapes = functools.lru_cache(SHAPES)(self._row)

    @property
    def running(self) -> bool:
        """Is any row being written?"""
        return any(batch.taken for batch in self.batches)

    def row(self, policy: Policy) -> KVState:
        """Shapes of an empty row of the policy, with a page in each pool."""
        return self._shapes(repr(policy), policy.structure, policy)

    def _row(self, name: str, structure: str, policy: Policy) -> KVState:
        context, chunk, page = self.settings.context, self.settings.chunk, self.settings.page
        make = functools.partial(
            paging.empty, self.model, policy, rows=1, context=context, chunk=chunk, page=page
        )
        return paging.sharded_shapes(jax.eval_shape(make))

    def check_fits(self, policy: Policy) -> None:
        """Refuses a policy whose batch never fits, whatever makes room. Any thread.

        Raises:
          RequestError: with the bytes.
        """
        size = self.empty_bytes(policy)
        if size > self.settings.kv_memory:
            raise RequestError(
                f"a running batch of '{policy!r}' with {self.settings.max_rows} rows needs {size} bytes "
                f"before it holds a token, and kv_memory is {self.settings.kv_memory}. Raise it, or lower "
                "max_rows."
            )

    def empty_bytes(self, policy: Policy) -> int:
        """Device bytes of the policy's batch before it holds a token."""
        return metrics.allocated(paging.widened(self.row(policy), self.settings.max_rows).layers)

    def structure(self, request: EngineRequest) -> Structure:
        """The structure of a request, a new one where there is none; nothing is compiled."""
        policy, name = request.policy, request.structure
        row = self.row(policy.after_prompt)
        structure = next((x for x in self.structures if x.serves(name, row)), None)
        if structure is None:
            structure = Structure(self.model, policy, request.learned, row, self.settings.page, name)
        else:
            self.structures.remove(structure)
        structure.reads.pop(request.reading, None)
        structure.reads[request.reading] = request.learned  # the last one is the newest
        for old in list(structure.reads)[:-READS]:
            del structure.reads[old]
        self.structures.append(structure)
        idle = self._idle_structures()
        for old in idle[: max(0, len(idle) - self.settings.max_lanes)]:
            self.structures.remove(old)
        return structure

    def new_structure(self, request: EngineRequest) -> Hashable | None:
        """What names the programs of a request; None where a structure has read for such. Any thread."""
        name, row = request.structure, self.row(request.policy.after_prompt)
        serving = [structure for structure in list(self.structures) if structure.serves(name, row)]
        if any(request.reading in structure.reads for structure in serving):
            return None
        return request.reading, paging.list_shapes(row)

    def shed(self, everything: bool) -> bool:
        """Drops the structure that was not used for longest, or the programs of all; was there any?"""
        if everything:
            owners: list[Structure | RunningBatch] = [*self.structures, *self.batches]
            for owner in owners:
                owner.forget()
            return True
        idle = self._idle_structures()
        if not idle:
            return self._drop_batch()
        self.structures.remove(idle[0])
        return True

    def _idle_structures(self) -> list[Structure]:
        """Of no batch and no request; the newest, which a request is just coming for, is not one."""
        used = [batch.structure for batch in self.batches] + self.wanted + self.structures[-1:]
        return [structure for structure in self.structures if structure not in used]

    # --- batches -------------------------------------------------------------------------------------

    def batch(self, request: EngineRequest, structure: Structure, reading: int) -> RunningBatch | None:
        """The batch of a request, made where there is none; None while too many others run.

        ``reading`` bytes must be left beside it, for the row that is read.
        """
        policy = request.policy
        drafts = policy.selection.drafts is not None
        kind = GuidedBatch if request.guided else DraftedBatch if drafts else RunningBatch
        serving = [x for x in self.batches if x.structure is structure and x.guided == request.guided]
        if serving:
            return next((batch for batch in serving if None in batch.rows), serving[0])
        while len(self.batches) >= self.settings.max_lanes:
            if not self._drop_batch():
                return None
        batch, reading = kind(structure, self.settings.max_rows), max(reading, self.coming())
        if not self.room(batch.allocated + reading):
            if self.running or self.promised or self.reading():
                return None
            raise self.refusal(
                batch.allocated,
                f"a running batch of '{policy!r}' with {self.settings.max_rows} rows needs {batch.allocated} "
                f"bytes before it holds a token and {reading} to read a prompt, and kv_memory is "
                f"{self.settings.kv_memory}, {self.allocated()} of it taken. Raise it, or lower max_rows.",
            )
        self.batches.append(batch)
        # Where a prompt decides what is kept, the first one that is read says how much that is.
        if not policy.whole_prompt and decode.most_slots(policy, self.settings.context, 1) is not None:
            counts = self.first_counts(batch, self._first_need(batch, request, reading), reading)
            if counts is not None:
                batch.resize(counts)
        return batch

    def _first_need(self, batch: RunningBatch, request: EngineRequest, reading: int) -> list[int]:
        """Pages of a row: what its budget bounds, if all rows may have that; else all of the first one."""
        policy, row = request.policy, batch.structure.row
        if policy.admission.rejects_all or policy.budget.limited:
            most = paging.most_pages(policy, row, self.settings.context, 1)
            every = [max(1, pages * len(batch.rows)) for pages in most]
            if self.room(batch.bytes_of(every) + reading, besides=batch):
                return most
        return paging.most_pages(policy, row, len(request.tokens) + max(request.left, 0), 1)

    def first_counts(self, batch: RunningBatch, need: list[int], beside: int = 0) -> list[int] | None:
        """Pages of a new batch: for as many rows, each of which needs so many, as there is memory for.

        ``beside`` it so many bytes are left. No more than that: a read on a CPU walks the whole pool.
        """
        most = paging.most_pages(batch.policy, batch.state, self.settings.context, 1)
        for rows in range(len(batch.rows), 0, -1):
            limits = [max(1, rows * pages) for pages in most]
            for ladder in (pool.size_class, int):  # of the sizes that are often met, else as few as possible
                counts = [min(max(1, ladder(rows * pages)), all) for pages, all in zip(need, limits)]
                if self.room(batch.growing(counts) + beside, besides=batch):
                    return counts
        return None

    def _drop_batch(self, besides: RunningBatch | None = None) -> bool:
        """Drops the idle batch that was not used for longest; False where all have rows."""
        idle = [x for x in self.batches if not x.taken and x is not besides and x not in self.promised]
        if not idle:
            return False
        batch = min(idle, key=lambda batch: batch.used)
        self.batches.remove(batch)
        used = [x.structure for x in self.batches] + self.wanted
        if batch.structure not in used and batch.structure is not self.structures[-1]:
            self.structures.remove(batch.structure)  # its programs leave with it
        return True

    # --- reservations --------------------------------------------------------------------------------

    def to_store(self, request: EngineRequest, state: KVState, known: Snapshot) -> int:
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
            if self.room(batch.growing(wanted), besides=batch):
                return wanted
        return None

    def allocated(self) -> int:
        """Device bytes of batches, rows that are read, prefixes, contexts and learned weights."""
        batches = sum(batch.allocated for batch in self.batches)
        others = self.reading() + self._learned.allocated
        return batches + self.prefixes.allocated + self.contexts.allocated + others

    def room(self, extra: int, besides: RunningBatch | None = None) -> bool:
        """Is there memory for so many bytes more? Prefixes and idle batches make room."""
        while self.allocated() + extra > self.settings.kv_memory:
            if not self.prefixes.drop() and not self._drop_batch(besides):
                return False
        return True

    def refusal(self, size: int, message: str) -> MemoryFull | RequestError:
        """The error of a request that does not get ``size`` bytes although no row is written.

        RequestError where it would not fit alone either; MemoryFull where others hold the memory.
        """
        if size > self.settings.kv_memory or not self.allocated():
            return RequestError(message)
        return MemoryFull(
            f"contexts and other texts hold {self.allocated()} of the {self.settings.kv_memory} bytes of "
            "kv_memory, which leaves too little for this request. Ask again later, or delete contexts."
        )

    def remember(self, key: Key, tokens: np.ndarray, state: KVState) -> Prefix:
        """Keeps the state of a text, for later ones that begin so, where older prefixes make room."""
        prefix = Prefix(key=key, tokens=tokens, state=state)
        while self.allocated() + prefix.bytes > self.settings.kv_memory and self.prefixes.drop():
            pass
        if self.allocated() + prefix.bytes <= self.settings.kv_memory:
            self.prefixes.keep(prefix)
        return prefix

    def remember_keys(self, new: HeldKeys) -> None:
        """Keeps keys and values of a prompt, where older prefixes make room."""
        while self.allocated() + new.bytes > self.settings.kv_memory and self.prefixes.drop():
            pass
        if self.allocated() + new.bytes <= self.settings.kv_memory:
            self.prefixes.keep_keys(new)


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
    """Device bytes of a running batch that holds so many rows of so many tokens, the last of them just read.

    Args:
      model, policy: as ``Engine`` takes them.
      rows: that are held at once.
      tokens: of each, prompt and answer.
      context: most tokens of a row; it decides the length of page lists.
      max_rows: most rows of the batch.
      chunk: prompt tokens read at a time.
    """
    policy = paging.paged(policy, context)
    make = functools.partial(paging.empty, model, policy, rows=1, context=context, chunk=chunk, page=None)
    row = jax.eval_shape(make)
    row, learned = paging.sharded_shapes(row), LearnedWeights({}, "")
    batch = RunningBatch(Structure(model, policy, learned, row, None), max_rows)
    need = paging.most_pages(policy, row, tokens, 1)
    read = [pool.coarse_class(max(1, pages)) for pages in need]
    row = paging.shapes_with(row, read)
    return batch.allocated + batch.bytes_of([rows * pages - 1 for pages in need]) + metrics.size(row.layers)
