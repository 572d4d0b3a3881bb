"""Prefiller: requests between the queue and their rows; which are read next is ``turns``'s.

Requests for the same prompt are read once. Who waits for memory or pages is passed only by those that take
nothing of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from kvjax.engine.beginnings import Beginnings
from kvjax.engine.compiler import PATIENCE, Compiler
from kvjax.engine.insertion import Insertion
from kvjax.engine.memory import Memory
from kvjax.engine.metrics import Counters
from kvjax.engine.prefill import Prefill
from kvjax.engine.prefill_programs import needed
from kvjax.engine.prefix import shareable
from kvjax.engine.request import Progress
from kvjax.engine.settings import NOTE_AFTER
from kvjax.engine.ticket import EngineRequest
from kvjax.engine.turns import Turns, too_large

STARTS = 8
"""Requests that may leave the queue in a turn: their programs are looked up, which takes milliseconds."""


class Prefiller:
    """Requests between the queue and their rows; the engine's thread only."""

    def __init__(
        self, memory: Memory, compiler: Compiler, counters: Counters, note: Callable[[str], None]
    ) -> None:
        self._settings, self._beginnings = memory.settings, Beginnings(memory)
        self._memory, self._compiler, self._counters, self._note = memory, compiler, counters, note
        self.pending: list[Prefill] = []  # the first that left the queue first; rows stay free for them
        self.returned: list[EngineRequest] = []  # are to wait again, the oldest first
        self._insertion = Insertion(self, memory, counters)
        self._turns = Turns(self, memory, compiler, counters, self._insertion.first_tokens)
        memory.reading = lambda: sum(prefill.bytes for prefill in self.pending)
        memory.coming = lambda: max((x.need for x in self.pending if not x.begun), default=0)

    @property
    def warm(self) -> bool:
        """Has any row entered a batch?"""
        return self._insertion.warm

    @property
    def units(self) -> int:
        """Chunks and layers that were read."""
        return self._turns.units

    @property
    def reads(self) -> bool:
        """Is there a prompt to be read between two programs of batches? Not one that waits for memory."""
        return any(
            not x.programs and not x.ready and x.request.ticket.id not in self._turns.waits
            for x in self.pending
        )

    @property
    def acts(self) -> bool:
        """Is there a prompt to be read, or a row to be inserted?"""
        return any(not x.programs for x in self.pending)

    @property
    def requests(self) -> list[EngineRequest]:
        """That are neither in the queue nor in a row."""
        return [request for prefill in self.pending for request in prefill.requests]

    def wait(self) -> bool:
        """Where programs are being compiled, waits a little; False where none are."""
        waiting = [prefill for prefill in self.pending if prefill.programs]
        for prefill in waiting[:1]:
            self._compiled(prefill, PATIENCE)
        return bool(waiting)

    def cancel(self, number: int, reason: str) -> None:
        """Ends the request of that number, if it is one of these."""
        for prefill in list(self.pending):
            for request in [request for request in prefill.requests if request.ticket.id == number]:
                self.leave(prefill, request)
                request.finish(reason)

    def progress(self, number: int) -> Progress | None:
        """How far the request of that number is; None if it is none of these."""
        for prefill in self.pending:
            if number in (request.ticket.id for request in prefill.requests):
                stage = "compiling" if prefill.programs else "waiting" if prefill.ready else "reading"
                return Progress(stage, round(len(prefill.tokens) - prefill.remaining))
        return None

    def put_back(self, request: int) -> bool:
        """Has the newest row that was read wait again, if it is newer than that request; was there one?"""
        held = [x for x in self.pending if x.begun and x.request.ticket.id > request]
        if not held:
            return False
        self.restart(max(held, key=lambda prefill: prefill.request.ticket.id))
        return True

    def restart(self, prefill: Prefill) -> None:
        """All its requests wait again, before the queue."""
        self.leave(prefill)
        for request in prefill.requests:
            if prefill.begun:
                request.restart()
        self.returned[:0] = prefill.requests

    def leave(self, prefill: Prefill, request: EngineRequest | None = None) -> None:
        """It is none of these any more, or one of its requests; what only it waited for is not compiled."""
        if request is not None and len(prefill.requests) > 1:
            prefill.requests = [other for other in prefill.requests if other is not request]
            return
        self.pending = [other for other in self.pending if other is not prefill]
        prefill.forget()
        self._promise()
        self._compiler.keep(program for other in self.pending for program in other.wanted)

    def fail(self, prefill: Prefill, error: Exception) -> None:
        """Its requests end with the error, and no others."""
        self.leave(prefill)
        for request in prefill.requests:
            request.fail(error)

    def _promise(self) -> None:
        """Batches and structures of these are not dropped."""
        self._memory.promised = [prefill.batch for prefill in self.pending if prefill.batch is not None]
        self._memory.wanted = [prefill.structure for prefill in self.pending]

    # --- from the queue ----------------------------------------------------------------------------

    def begin(self, queue: Iterable[EngineRequest]) -> list[EngineRequest]:
        """Takes requests that have a free row; those that wait in the queue no more.

        A request with a free row passes those without one; but one that has no batch is passed ``max_rows``
        times at most.
        """
        taken: list[EngineRequest] = []
        passed: list[EngineRequest] = []  # have no batch yet
        for prefill in list(self.pending):
            self._compiled(prefill, 0.0)
        for request in queue:
            if len(taken) >= STARTS or self.returned:
                break
            try:
                started = self._start(request)
            except Exception as error:  # of this request alone
                request.fail(error)
                taken.append(request)
                continue
            if started:
                taken.append(request)
                for other in passed:
                    other.overtaken += 1
            elif request.without_batch:
                if request.overtaken >= self._settings.max_rows:
                    break  # batches run empty until one can be dropped
                passed.append(request)
        return taken

    def _start(self, request: EngineRequest) -> bool:
        """Takes the request, if there is a free row for it."""
        memory, options, policy = self._memory, request.options, request.policy
        structure = memory.structure(request)
        ranked = options.echo and options.logprobs is not None and not request.echoed
        start = self._beginnings.stored(request, memory.row(policy), ranked)
        size = self._beginnings.bytes(request, structure)
        batch = None if request.keep_as else memory.batch(request, structure, size)
        request.without_batch = batch is None and not request.keep_as
        waiting = sum(len(prefill.requests) for prefill in self.pending if prefill.batch is batch)
        same = [x for x in self.pending if request.reads_as(x.request) and x.reads_from(start)]
        if request.without_batch or (batch is not None and batch.rows.count(None) <= waiting):
            return False
        if same:
            same[0].requests.append(request)
            request.cached = len(request.tokens)
            self._counters.cached_tokens += request.cached
            return True
        # The first row of a batch decides its size alone.
        if waiting > 0 and (batch is None or not batch.sized):
            return False
        borders: list[int] = []
        if shareable(policy) and not request.context:
            borders = memory.prefixes.borders(request.prefix_key, request.text, self._settings.chunk)
        behind, keeps = self._beginnings.keys(request, structure, start, ranked)
        prefill = Prefill(
            structure,
            memory.common,
            request,
            batch,
            start,
            ranked=ranked,
            borders=borders,
            width=self._settings.chunk,
            came=self._turns.tokens,
            behind=behind,
            keeps=keeps,
        )
        request.cached = prefill.seen
        if prefill.need > self._settings.kv_memory:
            prefill.forget()
            raise too_large(prefill, memory)
        prefill.programs = needed(prefill)
        if batch is not None and batch.sized:
            source = None if prefill.whole else prefill.shapes
            prefill.programs += batch.programs(self._settings.segment, source, shaped=request.shaped)
        self.pending.append(prefill)
        self._promise()
        self._compiled(prefill, 0.0)
        return True

    def _compiled(self, prefill: Prefill, seconds: float) -> bool:
        """Are the programs compiled that a request waits for? If they cannot be, it fails alone."""
        if not prefill.programs:
            return True
        client = prefill.request.options.client or id(prefill.structure)
        try:
            ready = self._compiler.ready(prefill.programs, seconds, client=client)
        except Exception as error:  # of this request alone: another policy compiles
            self.fail(prefill, error)
            return False
        waited = time.monotonic() - prefill.since
        if ready:
            if waited > NOTE_AFTER:
                policy = prefill.request.policy
                self._note(f"programs of '{policy!r}' took {waited:.1f} s to compile, beside the others")
            prefill.programs = []
        return ready

    # --- a turn ------------------------------------------------------------------------------------

    def read(self) -> bool:
        """Reads up to ``prefill_tokens`` tokens of prompts, and inserts rows; False where all that waits."""
        done = self._turns.read()
        for prefill in [x for x in self.pending if x.ready and not x.begun and not x.programs]:
            self._turns.begun(prefill)  # a context that nothing is added to
        return self._insertion.insert([x for x in self.pending if x.ready and x.begun]) or done

    def clear(self, prefill: Prefill) -> None:
        """It begins again, and batches without rows are made again, smaller: they are in its way."""
        prefill.request.alone = True
        for other in [x for x in reversed(self.pending) if x is not prefill] + [prefill]:
            self.restart(other)
        self._memory.batches.clear()
