"""The process behind ``compile``: one start, from the first call to the last token.

The model is ``host.narrow``, so narrow that nearly all of the time is tracing, lowering and compiling, or one
of ``random_model.SIZES`` in bfloat16.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import jax
import numpy as np

from benchmarks import random_model
from benchmarks.child import answer
from benchmarks.fill import untrained
from benchmarks.host import narrow
from benchmarks.results import Row
from kvjax import decode
from kvjax.catalogue import policy
from kvjax.loading import LanguageModel, load
from pallas_kernels.measure import timing


class Meter:
    """Time spent and programs compiled since it was last read."""

    def __init__(self) -> None:
        self.programs = 0
        jax.monitoring.register_event_duration_secs_listener(self._count)
        self._last = self._now()

    def _count(self, event: str, duration_secs: float, **_: str | int) -> None:
        self.programs += event == "/jax/core/compile/backend_compile_duration"

    def _now(self) -> tuple[float, float, int, timing.CompileTime]:
        spent = os.times()
        return time.perf_counter(), spent.user + spent.system, self.programs, timing.compile_time()

    def read(self) -> Row:
        """Seconds of the clock, of all CPUs and (by the clock) of the three stages; programs."""
        (wall, cpu, programs, stages), self._last = self._last, self._now()
        took = self._last[3].since(stages)
        return {
            "seconds": round(self._last[0] - wall, 2),
            "cpu_s": round(self._last[1] - cpu, 2),
            "tracing_s": round(took.tracing, 2),
            "lowering_s": round(took.lowering, 2),
            "compiling_s": round(took.compiling, 2),
            "programs": self._last[2] - programs,
        }


def start(spec: str, layers: int | str, prompt: int, new: int, keep: str) -> Row:
    """Reads a random prompt and writes ``new`` tokens; compiled programs are kept in the folder ``keep``.

    ``layers`` is the depth of a narrow model, or the folder of another.
    """
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", keep)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    chosen, begun = policy(spec), time.perf_counter()
    if isinstance(layers, int):
        sizes = narrow(layers)
        params = jax.device_put(random_model.draw(sizes, seed=0))
        model = LanguageModel(name="narrow", spec=sizes, params=params, folder=Path())
    else:
        model = load(layers, dtype="bfloat16")
        sizes = model.spec
    jax.block_until_ready(model.params)
    loading = round(time.perf_counter() - begun, 2)
    weights = jax.block_until_ready(untrained(model, chosen, seed=0))
    ids = np.random.default_rng(0).integers(1, sizes.vocab_size, prompt)
    context = decode.bucket(prompt + new, sizes.max_positions)
    meter = Meter()
    state, logits = decode.prefill(model, chosen, [ids], context=context, weights=weights)
    jax.block_until_ready(logits)
    read = meter.read()
    pieces = decode.stream(model, chosen, state, logits, max_new_tokens=new, stops=(), weights=weights)
    for _, after in pieces:
        state = after
    jax.block_until_ready(state.length)
    return {"load_s": loading, "prefill": read, "decode": meter.read(), "jax": jax.__version__}


def main() -> None:
    """Answer until standard input ends."""
    answer({"start": start})


if __name__ == "__main__":
    main()
