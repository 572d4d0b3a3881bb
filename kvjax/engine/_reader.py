"""A request on its way from the queue into a row: its programs, its prompt, its first token, its pages."""

from __future__ import annotations

import time
from collections.abc import Iterable

import jax
import numpy as np

from kvjax import metrics
from kvjax.cache.state import KVState, PoolOverflowError
from kvjax.decode import RequestError
from kvjax.engine import _prefix as prefixes
from kvjax.engine import _reading as readings
from kvjax.engine._begun import Begun, beginning
from kvjax.engine._lane import Lane
from kvjax.engine._reading import Reading
from kvjax.engine._request import Event, KVUsage
from kvjax.engine._segment import first, look
from kvjax.engine._shared import Shared
from kvjax.engine._usage import usages
from kvjax.engine._work import Job, pairs
from kvjax.sampling import sampling

TOLD = 0.5
"""Seconds of compiling, or of standing still, from which on an operator is told."""

PATIENCE = 0.02
"""Seconds to wait for a compilation where nothing else is to be done."""


class Reader:
    """Reads one prompt at a time; the engine's thread only.

    Attributes:
      begun: the request that is read, or waits for pages; None where there is none.
      aside: requests that wait for programs, the oldest first. Others pass them; places in their lanes are
        theirs.
      units: chunks and layers that were read.
      warm: has any row entered a lane?
    """

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self.begun: Begun | None = None
        self.aside: list[Begun] = []
        self.units = 0
        self.warm = False

    @property
    def reads(self) -> bool:
        """Is there a prompt to be read between two segments?"""
        return self.begun is not None and self.begun.state is None

    @property
    def jobs(self) -> list[Job]:
        """Requests that are neither in the queue nor in a row."""
        return [begun.job for begun in (self.begun, *self.aside) if begun is not None]

    def wait(self) -> bool:
        """Where programs are being compiled, waits a little; False where none are."""
        if not self.aside:
            return False
        self._next(PATIENCE)
        return True

    def cancel(self, number: int, reason: str) -> None:
        """Ends the request of that number, if it is one of these."""
        for job in self.jobs:
            if job.ticket.id == number:
                self.aside = [begun for begun in self.aside if begun.job is not job]
                if self.begun is not None and self.begun.job is job:
                    self.begun = None
                self._shared.end(job, reason)

    # --- a beginning -------------------------------------------------------------------------------------

    def begin(self, waiting: Iterable[Job]) -> list[Job]:
        """Begins the first of these requests that has a place and its programs; those that wait no more.

        Where programs are missing they are compiled beside, and the request stands aside. Who has a place
        passes those who have none, but not for ever those who have no lane.
        """
        taken: list[Job] = []
        passed: list[Job] = []  # have no lane yet
        self._next()
        for job in waiting:
            if self.begun is not None:
                break
            try:
                begun = self._start(job)
            except Exception as error:  # of this request alone
                self._shared.fail(job, error)
                taken.append(job)
                continue
            if begun is not None:
                taken.append(job)
                self.aside.append(begun)
                self._next()
                for other in passed:
                    other.passed += 1
            elif job.laneless:
                if job.passed >= self._shared.settings.max_rows:
                    break  # lanes run empty until one can be dropped
                passed.append(job)
        return taken

    def _next(self, seconds: float = 0.0) -> None:
        """Takes the oldest request whose programs are there, where none is being read."""
        for begun in list(self.aside):
            if self.begun is None and self._compiled(begun, seconds):
                self.aside.remove(begun)
                self.begun = begun
        held = [begun.lane for begun in (self.begun, *self.aside) if begun is not None]
        self._shared.space.promised = [lane for lane in held if lane is not None]

    def _start(self, job: Job) -> Begun | None:
        """A reading of the request, and the lane it is for; None while there is no place."""
        settings, model = self._shared.settings, self._shared.model
        row = self._shared.space.row(job)
        lane = None if job.keeps else self._shared.space.lane(job, row)
        job.laneless = lane is None and not job.keeps
        if job.laneless or not self._welcome(lane):
            return None
        ranked = job.ticket.request.echo and job.ticket.request.logprobs is not None and not job.echoed
        start = beginning(self._shared, job, row, ranked)
        job.cached = start.seen
        if start.seen == len(job.tokens):
            return Begun(job, lane, None, start)
        key, borders = job.prefix_key, []
        if prefixes.shareable(job.policy) and not job.continues:
            borders = self._shared.space.prefixes.borders(key, job.tokens, settings.chunk)
        reading = Reading(
            model,
            job.policy,
            job.learned.weights,
            job.tokens,
            start.state,
            begun=start.seen,
            seed=job.ticket.request.seed,
            ranked=ranked,
            borders=borders,
            width=settings.chunk,
        )
        begun, programs = Begun(job, lane, reading, start), readings.programs(reading)
        if lane is not None and lane.sized:
            programs.append(lane.program(settings.segment))
        begun.pending = programs
        return begun

    def _welcome(self, lane: Lane | None) -> bool:
        """Has it a place beside those that stand aside? The first row of a lane decides its size alone."""
        aside = sum(begun.lane is lane for begun in self.aside)
        if lane is None or not lane.sized:
            return not aside
        return lane.places.count(None) > aside

    # --- a prompt ----------------------------------------------------------------------------------------

    def read(self) -> bool:
        """One unit of the reading, or what is due after it."""
        begun = self.begun
        assert begun is not None  # noqa: S101
        try:
            if begun.state is None:
                self._unit(begun)
                if self.begun is None or begun.state is None:
                    return True
            return self._place(begun)
        except Exception as error:  # of this request alone
            self.begun = None
            self._shared.fail(begun.job, error)
            return True

    def _compiled(self, begun: Begun, seconds: float) -> bool:
        """Are the programs compiled that a request waits for? If they cannot be, it fails alone."""
        try:
            ready = self._shared.compiler.ready(begun.pending, seconds)
        except Exception as error:  # of this request alone: another policy compiles
            self.aside.remove(begun)
            self._shared.fail(begun.job, error)
            return False
        waited = time.monotonic() - begun.since
        if ready and begun.pending and waited > TOLD:
            self._shared.note(
                f"programs of '{begun.job.policy!r}' took {waited:.1f} s to compile, beside the others"
            )
        return ready

    def _unit(self, begun: Begun) -> None:
        job, reading = begun.job, begun.reading
        assert reading is not None  # noqa: S101
        if not reading.done:  # the first of its kind was read beside, where its programs were made
            reading.unit()
            self.units += 1
        if not reading.done:
            return
        for border, state in reading.snapshots.items():
            kept = self._shared.space.remember(job.prefix_key, job.tokens[:border], state)
            begun.begins.append(kept)
        begun.state = reading.state
        self._shared.counts.prompt_tokens += len(job.tokens) - reading.begun
        self._shared.counts.cached_tokens += reading.begun
        if job.keeps:
            size = metrics.allocated(reading.state.layers)
            if not self._shared.space.room(size):
                raise RequestError(
                    f"context {job.keeps!r} takes {size} bytes beside {self._shared.space.allocated()} held, "
                    f"and kv_memory is {self._shared.settings.kv_memory}. Raise it, or delete other contexts."
                )
            store = self._shared.store
            store.put(job.keeps, job.tokens, job.policy, job.learned, reading.state, reading.logits)
            self.begun = None
            self._shared.end(job, "length")
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
            self.begun = None
            self._shared.counts.ended("length")
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
        self._shared.counts.drawn(job, events)
        job.put(events, kv)
        if job.ticket.done:
            self._shared.look(job, begun.state, 0, kv, metrics.allocated(begun.state.layers))
            self.begun = None
            self._shared.counts.ended(job.ticket.finish_reason or "error", kv)

    def _alone(self, state: KVState) -> KVUsage:
        """Of a row that has just been read."""
        known = look(state)
        if known.overflow:
            raise PoolOverflowError("a prompt ran out of pages: it was given too few.")
        return usages(self._shared.model.network, state, known)[0]

    # --- a place -----------------------------------------------------------------------------------------

    def _place(self, begun: Begun) -> bool:
        """The row that was read enters its lane, once there are pages for it; False while there are none."""
        job, lane, state = begun.job, begun.lane, begun.state
        assert state is not None  # noqa: S101
        assert lane is not None  # noqa: S101
        if begun.reading is None and not job.written:  # a context that is continued by nothing
            self._first(begun, begun.start.logits)
            return True
        known = look(state)
        lists = [x[0] for x in known.lists]
        coming = self._shared.space.coming(job, state, known)
        lent = lane.lender(job.policy, begun.start.of) if self._shared.settings.share_pages else None
        need = lane.need(job.policy, lists, coming, lent)
        if not lane.sized or not all(n <= have for n, have in zip(need, lane.spare())):
            return self._grow(begun, need)
        if lent is not None and not lane.shared:  # the lender runs, so the others go on meanwhile
            sharing = lane.program(self._shared.settings.segment, shared=True)
            if not self._shared.compiler.ready([sharing]):
                return False
        lane.insert(job, state, lane.need(job.policy, lists, coming), begun.begins, lent)
        self.begun = None
        self.warm = True
        return True

    def _grow(self, begun: Begun, need: list[int]) -> bool:
        """Larger pools for the row that waits; False while that cannot be."""
        lane, space, settings = begun.lane, self._shared.space, self._shared.settings
        assert lane is not None  # noqa: S101
        if begun.growth is None:
            counts = [
                have if n <= free else have + n - free
                for have, n, free in zip(lane.counts, need, lane.spare())
            ]
            sized = lane.sized
            begun.growth = space.affordable(lane, counts) if sized else space.beginning_with(lane, need)
        if begun.growth is None:
            if not space.running:
                raise RequestError(
                    f"the row needs {lane.bytes_of(need)} bytes of pages beside {space.allocated()} that are "
                    f"held, and kv_memory is {settings.kv_memory}. Raise it, or ask for fewer tokens."
                )
            return False
        programs = [lane.program(settings.segment, begun.growth)]
        if not self._shared.compiler.ready(programs):
            begun.pending, begun.since = programs, time.monotonic()
            self.aside.insert(0, begun)
            self.begun = None
            return True
        growth, begun.growth = begun.growth, None
        larger = all(have <= n for have, n in zip(lane.counts, growth))  # rows may have grown it meanwhile
        if larger and space.affordable(lane, growth, exactly=True) is not None:
            lane.resize(growth)
        return True
