"""A request on its way into a row, and the state that it begins with."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from kvjax.cache.state import KVState
from kvjax.engine import _layout as layout
from kvjax.engine import _reading as readings
from kvjax.engine._errors import ContextMismatch, ContextNotFound
from kvjax.engine._lane import Lane
from kvjax.engine._loans import Beginning
from kvjax.engine._reading import Program, Reading
from kvjax.engine._shared import Shared
from kvjax.engine._work import Job


@dataclasses.dataclass(frozen=True, eq=False)
class Start:
    """What a row is read on from.

    Attributes:
      state: of the row, which has seen so many tokens.
      seen: how many.
      of: the prefix or the context that it is a copy of; None for an empty row.
      logits: what follows a context.
    """

    state: KVState
    seen: int
    of: Beginning | None = None
    logits: Any = None


class Begun:
    """A request that is being read, or has been and waits for pages.

    Attributes:
      job: the request.
      lane: where its row will stand; None where its prompt alone is kept.
      reading: of its prompt; None where a context is continued by nothing.
      start: what it is read on from.
      state: the row, once it is read.
      begins: states that it begins with, or left while it was read.
      pending: programs that it waits for.
      since: when it began to wait for them.
      growth: page counts that its lane is to have for it.
    """

    def __init__(self, job: Job, lane: Lane | None, reading: Reading | None, start: Start) -> None:
        """Waits for nothing yet."""
        self.job, self.lane, self.reading = job, lane, reading
        self.start = start
        self.state = start.state if reading is None else None
        self.begins = [] if start.of is None else [start.of]
        self.pending: Sequence[Program] = ()
        self.since = time.monotonic()
        self.growth: list[int] | None = None


def beginning(shared: Shared, job: Job, row: KVState, ranked: bool) -> Start:
    """The state to read on from, in pages enough for the whole prompt.

    Args:
      shared: what is held.
      job: the request.
      row: an empty one of its policy.
      ranked: are the prompt's log-probabilities asked for? Then all of it is read.

    Raises:
      ContextNotFound, ContextMismatch: the context was deleted meanwhile, or its lists are too short.
    """
    if job.continues:
        kept = shared.store.get(job.continues)
        if kept is None:
            raise ContextNotFound(f"context {job.continues!r} was deleted before the request began.")
        if any(mine[1] > theirs[1] for mine, theirs in zip(layout.shape(row), layout.shape(kept.state))):
            raise ContextMismatch(
                f"context {job.continues!r} was read with page lists too short for '{job.policy!r}'. "
                f"Go on with its own budget or a smaller one."
            )
        state = readings.continued(job.policy, kept.state, len(job.tokens) - len(kept.tokens))
        return Start(state, len(kept.tokens), kept, kept.logits)
    prefix = None if ranked else shared.space.prefixes.find(job.prefix_key, job.tokens)
    if prefix is None:
        return Start(readings.empty_for(job.policy, row, len(job.tokens)), 0)
    state = readings.continued(job.policy, prefix.state, len(job.tokens) - len(prefix.tokens))
    return Start(readings.with_total(state, len(job.tokens)), len(prefix.tokens), prefix)
