"""Insertion: what follows once a prompt is read. Its first tokens, and its rows in a running batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import jax
import numpy as np

from kvjax import metrics
from kvjax.cache.state import PoolOverflowError
from kvjax.engine import pages as paging
from kvjax.engine.batch import RunningBatch
from kvjax.engine.decoding import snapshot
from kvjax.engine.errors import MemoryFull
from kvjax.engine.held_context import HeldContext
from kvjax.engine.memory import Memory
from kvjax.engine.metrics import Counters, usages
from kvjax.engine.pages import Shorter, StoredState
from kvjax.engine.prefill import Prefill
from kvjax.engine.request import Event
from kvjax.engine.ticket import EngineRequest, likeliest


class Line(Protocol):
    """Prompts that are read, and wait for rows; ``Prefiller``."""

    pending: list[Prefill]

    def leave(self, prefill: Prefill, request: EngineRequest | None = None) -> None:
        """The prompt is no longer one of them, or the request none of the prompt's."""

    def fail(self, prefill: Prefill, error: Exception) -> None:
        """The prompt's requests end with the error."""

    def put_back(self, request: int) -> bool:
        """Has a newer prompt than that request wait again; was there one?"""

    def clear(self, prefill: Prefill) -> None:
        """All prompts begin again, this one first."""


class Insertion:
    """Gives prompts that were read their first tokens and their rows; the engine's thread only."""

    def __init__(self, line: Line, memory: Memory, counters: Counters) -> None:
        self._line, self._memory, self._counters = line, memory, counters
        self._settings, self._contexts = memory.settings, memory.contexts
        self.warm = False  # has any row entered a batch?

    # --- a prompt ------------------------------------------------------------------------------------

    def first_tokens(self, prefill: Prefill) -> None:
        """Keeps the prompt as a context, or draws each request's first token."""
        if prefill.request.keep_as:
            self._keep(prefill)
            return
        for request in list(prefill.requests):
            if not request.written:
                self._first_token(prefill, request)

    def _keep(self, prefill: Prefill) -> None:
        """Keeps the row as a context."""
        request, memory = prefill.request, self._memory
        context = HeldContext(
            name=request.keep_as,
            owner=request.options.owner,
            tokens=request.tokens,
            policy=request.policy,
            learned=request.learned,
            state=prefill.state,
            logits=prefill.logits,
        )
        going = self._contexts.leaving(context).bytes
        if not memory.room(-going):  # the row that was read is counted already
            raise MemoryFull(
                f"context {context.name!r} takes {context.bytes} bytes beside "
                f"{memory.allocated() - context.bytes} that are held, and kv_memory is "
                f"{self._settings.kv_memory}. Ask again later."
            )
        self._contexts.keep(context)
        self._line.leave(prefill)
        request.finish("length")

    def _echo(self, prefill: Prefill, request: EngineRequest) -> None:
        """Hands the prompt out."""
        request.echoed = True
        events = [Event(int(request.tokens[0]), prompt=True)]
        for at, token in enumerate(request.tokens[1:].tolist()):
            if prefill.ranks is None:
                events.append(Event(token, prompt=True))
                continue
            logprob, best, theirs = (x[at] for x in prefill.ranks)
            top = likeliest(best, theirs, request.options.logprobs or 0)
            events.append(Event(token, float(logprob), top, prompt=True))
        request.deliver(events, None)

    def _first_token(self, prefill: Prefill, request: EngineRequest) -> None:
        """Draws the token after the prompt."""
        options, state = request.options, prefill.state
        known = snapshot(state)
        if known.overflow:
            raise PoolOverflowError("a prompt ran out of pages: it was given too few.")
        if options.echo and not request.echoed:
            self._echo(prefill, request)
        kv = usages(prefill.model.network, state, known)[0]
        if options.max_new_tokens == 0:
            request.deliver([Event(None, finish_reason="length")], kv)
            self._line.leave(prefill, request)
            self._counters.ended("length")
            return
        assert prefill.logits is not None
        ranked, position = [options.logprobs is not None], np.asarray([len(request.tokens)], np.int32)
        first = (prefill.logits, request.sampling, np.asarray(ranked), position)
        if request.guide is None:
            drawn = prefill.common.first(*first)
        else:
            allowed = request.guide.allowed()[None]
            drawn = prefill.structure.guided_draw(*first, np.ones(1, bool), allowed)
        request.deliver(request.record(jax.device_get(drawn), 0), kv)
        if request.ticket.done:
            request.keep_inspection(state, 0, kv, metrics.allocated(state.layers))
            self._line.leave(prefill, request)
            self._counters.ended(request.ticket.finish_reason or "error", kv)

    # --- rows ----------------------------------------------------------------------------------------

    def insert(self, ready: Sequence[Prefill]) -> bool:
        """Rows that were read enter their batches, the oldest first; False where all that wait go on waiting.

        Where one waits for pages, no newer one of its batch passes it, and no batch grows for another.
        """
        done, waits = False, set[int]()
        for prefill in sorted(ready, key=lambda prefill: prefill.request.ticket.id):
            if prefill not in self._line.pending or id(prefill.batch) in waits:
                continue
            try:
                while prefill.ready and prefill in self._line.pending and not prefill.programs:
                    if not self._insert(prefill, grows=not waits):
                        waits.add(id(prefill.batch))
                        break
                    done = True
            except Exception as error:  # of this request alone
                self._line.fail(prefill, error)
                done = True
        return done

    def _insert(self, prefill: Prefill, grows: bool) -> bool:
        """The oldest request of a prompt gets its row, once there are pages; False while there are none."""
        request, batch, state = prefill.request, prefill.batch, prefill.state
        assert batch is not None
        if not request.written:  # a context that nothing is added to, or who came when the prompt was read
            self._first_token(prefill, request)
            return True
        known = snapshot(state)
        coming = self._memory.to_store(request, state, known)
        start, lender = self._lender(prefill, batch)
        lists = [x[0] for x in known.lists]
        reserved = need = paging.most_pages(request.policy, batch.state, coming, 1, lists)
        if start is not None:
            need = paging.most_pages(request.policy, batch.state, coming, 1, lists, start.pages)
        if None not in batch.rows:
            return False
        if not batch.sized or not all(n <= have for n, have in zip(need, batch.spare())):
            return grows and self._grow(prefill, batch, need)
        shared = batch.shared or lender is not None
        programs = batch.programs(self._settings.segment, state, shared=shared, shaped=request.shaped)
        if not all(program.ready for program in programs):
            prefill.compile(programs)
            return True
        batch.make()
        begins = [] if start is None else [start]
        batch.insert(
            request, state, reserved, [*begins, *(x for x in prefill.begins if x is not start)], lender
        )
        self._line.leave(prefill, request)
        self.warm = True
        return True

    def _lender(
        self, prefill: Prefill, batch: RunningBatch
    ) -> tuple[StoredState | Shorter | None, int | None]:
        """A stored state that the row begins with, and a row that lends its pages; None where nobody does."""
        if not self._settings.share_pages:
            return None, None
        if len(prefill.requests) > 1 and prefill.fork is None:  # the others borrow of the first
            prefill.fork = StoredState(tokens=prefill.tokens, state=prefill.state)
            prefill.begins.insert(0, prefill.fork)
        for start in (prefill.fork, prefill.start):
            lender = None if start is None else batch.lender(prefill.request.policy, start)
            if lender is not None:
                return start, lender
        return None, None

    def _grow(self, prefill: Prefill, batch: RunningBatch, need: list[int]) -> bool:
        """Larger pools for the row that waits; False while that cannot be."""
        memory, settings = self._memory, self._settings
        if prefill.growth is None and batch.sized:
            spare = zip(batch.counts, need, batch.spare())
            prefill.growth = memory.affordable(batch, [have + max(0, n - free) for have, n, free in spare])
        elif prefill.growth is None:
            prefill.growth = memory.first_counts(batch, need, memory.coming())
        if prefill.growth is None:
            if memory.running:
                return False
            if memory.reading() > prefill.bytes:  # rows that came later hold what it needs
                return self._line.put_back(prefill.request.ticket.id)
            if not prefill.request.alone:
                self._line.clear(prefill)
                return True
            raise memory.refusal(
                batch.allocated + batch.bytes_of(need),
                f"the row needs {batch.bytes_of(need)} bytes of pages beside {memory.allocated()} that "
                f"are held, and kv_memory is {settings.kv_memory}. Raise it, or ask for fewer tokens.",
            )
        programs = batch.programs(
            settings.segment, prefill.state, prefill.growth, shaped=prefill.request.shaped
        )
        if not all(program.ready for program in programs):
            prefill.compile(programs)
            return True
        growth, prefill.growth = prefill.growth, None
        larger = all(have <= n for have, n in zip(batch.counts, growth))  # rows may have grown it meanwhile
        if larger and memory.affordable(batch, growth, exactly=True) is not None:
            batch.resize(growth)
        return True
