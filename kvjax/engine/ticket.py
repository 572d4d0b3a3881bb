"""A request under way: the caller's end of it (``Ticket``), and the engine's (``EngineRequest``)."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING

import jax
import numpy as np

from kvjax.algebra import Policy
from kvjax.cache.state import KVState
from kvjax.decode import RequestError
from kvjax.engine.decoding import SampledTokens
from kvjax.engine.metrics import Counters, held_positions
from kvjax.engine.prefix import Key, generated_too
from kvjax.engine.request import Event, Guide, Inspection, KVUsage, LearnedWeights, Request, Usage
from kvjax.sampling import Sampling

if TYPE_CHECKING:
    from jaxtyping import Int


class Ticket:
    """What ``Engine.submit`` gives. Iterate it (``for`` or ``async for``) once, from any thread or loop.

    Events are never lost: who comes late finds all of them. The last one carries ``finish_reason``; where the
    engine fails, or the request does, the iteration raises instead (``EngineError``, or the request's own
    fault).

    Attributes:
      id: a number of its own, in the order of submission.
      request: as it was submitted.
      prompt_tokens: how many, those of a held context included.
      replayed_tokens: how many are fed behind the prompt before it is cut (``Eviction.replays``).
      submitted: when, by ``time.monotonic``.
    """

    def __init__(
        self,
        id: int,
        request: Request,
        prompt_tokens: int,
        cancel: Callable[[], None],
        replayed_tokens: int = 0,
    ) -> None:
        self.id = id
        self.request = request
        self.prompt_tokens, self.replayed_tokens = prompt_tokens, replayed_tokens
        self.submitted = time.monotonic()
        self._cancel = cancel
        self._lock = threading.Condition()
        self._events: collections.deque[Event] = collections.deque()
        self._wakes: list[Callable[[], None]] = []  # of event loops that wait
        self._finish: str | None = None
        self._error: BaseException | None = None
        self._cached = self._completion = self._preempted = 0
        self._drafted = self._accepted = 0
        self._first: float | None = None
        self._ended: float | None = None
        self._kv: KVUsage | None = None
        self._inspection: Inspection | None = None

    # --- the caller's side ------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Event]:
        """Blocks for each event until the last."""
        while True:
            with self._lock:
                while not self._events and not self.done:
                    self._lock.wait()
                event = self._next()
            yield event
            if event.finish_reason is not None:
                return

    async def __aiter__(self) -> AsyncIterator[Event]:
        """The same in an event loop, which is not blocked."""
        loop, came = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(came.set)

        with self._lock:
            self._wakes.append(wake)
        try:
            while True:
                came.clear()
                with self._lock:
                    event = self._next() if self._events or self.done else None
                if event is None:
                    await came.wait()
                    continue
                yield event
                if event.finish_reason is not None:
                    return
        finally:
            with self._lock:
                self._wakes.remove(wake)

    def _next(self) -> Event:
        """Under the lock, where there is an event or an end."""
        if self._events:
            return self._events.popleft()
        if self._error is not None:
            raise self._error
        return Event(None, finish_reason=self._finish)

    def result(self, timeout: float | None = None) -> list[int]:
        """All new token ids; blocks. Do not iterate as well.

        Raises:
          TimeoutError: not done in so many seconds.
        """
        with self._lock:
            if not self._lock.wait_for(lambda: self.done, timeout):
                raise TimeoutError(
                    f"request {self.id} is not done after {timeout} s. Wait longer, or cancel."
                )
        return [event.token for event in self if event.token is not None and not event.prompt]

    def cancel(self) -> None:
        """Ends it; its row is free after the running program. From any thread, at any time, repeatedly."""
        self._cancel()

    @property
    def done(self) -> bool:
        """Has the last event been made? (It may still wait to be taken.)"""
        return self._finish is not None or self._error is not None

    @property
    def finish_reason(self) -> str | None:
        """One of ``FINISHES``; None before the end, and where it failed."""
        return self._finish

    @property
    def usage(self) -> Usage:
        """What it took so far; final once ``done``."""
        with self._lock:
            end = time.monotonic() if self._ended is None else self._ended
            return Usage(
                prompt_tokens=self.prompt_tokens,
                cached_tokens=self._cached,
                completion_tokens=self._completion,
                drafted_tokens=self._drafted,
                accepted_tokens=self._accepted,
                preempted=self._preempted,
                first_token=None if self._first is None else self._first - self.submitted,
                total=end - self.submitted,
                kv=self._kv,
            )

    # --- the engine's side -----------------------------------------------------------------------

    def _deliver(self, events: list[Event], new: int, kv: KVUsage | None, cached: int) -> None:
        """Events with so many new tokens, and what the row holds after them."""
        with self._lock:
            if self.done:
                return
            if new and self._first is None:
                self._first = time.monotonic()
            self._completion += new
            self._kv = kv or self._kv
            self._cached = cached
            self._events += events
            if events and events[-1].finish_reason is not None:
                self._finish, self._ended = events[-1].finish_reason, time.monotonic()
            self._wake()

    def _count_drafts(self, drafted: int, accepted: int) -> None:
        with self._lock:
            self._drafted += drafted
            self._accepted += accepted

    def _restarted(self) -> None:
        """Its row made room for others and is read again."""
        with self._lock:
            self._preempted += 1

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            if not self.done:
                self._error, self._ended = error, time.monotonic()
                self._wake()

    def _wake(self) -> None:
        self._lock.notify_all()
        for wake in self._wakes:
            wake()


@dataclasses.dataclass(kw_only=True, eq=False)
class EngineRequest:
    """A request as the engine's thread works on it, from the queue to its end."""

    ticket: Ticket
    counters: Counters
    tokens: Int[np.ndarray, " T"]  # the whole prompt, that of a held context included
    policy: Policy  # in the layout of batches
    learned: LearnedWeights
    stops: tuple[int, ...]  # token ids that end it
    sampling: Sampling  # of one row, on the host
    guide: Guide | None = None  # after what it wrote so far
    context: str = ""  # the name of the held context that its prompt begins with, one of its owner's
    keep_as: str = ""  # the name under which its prompt is to be held, once read; then nothing is written
    warms: bool = False  # is it there to have programs compiled?
    written: list[int] = dataclasses.field(default_factory=list)  # new tokens so far
    skip: int = 0  # new tokens that were handed out before its row had to make room
    echoed: bool = False  # was the prompt handed out?
    cached: int = 0  # tokens of the prompt that did not have to be read
    without_batch: bool = False  # is there no batch for it, and no memory for one?
    alone: bool = False  # had all idle batches to go for it?
    apart: bool = False  # is its prompt read alone, since a program of several prompts failed?
    overtaken: int = 0  # requests that came later and were begun before it, while it had no batch
    begun: bool = False  # has its prompt ever begun to be read?
    last: float | None = None  # when its last tokens were handed out

    @property
    def options(self) -> Request:
        """What the caller submitted."""
        return self.ticket.request

    @property
    def text(self) -> Int[np.ndarray, " T"]:
        """What is read before it is written on: its prompt, and what it wrote before it made room.

        The last token is fed by the next step.
        """
        if not self.written:
            return self.tokens
        return np.concatenate([self.tokens, np.asarray(self.written[:-1], self.tokens.dtype)])

    @property
    def left(self) -> int:
        """Tokens it may still write."""
        return self.options.max_new_tokens - len(self.written)

    @property
    def shaped(self) -> bool:
        """Does it change logits before a draw (``kvjax.sampling.Shaping``)?"""
        return self.sampling.shaping is not None

    @property
    def guided(self) -> bool:
        """Does a guide say which tokens may come?"""
        return self.guide is not None

    @property
    def how(self) -> Sampling:
        """How its next token is drawn: ``sampling``, and what was written so far."""
        shaping = self.sampling.shaping
        if shaping is None:
            return self.sampling
        tokens, begin = np.array(shaping.tokens), len(self.tokens)
        tokens[0, begin : begin + len(self.written)] = self.written
        shaping = dataclasses.replace(shaping, tokens=tokens)  # type: ignore[arg-type]
        return dataclasses.replace(self.sampling, shaping=shaping)

    @functools.cached_property
    def structure(self) -> tuple[str, str, str]:
        """What rows of one batch have in common, besides the sizes of their lists."""
        return _named(self.learned.after_prompt(self.policy), self.policy.after_prompt)

    @functools.cached_property
    def reading(self) -> tuple[str, str, str]:
        """What prompts that are read by the same programs have in common, besides these sizes."""
        return _named(self.learned, self.policy)

    @property
    def prefix_key(self) -> Key:
        """A state that it may begin with has this."""
        return repr(self.policy), self.learned.label, self.options.owner

    def reads_as(self, other: EngineRequest) -> bool:
        """Is one reading of the prompt enough for both? Then they differ in what is written."""
        own, others = self.options, other.options
        return (
            self.prefix_key == other.prefix_key
            and not (self.keep_as or other.keep_as or self.written or other.written)
            and self.context == other.context
            and (self.shaped, self.guided) == (other.shaped, other.guided)
            and (own.echo, own.logprobs is None) == (others.echo, others.logprobs is None)
            and (own.seed == others.seed or not self.policy.whole_prompt)  # an eviction may draw
            and np.array_equal(self.tokens, other.tokens)
        )

    def restart(self) -> None:
        """Begins again; tokens that were handed out are not handed out again.

        What it wrote is read, where that leaves the state that writing left; else it is written again.
        """
        self.skip = max(self.skip, len(self.written))
        if not generated_too(self.policy):
            self.written = []
            if self.options.guide is not None:
                self.guide = self.options.guide()
        self.ticket._restarted()
        self.counters.preempted += 1

    def record(self, drawn: SampledTokens, row: int) -> list[Event]:
        """Takes a row's drawn tokens; the events that are new, the last with the reason if it ends."""
        ranked, events = self.options.logprobs, []
        for at, token in enumerate(drawn.token[row].tolist()):
            if token < 0:
                break
            self.written.append(token)
            if self.guide is not None:
                self.guide.take(token)
                if self.guide.error:
                    self.ticket._fail(RequestError(f"Request(guide=...): {self.guide.error}"))
                    break
            ended = token in self.stops or (self.guide is not None and self.guide.done)
            done = "stop" if ended else None if self.left > 0 else "length"
            logprob = None if ranked is None else float(drawn.logprob[row, at])
            best = () if ranked is None else likeliest(drawn.best[row, at], drawn.logprobs[row, at], ranked)
            if len(self.written) > self.skip:
                events.append(Event(token, logprob, best, done))
            if done:
                break
        return events

    def count_drafts(self, drafted: int, accepted: int) -> None:
        """Counts what a program drafted for it."""
        if drafted:
            self.ticket._count_drafts(drafted, accepted)
            self.counters.drafted_tokens += drafted
            self.counters.accepted_tokens += accepted

    def deliver(self, events: list[Event], kv: KVUsage | None, took: float = 0.0) -> None:
        """Hands events out and counts new tokens, which took so many seconds to make."""
        new = sum(event.token is not None and not event.prompt for event in events)
        if new:
            self.last = self.counters.tokens(new, took, self.ticket.submitted, self.last)
        self.ticket._deliver(events, new, kv, self.cached)

    def finish(self, reason: str, kv: KVUsage | None = None) -> None:
        """Ends it; its last token is out."""
        self.deliver([Event(None, finish_reason=reason)], kv)
        self.counters.ended(reason, kv)

    def fail(self, error: Exception) -> None:
        """Its ticket raises the error."""
        self.ticket._fail(error)
        self.counters.ended("error")

    def inspection(self, state: KVState, row: int, kv: KVUsage, allocated: int) -> Inspection:
        """What its row of a state holds, position by position; ``allocated``: device bytes of the state."""
        return Inspection(
            seen=kv.seen,
            tokens=np.concatenate([self.tokens, np.asarray(self.written, np.int32)])[: kv.seen],
            heads=held_positions(state, row),
            completed=tuple(cache.summary is not None for cache in state.layers),
            live=kv.live,
            full=kv.full,
            allocated=allocated,
        )

    def keep_inspection(self, state: KVState, row: int, kv: KVUsage, allocated: int) -> None:
        """Keeps what its row holds at its end, where that was asked for."""
        if self.options.inspect:
            self.ticket._inspection = self.inspection(state, row, kv, allocated)


def _named(learned: LearnedWeights, policy: Policy) -> tuple[str, str, str]:
    return learned.label, policy.structure, str(jax.tree.structure(policy))


def likeliest(ids: np.ndarray, values: np.ndarray, most: int) -> tuple[tuple[int, float], ...]:
    """(token id, log-probability) of the first ``most``."""
    return tuple(zip(ids[:most].tolist(), values[:most].tolist()))
