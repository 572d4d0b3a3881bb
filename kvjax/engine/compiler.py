"""Programs are compiled beside the running ones: a new batch or a larger pool does not stop the others.

Why: kvjax/DESIGN.md, 18.
"""

from __future__ import annotations

import collections
import concurrent.futures
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax

from kvjax.programs import maps_taken

CROWDED = 0.75
"""Share of a process's memory maps from which on compiled programs are dropped before one more is made."""

PATIENCE = 0.02
"""Seconds to wait for a compilation where nothing else is to be done."""

Program = tuple[Any, Callable[[], Any]]
"""A key, and what compiles the program of that key."""


class Compiler:
    """One thread that compiles, each key once.

    Where JAX keeps what was compiled ahead of time (0.8 and later) the first call finds its program made.

    On a CPU a program holds hundreds of memory maps, of which Linux lets a process have only so many; beyond
    them the compiler crashes, and the server with it. So all programs are dropped in time; those that are
    still in use are made again when they are called next.
    """

    def __init__(self, note: Callable[[str], None] = lambda line: None) -> None:
        self._note = note  # called when programs were dropped
        self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="kvjax-compile")
        self._made: dict[Hashable, concurrent.futures.Future[Any]] = {}
        self._line: collections.deque[tuple[concurrent.futures.Future[Any], Callable[[], Any]]]
        self._line = collections.deque()

    def ready(self, programs: Sequence[Program], wait: float = 0.0, *, urgent: bool = False) -> bool:
        """Are all of them compiled? New ones are begun, and those that failed.

        Args:
          programs: keys, and what compiles them.
          wait: seconds to wait for them.
          urgent: running rows wait for them: they go before all others that were not begun.

        Raises:
          Exception: what a compilation raised.
        """
        new = [key for key, _ in programs if key not in self._made]
        if new and maps_taken() > CROWDED and not self._dropped():
            return False
        for key, make in programs:
            if key not in self._made:
                future: concurrent.futures.Future[Any] = concurrent.futures.Future()
                self._made[key] = future
                (self._line.appendleft if urgent else self._line.append)((future, make))
                self._pool.submit(self._one)
        futures = {key: self._made[key] for key, _ in programs}
        _, pending = concurrent.futures.wait(futures.values(), timeout=wait)
        for key, future in futures.items():
            if future.done() and future.exception() is not None:
                del self._made[key]  # the next request for it tries again
                future.result()
        return not pending

    def _one(self) -> None:
        future, make = self._line.popleft()
        try:
            future.set_result(make())
        except BaseException as error:  # raised again in ``ready``
            future.set_exception(error)

    def _dropped(self) -> bool:
        """Drops every compiled program; False while one is being made."""
        if not all(future.done() for future in self._made.values()):
            return False
        before = maps_taken()
        self._made.clear()
        jax.clear_caches()
        self._note(
            f"compiled programs took {before:.0%} of the memory maps a process may have, and were dropped; "
            "those in use are compiled again"
        )
        return True

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
