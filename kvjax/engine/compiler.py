"""Programs are compiled beside the running ones, each held by an object with which it leaves.

Why: kvjax/DESIGN.md, 18.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import inspect
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax

from kvjax.programs import maps_taken

CROWDED = 0.75
"""Share of a process's memory maps from which on compiled programs are dropped before one more is made."""

PATIENCE = 0.02
"""Seconds to wait for a compilation where nothing else is to be done."""

WORKERS = 3
"""Compilations at a time, each for another client."""

MOST = 16
"""Most programs of one function."""


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """What has to be compiled: where it will stand, its name there, and what makes it."""

    made: dict[Hashable, Any]
    key: Hashable
    compile: Callable[[], Any]

    @property
    def ready(self) -> bool:
        return self.key in self.made


class Owned:
    """A function and what was compiled of it, which is gone when this object is.

    JAX keeps programs for as long as their function lives. So each of these calls a function of its own. A
    program is found by the shapes of its arguments; where there is none yet, the call compiles it.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        static: Sequence[str] = (),
        donate: Sequence[str] = (),
        ahead: bool = True,
        most: int = MOST,
    ) -> None:
        """Compiles nothing.

        Args:
          function: pure, or one that ``jax.jit`` made of such.
          static, donate: names of its arguments.
          ahead: call the program that was compiled ahead; else JAX finds it, as over several devices, where
            it may have to move arguments.
          most: programs that are kept; the least recently used one goes.
        """
        function = getattr(function, "__wrapped__", function)

        @functools.wraps(function)
        def own(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        self._jitted = jax.jit(own, static_argnames=tuple(static), donate_argnames=tuple(donate))
        parameters = inspect.signature(function).parameters.values()
        self._names = [x.name for x in parameters if x.kind is x.POSITIONAL_OR_KEYWORD]
        self._static = frozenset(static)
        self._ahead, self._most = ahead, most
        self.made: dict[Hashable, Any] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.find(*args, **kwargs)(*args, **kwargs)

    def find(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """The program for such arguments, to be called with any of the same shapes."""
        key = self._key(args, kwargs)
        made = self.made.pop(key, None) or self._compile(args, kwargs)
        self.made[key] = made  # the last one is the newest
        return made  # type: ignore[no-any-return]

    def program(self, *args: Any, **kwargs: Any) -> Program:
        """What compiles it for such arguments, of which shapes are enough; holds no array."""
        key = self._key(args, kwargs)
        if (made := self.made.get(key)) is not None:
            return Program(self.made, key, lambda: made)  # put back if it is dropped meanwhile
        shapes = jax.tree.map(_shape, (args, kwargs))
        return Program(self.made, key, functools.partial(self._compile, *shapes))

    def shapes(self, *args: Any, **kwargs: Any) -> Any:
        """Of what it returns."""
        return self._jitted.eval_shape(*args, **kwargs)

    def _compile(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Callable[..., Any]:
        compiled = self._jitted.lower(*args, **kwargs).compile()
        for key in list(self.made)[: 1 - self._most]:
            self.made.pop(key, None)
        if not self._ahead:
            return self._jitted
        static = self._static
        kept = [at for at in range(len(args)) if self._name(at) not in static]

        def call(*args: Any, **kwargs: Any) -> Any:
            named = {name: value for name, value in kwargs.items() if name not in static}
            return compiled(*[args[at] for at in kept], **named)

        return call

    def _key(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Hashable:
        named = {self._name(at): value for at, value in enumerate(args)} | kwargs
        static = [item for item in named.items() if item[0] in self._static]
        traced = {name: value for name, value in named.items() if name not in self._static}
        leaves, structure = jax.tree.flatten(traced)
        sizes = tuple([(getattr(x, "shape", ()), getattr(x, "dtype", type(x))) for x in leaves])
        return tuple(static), structure, sizes

    def _name(self, at: int) -> str:
        """Of a positional argument."""
        return self._names[at] if at < len(self._names) else f"*{at}"


def _shape(x: Any) -> Any:
    """What stands for an array; numbers and arrays of the host are small and stay."""
    if not isinstance(x, jax.Array):
        return x
    sharding = x.sharding if len(x.sharding.device_set) > 1 else None
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


@dataclasses.dataclass(eq=False)
class _Job:
    program: Program
    client: Hashable  # one compilation of each client at a time; None for what running rows wait for
    future: concurrent.futures.Future[None]
    begun: bool = False


class Compiler:
    """A few threads that compile. A client waits for its own programs, not for those of others.

    Each client has a line. A thread that is free takes the oldest program of the client that was served least
    so far, and of which nothing is being compiled; a second one of a client only while another thread stays
    free. What running rows wait for goes before all others.

    On a CPU a program holds hundreds of memory maps, of which Linux lets a process have only so many; beyond
    them the compiler crashes, and the server with it. So before that the least recently used are dropped.
    """

    def __init__(
        self,
        note: Callable[[str], None] = lambda line: None,
        shed: Callable[[bool], bool] = lambda everything: False,
        workers: int = WORKERS,
    ) -> None:
        """Compiles nothing.

        Args:
          note: called with a line for the operator.
          shed: drops the programs that were not used for longest, or all of them; were there any?
          workers: compilations at a time.
        """
        self._note, self._shed = note, shed
        # Threads for second programs of a client: one stays free for others, two CPUs for what runs.
        self._beside = min(workers - 1, (os.cpu_count() or 1) - 2)
        self._pool = concurrent.futures.ThreadPoolExecutor(workers, thread_name_prefix="kvjax-compile")
        self._lock = threading.Lock()
        self._jobs: dict[tuple[int, Hashable], _Job] = {}  # not compiled yet, or failed; the oldest first
        self._served: collections.Counter[Hashable] = collections.Counter()  # seconds, by client
        self._in_use = CROWDED  # share of the memory maps that is left when all programs are dropped

    def ready(
        self, programs: Sequence[Program], wait: float = 0.0, *, client: Hashable = "", urgent: bool = False
    ) -> bool:
        """Are all of them compiled? New ones are begun, and those that failed.

        Args:
          programs: what is needed.
          wait: seconds to wait for them.
          client: for whom.
          urgent: running rows wait for them: they go before all others that were not begun.

        Raises:
          Exception: what a compilation raised.
        """
        programs = [program for program in programs if not program.ready]
        if not programs:
            return True
        named = {(id(program.made), program.key): program for program in programs}
        if any(name not in self._jobs for name in named) and not self._has_maps():
            return False
        futures = {}
        for name, program in named.items():
            job = self._jobs.get(name)
            if job is None and not program.ready:
                job = self._begin(name, program, None if urgent else client)
            if job is not None:
                futures[name] = job.future
        if wait:
            concurrent.futures.wait(futures.values(), timeout=wait)
        for name, future in futures.items():
            if future.done() and future.exception() is not None:
                with self._lock:
                    self._jobs.pop(name, None)  # the next request for it tries again
                future.result()
        return all(program.ready for program in programs)

    def keep(self, wanted: Iterable[Program]) -> None:
        """Takes everything out of the line that is neither begun, nor urgent, nor among these."""
        names = {(id(program.made), program.key) for program in wanted}
        with self._lock:
            for name, job in list(self._jobs.items()):
                waiting = not job.begun or job.future.done()
                if job.client is not None and waiting and name not in names:
                    del self._jobs[name]

    @property
    def waiting(self) -> int:
        """Programs that are not begun."""
        with self._lock:
            return sum(not job.begun for job in self._jobs.values())

    def close(self) -> None:
        with self._lock:
            self._jobs.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _begin(self, name: tuple[int, Hashable], program: Program, client: Hashable) -> _Job:
        job = _Job(program, client, concurrent.futures.Future())
        with self._lock:
            self._jobs[name] = job
        self._pool.submit(self._work)
        return job

    def _work(self) -> None:
        while (taken := self._next()) is not None:
            name, job = taken
            begun = time.monotonic()
            try:
                job.program.made[job.program.key] = job.program.compile()
            except BaseException as error:  # raised again in ``ready``
                job.future.set_exception(error)
            else:
                with self._lock:
                    self._jobs.pop(name, None)
                job.future.set_result(None)
            with self._lock:
                self._served[job.client] += time.monotonic() - begun  # type: ignore[assignment]
            del taken, job

    def _next(self) -> tuple[tuple[int, Hashable], _Job] | None:
        """The next one, which is begun; None while there is none that may be."""
        with self._lock:
            running = [job.client for job in self._jobs.values() if job.begun and not job.future.done()]
            waiting = [(name, job) for name, job in self._jobs.items() if not job.begun]
            clients = {job.client for job in self._jobs.values()}
            self._served = collections.Counter({c: s for c, s in self._served.items() if c in clients})
            free = [(name, job) for name, job in waiting if job.client is None or job.client not in running]
            if not free and len(running) < self._beside:
                free = waiting
            if not free:
                return None
            name, job = min(free, key=lambda one: (one[1].client is not None, self._served[one[1].client]))
            job.begun = True
            return name, job

    def _has_maps(self) -> bool:
        """Drops programs until there are maps for another; False while that cannot be.

        Where what is in use takes as many, it is not dropped again and again.
        """
        before = maps_taken()
        if before <= self._in_use:
            self._in_use = max(before, CROWDED)
            return True
        while maps_taken() > CROWDED:
            if self._shed(False):
                continue
            if any(job.begun and not job.future.done() for job in list(self._jobs.values())):
                return False
            self._shed(True)
            jax.clear_caches()
            break
        self._in_use = max(maps_taken(), CROWDED)
        self._note(
            f"compiled programs took {before:.0%} of the memory maps a process may have, and were dropped; "
            "those in use are compiled again"
        )
        return True
