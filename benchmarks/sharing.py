"""``serve --part arrivals behind clients grammar``: how prompts share an engine, and what a grammar costs.

arrivals     32 requests that come at once, prompts of many lengths under several policies: seconds to the
             first token, median and 95th percentile, and new tokens a second from the first prompt to the
             last token. Then all under ``full``, and with a folder of peers these by the continuous batching
             of ``transformers serve``; its row says how many times as long or fast the engine's mixed ones
             are.
behind       a prompt of 40 tokens behind six long ones: seconds to its first token, alone and so. The long
             ones are under ``full``, then under a policy that judges a prompt as a whole.
clients      16 clients that each send one request after another, and the same requests one by one: new tokens
             a second, and seconds to the first token.
grammar      16 texts of a JSON grammar, and as many without one: new tokens a second; microseconds for which
             the host looks for the allowed tokens of one row, median and longest.

Everything runs once before it is timed, with other prompts, so nothing is compiled meanwhile and no
beginning is held.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import peers, random_model
from benchmarks.child import Child
from benchmarks.results import Row
from benchmarks.serving import Serving, other
from kvjax.engine import Engine, Request
from kvjax.grammar import Grammars
from kvjax.loading import LanguageModel, load

ARRIVALS, CLIENTS, ROUNDS = 32, 16, 2
"""Requests of ``arrivals``; clients of ``clients``, and requests of each."""

POLICIES = ("full", "snapkv + uniform(0.25)", "int8(64)", "window(256) + sinks(4)")
"""Of ``arrivals``, in turn."""

SHORT, LONG_ONES = 40, 6
"""Tokens of the short prompt of ``behind``, and the long ones before it."""

WHOLE = "snapkv + uniform(0.25)"
"""A policy that judges a prompt as a whole."""


def sharing(settings: Serving, done: Callable[[Row], None]) -> None:
    """Calls ``done`` with the rows of those parts that are asked for."""
    with _model(settings) as model:
        if "arrivals" in settings.parts:
            mixed = arrivals(model, settings, POLICIES)
            done(mixed)
            done(arrivals(model, settings, ("full",)))
            if settings.peers is not None:
                done(_peer_arrivals(model, settings, mixed))
        if "behind" in settings.parts:
            for policy in ("full", WHOLE):
                done(behind(model, settings, policy))
        if "clients" in settings.parts:
            done(clients(model, settings))
        if "grammar" in settings.parts:
            done(grammar(model, settings))


@contextlib.contextmanager
def _model(settings: Serving) -> Iterator[LanguageModel]:
    """The model; a random one of a size lies in a folder, which peers read, too."""
    if settings.size is None:
        yield load(settings.model)
        return
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home) / settings.size
        spec, dtype = random_model.SIZES[settings.size], random_model.STORED[settings.size]
        random_model.write(folder, spec, 0, dtype)
        yield load(folder)


def _prompts(model: LanguageModel, settings: Serving, count: int) -> list[list[int]]:
    """Random ids; lengths from an eighth of ``--prompt`` to all of it, as many short ones as long ones."""
    draw = np.random.default_rng(settings.seed)
    lengths = np.exp(draw.uniform(np.log(max(2, settings.prompt // 8)), np.log(settings.prompt), count))
    return [draw.integers(3, model.spec.vocab_size, max(1, int(n))).tolist() for n in lengths]


def _engine(model: LanguageModel, settings: Serving, context: int) -> Engine:
    return Engine(
        model,
        kv_memory=settings.kv_memory,
        max_rows=settings.max_rows,
        context=context,
        queue=4096,
        segment=settings.segment,
        prefill_tokens=settings.prefill_tokens,
    )


def _asked(engine: Engine, requests: Sequence[Request]) -> tuple[list[float], float]:
    """Sends requests at once: each one's seconds to the first token, and those to the last token of all."""
    begun = time.perf_counter()
    tickets = [engine.submit(request) for request in requests]
    for ticket in tickets:
        ticket.result()
    firsts = [ticket.usage.first_token for ticket in tickets]
    return [seconds for seconds in firsts if seconds is not None], time.perf_counter() - begun


def _tail(firsts: Sequence[float]) -> Row:
    return {
        "first_token_s": round(float(np.median(firsts)), 3),
        "first_token_p95_s": round(float(np.quantile(firsts, 0.95)), 3),
    }


def arrivals(model: LanguageModel, settings: Serving, policies: Sequence[str]) -> Row:
    """One row of ``arrivals``."""
    drawn = _prompts(model, settings, ARRIVALS)

    def requests(prompts: list[list[int]]) -> list[Request]:
        how: dict[str, Any] = {"max_new_tokens": settings.new, "ignore_eos": True}
        return [Request(prompt=x, policy=policies[at % len(policies)], **how) for at, x in enumerate(prompts)]

    with _engine(model, settings, settings.context) as engine:
        _asked(engine, requests(other(drawn)))
        _asked(engine, requests(other(other(drawn))))  # pools have their size now
        spent = time.process_time()
        firsts, seconds = _asked(engine, requests(drawn))
        spent = time.process_time() - spent
    return {
        "part": "arrivals",
        "model": model.name,
        "policies": list(policies),
        "requests": ARRIVALS,
        "prompt": settings.prompt,
        "prompt_tokens": sum(map(len, drawn)),
        "new": settings.new,
        "max_rows": settings.max_rows,
        **_tail(firsts),
        "tokens_per_s": round(ARRIVALS * settings.new / seconds, 1),
        "seconds": round(seconds, 2),
        "cpu_seconds": round(spent, 2),
    }


def _peer_arrivals(model: LanguageModel, settings: Serving, ours: Row) -> Row:
    """The same prompts by transformers."""
    assert settings.peers is not None
    drawn = _prompts(model, settings, ARRIVALS)
    with Child(peers.command(settings.peers), settings.threads) as child:
        loaded = child.ask("load", folder=str(model.folder), dtype=str(model.params["embed"].dtype))
        theirs = child.ask("serve", warm=other(drawn), tokens=drawn, new=settings.new)
    row = {
        "part": "arrivals",
        "system": "transformers, continuous batching",
        "versions": loaded["versions"],
        **_tail([stamps[0] for stamps in theirs["stamps"]]),
        "tokens_per_s": round(ARRIVALS * settings.new / theirs["seconds"], 1),
        "seconds": round(theirs["seconds"], 2),
        "cpu_seconds": round(theirs["cpu_seconds"], 2),
    }
    for name in ("first_token_s", "first_token_p95_s", "tokens_per_s"):
        row[f"engine_{name}_ratio"] = round(ours[name] / row[name], 2)
    return row


def behind(model: LanguageModel, settings: Serving, policy: str) -> Row:
    """One row of ``behind``."""
    draw = np.random.default_rng(settings.seed)

    def request(tokens: int, **how: str) -> Request:
        prompt = draw.integers(3, model.spec.vocab_size, tokens).tolist()
        return Request(prompt=prompt, max_new_tokens=settings.new, ignore_eos=True, **how)  # type: ignore[arg-type]

    context = dataclasses.replace(settings, prompt=settings.long).context
    with _engine(model, settings, context) as engine:
        seconds = []
        for _ in range(2):  # the first time compiles
            (alone,), _ = _asked(engine, [request(SHORT)])
            long = [request(settings.long, policy=policy) for _ in range(LONG_ONES)]
            firsts, _ = _asked(engine, [*long, request(SHORT)])
            seconds = [alone, firsts[-1], float(np.median(firsts[:-1]))]
    return {
        "part": "behind",
        "model": model.name,
        "policy": policy,
        "prompt": SHORT,
        "long": settings.long,
        "alone_s": round(seconds[0], 3),
        "behind_s": round(seconds[1], 3),
        "times": round(seconds[1] / seconds[0], 2),
        "long_first_token_s": round(seconds[2], 3),
    }


def clients(model: LanguageModel, settings: Serving) -> Row:
    """The row of ``clients``."""
    draw = np.random.default_rng(settings.seed)

    def prompts() -> list[list[int]]:
        return draw.integers(3, model.spec.vocab_size, (CLIENTS * ROUNDS, settings.prompt)).tolist()

    def send(engine: Engine, own: Sequence[list[int]], firsts: list[float]) -> None:
        for prompt in own:
            request = Request(prompt=prompt, max_new_tokens=settings.new, ignore_eos=True)
            firsts += _asked(engine, [request])[0]

    def together(engine: Engine, drawn: list[list[int]]) -> tuple[list[float], float]:
        firsts: list[float] = []
        begun = time.perf_counter()
        words = [(engine, drawn[at::CLIENTS], firsts) for at in range(CLIENTS)]
        threads = [threading.Thread(target=send, args=own) for own in words]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return firsts, time.perf_counter() - begun

    with _engine(model, settings, settings.context) as engine:
        together(engine, prompts())
        many, seconds = together(engine, prompts())
        one: list[float] = []
        begun = time.perf_counter()
        send(engine, prompts(), one)
        alone = time.perf_counter() - begun
    tokens = CLIENTS * ROUNDS * settings.new
    return {
        "part": "clients",
        "model": model.name,
        "clients": CLIENTS,
        "prompt": settings.prompt,
        "new": settings.new,
        **_tail(many),
        "tokens_per_s": round(tokens / seconds, 1),
        "one_by_one_first_token_s": round(float(np.median(one)), 3),
        "one_by_one_tokens_per_s": round(tokens / alone, 1),
        "times": round(alone / seconds, 2),
    }


def grammar(model: LanguageModel, settings: Serving) -> Row:
    """The row of ``grammar``; the model needs a tokenizer."""
    items = {"type": "array", "items": {"type": "string"}, "minItems": settings.new}
    schema = {"type": "object", "properties": {"words": items}, "required": ["words"]}
    guide = Grammars(model.text, model.spec.vocab_size).guide("json", schema)
    drawn = _prompts(model, settings, CLIENTS)

    def requests(prompts: list[list[int]], **how: Any) -> list[Request]:
        asked: dict[str, Any] = {"max_new_tokens": settings.new, "ignore_eos": True, "temperature": 1.0} | how
        return [Request(prompt=prompt, seed=at, **asked) for at, prompt in enumerate(prompts)]

    seconds: dict[str, float] = {}
    with _engine(model, settings, settings.context) as engine:
        for name, how in (("plain", {}), ("grammar", {"guide": guide})):
            _asked(engine, requests(other(drawn), **how))
            _, seconds[name] = _asked(engine, requests(drawn, **how))
        (written,) = [engine.submit(x).result() for x in requests(drawn[:1], guide=guide)]
    one, looked = guide(), []
    for token in written:
        begun = time.perf_counter()
        one.allowed()
        looked.append(time.perf_counter() - begun)
        one.take(token)
    tokens = CLIENTS * settings.new
    return {
        "part": "grammar",
        "model": model.name,
        "vocabulary": model.spec.vocab_size,
        "rows": CLIENTS,
        "new": settings.new,
        "plain_tokens_per_s": round(tokens / seconds["plain"], 1),
        "tokens_per_s": round(tokens / seconds["grammar"], 1),
        "mask_us": round(float(np.median(looked)) * 1e6, 1),
        "mask_longest_us": round(max(looked) * 1e6, 1),
    }
