"""``serve``: what the engine costs beside ``generate``, and what a policy gives it at equal KV memory.

price     the same prompts, rows and new tokens by ``kvjax.generate`` and by the engine. ``tokens_per_s`` is
          that of decoding: all rows running, between the last first token and the first end, which is
          ``steps_together`` steps; ``tokens_per_cpu_s`` the same by processor time, which a busy machine
          disturbs less. ``seconds`` is from the first prompt to the last token.
beside    the requests of ``price`` by the engine under ``full`` and by the continuous batching of
          ``transformers serve``, both without HTTP; where there is a folder of peers.
memory    as many bytes for KV caches as ``full`` needs for a few rows, four times as many places and twelve
          times as many requests: how many rows each policy held at once, and new tokens a second from the
          first prompt to the last token. One policy more is asked than in the other parts: one that holds a
          quarter of what ``full`` does at every step. (What acts once keeps the answer whole.)
prefix    requests one after another that begin with the same 1,500 tokens: how many of these the engine
          held, and the time to the first token.
pages     16 requests under ``full`` that begin with the same tokens, their pages shared or not: the most
          bytes of pages that were owned at once, and tokens a second while all rows ran.

Everything is run once before it is timed, so nothing is compiled meanwhile.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import Any

import numpy as np

from benchmarks import machine
from benchmarks.beginnings import pages, prefix
from benchmarks.beside import beside
from benchmarks.serving import Serving, ask, engine_of, other, prompts, rate
from kvjax import decode
from kvjax.algebra import Policy
from kvjax.catalogue import policy as read_policy
from kvjax.engine import Engine, batch_bytes
from kvjax.loading import LanguageModel, load
from kvjax.weights import weights_for

Row = dict[str, Any]


def serve(settings: Serving, done: Any) -> None:
    """Measures; ``done`` is given each row."""
    machine.pin(machine.cpus(settings.threads))
    model = load(settings.model)
    if "price" in settings.parts:
        prices = []
        for spec in settings.policies:
            for batch in settings.batches:
                prices.append(price(model, settings, spec, batch))
                done(prices[-1])
        if settings.peers is not None:
            for row in beside(model, settings, [row for row in prices if row["policy"] == "full"]):
                done(row)
    if "memory" in settings.parts:
        _memories(model, dataclasses.replace(settings, prompt=settings.long), done)
    if "prefix" in settings.parts:
        for spec in settings.policies:
            for row in prefix(model, settings, spec):
                done(row)
    if "pages" in settings.parts:
        for share in (False, True):
            done(pages(model, settings, share))


# --- price -----------------------------------------------------------------------------------------


def price(model: LanguageModel, settings: Serving, spec: str, batch: int) -> Row:
    """One row of ``price``."""
    asked = prompts(model, settings, batch)
    alone = _generated(model, settings, spec, asked)
    with engine_of(model, settings, spec, batch, None) as engine:
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
        "generate_tokens_per_cpu_s": alone["tokens_per_cpu_s"],
        "engine_tokens_per_cpu_s": served["tokens_per_cpu_s"],
        "price_by_cpu": round(1 - served["tokens_per_cpu_s"] / alone["tokens_per_cpu_s"], 3),
        "steps_together": served["steps_together"],
        "generate_seconds": alone["seconds"],
        "engine_seconds": served["seconds"],
        "engine_cpu_seconds": served["cpu_seconds"],
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
        first, spent = time.perf_counter(), time.process_time()
        many = sum(tokens.size for tokens, _ in pieces)
        ended, spent = time.perf_counter(), time.process_time() - spent
        found = {
            "tokens_per_s": round(many / (ended - first), 1),
            "tokens_per_cpu_s": round(many / spent, 1),
            "seconds": round(ended - begun, 3),
        }
    return found


def _served(engine: Engine, settings: Serving, spec: str, asked: list[list[int]]) -> Row:
    """The engine, the second time; other prompts the first time, so that no prefix is there."""
    ask(engine, settings, other(asked))
    pauses = engine.metrics().pauses
    begun, spent = time.perf_counter(), time.process_time()
    stamps = ask(engine, settings, asked)
    seconds, spent = time.perf_counter() - begun, time.process_time() - spent
    after = engine.metrics().pauses
    recent = after.recent[-(after.count - pauses.count) :] if after.count > pauses.count else (0.0,)
    times = [x.seconds for x in stamps]
    together = max(mine[0] for mine in times)
    return {
        "tokens_per_s": rate(times, settings.segment),
        "tokens_per_cpu_s": rate([x.spent for x in stamps], settings.segment),
        "steps_together": min(sum(at > together for at in mine) for mine in times),
        "seconds": round(seconds, 3),
        "cpu_seconds": round(spent, 3),
        "first_token_s": round(float(np.median([mine[0] for mine in times])) - begun, 3),
        "longest_pause_s": round(max(recent), 4),
        "new_tokens_per_s": round(sum(map(len, times)) / seconds, 1),
    }


# --- memory ----------------------------------------------------------------------------------------


def _memories(model: LanguageModel, settings: Serving, done: Any) -> None:
    """Rows of ``memory``, beside the first policy."""
    base: Row = {}
    for spec in (*settings.policies, settings.quarter):
        found = memory(model, settings, spec)
        base = base or found
        if base is not found:
            for name in ("rows_held", "tokens_per_s", "tokens_per_cpu_s"):
                found[f"{name}_ratio"] = round(found[name] / base[name], 2)
        done(found)


def memory(model: LanguageModel, settings: Serving, spec: str) -> Row:
    """One row of ``memory``."""
    places, size = 4 * settings.fit, kv_memory(model, settings)
    asked = prompts(model, settings, 3 * places)
    with engine_of(model, settings, spec, places, size) as engine:
        held, stop = [0], threading.Event()

        def look() -> None:
            while not stop.wait(0.05):
                held[0] = max(held[0], engine.metrics().running)

        ask(engine, settings, other(asked[:places]))
        watching = threading.Thread(target=look)
        watching.start()
        begun, spent = time.perf_counter(), time.process_time()
        stamps = ask(engine, settings, asked)
        seconds, spent = time.perf_counter() - begun, time.process_time() - spent
        stop.set()
        watching.join()
        found = engine.metrics()
    new = sum(len(x.seconds) for x in stamps)
    return {
        "part": "memory",
        "policy": spec,
        "kv_memory": size,
        "kv_allocated": found.kv_allocated,
        "requests": len(asked),
        "prompt": settings.prompt,
        "new": settings.new,
        "rows_held": held[0],
        "preempted": found.preempted,
        "seconds": round(seconds, 3),
        "cpu_seconds": round(spent, 3),
        "tokens_per_s": round(new / seconds, 1),
        "tokens_per_cpu_s": round(new / spent, 1),
    }


def kv_memory(model: LanguageModel, settings: Serving) -> int:
    """Bytes that ``full`` needs for ``fit`` rows: their rings, their pages and their page lists."""
    return batch_bytes(
        model,
        Policy(),
        rows=settings.fit,
        tokens=settings.prompt + settings.new,
        context=settings.context,
        max_rows=4 * settings.fit,
    )
