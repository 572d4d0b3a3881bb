"""What other threads want of the engine's thread, in the order in which they came."""

from __future__ import annotations

import concurrent.futures
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

from kvjax.engine._errors import EngineDead

T = TypeVar("T")


class Inbox:
    """Calls that one thread makes for the others; all methods may be called from any thread but ``work``."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._awake = threading.Event()

    @property
    def waiting(self) -> bool:
        """Has anybody asked for something that was not done yet?"""
        return not self._calls.empty()

    def post(self, do: Callable[[], None]) -> None:
        """Has it done, some time."""
        self._calls.put(do)
        self._awake.set()

    def call(self, do: Callable[[], T], dead: Callable[[], EngineDead | None]) -> T:
        """Has it done and waits; what it gives, or raises.

        Raises:
          EngineDead: ``dead`` says that nobody does it any more.
        """
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            try:
                future.set_result(do())
            except BaseException as error:  # whose call it was hears of it
                future.set_exception(error)

        self.post(run)
        while True:
            try:
                return future.result(timeout=0.5)
            except concurrent.futures.TimeoutError:
                if future.done():
                    raise
                gone = dead()
                if gone is not None:
                    raise gone from gone.__cause__

    def work(self) -> None:
        """Does all that was asked for; the engine's thread."""
        self._awake.clear()
        while True:
            try:
                do = self._calls.get_nowait()
            except queue.Empty:
                return
            do()

    def wait(self, seconds: float) -> None:
        """Until somebody asks for something, or ``wake``."""
        self._awake.wait(timeout=seconds)

    def wake(self) -> None:
        """Ends ``wait``."""
        self._awake.set()
