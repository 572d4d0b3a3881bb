"""A request as the engine's thread works on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvjax.algebra import Policy
from kvjax.engine._check import Learned
from kvjax.engine._loans import Beginning
from kvjax.engine._request import Event, KVUsage
from kvjax.engine._segment import STOPS, Drawn, Run
from kvjax.engine._ticket import Ticket
from kvjax.sampling import Sampling, sampling
from kvjax.types import EMPTY

if TYPE_CHECKING:
    from jaxtyping import Int


@dataclasses.dataclass(kw_only=True, eq=False)
class Job:
    """A request under way.

    Attributes:
      ticket: where its events go.
      tokens: the whole prompt, that of a held context included.
      policy: what its cache keeps, in its lane's layout.
      learned: the policy's learned weights.
      stops: token ids that end it.
      key: of its draws, uint32 [2].
      continues: the name of the held context that its prompt begins with, or "".
      keeps: the name under which its prompt is to be held, once read; then nothing is written.
      written: new tokens so far.
      skip: new tokens that were handed out before its row had to make room.
      echoed: was the prompt handed out?
      cached: tokens of the prompt that did not have to be read.
      laneless: is there no lane for it, and no memory for one?
      passed: requests that were begun before it meanwhile, though they came later.
    """

    ticket: Ticket
    tokens: Int[np.ndarray, " T"]
    policy: Policy
    learned: Learned
    stops: tuple[int, ...]
    key: np.ndarray
    continues: str = ""
    keeps: str = ""
    written: list[int] = dataclasses.field(default_factory=list)
    skip: int = 0
    echoed: bool = False
    cached: int = 0
    laneless: bool = False
    passed: int = 0
    given: float = 0.0

    @property
    def left(self) -> int:
        """Tokens it may still write."""
        return self.ticket.request.max_new_tokens - len(self.written)

    @property
    def prefix_key(self) -> tuple[str, str]:
        """What a state it may begin with was read under: its policy, dials included, and weights."""
        return repr(self.policy), self.learned.label

    def again(self) -> None:
        """From its prompt, for what was handed out already in silence."""
        self.skip = max(self.skip, len(self.written))
        self.written = []
        self.ticket._again()

    def write(self, drawn: Drawn, row: int) -> list[Event]:
        """Takes a row's drawn tokens; the events that are new, the last with the reason if it ends."""
        request, events = self.ticket.request, []
        for at, token in enumerate(drawn.token[row].tolist()):
            if token < 0:
                break
            self.written.append(token)
            done = "stop" if token in self.stops else None if self.left > 0 else "length"
            logprob: float | None = None
            best: tuple[tuple[int, float], ...] = ()
            if request.logprobs is not None:
                logprob = float(drawn.logprob[row, at])
                best = pairs(drawn.best[row, at], drawn.logprobs[row, at], request.logprobs)
            if len(self.written) > self.skip:
                events.append(Event(token, logprob, best, done))
            if done:
                break
        return events

    def put(self, events: list[Event], kv: KVUsage | None) -> None:
        """Hands events out."""
        self.ticket._put(events, kv, self.cached)


@dataclasses.dataclass(eq=False)
class Place:
    """A row that is being written.

    Attributes:
      job: whose.
      order: rows that came later have higher ones.
      reserved: pages of each pool (of a layer, the fullest) that it may own, those it shares included.
      begins: states that it begins with, or left while it was read.
      family: rows that share pages are of one.
    """

    job: Job
    order: int
    reserved: list[int]
    begins: Sequence[Beginning] = ()
    family: int = 0


def run_of(places: Sequence[Place | None], steps: int) -> Run:
    """What a segment of so many steps is told of its rows; places that are empty take no part."""
    rows = len(places)
    token, left = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
    active, ranked = np.zeros(rows, bool), np.zeros(rows, bool)
    stops = np.full((rows, STOPS), EMPTY, np.int32)
    temperature, top_p = np.zeros(rows, np.float32), np.ones(rows, np.float32)
    top_k, key = np.zeros(rows, np.int32), np.zeros((rows, 2), np.uint32)
    for at, place in enumerate(places):
        if place is None:
            continue
        job, request = place.job, place.job.ticket.request
        token[at], left[at], active[at] = job.written[-1], job.left, True
        stops[at, : len(job.stops)] = job.stops
        ranked[at] = request.logprobs is not None
        temperature[at], top_k[at], top_p[at] = request.temperature, request.top_k, request.top_p
        key[at] = job.key
    drawing: Any = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "key": key}
    return Run(
        token=token,
        active=active,
        left=left,
        stops=stops,
        ranked=ranked,
        how=Sampling(**drawing),
        steps=np.int32(steps),
    )


def pairs(ids: np.ndarray, values: np.ndarray, most: int) -> tuple[tuple[int, float], ...]:
    """(token id, log-probability) of the first ``most``."""
    return tuple(zip(ids[:most].tolist(), values[:most].tolist()))


def draw_key(seed: int, draw: int) -> np.ndarray:
    """The key of a request's draws, as ``kvjax.sampling`` makes it."""
    return np.asarray(sampling(1, seed=seed, requests=[draw]).key)[0]
