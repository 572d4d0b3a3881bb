"""Options of ``serve``; how requests are sent to an engine and timed."""

from __future__ import annotations

import dataclasses
import threading
import time
from pathlib import Path

import numpy as np

from benchmarks import peers
from benchmarks.random_model import SIZES
from kvjax import decode
from kvjax.cli import option, shared, whole
from kvjax.engine import Engine, Request, Ticket
from kvjax.loading import LanguageModel

PARTS = ("price", "memory", "prefix", "pages")
"""What can be measured; ``beside`` belongs to ``price``."""

SHARED = ("arrivals", "behind", "clients", "grammar")
"""Parts of ``benchmarks.sharing``."""

MORE = ("structures", "mixed", *SHARED)
"""What is measured only where it is named (``benchmarks.structures``, ``benchmarks.sharing``)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Serving:
    """What ``serve`` measures, as options of its command line.

    At equal memory a policy saves what it drops of the ``long`` prompts.
    """

    model: str | None = shared("--model")
    parts: tuple[str, ...] = option(
        PARTS,
        f"what is measured (default: {' '.join(PARTS)})",
        choices=(*PARTS, *MORE),
        flag="--part",
    )
    threads: int = option(1, "CPUs it is pinned to")
    batches: tuple[int, ...] = option((1, 4, 16), "rows of the engine and of generate", flag="--batch")
    prompt: int = option(512, "prompt tokens of a request")
    long: int = option(2048, "prompt tokens of a request at equal memory")
    prefix: int = option(1500, "prompt tokens that requests share, some of them held before")
    new: int = option(128, "new tokens of a request", type=whole(2))
    policies: tuple[str, ...] = option(
        ("full", "snapkv + uniform(0.25)"), "full comes first", "SPEC", flag="--policy"
    )
    fit: int = option(4, "rows of full that the memory holds")
    segment: int = option(16, "decode steps between two turns of the host")
    count: int = option(40, "structures, or requests of mixed policies")
    narrow: int | None = option(None, "layers of a random model instead, for structures and mixed")
    kv_memory: int | None = option(None, "bytes, for structures, mixed and what shares an engine")
    size: str | None = option(
        None, "of a random model instead, for arrivals, behind and clients", choices=sorted(SIZES)
    )
    prefill_tokens: int | None = option(None, "of the engine, for arrivals, behind and clients")
    max_rows: int = option(16, "rows of a running batch, for arrivals, behind, clients and grammar")
    seed: int = option(0, "of the prompts", type=whole(0))
    peers: Path | None = option(None, "environment that `peers --make` made", "DIR")

    def __post_init__(self) -> None:
        if self.peers is not None:
            peers.command(self.peers)  # raises InputError

    @property
    def context(self) -> int:
        return decode.bucket(self.prompt + self.new)

    @property
    def quarter(self) -> str:
        """A policy that never holds more than a quarter of what ``full`` holds at the end."""
        return f"knorm + uniform({(self.prompt + self.new) // 4}, every_step)"


def prompts(model: LanguageModel, settings: Serving, rows: int) -> list[list[int]]:
    """Random ids; no two rows begin with the same ids."""
    draw = np.random.default_rng(settings.seed)
    return draw.integers(3, model.spec.vocab_size, (rows, settings.prompt)).tolist()


def other(requests: list[list[int]]) -> list[list[int]]:
    """Prompts of the same lengths that begin differently, for a first run that leaves no common prefix."""
    return [[(token + 1) % 1000 + 3 for token in row] for row in requests]


def engine_of(
    model: LanguageModel, settings: Serving, spec: str, rows: int, memory: int | None, share: bool = False
) -> Engine:
    """An engine with so many batch rows."""
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


def ask(engine: Engine, settings: Serving, requests: list[list[int]]) -> list[Stamps]:
    """Sends all requests at once; when each of their tokens came."""
    tickets = [
        engine.submit(Request(prompt=prompt, max_new_tokens=settings.new, ignore_eos=True))
        for prompt in requests
    ]
    stamps = [Stamps() for _ in tickets]

    def listen(ticket: Ticket, times: Stamps) -> None:
        for _ in ticket:
            times.seconds.append(time.perf_counter())
            times.spent.append(time.process_time())

    threads = [threading.Thread(target=listen, args=pair) for pair in zip(tickets, stamps)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return stamps


def rate(stamps: list[list[float]], segment: int) -> float:
    """Tokens a second, by either clock, while all rows ran; of the whole time if they never all did."""
    start, end = max(times[0] for times in stamps), min(times[-1] for times in stamps)
    if end <= start:
        start, end = min(times[0] for times in stamps), max(times[-1] for times in stamps)
    else:  # tokens of other rows from the same multi-step decode came a little later, and count
        segments = max(1.0, max(sum(start < at <= end for at in times) for times in stamps) / segment)
        late = end + (end - start) / segments / 2
        end = max(at for times in stamps for at in times if at <= late)
    many = sum(sum(start < at <= end for at in times) for times in stamps)
    return round(many / (end - start), 1)
