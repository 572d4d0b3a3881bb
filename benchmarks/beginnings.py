"""What requests that begin alike save: the reading of what they share, and the pages that hold it."""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import Any

import numpy as np

from benchmarks.serving import Serving, ask, engine_of, prompts, rate
from kvjax.engine import Engine, Request
from kvjax.loading import LanguageModel

Row = dict[str, Any]

END = 36
"""Tokens in which requests of ``prefix`` differ."""

TEXTS = 3
"""Beginnings of ``prefix``; each is asked ``ASKED`` times."""

ASKED = 3

ALIKE = 16
"""Requests of ``pages``."""


def prefix(model: LanguageModel, settings: Serving, spec: str) -> list[Row]:
    """Rows of ``prefix``: medians over the texts of the first request that begins so, the second, the third.

    Nothing is held of the first one's text, the second finds one that is held, the third two.
    """
    longer = dataclasses.replace(settings, prompt=settings.prefix + END, new=1)
    asked = prompts(model, longer, (TEXTS + 1) * ASKED)
    found = []
    with engine_of(model, longer, spec, 1, None) as engine:
        for at in range(0, len(asked), ASKED):
            begin = asked[at][: settings.prefix]
            texts = [[*begin, *other[settings.prefix :]] for other in asked[at : at + ASKED]]
            found.append([_first_token(engine, text) for text in texts])
    # What the first text needed was compiled meanwhile.
    middle = np.median(np.asarray(found[1:]), axis=0)
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
    begin, *ends = prompts(model, dataclasses.replace(settings, prompt=settings.prefix), ALIKE + 1)
    asked = [[*begin, *end[:16]] for end in ends]
    longer = dataclasses.replace(settings, prompt=settings.prefix + 16)
    with engine_of(model, longer, "full", ALIKE, None, share) as engine:
        ask(engine, longer, asked)  # the second time all begin with what the first left
        used, stop = [0.0], threading.Event()

        def look() -> None:
            while not stop.wait(0.05):
                (batch,) = engine.metrics().batches
                used[0] = max(used[0], batch.allocated * batch.pages_used / max(batch.pages, 1))

        watching = threading.Thread(target=look)
        watching.start()
        stamps = ask(engine, longer, asked)
        stop.set()
        watching.join()
    return {
        "part": "pages",
        "shared": share,
        "requests": ALIKE,
        "prompt": longer.prompt,
        "prefix": settings.prefix,
        "new": settings.new,
        "owned_page_bytes": int(used[0]),
        "tokens_per_s": rate([x.seconds for x in stamps], settings.segment),
        "tokens_per_cpu_s": rate([x.spent for x in stamps], settings.segment),
    }
