"""A request under way: its tokens as they come, in whatever thread or event loop one waits for them."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator

from kvjax.engine._request import Event, Inspection, KVUsage, Request, Usage


class Ticket:
    """What ``Engine.submit`` gives. Iterate it (``for`` or ``async for``) once, from anywhere.

    Events are never lost: one who comes late finds all of them. The last one carries ``finish_reason``; where
    the engine fails, or the request does, the iteration raises instead (``EngineError``, or the request's
    own fault).

    Attributes:
      id: a number of its own, in the order of submission.
      request: as it was submitted.
      prompt_tokens: how many, those of a held context included.
    """

    def __init__(self, id: int, request: Request, prompt_tokens: int, cancel: Callable[[], None]) -> None:
        self.id = id
        self.request = request
        self.prompt_tokens = prompt_tokens
        self.submitted = time.monotonic()
        self._cancel = cancel
        self._lock = threading.Condition()
        self._events: collections.deque[Event] = collections.deque()
        self._waiting: list[Callable[[], None]] = []
        self._finish: str | None = None
        self._error: BaseException | None = None
        self._cached = self._completion = self._preempted = 0
        self._first: float | None = None
        self._ended: float | None = None
        self._kv: KVUsage | None = None
        self._last: Inspection | None = None

    # --- the asking side -------------------------------------------------------------------------

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
            self._waiting.append(wake)
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
                self._waiting.remove(wake)

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
        """End it: its row is free within one segment. Any thread, any time, as often as one likes."""
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
                preempted=self._preempted,
                first_token=None if self._first is None else self._first - self.submitted,
                total=end - self.submitted,
                kv=self._kv,
            )

    # --- the engine's side -----------------------------------------------------------------------

    def _put(self, events: list[Event], kv: KVUsage | None = None, cached: int | None = None) -> None:
        """New events, and what the row holds after them."""
        with self._lock:
            if self.done:
                return
            fresh = sum(event.token is not None and not event.prompt for event in events)
            if fresh and self._first is None:
                self._first = time.monotonic()
            self._completion += fresh
            self._kv = kv or self._kv
            self._cached = self._cached if cached is None else cached
            self._events += events
            if events and events[-1].finish_reason is not None:
                self._finish, self._ended = events[-1].finish_reason, time.monotonic()
            self._tell()

    def _again(self) -> None:
        """Its row had to make room."""
        with self._lock:
            self._preempted += 1

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            if not self.done:
                self._error, self._ended = error, time.monotonic()
                self._tell()

    def _tell(self) -> None:
        self._lock.notify_all()
        for wake in self._waiting:
            wake()
