"""What runs next: the engine's thread asks for one turn after another.

A turn is one segment of one lane, or one unit (a chunk, a layer) of the prompt that is being read; lanes and
the reading take turns. So a running row waits at most for one segment of each other lane and one unit. A
request goes

  queue -> preparing (programs are compiled beside the others) -> reading -> waiting for pages -> a row

in the order of the queue; only those pass it whose lane has a place while the first one's has none.
"""

from __future__ import annotations

import collections
import functools
import time
from collections.abc import Callable

import jax
import numpy as np

from kvjax import metrics
from kvjax.cache.state import KVState, PoolOverflowError
from kvjax.decode import RequestError
from kvjax.engine import _layout as layout
from kvjax.engine import _prefix as prefixes
from kvjax.engine import _reading as readings
from kvjax.engine._compiler import Compiler
from kvjax.engine._counts import Counts
from kvjax.engine._errors import ContextMismatch, ContextNotFound
from kvjax.engine._lane import Lane
from kvjax.engine._looks import inspection, of_lane
from kvjax.engine._metrics import Metrics
from kvjax.engine._reading import Reading
from kvjax.engine._request import Event, Inspection, KVUsage
from kvjax.engine._segment import first, look
from kvjax.engine._settings import Settings
from kvjax.engine._space import Space
from kvjax.engine._store import Store
from kvjax.engine._usage import usages
from kvjax.engine._work import Job, pairs
from kvjax.sampling import sampling
from kvjax.types import Weighted

TOLD = 0.5
"""Seconds of compiling from which on an operator is told."""

PATIENCE = 0.02
"""Seconds to wait for a compilation where nothing else is to be done."""


class Begun:
    """A request that is being read, or has been and waits for pages."""

    def __init__(self, job: Job, lane: Lane | None, reading: Reading | None, state: KVState | None) -> None:
        self.job, self.lane, self.reading = job, lane, reading
        self.state = state  # once it is read
        self.compiled = reading is None
        self.since = time.monotonic()
        self.growth: list[int] | None = None


class Scheduler:
    """Queue, lanes and readings; one thread only."""

    def __init__(
        self, model: Weighted, settings: Settings, store: Store, note: Callable[[str], None]
    ) -> None:
        self.model, self.settings, self.store, self.note = model, settings, store, note
        self.counts = Counts()
        self.warm = False
        self.space = Space(model, settings, store)
        self._queue: collections.deque[Job] = collections.deque()
        self._begun: Begun | None = None
        self._compiler = Compiler()
        self._turn = 0

    # --- from the door -----------------------------------------------------------------------------------

    @property
    def queued(self) -> int:
        """Requests that wait."""
        return len(self._queue)

    def retry_after(self, waiting: int) -> float:
        """Seconds in which a place in the queue may be free."""
        rate = self.counts.finished_per_second()
        return 1.0 if not rate else min(60.0, max(1.0, waiting / rate / 2))

    def enter(self, job: Job) -> None:
        """Puts a request into the queue."""
        self._queue.append(job)

    def cancel(self, number: int, reason: str = "cancelled") -> None:
        """Ends a request, wherever it is."""
        for job in [job for job in self._queue if job.ticket.id == number]:
            self._queue.remove(job)
            self._end(job, reason)
        if self._begun is not None and self._begun.job.ticket.id == number:
            begun, self._begun = self._begun, None
            self._end(begun.job, reason)
        for lane in self.space.lanes:
            for at in lane.rows:
                place = lane.places[at]
                if place is not None and place.job.ticket.id == number:
                    self._finish(lane, at, reason)
                    lane.release([at])

    def close(self) -> None:
        """Compiles nothing more."""
        self._compiler.close()

    # --- a turn ------------------------------------------------------------------------------------------

    def turn(self) -> bool:
        """Does one piece of work; False where there is none."""
        self._expire()
        if self._begun is None:
            self._begin()
        work: list[Callable[[], bool]] = [
            functools.partial(self._segment, lane) for lane in self.space.lanes if lane.rows
        ]
        if self._begun is not None:
            work.append(self._read)
        for _ in work:
            self._turn = (self._turn + 1) % len(work)
            if work[self._turn]():
                return True
        if self._begun is not None and not self._begun.compiled:
            self._wait(self._begun)
            return True
        return bool(work)

    @property
    def _reads(self) -> bool:
        """Is there a prompt to be read between two segments?"""
        return self._begun is not None and self._begun.compiled and self._begun.state is None

    def _expire(self) -> None:
        """Ends requests whose deadline has come."""
        now = time.monotonic()
        jobs = [*self._queue, *([self._begun.job] if self._begun else [])]
        jobs += [place.job for lane in self.space.lanes for place in lane.places if place is not None]
        for job in jobs:
            deadline = job.ticket.request.deadline
            if deadline is not None and now - job.ticket.submitted > deadline:
                self.cancel(job.ticket.id, "deadline")

    # --- reading -----------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Takes the first request from the queue that has a place."""
        self.space.promised = None
        for job in list(self._queue):
            try:
                begun = self._start(job)
            except Exception as error:  # of this request alone
                self._queue.remove(job)
                self._fail(job, error)
                return
            if begun is not None:
                self._queue.remove(job)
                self._begun, self.space.promised = begun, begun.lane
                if not begun.compiled:
                    self._wait(begun, 0.0)
                return

    def _start(self, job: Job) -> Begun | None:
        """A reading of the request, and the lane it is for; None while there is no place."""
        settings, model = self.settings, self.model
        row = self.space.row(job)
        lane = None if job.keeps else self.space.lane(job, row)
        if not job.keeps and (lane is None or lane.free_place is None):
            return None
        ranked = job.ticket.request.echo and job.ticket.request.logprobs is not None and not job.echoed
        state, begun = self._beginning(job, row, ranked)
        job.cached = begun
        if begun == len(job.tokens):
            return Begun(job, lane, None, state)
        key, borders = self._key(job), []
        if prefixes.shareable(job.policy) and not job.continues:
            borders = self.space.prefixes.borders(key, job.tokens, settings.chunk)
        reading = Reading(
            model,
            job.policy,
            job.learned.weights,
            job.tokens,
            state,
            begun=begun,
            seed=job.ticket.request.seed,
            ranked=ranked,
            borders=borders,
            width=settings.chunk,
        )
        return Begun(job, lane, reading, None)

    def _beginning(self, job: Job, row: KVState, ranked: bool) -> tuple[KVState, int]:
        """The state to read on from, and how many tokens it has seen."""
        if job.continues:
            kept = self.store.get(job.continues)
            if kept is None:
                raise ContextNotFound(f"context {job.continues!r} was deleted before the request began.")
            if any(mine[1] > theirs[1] for mine, theirs in zip(layout.shape(row), layout.shape(kept.state))):
                raise ContextMismatch(
                    f"context {job.continues!r} was read with page lists too short for '{job.policy!r}'. "
                    f"Go on with its own budget or a smaller one."
                )
            more = len(job.tokens) - len(kept.tokens)
            return readings.continued(job.policy, kept.state, more), len(kept.tokens)
        prefix = None if ranked else self.space.prefixes.find(self._key(job), job.tokens)
        if prefix is None:
            return readings.empty_for(job.policy, row, len(job.tokens)), 0
        more = len(job.tokens) - len(prefix.tokens)
        state = readings.continued(job.policy, prefix.state, more)
        return readings.with_total(state, len(job.tokens)), len(prefix.tokens)

    def _key(self, job: Job) -> tuple[str, str]:
        return repr(job.policy), job.learned.label

    def _read(self) -> bool:
        """One unit of the reading, or what is due after it."""
        begun = self._begun
        assert begun is not None  # noqa: S101
        try:
            if begun.state is None:
                if not begun.compiled and not self._wait(begun, 0.0):
                    return self._begun is None
                self._unit(begun)
                if self._begun is None or begun.state is None:
                    return True
            return self._place(begun)
        except Exception as error:  # of this request alone
            self._begun = None
            self._fail(begun.job, error)
            return True

    def _wait(self, begun: Begun, seconds: float = PATIENCE) -> bool:
        """Are the programs of a reading and of its lane compiled?"""
        assert begun.reading is not None  # noqa: S101
        try:
            programs = readings.programs(begun.reading)
            if begun.lane is not None:
                programs.append(begun.lane.program(self.settings.segment))
            begun.compiled = self._compiler.ready(programs, seconds)
            waited = time.monotonic() - begun.since
            if begun.compiled and waited > TOLD:
                self.note(
                    f"programs of '{begun.job.policy!r}' took {waited:.1f} s to compile, beside the others"
                )
        except Exception as error:  # of this request alone: another policy compiles
            self._begun = None
            self._fail(begun.job, error)
            return False
        return begun.compiled

    def _unit(self, begun: Begun) -> None:
        job, reading = begun.job, begun.reading
        assert reading is not None  # noqa: S101
        start = time.monotonic()
        reading.unit()
        if self.space.running:
            self.counts.pauses.add(time.monotonic() - start)
        if not reading.done:
            return
        for border, state in reading.snapshots.items():
            self.space.prefixes.keep(self._key(job), job.tokens[:border], state)
        begun.state = reading.state
        self.counts.prompt_tokens += len(job.tokens) - reading.begun
        self.counts.cached_tokens += reading.begun
        if job.keeps:
            size = metrics.allocated(reading.state.layers)
            if not self.space.room(size):
                raise RequestError(
                    f"context {job.keeps!r} takes {size} bytes beside {self.space.allocated()} held, "
                    f"and kv_memory is {self.settings.kv_memory}. Raise it, or delete other contexts."
                )
            self.store.put(job.keeps, job.tokens, job.policy, job.learned, reading.state, reading.logits)
            self._begun = None
            self._end(job, "length")
            return
        self._echo(job, reading)
        self._first(begun, reading.logits)

    def _echo(self, job: Job, reading: Reading) -> None:
        """Hands the prompt out, where it was asked for."""
        request = job.ticket.request
        if not request.echo or job.echoed:
            return
        job.echoed = True
        events = [Event(int(job.tokens[0]), prompt=True)]
        for at, token in enumerate(job.tokens[1:].tolist()):
            if reading.ranks is None:
                events.append(Event(token, prompt=True))
                continue
            logprob, best, theirs = (x[at] for x in reading.ranks)
            top = pairs(best, theirs, request.logprobs or 0)
            events.append(Event(token, float(logprob), top, prompt=True))
        job.put(events, None)

    def _first(self, begun: Begun, logits: jax.Array | None) -> None:
        """Draws the token after the prompt."""
        job, request = begun.job, begun.job.ticket.request
        assert begun.state is not None  # noqa: S101
        kv = self._alone(begun.state)
        if request.max_new_tokens == 0:
            job.put([Event(None, finish_reason="length")], kv)
            self._begun = None
            self.counts.ended("length")
            return
        assert logits is not None  # noqa: S101
        how = sampling(
            1,
            temperature=request.temperature,
            top_k=request.top_k,
            top_p=request.top_p,
            seed=request.seed,
            requests=[request.draw],
        )
        ranked = np.asarray([request.logprobs is not None])
        drawn = jax.device_get(first(logits, how, ranked, np.asarray([len(job.tokens)], np.int32)))
        events = job.write(drawn, 0)
        self.counts.drawn(job, events)
        job.put(events, kv)
        if job.ticket.done:
            self._look(job, begun.state, 0, kv, metrics.allocated(begun.state.layers))
            self._begun = None
            self.counts.ended(job.ticket.finish_reason or "error", kv)

    def _alone(self, state: KVState) -> KVUsage:
        """Of a row that has just been read."""
        known = look(state)
        if known.overflow:
            raise PoolOverflowError("a prompt ran out of pages: it was given too few.")
        return usages(self.model.network, state, known)[0]

    # --- a place -----------------------------------------------------------------------------------------

    def _place(self, begun: Begun) -> bool:
        """The row that was read enters its lane, once there are pages for it; False while there are none."""
        job, lane, state = begun.job, begun.lane, begun.state
        assert state is not None  # noqa: S101
        assert lane is not None  # noqa: S101
        if begun.reading is None and not job.written:  # a context that is continued by nothing
            kept = self.store.get(job.continues)
            assert kept is not None  # noqa: S101
            self._first(begun, kept.logits)
            return True
        known = look(state)
        lists = [x[0] for x in known.lists]
        need = lane.need(job.policy, lists, self.space.coming(job, state, known))
        spare = lane.spare()
        if all(n <= have for n, have in zip(need, spare)):
            lane.insert(job, state, need)
            self._begun = None
            self.warm = True
            return True
        return self._grow(begun, need)

    def _grow(self, begun: Begun, need: list[int]) -> bool:
        """Larger pools for the row that waits; False while that cannot be."""
        lane = begun.lane
        assert lane is not None  # noqa: S101
        if begun.growth is None:
            counts = [
                have if n <= free else have + n - free
                for have, n, free in zip(lane.counts, need, lane.spare())
            ]
            begun.growth = self.space.affordable(lane, counts)
        if begun.growth is None:
            if not self.space.running:
                raise RequestError(
                    f"the row needs {lane.bytes_of(need)} bytes of pages beside {self.space.allocated()} "
                    f"that are held, and kv_memory is {self.settings.kv_memory}. Raise it, or ask for fewer "
                    "tokens."
                )
            return False
        if not self._compiler.ready([lane.program(self.settings.segment, begun.growth)]):
            if not self.space.running:
                self._compiler.ready([lane.program(self.settings.segment, begun.growth)], PATIENCE)
            return False
        growth, begun.growth = begun.growth, None
        if self.space.affordable(lane, growth, exactly=True):
            lane.resize(growth)
        return True

    # --- writing -----------------------------------------------------------------------------------------

    def _segment(self, lane: Lane) -> bool:
        """A few steps of a lane; False where it waits for larger pools."""
        # While a prompt is read a segment is one step: its row joins the others sooner.
        steps = self.settings.segment
        now = 1 if self._reads else steps
        if not self._enough(lane, now):
            return False
        begun = time.monotonic()
        drawn = lane.step(steps, now)
        took = time.monotonic() - begun
        kv = usages(self.model.network, lane.state, lane.known)
        gone = []
        for at in lane.rows:
            place = lane.places[at]
            assert place is not None  # noqa: S101
            events = place.job.write(drawn, at)
            self.counts.drawn(place.job, events, took)
            place.job.put(events, kv[at])
            if place.job.ticket.done:
                gone.append(at)
        for at in gone:
            self._finish(lane, at, None, kv[at])
        lane.release(gone)
        return True

    def _enough(self, lane: Lane, steps: int) -> bool:
        """Are there pages for whatever the next steps store? Else pools grow, or the youngest row goes."""
        while any(lack > 0 for lack in lane.short_by(steps)):
            lack = lane.short_by(steps)
            wanted = self.space.affordable(lane, [have + max(0, n) for have, n in zip(lane.counts, lack)])
            if wanted is not None:
                if not self._compiler.ready([lane.program(self.settings.segment, wanted)], PATIENCE):
                    return False
                lane.resize(wanted)
                continue
            at = max(lane.rows, key=lambda at: lane.places[at].order)  # type: ignore[union-attr]
            place = lane.places[at]
            assert place is not None  # noqa: S101
            lane.release([at])
            if not lane.rows and not self.space.running:
                error = RequestError(
                    f"the text outgrew kv_memory ({self.settings.kv_memory} bytes) after "
                    f"{len(place.job.written)} new tokens. Raise it, or ask for fewer tokens."
                )
                self._fail(place.job, error)
                return False
            place.job.again()
            self._queue.appendleft(place.job)
            self.counts.preempted += 1
            self.note(f"request {place.job.ticket.id} made room for older ones and will be read again")
        return bool(lane.rows)

    def _finish(self, lane: Lane, at: int, reason: str | None, kv: KVUsage | None = None) -> None:
        """What is left to do for a row before it is released."""
        place = lane.places[at]
        assert place is not None  # noqa: S101
        job = place.job
        kv = kv or usages(self.model.network, lane.state, lane.known)[at]
        self._look(job, lane.state, at, kv, lane.allocated)
        if reason is not None:
            self._end(job, reason, kv)
        else:
            self.counts.ended(job.ticket.finish_reason or "error", kv)
        if prefixes.generated_too(job.policy) and not job.continues:
            fed = np.concatenate([job.tokens, np.asarray(job.written, np.int32)])[: kv.seen]
            if self.space.welcome():
                self.space.prefixes.keep(self._key(job), fed, lane.cut(at))

    # --- ends --------------------------------------------------------------------------------------------

    def _end(self, job: Job, reason: str, kv: KVUsage | None = None) -> None:
        job.put([Event(None, finish_reason=reason)], kv)
        self.counts.ended(reason, kv)

    def _fail(self, job: Job, error: Exception) -> None:
        job.ticket._fail(error)
        self.counts.ended("error")

    # --- looks -------------------------------------------------------------------------------------------

    def _look(self, job: Job, state: KVState, at: int, kv: KVUsage, allocated: int) -> None:
        """Keeps what a row held at its end, where it was asked for."""
        if job.ticket.request.inspect:
            job.ticket._last = inspection(job, state, at, kv, allocated)

    def inspect(self, number: int) -> Inspection | None:
        """What a running row holds; None where there is none of that number."""
        for lane in self.space.lanes:
            for at in lane.rows:
                place = lane.places[at]
                if place is not None and place.job.ticket.id == number:
                    kv = usages(self.model.network, lane.state, lane.known)[at]
                    return inspection(place.job, lane.state, at, kv, lane.allocated)
        return None

    def metrics(self, waiting: int) -> Metrics:
        """A snapshot; ``waiting`` requests are on their way to the queue."""
        return self.counts.snapshot(
            queued=len(self._queue) + waiting,
            reading=int(self._begun is not None),
            running=sum(len(lane.rows) for lane in self.space.lanes),
            lanes=tuple(of_lane(lane) for lane in self.space.lanes),
            kv_memory=self.settings.kv_memory,
            kv_allocated=self.space.allocated(),
        )
