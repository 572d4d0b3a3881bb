"""Our side of a comparison: ``python -m benchmarks.ours CPU,CPU…`` answers requests on standard input.

Parts that learn have untrained weights (``Part.untrained``); write gates admit a quarter of the prompt.

load      read a model folder in a dtype
prefill   read random prompts under a policy; seconds, and how much of them was compiling (``kvjax.timing``)
start     copy the prefilled rows and draw the first token
decode    the next few tokens of every row, timed: one piece of ``kvjax.decode.stream``
bytes     live and allocated bytes of the state, bytes of the compiled programs' temporaries
memory    of the process; ``forget`` lets the peak start again
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from benchmarks import machine
from benchmarks.child import answer
from benchmarks.fill import untrained
from kvjax import decode, metrics, timing
from kvjax.algebra import Policy
from kvjax.cache.state import KVState, fork
from kvjax.catalogue import policy
from kvjax.loading import LanguageModel, load
from kvjax.types import Params


class Side:
    """A model and what it is in the middle of."""

    def __init__(self) -> None:
        self.model: LanguageModel | None = None
        self.policy: Policy | None = None
        self.weights: Params = {}
        self.prefilled: tuple[KVState, jax.Array] | None = None
        self.state: KVState | None = None
        self.pieces: Iterator[tuple[np.ndarray, KVState]] | None = None
        self.new = self.every = 0

    def load(self, folder: str, dtype: str, mesh: str | None = None) -> dict[str, Any]:
        """Read the model, onto a mesh where one is named."""
        self.model = load(folder, dtype=dtype, mesh=mesh)
        jax.block_until_ready(self.model.params)
        return self.memory(forget=True) | {"versions": {"jax": jax.__version__}}

    def prefill(self, spec: str, tokens: list[list[int]], new: int, every: int) -> dict[str, Any]:
        """Prompt to first token. The state is made for exactly the prompt and ``new`` tokens."""
        assert self.model is not None  # noqa: S101  (the order of requests is ours)
        if self.policy != policy(spec):
            self.policy = policy(spec)
            self.weights = jax.block_until_ready(untrained(self.model, self.policy, seed=0))
        self.new, self.every = new, every
        self.prefilled = self.state = self.pieces = None  # a second call must not hold two states
        begun, spent = timing.now(), time.process_time()
        state, logits = decode.prefill(
            self.model, self.policy, tokens, context=len(tokens[0]) + new, weights=self.weights
        )
        state.mesh.read(logits).argmax(axis=-1)  # the first token, on the host
        took, spent = timing.now() - begun, time.process_time() - spent
        self.prefilled = (jax.block_until_ready(state), logits)
        seconds = {"seconds": took.wall, "compile_seconds": took.compiling, "cpu_seconds": spent}
        return seconds | self.bytes()

    def start(self, rows: int) -> dict[str, Any]:
        """Decode from copies of the first prefilled row."""
        assert self.model is not None  # noqa: S101
        assert self.policy is not None  # noqa: S101
        assert self.prefilled is not None  # noqa: S101
        jax.clear_caches()  # so that ``temporary`` speaks of decoding alone
        state, logits = self.prefilled
        where = state.mesh
        many = where.put(where.read(logits)[np.zeros(rows, np.int32)])
        self.state = fork(state, 0, rows)
        self.pieces = decode.stream(
            self.model,
            self.policy,
            self.state,
            many,
            max_new_tokens=self.new,
            weights=self.weights,
            every=self.every,
        )
        _, self.state = next(self.pieces)
        return self.bytes()

    def decode(self) -> dict[str, Any]:
        """One more piece, timed."""
        assert self.pieces is not None  # noqa: S101
        begun = timing.now()
        found, self.state = next(self.pieces)
        took = timing.now() - begun
        return {"seconds": took.wall, "tokens": int(found.size), "compile_seconds": took.compiling}

    def bytes(self) -> dict[str, Any]:
        """Of the state in hand."""
        state = self.prefilled[0] if self.state is None and self.prefilled else self.state
        assert state is not None  # noqa: S101
        return metrics.nbytes(state).total | {"temporary": temporary()}

    def memory(self, forget: bool) -> dict[str, Any]:
        """Of the process."""
        found = machine.resident()
        if forget:
            machine.forget_peak()
        return found


def temporary() -> int:
    """Bytes of temporaries of the hungriest program compiled so far."""
    programs = jax.devices()[0].client.live_executables()
    return max((p.get_compiled_memory_stats().temp_size_in_bytes for p in programs), default=0)


def main() -> None:
    """Answer until standard input ends."""
    side = Side()
    answer({name: getattr(side, name) for name in ("load", "prefill", "start", "decode", "bytes", "memory")})


if __name__ == "__main__":
    main()
