"""``serve --part structures mixed``: what many policy structures cost a server, and whether memory is kept.

structures   one text is written under ``full`` all the time, and structures come one after another, each to
             be compiled: memory maps and resident memory of the process, and the longest pause of the text's
             tokens meanwhile. The first row is before them, the last one after the engine has ended.
mixed        requests of several policies that fill ``--kv-memory``: the bytes of all arrays on the device,
             looked at a hundred times a second, beside the bound.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from benchmarks import random_model
from benchmarks.host import narrow
from benchmarks.results import Row
from benchmarks.serving import Serving
from kvjax.engine import Engine, Request
from kvjax.loading import LanguageModel, load

FAMILIES = ("window({})", "window({}) + sinks(4)", "int8({})", "snapkv({}) + uniform(0.5)")
"""Policies whose structure the number changes."""

MIXED = ("full", "snapkv + uniform(0.25)", "knorm + uniform(256, every_step)", "int8(64)", "window(256)")
"""Policies of ``mixed``."""


def model_of(settings: Serving) -> LanguageModel:
    """The model, or a random one of so many narrow layers, where nearly all of the time is compilation."""
    if settings.narrow is None:
        return load(settings.model)
    sizes = narrow(settings.narrow)
    params = jax.device_put(random_model.draw(sizes, seed=0))
    return LanguageModel(name=f"narrow, {settings.narrow} layers", spec=sizes, params=params, folder=Path())


def structures(settings: Serving, done: Callable[[Row], None]) -> None:
    """Calls ``done`` with the rows of ``structures``."""
    model, ids = model_of(settings), np.random.default_rng(settings.seed)
    prompt = ids.integers(3, model.spec.vocab_size, settings.prompt).tolist()
    about = {"part": "structures", "model": model.name, "prompt": settings.prompt, "new": settings.new}
    with Engine(model, kv_memory=settings.kv_memory, context=settings.context) as engine:
        engine.warm_up()
        with _Text(engine, prompt, settings.context - settings.prompt) as text:
            done(about | {"structures": 0} | _process())
            for count in range(1, settings.count + 1):
                which, turn = (count - 1) % len(FAMILIES), (count - 1) // len(FAMILIES)
                policy = FAMILIES[which].format(64 + 8 * turn)
                begun, spent = time.perf_counter(), time.process_time()
                text.longest = 0.0
                request = Request(
                    prompt=prompt[::-1], max_new_tokens=settings.new, policy=policy, ignore_eos=True
                )
                engine.submit(request).result()
                row = about | {"structures": count, "policy": policy} | _process()
                row["seconds"] = round(time.perf_counter() - begun, 2)
                row["cpu_s"] = round(time.process_time() - spent, 2)
                done(
                    row
                    | {"longest_pause_s": round(text.longest, 2), "batches": len(engine.metrics().batches)}
                )
    del engine, text
    done(about | {"structures": "after the engine"} | _process())


def _process() -> Row:
    """Memory maps and resident MiB of this process."""
    gc.collect()
    maps = len(Path("/proc/self/maps").read_text().splitlines())
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {"maps": maps, "resident_mib": int(status["VmRSS"].split()[0]) // 1024}


class _Text:
    """A text that is written all the time; ``longest`` is the longest time between two of its tokens."""

    def __init__(self, engine: Engine, prompt: list[int], tokens: int) -> None:
        self._engine, self.longest, self._ends = engine, 0.0, threading.Event()
        self._request = Request(prompt=prompt, max_new_tokens=tokens, policy="full", ignore_eos=True)
        self._thread, self._begun = threading.Thread(target=self._write), threading.Event()

    def _write(self) -> None:
        while not self._ends.is_set():
            ticket, last = self._engine.submit(self._request), None
            for _ in ticket:
                now = time.perf_counter()
                self.longest = max(self.longest, 0.0 if last is None else now - last)
                last = now
                self._begun.set()
                if self._ends.is_set():
                    ticket.cancel()

    def __enter__(self) -> _Text:
        self._thread.start()
        self._begun.wait()
        return self

    def __exit__(self, *error: object) -> None:
        self._ends.set()
        self._thread.join()


def mixed(settings: Serving) -> Row:
    """The row of ``mixed``."""
    model, ids = model_of(settings), np.random.default_rng(settings.seed)
    gc.collect()
    before, counted, ends = _device_bytes(), [0, 0], threading.Event()
    assert settings.kv_memory is not None
    with Engine(model, kv_memory=settings.kv_memory, context=settings.context, queue=4096) as engine:

        def look() -> None:
            while not ends.wait(0.01):
                counted[0] = max(counted[0], _device_bytes() - before)
                counted[1] = max(counted[1], engine.metrics().kv_allocated)

        watch, begun = threading.Thread(target=look), time.perf_counter()
        watch.start()
        tickets = []
        for at in range(settings.count):
            length = int(ids.integers(settings.prompt // 4, settings.prompt + 1))
            prompt = ids.integers(3, model.spec.vocab_size, length).tolist()
            request = Request(
                prompt=prompt, max_new_tokens=settings.new, policy=MIXED[at % len(MIXED)], ignore_eos=True
            )
            tickets.append(engine.submit(request))
        written = sum(len(ticket.result()) for ticket in tickets)
        seconds = time.perf_counter() - begun
        ends.set()
        watch.join()
        preempted = engine.metrics().preempted
    return {
        "part": "mixed",
        "model": model.name,
        "policies": list(MIXED),
        "requests": settings.count,
        "tokens": written,
        "kv_memory": settings.kv_memory,
        "most_counted": counted[1],
        "most_on_device": counted[0],
        "over": round(counted[0] / settings.kv_memory - 1, 4),
        "preempted": preempted,
        "seconds": round(seconds, 1),
    }


def _device_bytes() -> int:
    return sum(array.nbytes for array in jax.live_arrays())
