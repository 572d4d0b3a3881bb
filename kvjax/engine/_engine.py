"""The engine: one thread that owns the device, and the door through which everybody else reaches it."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Literal, TypeVar

import numpy as np

from kvjax import decode
from kvjax.algebra import Policy
from kvjax.decode import CHUNK
from kvjax.engine._check import (
    Learned,
    Shelf,
    check_numbers,
    check_space,
    checked_stops,
    chosen_policy,
    prompt_ids,
)
from kvjax.engine._contexts import Contexts
from kvjax.engine._errors import Draining, EngineDead, QueueFull
from kvjax.engine._inbox import Inbox
from kvjax.engine._layout import paged
from kvjax.engine._metrics import Metrics
from kvjax.engine._request import Inspection, Request
from kvjax.engine._schedule import Scheduler
from kvjax.engine._settings import Settings
from kvjax.engine._store import Store
from kvjax.engine._ticket import Ticket
from kvjax.engine._work import Job, draw_key
from kvjax.types import Weighted
from kvjax.weights import Source

Health = Literal["loading", "ready", "draining", "dead"]

T = TypeVar("T")


class Engine:
    """Many requests in running batches, each with its own policy. See the package.

    On one device, or on the devices of a mesh that cuts heads (``kvjax.load(..., mesh="tensor=8")``).

    All methods may be called from any thread; none but ``drain``, ``close`` and those of ``contexts`` that
    read a prompt takes longer than a segment.
    """

    def __init__(
        self,
        model: Weighted,
        *,
        policy: str | Policy = "full",
        weights: Mapping[str, Source] | None = None,
        kv_memory: int | None = None,
        max_rows: int = 16,
        max_lanes: int = 8,
        context: int | None = None,
        queue: int = 64,
        chunk: int = CHUNK,
        segment: int = 8,
        page: int | None = None,
        share: float | None = None,
        share_pages: bool | None = None,
        on_note: Callable[[str], None] | None = None,
    ) -> None:
        """Checks everything and starts the engine's thread; nothing is compiled before the first request.

        Args:
          model: a network and its weights (``kvjax.load``), where the caches then are.
          policy: for requests that name none.
          weights: sources of its learned weights, by part name.
          kv_memory: bytes that caches may have on the device, all lanes and contexts together; by default
            nine tenths of what the device has left.
          max_rows: most rows of a lane.
          max_lanes: most lanes (policy structures) at a time.
          context: most tokens of a row, prompt and answer; by default the model's positions.
          queue: most requests that wait; one more raises ``QueueFull``.
          chunk: prompt tokens read at a time; no running row pauses longer than one chunk takes (or one
            layer, for policies that judge a whole prompt).
          segment: steps between two looks of the host: a cancelled row is free after so many.
          page: slots of a page; by default chosen by the context.
          share: of the tokens still to come, how many a row is counted to store when it is admitted; by
            default all of them where the policy bounds them, else the share measured in the row's own prompt.
            Less admits more rows at the risk that the youngest has to be read again.
          share_pages: rows that begin with the same tokens share the pages that hold them. By default not on
            a CPU, where a read that may meet a page twice follows every list and does not walk the pool once.
          on_note: told what an operator should know (a lane was made and how long that took, a row was put
            back); one line each.

        Raises:
          PolicyError, WeightsError, RequestError: what cannot be served at all.
        """
        default = decode.read_policy(policy, model)
        self._shelf = Shelf(model)
        self._settings = Settings.checked(
            model,
            kv_memory=kv_memory,
            max_rows=max_rows,
            max_lanes=max_lanes,
            context=context,
            chunk=chunk,
            segment=segment,
            page=page,
            share=share,
            share_pages=share_pages,
        )
        self._model, self._default, self._given, self._most = model, default, weights, queue
        self._shelf.get(default, weights)
        self._ids = itertools.count(1)
        self._inbox = Inbox()
        self._lock = threading.Lock()
        self._waiting = 0
        self._stopping = False
        self._draining = False
        self._fault: BaseException | None = None
        self._tickets: dict[int, Ticket] = {}
        store, note = Store(), on_note or (lambda line: None)
        self._scheduler = Scheduler(model, self._settings, store, note, lambda: self._inbox.waiting)
        self.contexts = Contexts(model, self._settings, self._shelf, self._submit, store)
        self._thread = threading.Thread(target=self._run, name="kvjax-engine", daemon=True)
        self._thread.start()

    # --- what one asks -----------------------------------------------------------------------------

    @property
    def model(self) -> Weighted:
        """The model that answers."""
        return self._model

    @property
    def policy(self) -> Policy:
        """Of requests that name none."""
        return self._default

    @property
    def context(self) -> int:
        """Most tokens of a row, prompt and answer together."""
        return self._settings.context

    @property
    def health(self) -> Health:
        """ "loading" until the first lane is compiled, "draining" after ``drain``, "dead" after a fault."""
        if self._fault is not None or self._stopping:
            return "dead"
        if self._draining:
            return "draining"
        return "ready" if self._scheduler.warm else "loading"

    @property
    def fault(self) -> BaseException | None:
        """What killed the engine; None while it lives."""
        return self._fault

    def submit(self, request: Request) -> Ticket:
        """Takes a request; its tokens come through the ticket.

        Raises:
          RequestError, PolicyError, WeightsError: what cannot be served; nothing was begun.
          ContextNotFound, ContextMismatch: of ``request.context``.
          QueueFull: as many wait as may.
          Draining, EngineDead: the engine takes nothing any more.
        """
        return self._submit(request)

    def _submit(self, request: Request, keeps: str = "") -> Ticket:
        """``submit``; with a name the prompt is kept under it and nothing is written."""
        job = self._prepared(request, keeps)
        with self._lock:
            self._check_alive()
            waiting = self._scheduler.queued + self._waiting
            if waiting >= self._most:
                raise QueueFull(waiting, self._scheduler.retry_after(waiting))
            self._waiting += 1
            self._tickets[job.ticket.id] = job.ticket
        self._inbox.post(lambda: self._enter(job))
        return job.ticket

    def inspect(self, ticket: Ticket) -> Inspection | None:
        """The cache of a running row as it is now; None while it waits.

        Once it is done: as it was at the end where ``Request.inspect`` asked for that, else None.

        Raises:
          EngineDead: the engine is no more.
        """
        if ticket.done:
            return ticket._last
        return self._call(lambda: self._scheduler.inspect(ticket.id)) or ticket._last

    def metrics(self) -> Metrics:
        """One consistent snapshot.

        Raises:
          EngineDead: the engine is no more.
        """
        return self._call(lambda: self._scheduler.metrics(self._waiting))

    def warm_up(
        self, policy: str | Policy | None = None, weights: Mapping[str, Source] | None = None
    ) -> float:
        """Makes and compiles the lane of a policy before anybody waits for it; the seconds it took.

        Raises:
          PolicyError, WeightsError: as ``submit``.
        """
        begun = time.monotonic()
        asked = Request(prompt=[0], max_new_tokens=2, policy=policy, weights=weights, ignore_eos=True)
        self.submit(asked).result()
        return time.monotonic() - begun

    def drain(self, deadline: float | None = None) -> bool:
        """Takes nothing new and waits until everything is done; after ``deadline`` seconds ends the rest.

        Returns:
          True where all requests ended by themselves. Contexts stay; ``close`` ends the thread.
        """
        with self._lock:
            self._draining = True
        until = None if deadline is None else time.monotonic() + deadline
        while self._thread.is_alive() and self._busy():
            if until is not None and time.monotonic() >= until:
                self._cancel_all()
                return False
            time.sleep(0.01)
        return True

    def close(self) -> None:
        """Ends the thread; requests that are not done fail with ``EngineDead``. Idempotent."""
        with self._lock:
            self._draining = self._stopping = True
        self._inbox.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    # --- between the threads -------------------------------------------------------------------------

    def _prepared(self, request: Request, keeps: str = "") -> Job:
        """The request, checked, as the engine's thread takes it."""
        check_numbers(request)
        policy = chosen_policy(request, self._default, self._model)
        learned = self._learned(request, policy)
        ids = prompt_ids(self._model, request.prompt)
        if request.context is not None:
            ids = np.concatenate([self.contexts.tokens(request.context, policy, learned), ids])
        check_space(len(ids), request, self._settings.context)
        ends = () if request.ignore_eos else tuple(getattr(getattr(self._model, "spec", None), "eos", ()))
        number = next(self._ids)
        return Job(
            ticket=Ticket(number, request, len(ids), lambda: self._cancel(number)),
            tokens=ids,
            policy=paged(policy, self._settings.context),
            learned=learned,
            stops=checked_stops((*ends, *request.stop_tokens)),
            key=draw_key(request.seed, request.draw),
            continues=request.context or "",
            keeps=keeps,
        )

    def _learned(self, request: Request, policy: Policy) -> Learned:
        """The policy's weights: those the request names, its context's, or what the engine was told."""
        if request.weights is not None:
            return self._shelf.get(policy, request.weights)
        held = None if request.context is None else self.contexts.learned(request.context, policy)
        names = {part.name for part in policy.learned}
        given = {name: source for name, source in (self._given or {}).items() if name in names}
        return held or self._shelf.get(policy, given)

    def _enter(self, job: Job) -> None:
        with self._lock:
            self._waiting -= 1
        self._scheduler.enter(job)

    def _cancel(self, number: int) -> None:
        self._inbox.post(lambda: self._scheduler.cancel(number))

    def _cancel_all(self) -> None:
        for number in list(self._tickets):
            self._cancel(number)

    def _busy(self) -> bool:
        return any(not ticket.done for ticket in list(self._tickets.values()))

    def _check_alive(self) -> None:
        if self._fault is not None or self._stopping:
            raise self._no_more() from self._fault
        if self._draining:
            raise Draining("the engine is being shut down and takes no new request. Ask another one.")

    def _no_more(self) -> EngineDead:
        error = EngineDead("the engine is no more. Start another one.")
        error.__cause__ = self._fault
        return error

    def _call(self, do: Callable[[], T]) -> T:
        """What ``do`` gives in the engine's thread, between two segments."""
        if threading.current_thread() is self._thread:
            return do()
        return self._inbox.call(do, lambda: None if self._thread.is_alive() else self._no_more())

    # --- the engine's thread -------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._inbox.work()
                if not self._scheduler.turn():
                    self._inbox.wait(0.25)
                self._forget_done()
        except BaseException as fault:  # a request's own faults are caught where they happen
            self._fault = fault
        finally:
            self._stopping = True
            self._scheduler.close()
            self._inbox.work()
            for ticket in list(self._tickets.values()):
                error = EngineDead("the engine ended before the request did. Ask again elsewhere.")
                error.__cause__ = self._fault
                ticket._fail(error)

    def _forget_done(self) -> None:
        for number in [number for number, ticket in list(self._tickets.items()) if ticket.done]:
            del self._tickets[number]
