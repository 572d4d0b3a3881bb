"""Prefiller: which prompts are read next, from the queue to their rows.

**The order.** A turn reads ``prefill_tokens`` tokens of prompts. The prompt with the fewest tokens left comes
first; but for every ``PASSED`` tokens that are read of others, a waiting one counts as a token shorter. So a
prompt of n tokens is passed by at most ``PASSED`` n tokens of those that came later. Prompts that are alike
are read by one program (``Together``) once that is compiled, and one by one until then. Requests for the same
prompt are read once.

Who waits for memory or pages is passed only by those that take nothing of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from kvjax.decode import RequestError
from kvjax.engine.beginnings import Beginnings
from kvjax.engine.compiler import PATIENCE, Compiler
from kvjax.engine.errors import MemoryFull
from kvjax.engine.insertion import Insertion
from kvjax.engine.memory import Memory
from kvjax.engine.metrics import Counters
from kvjax.engine.prefill import Prefill
from kvjax.engine.prefill_programs import needed
from kvjax.engine.prefix import HeldKeys, shareable
from kvjax.engine.request import Progress
from kvjax.engine.settings import NOTE_AFTER
from kvjax.engine.ticket import EngineRequest
from kvjax.engine.together import Together

PASSED = 4
"""Tokens of later prompts that may be read before one of a prompt's own."""

STARTS = 4
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
        self.units = 0  # chunks and layers that were read
        self._tokens = 0.0  # that were read, of all prompts
        self._insertion = Insertion(self, memory, counters)
        memory.reading = lambda: sum(prefill.bytes for prefill in self.pending)
        memory.coming = lambda: max((x.need for x in self.pending if not x.begun), default=0)

    @property
    def warm(self) -> bool:
        """Has any row entered a batch?"""
        return self._insertion.warm

    @property
    def reads(self) -> bool:
        """Is there a prompt to be read between two programs of batches?"""
        return any(x.begun and not x.programs and not x.ready for x in self.pending)

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
        self._restart(max(held, key=lambda prefill: prefill.request.ticket.id))
        return True

    def _restart(self, prefill: Prefill) -> None:
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
            came=self._tokens,
            behind=behind,
            keeps=keeps,
        )
        request.cached = prefill.seen
        if prefill.need > self._settings.kv_memory:
            prefill.forget()
            raise self._too_large(prefill)
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
        left, done, waits = float(self._settings.prefill_tokens), False, set[int]()
        while True:
            chosen = self._chosen(left, waits, first=not done)
            if not chosen:
                break
            together = self._together(chosen)
            if chosen[0].programs:
                done = True
            elif together is None:
                left -= chosen[0].cost
                done = self._read(chosen[0], waits) or done
            else:
                left -= len(chosen) * chosen[0].cost
                done = self._read_together(together) or done
            if self.returned:  # they come before others
                break
        for prefill in [x for x in self.pending if x.ready and not x.begun and not x.programs]:
            self._begun(prefill)  # a context that nothing is added to
        return self._insertion.insert([x for x in self.pending if x.ready and x.begun]) or done

    def _rank(self, prefill: Prefill) -> tuple[float, int]:
        """The lowest is read first."""
        others = self._tokens - prefill.came - prefill.read
        return prefill.remaining - others / PASSED, prefill.request.ticket.id

    def _chosen(self, budget: float, waits: set[int], first: bool) -> list[Prefill]:
        """Who is read next: one, or several that are alike; nobody where the budget is used up.

        ``waits``: numbers of requests that wait for memory in this turn.
        """
        chosen: list[Prefill] = []
        for prefill in sorted(self.pending, key=self._rank):
            number = prefill.request.ticket.id
            if prefill.ready or prefill.programs or prefill not in self.pending or number in waits:
                continue
            if chosen:
                fits = (len(chosen) + 1) * prefill.cost <= budget
                if not fits or prefill.alike() != chosen[0].alike():
                    continue
            elif not first and prefill.cost > budget:
                return []
            newer = waits and number > min(waits)  # memory is kept for who came before
            if not prefill.begun and (newer or not self._begun(prefill)):
                waits.add(number)
                continue
            chosen.append(prefill)
            if 2 * prefill.cost > budget or prefill.alike() is None:
                break
        return chosen[: 1 << (len(chosen).bit_length() - 1)] if chosen else []

    def _together(self, chosen: list[Prefill]) -> Together | None:
        """What reads them in one program; None for one alone, and while that program is compiled."""
        if len(chosen) == 1:
            return None
        together = Together(chosen)
        chosen[0].beside = programs = together.programs()
        client = chosen[0].request.options.client or id(chosen[0].structure)
        if self._compiler.ready(programs, client=client):
            return together
        for prefill in chosen:  # who is there for the programs waits for them; others are read one by one
            if prefill.request.warms:
                prefill.compile(programs)
        return None

    def _read(self, prefill: Prefill, waits: set[int]) -> bool:
        """Reads the next unit of it; False where that waits for memory."""
        before = prefill.remaining
        try:
            if not prefill.done:
                if not prefill.unit(self._affordable, self._has_room):
                    waits.add(prefill.request.ticket.id)
                    return False
                if prefill.programs:
                    return True
                read = before - prefill.remaining
                self._count(read)
                prefill.read += read if prefill.whole else 0.0
            self._read_whole(prefill)
        except Exception as error:  # of this request alone
            self.fail(prefill, error)
        return True

    def _read_together(self, together: Together) -> bool:
        try:
            before = sum(prefill.remaining for prefill in together.prefills)
            together.read(self._affordable)
            self._count(before - sum(prefill.remaining for prefill in together.prefills))
        except Exception:  # whoever it is of: each is read alone, and fails alone
            for prefill in reversed(together.prefills):
                for request in prefill.requests:
                    request.apart = True
                self._restart(prefill)
            return True
        for prefill in together.prefills:
            try:
                self._read_whole(prefill)
            except Exception as error:
                self.fail(prefill, error)
        return True

    def _count(self, tokens: float) -> None:
        self.units += 1
        self._tokens += tokens

    def _read_whole(self, prefill: Prefill) -> None:
        """Once all of a prompt is read: keeps what others may begin with; the first tokens."""
        if not prefill.done:
            return
        for border, state in prefill.snapshots.items():
            prefix = self._memory.remember(prefill.request.prefix_key, prefill.tokens[:border], state)
            prefill.begins.append(prefix)
        if prefill.keys:
            owner = prefill.request.options.owner
            kept = HeldKeys(tokens=prefill.tokens, owner=owner, keys=prefill.keys)
            prefill.keys = None
            self._memory.remember_keys(kept)
        prefill.snapshots, prefill.ready = {}, True
        self._counters.prompt_tokens += len(prefill.tokens) - prefill.seen
        self._counters.cached_tokens += prefill.seen
        self._insertion.first_tokens(prefill)

    def _has_room(self, size: int) -> bool:
        """For a layer; where nobody writes there is nothing to wait for."""
        return self._memory.room(size) or not self._memory.running

    def _affordable(self, size: int) -> bool:
        return self._memory.allocated() + size <= self._settings.kv_memory

    def _begun(self, prefill: Prefill) -> bool:
        """Has it a state? Made now, if there is memory for it; False where there is none yet."""
        request, memory = prefill.request, self._memory
        if prefill.start is not None and prefill.start.state is None:  # the prefix was dropped meanwhile
            self.leave(prefill)
            self.returned += prefill.requests
            return False
        try:
            if memory.room(prefill.need, besides=prefill.batch):
                prefill.begin()
                for one in prefill.requests:
                    if not one.begun:
                        self._counters.queue.add(time.monotonic() - one.ticket.submitted)
                        one.begun = True
                return True
            if memory.running or memory.reading():
                return False
            if request.alone:
                raise self._too_large(prefill)
        except Exception as error:  # of this request alone
            self.fail(prefill, error)
            return False
        self.clear(prefill)
        return False

    def clear(self, prefill: Prefill) -> None:
        """It begins again, and batches without rows are made again, smaller: they are in its way."""
        prefill.request.alone = True
        for other in [x for x in reversed(self.pending) if x is not prefill] + [prefill]:
            self._restart(other)
        self._memory.batches.clear()

    def _too_large(self, prefill: Prefill) -> MemoryFull | RequestError:
        return self._memory.refusal(
            prefill.need,
            f"reading the prompt takes {prefill.need} bytes beside {self._memory.allocated()} that are held, "
            f"and kv_memory is {self._settings.kv_memory}. Raise it, or ask for fewer tokens.",
        )
