"""``serve``: what the engine costs beside ``generate``, and what a policy gives it at equal KV memory.

price     the same prompts, rows and new tokens by ``kvjax.generate`` and by the engine. ``tokens_per_s`` is
          that of decoding: all rows running, between the last first token and the first end.
          ``seconds`` is from the first prompt to the last token.
memory    as many bytes for KV caches as ``full`` needs for a few rows, and four times as many requests: how
          many rows each policy held at once, and new tokens a second from the first prompt to the last token.
prefix    16 requests under ``full`` that begin with the same tokens, their pages shared or not: the most
          bytes of pages that were owned at once, and tokens a second while all rows ran.

Everything is run once before it is timed, so nothing is compiled meanwhile.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import Any

import numpy as np

from kvjax import decode
from kvjax.algebra import Policy
from kvjax.bench import machine
from kvjax.catalogue import policy as read_policy
from kvjax.engine import Engine, Request, Ticket
from kvjax.loading import LanguageModel, load
from kvjax.weights import weights_for

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Serving:
    """What ``serve`` measures.

    Attributes:
      model: folder or hub id; None is the embedded model.
      threads: CPUs it is pinned to.
      batches: rows of ``price``.
      prompt, new: tokens of a request.
      long: prompt tokens of a request of ``memory``; what a policy drops of a prompt is what it saves.
      prefix: tokens that the requests of ``prefix`` begin with.
      policies: of ``price``, the first of them; all of ``memory``, beside ``full``.
      fit: rows of ``full`` that the memory of ``memory`` holds.
      segment: steps between two looks of the host.
      seed: of the prompts.
    """

    model: str | None = None
    threads: int = 1
    batches: tuple[int, ...] = (1, 4, 16)
    prompt: int = 512
    long: int = 2048
    prefix: int = 1024
    new: int = 128
    policies: tuple[str, ...] = ("full", "snapkv + uniform(0.25)")
    fit: int = 4
    segment: int = 16
    seed: int = 0

    @property
    def context(self) -> int:
        """Tokens of a row."""
        return decode.bucket(self.prompt + self.new)


def serve(settings: Serving, done: Any) -> None:
    """Measures; ``done`` is given each row."""
    machine.pin(machine.cpus(settings.threads))
    model = load(settings.model)
    for spec in settings.policies:
        for batch in settings.batches:
            done(price(model, settings, spec, batch))
    base: Row = {}
    longer = dataclasses.replace(settings, prompt=settings.long)
    for spec in settings.policies:
        found = memory(model, longer, spec)
        base = base or found
        if base is not found:
            found["rows_ratio"] = round(found["rows_held"] / base["rows_held"], 2)
            found["tokens_per_s_ratio"] = round(found["tokens_per_s"] / base["tokens_per_s"], 2)
        done(found)
    for share in (False, True):
        done(prefix(model, settings, share))


def prompts(model: LanguageModel, settings: Serving, rows: int) -> list[list[int]]:
    """Random ids; no two rows begin alike."""
    draw = np.random.default_rng(settings.seed)
    return draw.integers(3, model.spec.vocab_size, (rows, settings.prompt)).tolist()


# --- price -----------------------------------------------------------------------------------------


def price(model: LanguageModel, settings: Serving, spec: str, batch: int) -> Row:
    """One row of ``price``."""
    asked = prompts(model, settings, batch)
    alone = _generated(model, settings, spec, asked)
    with _engine(model, settings, spec, batch, None) as engine:
        served = _served(engine, settings, spec, asked)
    return {
        "part": "price",
        "policy": spec,
        "rows": batch,
        "prompt": settings.prompt,
        "new": settings.new,
        "generate_tokens_per_s": alone["tokens_per_s"],
        "engine_tokens_per_s": served["tokens_per_s"],
        "price": round(1 - served["tokens_per_s"] / alone["tokens_per_s"], 3),
        "generate_seconds": alone["seconds"],
        "engine_seconds": served["seconds"],
        "engine_first_token_s": served["first_token_s"],
        "engine_longest_pause_s": served["longest_pause_s"],
    }


def _generated(model: LanguageModel, settings: Serving, spec: str, asked: list[list[int]]) -> Row:
    """``generate``, taken apart so that its decoding can be timed."""
    policy = read_policy(spec)
    weights = weights_for(policy, model)
    found: Row = {}
    for _ in range(2):
        begun = time.perf_counter()
        state, logits = decode.prefill(model, policy, asked, context=settings.context, weights=weights)
        pieces = decode.stream(model, policy, state, logits, max_new_tokens=settings.new, weights=weights)
        next(pieces)
        first = time.perf_counter()
        many = sum(tokens.size for tokens, _ in pieces)
        ended = time.perf_counter()
        found = {"tokens_per_s": round(many / (ended - first), 1), "seconds": round(ended - begun, 3)}
    return found


def _engine(
    model: LanguageModel, settings: Serving, spec: str, rows: int, memory: int | None, share: bool = False
) -> Engine:
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


def _served(engine: Engine, settings: Serving, spec: str, asked: list[list[int]]) -> Row:
    """The engine, the second time; other prompts the first time, so that no prefix is there."""
    warm = [[(token + 1) % 1000 + 3 for token in row] for row in asked]
    _ask(engine, settings, warm)
    pauses = engine.metrics().pauses
    begun = time.perf_counter()
    stamps = _ask(engine, settings, asked)
    seconds = time.perf_counter() - begun
    after = engine.metrics().pauses
    recent = after.recent[-(after.count - pauses.count) :] if after.count > pauses.count else (0.0,)
    return {
        "tokens_per_s": _rate(stamps, settings.segment),
        "seconds": round(seconds, 3),
        "first_token_s": round(float(np.median([times[0] for times in stamps])) - begun, 3),
        "longest_pause_s": round(max(recent), 4),
        "new_tokens_per_s": round(sum(map(len, stamps)) / seconds, 1),
    }


def _ask(engine: Engine, settings: Serving, asked: list[list[int]]) -> list[list[float]]:
    """All requests at once; when each of their tokens came."""
    tickets = [
        engine.submit(Request(prompt=prompt, max_new_tokens=settings.new, ignore_eos=True))
        for prompt in asked
    ]
    stamps: list[list[float]] = [[] for _ in tickets]

    def listen(ticket: Ticket, times: list[float]) -> None:
        for _ in ticket:
            times.append(time.perf_counter())

    threads = [threading.Thread(target=listen, args=pair) for pair in zip(tickets, stamps)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return stamps


def _rate(stamps: list[list[float]], segment: int) -> float:
    """Tokens a second while all rows ran; of all, where they did not."""
    start, end = max(times[0] for times in stamps), min(times[-1] for times in stamps)
    if end <= start:
        start, end = min(times[0] for times in stamps), max(times[-1] for times in stamps)
    else:  # what other rows were given in the same segment came a little later, and is part of it
        segments = max(1.0, max(sum(start < at <= end for at in times) for times in stamps) / segment)
        late = end + (end - start) / segments / 2
        end = max(at for times in stamps for at in times if at <= late)
    many = sum(sum(start < at <= end for at in times) for times in stamps)
    return round(many / (end - start), 1)


# --- memory ----------------------------------------------------------------------------------------


def memory(model: LanguageModel, settings: Serving, spec: str) -> Row:
    """One row of ``memory``."""
    many = 4 * settings.fit
    size = kv_memory(model, settings)
    with _engine(model, settings, spec, many, size) as engine:
        held, stop = [0], threading.Event()

        def look() -> None:
            while not stop.wait(0.05):
                held[0] = max(held[0], engine.metrics().running)

        asked = prompts(model, settings, many)
        _ask(engine, settings, [[(token + 1) % 1000 + 3 for token in row] for row in asked])
        watching = threading.Thread(target=look)
        watching.start()
        begun = time.perf_counter()
        stamps = _ask(engine, settings, asked)
        seconds = time.perf_counter() - begun
        stop.set()
        watching.join()
        found = engine.metrics()
    return {
        "part": "memory",
        "policy": spec,
        "kv_memory": size,
        "kv_allocated": found.kv_allocated,
        "requests": many,
        "prompt": settings.prompt,
        "new": settings.new,
        "rows_held": held[0],
        "preempted": found.preempted,
        "seconds": round(seconds, 3),
        "tokens_per_s": round(sum(map(len, stamps)) / seconds, 1),
    }


# --- prefix ----------------------------------------------------------------------------------------

ALIKE = 16
"""Requests of ``prefix``."""


def prefix(model: LanguageModel, settings: Serving, share: bool) -> Row:
    """One row of ``prefix``."""
    begin, *ends = prompts(model, dataclasses.replace(settings, prompt=settings.prefix), ALIKE + 1)
    asked = [[*begin, *end[:16]] for end in ends]
    longer = dataclasses.replace(settings, prompt=settings.prefix + 16)
    with _engine(model, longer, "full", ALIKE, None, share) as engine:
        _ask(engine, longer, asked)  # the second time all begin with what the first left
        used, stop = [0.0], threading.Event()

        def look() -> None:
            while not stop.wait(0.05):
                (lane,) = engine.metrics().lanes
                used[0] = max(used[0], lane.allocated * lane.pages_used / max(lane.pages, 1))

        watching = threading.Thread(target=look)
        watching.start()
        stamps = _ask(engine, longer, asked)
        stop.set()
        watching.join()
    return {
        "part": "prefix",
        "shared": share,
        "requests": ALIKE,
        "prompt": longer.prompt,
        "prefix": settings.prefix,
        "new": settings.new,
        "owned_page_bytes": int(used[0]),
        "tokens_per_s": _rate(stamps, settings.segment),
    }


def kv_memory(model: LanguageModel, settings: Serving) -> int:
    """Bytes that ``full`` needs for ``fit`` rows: their rings, their pages and their page lists."""
    from kvjax.engine import lane_bytes

    return lane_bytes(
        model,
        Policy(),
        rows=settings.fit,
        tokens=settings.prompt + settings.new,
        context=settings.context,
        places=4 * settings.fit,
    )
