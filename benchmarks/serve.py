"""``serve``: what the engine costs beside ``generate``, and what a policy gives it at equal KV memory.

price     the same prompts, rows and new tokens by ``kvjax.generate`` and by the engine. ``tokens_per_s`` is
          that of decoding: all rows running, between the last first token and the first end, which is
          ``steps_together`` steps; ``tokens_per_cpu_s`` the same by processor time, which a busy machine
          disturbs less. ``seconds`` is from the first prompt to the last token.
beside    the requests of ``price`` by the engine under ``full`` and by the continuous batching of
          ``transformers serve``, both without HTTP; only with a folder of peers.
memory    as many bytes for KV caches as ``full`` needs for a few rows, four times as many batch rows and
          twelve times as many requests: how many rows each policy held at once, and new tokens a second from
          the first prompt to the last token. It measures one policy more than the other parts: one that holds
          a quarter of what ``full`` does at every step. (A policy that evicts once keeps the whole answer.)
prefix    requests one after another that begin with the same 1,500 tokens: how many of these the engine
          held, and the time to the first token.
pages     16 requests under ``full`` that begin with the same tokens, their pages shared or not: the most
          bytes of pages that were owned at once, and tokens a second while all rows ran.

structures, mixed
          what many structures cost, and whether memory is kept: ``benchmarks.structures``.
arrivals, behind, clients, grammar
          how prompts share an engine, and what a grammar costs: ``benchmarks.sharing``.

Everything runs once before it is timed, so nothing is compiled meanwhile.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from benchmarks import machine, peers
from benchmarks.child import Child
from benchmarks.results import Row
from benchmarks.serving import PARTS, SHARED, Serving, ask, engine_of, other, prompts, rate
from benchmarks.sharing import sharing
from benchmarks.structures import mixed, structures
from kvjax import decode
from kvjax.algebra import Policy
from kvjax.catalogue import policy as read_policy
from kvjax.engine import Engine, Request, batch_bytes
from kvjax.loading import LanguageModel, load
from kvjax.weights import weights_for

PREFIX_END = 36
"""Tokens in which requests of ``prefix`` differ."""

TEXTS, ASKED = 3, 3
"""Beginnings of ``prefix``, and requests with each."""

SHARING = 16
"""Requests of ``pages``."""


def serve(settings: Serving, done: Callable[[Row], None]) -> None:
    """Measures, and calls ``done`` with each row."""
    machine.pin(machine.cpus(settings.threads))
    if "structures" in settings.parts:
        structures(settings, done)
    if "mixed" in settings.parts:
        done(mixed(settings))
    if set(settings.parts) & set(SHARED):
        sharing(settings, done)
    if not set(settings.parts) & set(PARTS):
        return
    model = load(settings.model)
    if "price" in settings.parts:
        full = []
        for spec in settings.policies:
            for batch in settings.batches:
                row = price(model, settings, spec, batch)
                full += [row] if spec == "full" else []
                done(row)
        if settings.peers is not None:
            for row in beside(model, settings, full):
                done(row)
    if "memory" in settings.parts:
        long = dataclasses.replace(settings, prompt=settings.long)
        base: Row = {}
        for spec in (*long.policies, long.quarter):
            row = memory(model, long, spec)
            if base:
                for name in ("rows_held", "tokens_per_s", "tokens_per_cpu_s"):
                    row[f"{name}_ratio"] = round(row[name] / base[name], 2)
            base = base or row
            done(row)
    if "prefix" in settings.parts:
        for spec in settings.policies:
            for row in prefix(model, settings, spec):
                done(row)
    if "pages" in settings.parts:
        for share in (False, True):
            done(pages(model, settings, share))


# --- price and beside ------------------------------------------------------------------------------


def price(model: LanguageModel, settings: Serving, spec: str, batch: int) -> Row:
    """One row of ``price``."""
    requests = prompts(model, settings, batch)
    alone = _generated(model, settings, spec, requests)
    with engine_of(model, settings, spec, batch, None) as engine:
        served = _served(engine, settings, requests)
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


def _generated(model: LanguageModel, settings: Serving, spec: str, requests: list[list[int]]) -> Row:
    """``generate``, as its two halves so that decoding can be timed; the second run counts."""
    policy = read_policy(spec)
    weights = weights_for(policy, model)
    row: Row = {}
    for _ in range(2):
        begun = time.perf_counter()
        state, logits = decode.prefill(model, policy, requests, context=settings.context, weights=weights)
        pieces = decode.stream(
            model, policy, state, logits, max_new_tokens=settings.new, stops=(), weights=weights
        )
        next(pieces)
        first, spent = time.perf_counter(), time.process_time()
        new = sum(tokens.size for tokens, _ in pieces)
        ended, spent = time.perf_counter(), time.process_time() - spent
        row = {
            "tokens_per_s": round(new / (ended - first), 1),
            "tokens_per_cpu_s": round(new / spent, 1),
            "seconds": round(ended - begun, 3),
        }
    return row


def _served(engine: Engine, settings: Serving, requests: list[list[int]]) -> Row:
    """The engine's second run; the first one has other prompts, so that no prefix is held."""
    ask(engine, settings, other(requests))
    pauses = engine.metrics().pauses
    begun, spent = time.perf_counter(), time.process_time()
    stamps = ask(engine, settings, requests)
    seconds, spent = time.perf_counter() - begun, time.process_time() - spent
    after = engine.metrics().pauses
    recent = after.recent[-(after.count - pauses.count) :] if after.count > pauses.count else (0.0,)
    times = [x.seconds for x in stamps]
    together = max(row[0] for row in times)
    return {
        "tokens_per_s": rate(times, settings.segment),
        "tokens_per_cpu_s": rate([x.spent for x in stamps], settings.segment),
        "steps_together": min(sum(at > together for at in row) for row in times),
        "seconds": round(seconds, 3),
        "cpu_seconds": round(spent, 3),
        "first_token_s": round(float(np.median([row[0] for row in times])) - begun, 3),
        "longest_pause_s": round(max(recent), 4),
    }


def beside(model: LanguageModel, settings: Serving, ours: Sequence[Row]) -> list[Row]:
    """The same weights and prompts by transformers, a row for each of ``ours`` (of ``price``, ``full``)."""
    assert settings.peers is not None
    rows = []
    with Child(peers.command(settings.peers), settings.threads) as child:
        loaded = child.ask("load", folder=str(model.folder), dtype=str(model.params["embed"].dtype))
        for our in ours:
            requests = prompts(model, settings, our["rows"])
            theirs = child.ask("serve", warm=other(requests), tokens=requests, new=settings.new)
            stamps = theirs["stamps"]
            row = {
                "part": "beside",
                "system": "transformers, continuous batching",
                "versions": loaded["versions"],
                "rows": our["rows"],
                "prompt": settings.prompt,
                "new": settings.new,
                "tokens_per_s": rate(stamps, 1),
                "seconds": round(theirs["seconds"], 3),
                "cpu_seconds": round(theirs["cpu_seconds"], 3),
                "first_token_s": round(float(np.median([times[0] for times in stamps])), 3),
            }
            names = ("tokens_per_s", "seconds", "cpu_seconds", "first_token_s")
            row |= {f"engine_{name}": our[f"engine_{name}"] for name in names}
            row["times_as_fast"] = round(theirs["seconds"] / our["engine_seconds"], 2)
            rows.append(row)
    return rows


# --- memory ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _watch(look: Callable[[], None]) -> Iterator[None]:
    """Calls ``look`` 20 times a second meanwhile."""
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.05):
            look()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def memory(model: LanguageModel, settings: Serving, spec: str) -> Row:
    """One row of ``memory``."""
    rows, size = 4 * settings.fit, kv_memory(model, settings)
    requests = prompts(model, settings, 3 * rows)
    with engine_of(model, settings, spec, rows, size) as engine:
        held = [0]

        def look() -> None:
            held[0] = max(held[0], engine.metrics().running)

        ask(engine, settings, other(requests[:rows]))
        with _watch(look):
            begun, spent = time.perf_counter(), time.process_time()
            stamps = ask(engine, settings, requests)
            seconds, spent = time.perf_counter() - begun, time.process_time() - spent
        after = engine.metrics()
    new = sum(len(x.seconds) for x in stamps)
    return {
        "part": "memory",
        "policy": spec,
        "kv_memory": size,
        "kv_allocated": after.kv_allocated,
        "requests": len(requests),
        "prompt": settings.prompt,
        "new": settings.new,
        "rows_held": held[0],
        "preempted": after.preempted,
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


# --- shared beginnings -----------------------------------------------------------------------------


def prefix(model: LanguageModel, settings: Serving, spec: str) -> list[Row]:
    """Rows of ``prefix``: medians over the texts of the first, second and third request that begins with one.

    Nothing of the text is held at the first request, one copy at the second, two at the third.
    """
    longer = dataclasses.replace(settings, prompt=settings.prefix + PREFIX_END, new=1)
    drawn = prompts(model, longer, (TEXTS + 1) * ASKED)
    measured = []
    with engine_of(model, longer, spec, 1, None) as engine:
        for at in range(0, len(drawn), ASKED):
            begin = drawn[at][: settings.prefix]
            requests = [[*begin, *ids[settings.prefix :]] for ids in drawn[at : at + ASKED]]
            measured.append([_first_token(engine, request) for request in requests])
    # The programs were compiled during the first text.
    middle = np.median(np.asarray(measured[1:]), axis=0)
    return [
        {
            "part": "prefix",
            "policy": spec,
            "prompt": longer.prompt,
            "prefix": settings.prefix,
            "asked": number,
            "cached_tokens": int(cached),
            "first_token_s": round(float(seconds), 4),
            "first_token_cpu_s": round(float(spent), 4),
        }
        for number, (seconds, spent, cached) in enumerate(middle, start=1)
    ]


def _first_token(engine: Engine, prompt: list[int]) -> tuple[float, float, int]:
    """Seconds by the clock and of processor time to the first token, and the tokens that were held."""
    begun, spent = time.perf_counter(), time.process_time()
    ticket = engine.submit(Request(prompt=prompt, max_new_tokens=1, ignore_eos=True))
    ticket.result()
    return time.perf_counter() - begun, time.process_time() - spent, ticket.usage.cached_tokens


def pages(model: LanguageModel, settings: Serving, share: bool) -> Row:
    """One row of ``pages``."""
    begin, *ends = prompts(model, dataclasses.replace(settings, prompt=settings.prefix), SHARING + 1)
    requests = [[*begin, *end[:16]] for end in ends]
    longer = dataclasses.replace(settings, prompt=settings.prefix + 16)
    with engine_of(model, longer, "full", SHARING, None, share) as engine:
        ask(engine, longer, requests)  # the second time all begin with what the first left
        used = [0.0]

        def look() -> None:
            (batch,) = engine.metrics().batches
            used[0] = max(used[0], batch.allocated * batch.pages_used / max(batch.pages, 1))

        with _watch(look):
            stamps = ask(engine, longer, requests)
    return {
        "part": "pages",
        "shared": share,
        "requests": SHARING,
        "prompt": longer.prompt,
        "prefix": settings.prefix,
        "new": settings.new,
        "owned_page_bytes": int(used[0]),
        "tokens_per_s": rate([x.seconds for x in stamps], settings.segment),
        "tokens_per_cpu_s": rate([x.spent for x in stamps], settings.segment),
    }
