"""What ``serve`` measures, and how requests are asked and timed."""

from __future__ import annotations

import dataclasses
import threading
import time
from pathlib import Path

import numpy as np

from benchmarks import peers
from kvjax import decode
from kvjax.engine import Engine, Request, Ticket
from kvjax.loading import LanguageModel

PARTS = ("price", "memory", "prefix", "pages")
"""What can be measured; ``beside`` belongs to ``price``."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Serving:
    """What ``serve`` measures.

    Attributes:
      model: folder or hub id; None is the embedded model.
      parts: what is measured.
      threads: CPUs it is pinned to.
      batches: rows of ``price``.
      prompt, new: tokens of a request.
      long: prompt tokens of a request of ``memory``; what a policy drops of a prompt is what it saves.
      prefix: tokens that the requests of ``prefix`` and ``pages`` begin with.
      policies: ``full`` comes first.
      fit: rows of ``full`` that the memory of ``memory`` holds.
      segment: steps between two looks of the host.
      seed: of the prompts.
      peers: the peers' environment, or None.
    """

    model: str | None = None
    parts: tuple[str, ...] = PARTS
    threads: int = 1
    batches: tuple[int, ...] = (1, 4, 16)
    prompt: int = 512
    long: int = 2048
    prefix: int = 1500
    new: int = 128
    policies: tuple[str, ...] = ("full", "snapkv + uniform(0.25)")
    fit: int = 4
    segment: int = 16
    seed: int = 0
    peers: Path | None = None

    def __post_init__(self) -> None:
        if self.peers is not None:
            peers.command(self.peers)  # raises InputError

    @property
    def context(self) -> int:
        """Tokens of a row."""
        return decode.bucket(self.prompt + self.new)

    @property
    def quarter(self) -> str:
        """A policy that never holds more than a quarter of what ``full`` holds in the end."""
        return f"knorm + uniform({(self.prompt + self.new) // 4}, every_step)"


def prompts(model: LanguageModel, settings: Serving, rows: int) -> list[list[int]]:
    """Random ids; no two rows begin alike."""
    draw = np.random.default_rng(settings.seed)
    return draw.integers(3, model.spec.vocab_size, (rows, settings.prompt)).tolist()


def other(asked: list[list[int]]) -> list[list[int]]:
    """Prompts as long as these that begin otherwise: for a first run, which leaves nothing to begin with."""
    return [[(token + 1) % 1000 + 3 for token in row] for row in asked]


def engine_of(
    model: LanguageModel, settings: Serving, spec: str, rows: int, memory: int | None, share: bool = False
) -> Engine:
    """An engine of so many places."""
    return Engine(
        model,
        policy=spec,
        kv_memory=memory,
        max_rows=rows,
        context=settings.context,
        queue=4096,
        segment=settings.segment,
        share_pages=share,
    )


@dataclasses.dataclass
class Stamps:
    """When the tokens of a request came.

    Attributes:
      seconds: by the clock.
      spent: processor time of the process by then.
    """

    seconds: list[float] = dataclasses.field(default_factory=list)
    spent: list[float] = dataclasses.field(default_factory=list)


def ask(engine: Engine, settings: Serving, asked: list[list[int]]) -> list[Stamps]:
    """All requests at once; when each of their tokens came."""
    tickets = [
        engine.submit(Request(prompt=prompt, max_new_tokens=settings.new, ignore_eos=True))
        for prompt in asked
    ]
    stamps = [Stamps() for _ in tickets]

    def listen(ticket: Ticket, mine: Stamps) -> None:
        for _ in ticket:
            mine.seconds.append(time.perf_counter())
            mine.spent.append(time.process_time())

    threads = [threading.Thread(target=listen, args=pair) for pair in zip(tickets, stamps)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return stamps


def rate(stamps: list[list[float]], segment: int) -> float:
    """Tokens a second, of either clock, while all rows ran; of all, where they did not."""
    start, end = max(times[0] for times in stamps), min(times[-1] for times in stamps)
    if end <= start:
        start, end = min(times[0] for times in stamps), max(times[-1] for times in stamps)
    else:  # what other rows were given in the same segment came a little later, and is part of it
        segments = max(1.0, max(sum(start < at <= end for at in times) for times in stamps) / segment)
        late = end + (end - start) / segments / 2
        end = max(at for times in stamps for at in times if at <= late)
    many = sum(sum(start < at <= end for at in times) for times in stamps)
    return round(many / (end - start), 1)
