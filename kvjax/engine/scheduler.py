"""What runs next: the engine's thread takes one turn after another.

A turn is one program of one batch (up to ``segment`` steps), or up to ``prefill_tokens`` tokens of prompts
(``turns`` says of which), between every two programs. So a running row waits at most for one program of each
other batch and for so many tokens for each. Where one batch alone has anything to do, its next program is
begun before the last one's tokens are handed out. A request goes

  queue -> waiting for compilation (beside the others) -> reading -> waiting for pages -> a row

and leaves the queue in its order. A request whose batch has a free row, or whose programs are there, passes
those that lack them. A request that has no batch at all is passed ``max_rows`` times at most.
"""

from __future__ import annotations

import collections
import functools
import time
from collections.abc import Callable

import numpy as np

from kvjax.engine.batch import RunningBatch
from kvjax.engine.compiler import PATIENCE, Compiler
from kvjax.engine.memory import Memory
from kvjax.engine.metrics import Counters, Metrics
from kvjax.engine.prefiller import Prefiller
from kvjax.engine.prefix import generated_too
from kvjax.engine.request import Inspection, KVUsage, Progress
from kvjax.engine.settings import NOTE_AFTER
from kvjax.engine.ticket import EngineRequest

LONGEST_CUT = 30.0
"""Seconds to wait for the program that copies a row's state, while there is nothing else to do."""


class Scheduler:
    """The queue, and whose turn it is; one thread only."""

    def __init__(
        self,
        memory: Memory,
        counters: Counters,
        note: Callable[[str], None],
        calls_wait: Callable[[], bool],
    ) -> None:
        """An empty queue; ``note`` takes lines for the operator, ``calls_wait``: does another thread wait?"""
        self.memory, self.counters, self._settings = memory, counters, memory.settings
        self._note, self._calls_wait = note, calls_wait
        self.compiler = Compiler(note, memory.shed)
        self.queue: collections.deque[EngineRequest] = collections.deque()
        self.prefiller = Prefiller(memory, self.compiler, counters, note)
        self._turn = 0
        self._stuck: int | None = 0  # requests in the queue that were considered and found no free row
        self._waited = 0.0  # seconds that this thread has waited for programs of batches

    def cancel(self, number: int, reason: str = "cancelled") -> None:
        """Ends a request, wherever it is."""
        for request in [request for request in self.queue if request.ticket.id == number]:
            self.queue.remove(request)
            request.finish(reason)
        self.prefiller.cancel(number, reason)
        where = self._row(number)
        if where is not None:
            batch, row = where
            self._end_row(batch, row, reason, batch.usages()[row])
            batch.release([row])

    # --- a turn ------------------------------------------------------------------------------------------

    def turn(self) -> bool:
        """Does one piece of work; False where there is none."""
        begun, read, waited = time.monotonic(), self.prefiller.units, self._waited
        running = self.memory.running
        done = self._piece()
        stood = time.monotonic() - begun - (self._waited - waited)
        if running and (stood > NOTE_AFTER or self.prefiller.units > read):
            self.counters.pauses.add(stood)
        if running and stood > NOTE_AFTER:
            self._note(f"running rows stood still for {stood:.1f} s, for a row that came or went")
        return done

    def _piece(self) -> bool:
        self._return()
        self._expire()
        prefiller = self.prefiller
        taken = prefiller.begin(self.queue)
        for request in taken:
            self.queue.remove(request)
        self._stuck = None if taken else len(self.queue)
        if prefiller.acts:
            self._settle()
        work: list[Callable[[], bool]] = [
            functools.partial(self._write, batch) for batch in self.memory.batches if batch.taken
        ]
        if prefiller.acts:  # between every two programs
            work = [turn for write in work for turn in (write, prefiller.read)] or [prefiller.read]
        for _ in work:
            self._turn = (self._turn + 1) % len(work)
            if work[self._turn]():
                return True
        return prefiller.wait() or bool(work)

    def _expire(self) -> None:
        """Ends requests whose deadline has come, and drops contexts that nobody used for long."""
        now = time.monotonic()
        self.memory.contexts.expire(now)
        requests = [*self.queue, *self.prefiller.requests]
        requests += [row.request for batch in self.memory.batches for row in batch.taken.values()]
        for request in requests:
            deadline = request.options.deadline
            if deadline is not None and now - request.ticket.submitted > deadline:
                self.cancel(request.ticket.id, "deadline")

    # --- rows that are written ---------------------------------------------------------------------------

    def _write(self, batch: RunningBatch) -> bool:
        """The next tokens of a batch; False where it waits for larger pools."""
        # While a prompt is read a program does one step: its row joins the others sooner.
        steps = 1 if self.prefiller.reads else self._settings.segment
        if not batch.flying:
            if not self._ensure_pages(batch, steps):
                return False
            batch.step(self._settings.segment, steps)
        self._land(batch, goes_on=True)
        return True

    def _settle(self) -> None:
        """Hands out what is under way; rows may come and go then."""
        for batch in self.memory.batches:
            if batch.flying:
                self._land(batch)

    def _land(self, batch: RunningBatch, goes_on: bool = False) -> None:
        """Hands out a program's tokens.

        Where the batch ``goes_on`` as it is, the next program is begun before: the device need not wait for
        usage, events and the threads that they wake. Where a row ends, or another thread waits, rows come and
        go first.
        """
        waits = time.monotonic()
        drawn, took = batch.land()
        self._waited += time.monotonic() - waits
        rows = batch.taken.items()
        written = [(number, row.request, row.request.record(drawn, number)) for number, row in rows]
        for number, request, _ in written:
            request.count_drafts(*batch.drafts(number))
        # The last event says so; where a guide failed, the ticket does.
        gone = [n for n, one, events in written if one.ticket.done or (events and events[-1].finish_reason)]
        steps = self._settings.segment
        if goes_on and not gone and self._quiet() and not any(lack > 0 for lack in batch.short_by(steps)):
            batch.step(steps, steps)
        kv = batch.usages()
        for number, request, events in written:
            request.deliver(events, kv[number], took)
        for number in gone:
            self._end_row(batch, number, None, kv[number])
        batch.release(gone)

    def _quiet(self) -> bool:
        """Is there nothing to do but to write on with one batch? Stuck requests wait for a row to end."""
        if self._calls_wait() or self.prefiller.acts or len(self.queue) != self._stuck:
            return False
        return sum(bool(batch.taken) for batch in self.memory.batches) == 1

    def _ensure_pages(self, batch: RunningBatch, steps: int) -> bool:
        """Are there pages for what the next steps store? Else pools grow, or the youngest row makes room."""
        settings, memory = self._settings, self.memory
        while any(lack > 0 for lack in batch.short_by(steps)):
            short = batch.short_by(steps)
            wanted = memory.affordable(batch, [have + max(0, n) for have, n in zip(batch.counts, short)])
            if wanted is not None:
                larger = batch.programs(settings.segment, counts=wanted)
                if not self.compiler.ready(larger, PATIENCE, urgent=True):
                    return False
                batch.resize(wanted)
                continue
            number, row = max(batch.taken.items(), key=lambda item: item[1].request.ticket.id)
            if self.prefiller.put_back(row.request.ticket.id):
                self._return()
                continue
            batch.release([number])
            if not memory.running:
                error = memory.refusal(
                    batch.allocated + batch.bytes_of([max(0, n) for n in short]),
                    f"the text outgrew kv_memory ({settings.kv_memory} bytes) after "
                    f"{len(row.request.written)} new tokens. Raise it, or ask for fewer tokens.",
                )
                row.request.fail(error)
                return False
            row.request.restart()
            self.queue.appendleft(row.request)
            self._note(f"request {row.request.ticket.id} made room for older ones and will be read again")
        return bool(batch.taken)

    def _return(self) -> None:
        """Requests that were put back wait again, before all others."""
        self.queue.extendleft(reversed(self.prefiller.returned))
        self.prefiller.returned = []

    def _end_row(self, batch: RunningBatch, number: int, reason: str | None, kv: KVUsage) -> None:
        """What is left to do for a row before it is released; without a reason its last event is out."""
        request = batch.taken[number].request
        request.keep_inspection(batch.state, number, kv, batch.allocated)
        if reason is not None:
            request.finish(reason, kv)
        else:
            self.counters.ended(request.ticket.finish_reason or "error", kv)
        # Where there is memory, what it wrote may begin another prompt.
        if generated_too(request.policy) and not request.context:
            tokens = np.concatenate([request.tokens, np.asarray(request.written, np.int32)])[: kv.seen]
            if self.memory.allocated() < 0.9 * self._settings.kv_memory and self._can_cut(batch, number):
                self.memory.remember(request.prefix_key, tokens, batch.cut(number))

    def _can_cut(self, batch: RunningBatch, number: int) -> bool:
        """Are the programs there? They are waited for while that stops nobody; else the next row has them."""
        programs, running = batch.cut_programs(number), sum(len(x.taken) for x in self.memory.batches)
        alone = running == 1 and not self.queue and not self.prefiller.pending
        until = time.monotonic() + LONGEST_CUT
        while not self.compiler.ready(programs, PATIENCE, urgent=True):
            if not alone or self._calls_wait() or time.monotonic() > until:
                return False
        return True

    # --- snapshots ---------------------------------------------------------------------------------------

    def inspect(self, number: int) -> Inspection | None:
        """What a running row holds; None where there is none of that number."""
        where = self._row(number)
        if where is None:
            return None
        batch, row = where
        request = batch.taken[row].request
        return request.inspection(batch.state, row, batch.usages()[row], batch.allocated)

    def progress(self, number: int) -> Progress | None:
        """How far the request of that number is; None for one that is in no row and not being read."""
        for batch in self.memory.batches:
            for row in batch.taken.values():
                if row.request.ticket.id == number:
                    return Progress("writing", len(row.request.tokens))
        return self.prefiller.progress(number)

    def _row(self, number: int) -> tuple[RunningBatch, int] | None:
        """The row of the request of that number, once nothing of it is under way."""
        self._settle()
        for batch in self.memory.batches:
            for row, taken in batch.taken.items():
                if taken.request.ticket.id == number:
                    return batch, row
        return None

    def metrics(self, waiting: int) -> Metrics:
        """A snapshot; ``waiting`` requests are on their way to the queue."""
        return self.counters.snapshot(
            queued=len(self.queue) + waiting,
            reading=len(self.prefiller.requests),
            running=sum(len(batch.taken) for batch in self.memory.batches),
            batches=tuple(batch.metrics() for batch in self.memory.batches),
            kv_memory=self._settings.kv_memory,
            kv_allocated=self.memory.allocated(),
            contexts_resting=self.memory.contexts.resting,
            contexts_to_host=self.memory.contexts.to_host,
            contexts_from_host=self.memory.contexts.from_host,
        )
