"""Turns: which prompts are read next, alone or several in one program.

A turn reads ``prefill_tokens`` tokens of prompts. The prompt with the fewest tokens left comes first; but for
every ``PASSED`` tokens that are read of others, a waiting one counts as a token shorter. So a prompt of n
tokens is passed by at most ``PASSED`` n tokens of those that came later. Prompts that are alike are read by
one program (``Together``) once that is compiled, and one by one until then.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from kvjax.decode import RequestError
from kvjax.engine.compiler import Compiler
from kvjax.engine.errors import MemoryFull
from kvjax.engine.memory import Memory
from kvjax.engine.metrics import Counters
from kvjax.engine.prefill import Prefill
from kvjax.engine.prefix import HeldKeys
from kvjax.engine.ticket import EngineRequest
from kvjax.engine.together import Together

PASSED = 4
"""Tokens of later prompts that may be read before one of a prompt's own."""


class Line(Protocol):
    """Prompts that are to be read; ``Prefiller``."""

    pending: list[Prefill]
    returned: list[EngineRequest]

    def leave(self, prefill: Prefill, request: EngineRequest | None = None) -> None:
        """Takes the prompt out of those that are to be read."""

    def fail(self, prefill: Prefill, error: Exception) -> None:
        """The prompt's requests end with the error."""

    def restart(self, prefill: Prefill) -> None:
        """The prompt's requests wait again, before the queue."""

    def clear(self, prefill: Prefill) -> None:
        """All prompts begin again, this one first."""


class Turns:
    """Reads prompts, a turn's tokens at a time; the engine's thread only.

    Attributes:
      units: chunks and layers that were read.
      tokens: that were read, of all prompts.
      waits: numbers of requests that waited for memory in the last turn.
    """

    def __init__(
        self,
        line: Line,
        memory: Memory,
        compiler: Compiler,
        counters: Counters,
        first_tokens: Callable[[Prefill], None],
    ) -> None:
        """Reads nothing; ``first_tokens`` is called with each prompt that is read."""
        self._line, self._memory, self._settings = line, memory, memory.settings
        self._compiler, self._counters, self._first_tokens = compiler, counters, first_tokens
        self.units, self.tokens, self.waits = 0, 0.0, set[int]()

    def read(self) -> bool:
        """Reads up to ``prefill_tokens`` tokens; False where there was nothing to read, or all that waits."""
        left, done = float(self._settings.prefill_tokens), False
        self.waits = waits = set[int]()
        while True:
            chosen = self._chosen(left, waits, first=not done)
            if not chosen:
                return done
            together = self._together(chosen)
            if chosen[0].programs:
                done = True
            elif together is None:
                left -= chosen[0].cost
                done = self._read(chosen[0], waits) or done
            else:
                left -= len(chosen) * chosen[0].cost
                done = self._read_together(together) or done
            if self._line.returned:  # they come before others
                return done

    def _rank(self, prefill: Prefill) -> tuple[float, int]:
        """The lowest is read first."""
        others = self.tokens - prefill.came - prefill.read
        return prefill.remaining - others / PASSED, prefill.request.ticket.id

    def _chosen(self, budget: float, waits: set[int], first: bool) -> list[Prefill]:
        """Who is read next: one, or several that are alike; nobody where the budget is used up.

        ``waits``: numbers of requests that wait for memory in this turn.
        """
        chosen: list[Prefill] = []
        for prefill in sorted(self._line.pending, key=self._rank):
            number = prefill.request.ticket.id
            if prefill.ready or prefill.programs or prefill not in self._line.pending or number in waits:
                continue
            if chosen:
                fits = (len(chosen) + 1) * prefill.cost <= budget
                if not fits or prefill.alike() != chosen[0].alike():
                    continue
            elif not first and prefill.cost > budget:
                return []
            newer = waits and number > min(waits)  # memory is kept for who came before
            if not prefill.begun and (newer or not self.begun(prefill)):
                waits.add(number)
                continue
            chosen.append(prefill)
            if 2 * prefill.cost > budget or prefill.alike() is None:
                break
        return chosen[: 1 << (len(chosen).bit_length() - 1)] if chosen else []

    def _together(self, chosen: list[Prefill]) -> Together | None:
        """What reads them in one program; None for one alone, and while that program is compiled."""
        if len(chosen) == 1:
            return None
        together = Together(chosen)
        chosen[0].beside = programs = together.programs()
        client = chosen[0].request.options.client or id(chosen[0].structure)
        if self._compiler.ready(programs, client=client):
            return together
        for prefill in chosen:  # who is there for the programs waits for them; others are read one by one
            if prefill.request.warms:
                prefill.compile(programs)
        return None

    def _read(self, prefill: Prefill, waits: set[int]) -> bool:
        """Reads the next unit of it; False where that waits for memory."""
        before = prefill.remaining
        try:
            if not prefill.done:
                if not prefill.unit(self._affordable, self._has_room):
                    waits.add(prefill.request.ticket.id)
                    return False
                if prefill.programs:
                    return True
                read = before - prefill.remaining
                self._count(read)
                prefill.read += read if prefill.whole else 0.0
            self._read_whole(prefill)
        except Exception as error:  # of this request alone
            self._line.fail(prefill, error)
        return True

    def _read_together(self, together: Together) -> bool:
        try:
            before = sum(prefill.remaining for prefill in together.prefills)
            together.read(self._affordable)
            self._count(before - sum(prefill.remaining for prefill in together.prefills))
        except Exception:  # whoever it is of: each is read alone, and fails alone
            for prefill in reversed(together.prefills):
                for request in prefill.requests:
                    request.apart = True
                self._line.restart(prefill)
            return True
        for prefill in together.prefills:
            try:
                self._read_whole(prefill)
            except Exception as error:
                self._line.fail(prefill, error)
        return True

    def _count(self, tokens: float) -> None:
        self.units += 1
        self.tokens += tokens

    def _read_whole(self, prefill: Prefill) -> None:
        """Once all of a prompt is read: keeps what others may begin with; the first tokens."""
        if not prefill.done:
            return
        for border, state in prefill.snapshots.items():
            prefix = self._memory.remember(prefill.request.prefix_key, prefill.tokens[:border], state)
            prefill.begins.append(prefix)
        if prefill.keys:
            owner = prefill.request.options.owner
            kept = HeldKeys(tokens=prefill.tokens, owner=owner, keys=prefill.keys)
            prefill.keys = None
            self._memory.remember_keys(kept)
        prefill.snapshots, prefill.ready = {}, True
        self._counters.prompt_tokens += len(prefill.tokens) - prefill.seen
        self._counters.cached_tokens += prefill.seen
        self._first_tokens(prefill)

    def _has_room(self, size: int) -> bool:
        """For a layer; where nobody writes there is nothing to wait for."""
        return self._memory.room(size) or not self._memory.running

    def _affordable(self, size: int) -> bool:
        return self._memory.allocated() + size <= self._settings.kv_memory

    def begun(self, prefill: Prefill) -> bool:
        """Has it a state? Made now, if there is memory for it; False where there is none yet."""
        request, memory = prefill.request, self._memory
        if prefill.start is not None and prefill.start.state is None:  # the prefix was dropped meanwhile
            self._line.leave(prefill)
            self._line.returned += prefill.requests
            return False
        try:
            if memory.room(prefill.need, besides=prefill.batch):
                prefill.begin()
                for one in prefill.requests:
                    if not one.begun:
                        self._counters.queue.add(time.monotonic() - one.ticket.submitted)
                        one.begun = True
                return True
            if memory.running or memory.reading():
                return False
            if request.alone:
                raise too_large(prefill, memory)
        except Exception as error:  # of this request alone
            self._line.fail(prefill, error)
            return False
        self._line.clear(prefill)
        return False


def too_large(prefill: Prefill, memory: Memory) -> MemoryFull | RequestError:
    """The error of a prompt for which there will be no memory."""
    return memory.refusal(
        prefill.need,
        f"reading the prompt takes {prefill.need} bytes beside {memory.allocated()} that are held, "
        f"and kv_memory is {memory.settings.kv_memory}. Raise it, or ask for fewer tokens.",
    )
