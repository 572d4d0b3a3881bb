"""The engine: one thread that owns the device, and the methods through which all other threads reach it."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import itertools
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Any, Literal, TypeVar

import jax
import numpy as np

from kvjax import decode
from kvjax.algebra import Policy
from kvjax.decode import CHUNK, RequestError
from kvjax.engine.contexts import Contexts
from kvjax.engine.errors import Draining, EngineDead, QueueFull, TooManyStructures
from kvjax.engine.memory import Memory
from kvjax.engine.metrics import Counters, Metrics
from kvjax.engine.pages import paged
from kvjax.engine.prefill import widths
from kvjax.engine.prefiller import STARTS
from kvjax.engine.request import (
    MOST_BIASES,
    MOST_STOPS,
    Inspection,
    LearnedWeights,
    Progress,
    Request,
    WeightCache,
    check_numbers,
    check_space,
    read_stops,
)
from kvjax.engine.scheduler import Scheduler
from kvjax.engine.settings import EngineSettings
from kvjax.engine.ticket import EngineRequest, Ticket
from kvjax.sampling import sampling
from kvjax.types import Weighted
from kvjax.weights import Source

Health = Literal["loading", "ready", "draining", "dead"]

MINUTE = 60.0
"""Seconds in which a client's new structures are counted."""

T = TypeVar("T")


class Engine:
    """Many requests in running batches, each with its own policy. See the package.

    On one device, or on the devices of a mesh that cuts heads (``kvjax.load(..., mesh="tensor=8")``).

    All methods may be called from any thread; none but ``drain``, ``close`` and those of ``contexts`` that
    read a prompt takes longer than one program of a batch.
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
        prefill_tokens: int | None = None,
        page: int | None = None,
        share: float | None = None,
        share_pages: bool | None = None,
        new_structures: int = 0,
        max_contexts: int = 64,
        contexts_share: float = 0.5,
        contexts_ttl: float | None = None,
        host_memory: int = 0,
        on_note: Callable[[str], None] | None = None,
    ) -> None:
        """Checks everything and starts the engine's thread; nothing is compiled before the first request.

        Args:
          model: a network and its weights (``kvjax.load``); its devices hold the caches too.
          policy: for requests that name none.
          weights: sources of its learned weights, by part name.
          kv_memory: bytes that caches may have on the device: all batches, rows that are read, contexts and
            learned weights together; by default nine tenths of what the device has left.
          max_rows: most rows of a running batch.
          max_lanes: most running batches (policy structures) at a time.
          context: most tokens of a row, prompt and answer; by default the model's positions.
          queue: most requests that wait; one more raises ``QueueFull``.
          chunk: prompt tokens of a text that are read at a time.
          prefill_tokens: prompt tokens that are read between two programs of running rows, of one text or of
            several in one program; by default ``chunk``. No running row pauses for longer than these take (or
            a layer of one prompt, for policies that judge it as a whole).
          segment: decode steps of one program. The host acts between programs: a cancelled row is free after
            so many steps.
          page: slots of a page; by default chosen by the context.
          share: of the tokens still to come, how many a row is counted to store when it is admitted; by
            default all of them where the policy bounds them, else the share measured in the row's own prompt.
            Less admits more rows at the risk that the youngest has to be read again.
          share_pages: rows that begin with the same tokens share the pages that hold them. By default not on
            a CPU, where a read that may meet a page twice follows every list and does not walk the pool once.
          new_structures: most policy structures without compiled programs that a client (``Request.client``)
            may bring a minute; 0 for any number.
          max_contexts: most contexts that are held; the longest unused makes room for a new one.
          contexts_share: of ``kv_memory``, how much contexts may take; the rest is left for texts.
          contexts_ttl: seconds after its last use at which a context goes; None keeps it.
          host_memory: bytes of the host's memory for contexts that have no place among those on the device;
            the longest unused go there, and come back when they are continued. On one device.
          on_note: called with one line for the operator (a compilation took long, a row was put back).

        Raises:
          PolicyError, WeightsError, RequestError: what cannot be served at all.
        """
        self._model, self._policy, self._sources = model, decode.read_policy(policy, model), weights
        paged(self._policy, model.network.max_positions)  # refuses what no batch can hold
        self._settings = EngineSettings.checked(
            model,
            kv_memory=kv_memory,
            max_rows=max_rows,
            max_lanes=max_lanes,
            context=context,
            chunk=chunk,
            segment=segment,
            prefill_tokens=chunk if prefill_tokens is None else prefill_tokens,
            page=page,
            share=share,
            share_pages=share_pages,
            max_contexts=max_contexts,
            contexts_share=contexts_share,
            contexts_ttl=contexts_ttl,
            host_memory=host_memory,
        )
        self._most_waiting, self._new_structures = queue, new_structures
        self._brought: dict[str, dict[Hashable, float]] = {}  # new structures and when, by client
        self._weights = WeightCache(model)
        self._own_weights = self._weights.get(self._policy, weights)  # kept while the engine lives
        self._ids = itertools.count(1)
        self._inbox: SimpleQueue[Callable[[], Any]] = SimpleQueue()  # calls for the engine's thread
        self._lock = threading.Lock()
        self._entering = 0  # requests in the inbox, on their way to the queue
        self._stopping = False
        self._draining = False
        self._fault: BaseException | None = None
        self._tickets: dict[int, Ticket] = {}
        self._counters = Counters()
        self.contexts = Contexts(model, self._settings, self._weights, self._submit)
        note, calls_wait = on_note or (lambda line: None), lambda: not self._inbox.empty()
        memory = Memory(model, self._settings, self.contexts, self._weights)
        self._scheduler = Scheduler(memory, self._counters, note, calls_wait)
        self._thread = threading.Thread(target=self._run, name="kvjax-engine", daemon=True)
        self._thread.start()

    # --- any thread --------------------------------------------------------------------------------

    @property
    def model(self) -> Weighted:
        return self._model

    @property
    def policy(self) -> Policy:
        """Of requests that name none."""
        return self._policy

    @property
    def context(self) -> int:
        """Most tokens of a row, prompt and answer together."""
        return self._settings.context

    @property
    def health(self) -> Health:
        """ "loading" until the first row is written, "draining" after ``drain``, "dead" after a fault."""
        if self._fault is not None or self._stopping:
            return "dead"
        if self._draining:
            return "draining"
        return "ready" if self._scheduler.prefiller.warm else "loading"

    @property
    def fault(self) -> BaseException | None:
        """What killed the engine; None while it lives."""
        return self._fault

    def submit(self, request: Request) -> Ticket:
        """Takes a request; its tokens come through the ticket.

        Raises:
          RequestError, PolicyError, WeightsError: what cannot be served; nothing was begun.
          ContextNotFound, ContextMismatch: of ``request.context``.
          QueueFull: no more requests may wait.
          TooManyStructures: ``new_structures`` of the request's client were compiled within a minute.
          Draining, EngineDead: the engine takes nothing any more.
        """
        return self._submit([request])[0]

    def submit_all(self, requests: Sequence[Request]) -> list[Ticket]:
        """Takes all of these requests, or none.

        Raises:
          RequestError: more than may ever wait.
          EngineError, PolicyError, WeightsError: as ``submit``, of the first that is refused.
        """
        return self._submit(requests)

    def _submit(self, requests: Sequence[Request], keep_as: str = "", warms: bool = False) -> list[Ticket]:
        """``submit_all``; with a name the prompt is kept under it and nothing is written.

        ``warms``: they are there for the programs, also of those that read several, and wait for them.
        """
        if len(requests) > self._most_waiting:
            raise RequestError(
                f"{len(requests)} texts at once are more than the {self._most_waiting} that may wait. Ask "
                "for fewer, or start the engine with a longer queue."
            )
        checked = [self._checked(request, keep_as, warms) for request in requests]
        with self._lock:
            if self._fault is not None or self._stopping:
                raise self._dead() from self._fault
            if self._draining:
                raise Draining("the engine is being shut down and takes no new request. Ask another one.")
            waiting = len(self._scheduler.queue) + self._entering
            if waiting + len(checked) > self._most_waiting:
                raise QueueFull(waiting, self._counters.retry_after(waiting))
            for request in checked:
                self._count_structure(request)
            self._entering += len(checked)
            self._tickets |= {request.ticket.id: request.ticket for request in checked}
        self._inbox.put(functools.partial(self._enter, checked))
        return [request.ticket for request in checked]

    def _checked(self, request: Request, keep_as: str, warms: bool) -> EngineRequest:
        """The request as the engine's thread takes it; everything about it is checked here, once."""
        check_numbers(request)
        tokens = {"prompt": len(request.prompt), "answer": request.max_new_tokens}
        policy = self._policy
        if request.policy is not None:
            policy = decode.read_policy(request.policy, self._model, **tokens)
        policy = decode.with_draft(policy, request.draft)
        batched = paged(policy, self._settings.context)
        self._scheduler.memory.check_fits(batched)  # computes its shapes in this thread: that takes a while
        learned = self._learned(request, policy)
        ids = decode.read_ids("Request(prompt=...)", self._model, request.prompt)
        if request.context is not None:
            ids = np.concatenate([self.contexts.tokens(request.context, request.owner, policy, learned), ids])
        check_space(request, len(ids), self._settings.context)
        (pieces,) = decode.prompt_pieces("Request(prompt=...)", self._model, policy, [ids])
        decode.read_ids("Request(logit_bias=...)", self._model, [*(request.logit_bias or {})])
        stops = read_stops(request, self._model)
        how = sampling(
            1,
            temperature=request.temperature,
            top_k=request.top_k,
            top_p=request.top_p,
            min_p=request.min_p,
            frequency_penalty=request.frequency_penalty,
            presence_penalty=request.presence_penalty,
            repetition_penalty=request.repetition_penalty,
            logit_bias=request.logit_bias,
            min_tokens=request.min_tokens,
            seed=request.seed,
            requests=[request.draw],
            prompts=[ids],
            stops=stops,
            context=self._settings.context,
            most_biases=MOST_BIASES,
            most_stops=MOST_STOPS,
        )
        number = next(self._ids)
        return EngineRequest(
            ticket=Ticket(
                number,
                request,
                len(ids),
                lambda: self._cancel(number),
                sum(len(piece.tokens) for piece in pieces),
            ),
            counters=self._counters,
            tokens=ids,
            policy=batched,
            learned=learned,
            stops=stops,
            sampling=jax.device_get(how),
            guide=None if request.guide is None else request.guide(),
            context=request.context or "",
            keep_as=keep_as,
            warms=warms,
        )

    def _count_structure(self, request: EngineRequest) -> None:
        """Raises TooManyStructures if the client brought too many. Under the lock."""
        name, now, client = (
            self._scheduler.memory.new_structure(request),
            time.monotonic(),
            request.options.client,
        )
        if not self._new_structures or name is None:
            return
        self._brought = {
            one: recent
            for one, names in self._brought.items()
            if (recent := {key: when for key, when in names.items() if now - when < MINUTE})
        }
        brought = self._brought.setdefault(client, {})
        if name not in brought and len(brought) >= self._new_structures:
            wait = MINUTE - (now - sorted(brought.values())[-self._new_structures])
            raise TooManyStructures(self._new_structures, max(1.0, wait))
        brought.setdefault(name, now)

    def _learned(self, request: Request, policy: Policy) -> LearnedWeights:
        """The policy's weights: those the request names, its context's, or the engine's own."""
        if request.weights is not None:
            return self._weights.get(policy, request.weights)
        context = None if request.context is None else self.contexts.held(request.context, request.owner)
        if context is not None and context.policy.structure == policy.structure:
            return context.learned
        names = {part.name for part in policy.learned}
        sources = {name: source for name, source in (self._sources or {}).items() if name in names}
        return self._weights.get(policy, sources)

    def inspect(self, ticket: Ticket) -> Inspection | None:
        """The cache of a running row as it is now; None while it waits.

        Once it is done: as it was at the end where ``Request.inspect`` asked for that, else None.

        Raises:
          EngineDead: the engine has ended.
        """
        if ticket.done:
            return ticket._inspection
        return self._call(lambda: self._scheduler.inspect(ticket.id)) or ticket._inspection

    def progress(self, ticket: Ticket) -> Progress:
        """How far a request is; of one that waits, how much of its prompt needs not be read is not known yet.

        Raises:
          EngineDead: the engine has ended.
        """
        done = Progress("done", ticket.prompt_tokens)
        if ticket.done:
            return done
        found = self._call(lambda: self._scheduler.progress(ticket.id))
        return found or (done if ticket.done else Progress("waiting", 0))

    def metrics(self, *, wait: bool = True) -> Metrics:
        """One consistent snapshot, taken between two programs.

        Args:
          wait: for the engine's thread. False answers at once; what ends meanwhile may be counted in part.

        Raises:
          EngineDead: the engine has ended.
        """
        if wait:
            return self._call(lambda: self._scheduler.metrics(self._entering))
        if self._fault is not None or self._stopping:
            raise self._dead() from self._fault
        return self._scheduler.metrics(self._entering)

    def warm_up(
        self,
        policy: str | Policy | None = None,
        weights: Mapping[str, Source] | None = None,
        prompts: Sequence[int] = (1,),
        rows: Sequence[int] = (1,),
        answer: int = 2,
    ) -> float:
        """Compiles the programs of a policy before a request needs them; the seconds it took.

        Args:
          policy, weights: as of a ``Request``.
          prompts: lengths of the prompts whose programs are compiled, each by reading one; those that leave
            no room for an answer are left out.
          rows: how many of each are read at once, where one program reads as many (``usual_rows``).
          answer: new tokens for which the pools get pages, 2 or more; two are written.

        Raises:
          PolicyError, WeightsError: as ``submit``.
        """
        begun, vocabulary = time.monotonic(), self._model.params["embed"].shape[0]
        number = itertools.count()
        for length in prompts:
            left = self.context - length
            for many in rows if left >= 2 else ():
                requests = [
                    Request(
                        prompt=np.full(length, next(number) % vocabulary),  # begins as no other does
                        max_new_tokens=min(left, answer),
                        policy=policy,
                        weights=weights,
                        ignore_eos=True,
                        owner="warm-up",
                    )
                    for _ in range(many)
                ]
                for ticket in self._submit(requests, warms=True):
                    for _ in zip(range(2), ticket):  # the second token is a step's
                        pass
                    ticket.cancel()
                    for _ in ticket:
                        pass
        return time.monotonic() - begun

    def usual_prompts(self) -> tuple[int, ...]:
        """Lengths of prompts by which ``warm_up`` meets every width of chunk and the first sizes of pools."""
        return widths(self._settings.chunk)

    def usual_rows(self) -> tuple[int, ...]:
        """How many prompts ``warm_up`` has read at once, so that it meets programs of several."""
        most = min(self._settings.prefill_tokens // widths(self._settings.chunk)[0], self._settings.max_rows)
        return tuple(many for many in (1, 2, STARTS) if many <= max(1, min(most, self._most_waiting)))

    def drain(self, deadline: float | None = None) -> bool:
        """Takes nothing new and waits until everything is done; after ``deadline`` seconds ends the rest.

        Returns:
          True where all requests ended by themselves. Contexts stay; ``close`` ends the thread.
        """
        with self._lock:
            self._draining = True
        until = None if deadline is None else time.monotonic() + deadline
        while self._thread.is_alive() and any(not ticket.done for ticket in list(self._tickets.values())):
            if until is not None and time.monotonic() >= until:
                for number in list(self._tickets):
                    self._cancel(number)
                return False
            time.sleep(0.01)
        return True

    def close(self) -> None:
        """Ends the thread; requests that are not done fail with ``EngineDead``. Idempotent."""
        with self._lock:
            self._draining = self._stopping = True
        self._inbox.put(lambda: None)  # wakes the thread
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def _cancel(self, number: int) -> None:
        self._inbox.put(lambda: self._scheduler.cancel(number))

    def _call(self, do: Callable[[], T]) -> T:
        """The result of ``do`` on the engine's thread, between two programs; waits for it."""
        if threading.current_thread() is self._thread:
            return do()
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            try:
                future.set_result(do())
            except BaseException as error:  # raised again in the caller's thread
                future.set_exception(error)

        self._inbox.put(run)
        while True:
            try:
                return future.result(timeout=0.5)
            except concurrent.futures.TimeoutError:
                if future.done():
                    raise
                if not self._thread.is_alive():
                    raise self._dead() from self._fault

    def _dead(self, message: str = "the engine has ended. Start another one.") -> EngineDead:
        error = EngineDead(message)
        error.__cause__ = self._fault
        return error

    # --- the engine's thread -----------------------------------------------------------------------

    def _enter(self, requests: Sequence[EngineRequest]) -> None:
        with self._lock:
            self._entering -= len(requests)
        self._scheduler.queue.extend(requests)

    def _run(self) -> None:
        try:
            wait = 0.0
            while not self._stopping:
                self._make_calls(wait)
                wait = 0.0 if self._scheduler.turn() else 0.25
                for number in [number for number, ticket in list(self._tickets.items()) if ticket.done]:
                    self._counters.request_ended(self._tickets.pop(number).usage)
        except BaseException as fault:  # a request's own faults are caught where they happen
            self._fault = fault
        finally:
            self._stopping = True
            self._scheduler.compiler.close()
            self._make_calls()
            for ticket in list(self._tickets.values()):
                ticket._fail(self._dead("the engine ended before the request did. Ask again elsewhere."))

    def _make_calls(self, wait: float = 0.0) -> None:
        """Makes the calls of other threads; waits so many seconds for the first."""
        with contextlib.suppress(Empty):
            call = self._inbox.get(timeout=wait) if wait else self._inbox.get_nowait()
            while True:
                call()
                call = self._inbox.get_nowait()
