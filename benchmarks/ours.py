"""Our side of a comparison: ``python -m benchmarks.ours CPU,CPU…`` answers requests on standard input.

Parts that learn have untrained weights (``Part.untrained``); write gates admit a quarter of the prompt.

load      reads a model folder in a dtype, its weights quantised or not
prefill   reads random prompts under a policy; seconds, how many of them were compiling (``kvjax.timing``);
          ``attention=False`` leaves attention and cache out
fill      a state as after such a prompt, of random keys and values, without reading it
start     copies the prefilled rows and draws the first token
decode    writes the next few tokens of every row, timed: one piece of ``kvjax.decode.stream``
bytes     live and allocated bytes of the state, bytes of the compiled programs' temporaries
memory    of the process; ``forget`` lets the peak start again
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import machine
from benchmarks.child import answer
from benchmarks.fill import filled, untrained
from benchmarks.results import Row
from kvjax import decode, metrics, timing
from kvjax.algebra import Policy
from kvjax.cache.state import KVState, fork
from kvjax.catalogue import policy
from kvjax.loading import LanguageModel, load
from kvjax.models.decoder import Decoder
from kvjax.types import AttendFn, C, Heads, Params, Weighted


class Worker:
    """A model, its prefilled rows, and the state that is being decoded."""

    model: LanguageModel
    policy: Policy | None = None
    weights: Params
    prefilled: tuple[KVState, jax.Array] | None = None
    state: KVState | None = None
    pieces: Iterator[tuple[np.ndarray, KVState]] | None = None
    new = every = 0

    def load(self, folder: str, dtype: str, mesh: str | None = None, weight_dtype: str | None = None) -> Row:
        begun = time.perf_counter()
        self.model = load(folder, dtype=dtype, mesh=mesh, weight_dtype=weight_dtype)
        jax.block_until_ready(self.model.params)
        seconds = {"seconds": time.perf_counter() - begun}
        return self.memory(forget=True) | seconds | {"versions": {"jax": jax.__version__}}

    def prefill(
        self, spec: str, tokens: list[list[int]], new: int, every: int, attention: bool = True
    ) -> Row:
        """Prompt to first token. The state has room for exactly the prompt and ``new`` tokens."""
        chosen = self._begin(spec, new, every)
        model: Weighted = self.model if attention else _without_attention(self.model)
        begun, spent = timing.now(), time.process_time()
        state, logits = decode.prefill(
            model, chosen, tokens, context=len(tokens[0]) + new, weights=self.weights
        )
        state.mesh.read(logits).argmax(axis=-1)  # the first token, on the host
        took, spent = timing.now() - begun, time.process_time() - spent
        self.prefilled = (jax.block_until_ready(state), logits)
        seconds = {"seconds": took.wall, "compile_seconds": took.compiling, "cpu_seconds": spent}
        return seconds | self.bytes()

    def fill(self, spec: str, tokens: list[list[int]], new: int, every: int) -> Row:
        """The state that ``prefill`` leaves, with random keys and values."""
        chosen, model, seen = self._begin(spec, new, every), self.model, len(tokens[0])
        dtype = model.params["embed"].dtype
        state = filled(model.network, chosen, self.weights, seen, seen + new, dtype, 0, new)
        self.prefilled = (state, np.zeros((1, model.spec.vocab_size), np.float32))  # type: ignore[assignment]
        return self.bytes()

    def _begin(self, spec: str, new: int, every: int) -> Policy:
        if self.policy != policy(spec):
            self.policy = policy(spec)
            self.weights = jax.block_until_ready(untrained(self.model, self.policy, seed=0))
        self.new, self.every = new, every
        self.prefilled = self.state = self.pieces = None  # a second call must not hold two states
        return self.policy

    def start(self, rows: int) -> Row:
        """Decodes from copies of the first prefilled row."""
        assert self.policy is not None
        assert self.prefilled is not None
        jax.clear_caches()  # so that ``temporary`` counts decoding alone
        state, logits = self.prefilled
        repeated = state.mesh.put(state.mesh.read(logits)[np.zeros(rows, np.int32)])
        self.state = fork(state, 0, rows)
        self.pieces = decode.stream(
            self.model,
            self.policy,
            self.state,
            repeated,
            max_new_tokens=self.new,
            stops=(),
            weights=self.weights,
            every=self.every,
        )
        _, self.state = next(self.pieces)
        return self.bytes()

    def decode(self) -> Row:
        """One more piece, timed."""
        assert self.pieces is not None
        begun = timing.now()
        tokens, self.state = next(self.pieces)
        took = timing.now() - begun
        return {"seconds": took.wall, "tokens": int(tokens.size), "compile_seconds": took.compiling}

    def bytes(self) -> Row:
        """Of the current state; temporaries are those of the program that needs most."""
        state = self.prefilled[0] if self.state is None and self.prefilled else self.state
        assert state is not None
        programs = jax.devices()[0].client.live_executables()
        temporary = max((p.get_compiled_memory_stats().temp_size_in_bytes for p in programs), default=0)
        return metrics.nbytes(state).total | {"temporary": temporary}

    def memory(self, forget: bool) -> Row:
        """Of the process."""
        resident = machine.resident()
        if forget:
            machine.forget_peak()
        return resident


class _Products(Decoder):
    """A decoder whose attention returns q + k + v."""

    def at(self, context: int) -> _Products:
        return _Products(self.spec.at(context))

    def layer(
        self, params: Params, index: int, x: jax.Array, positions: jax.Array, attend: AttendFn[C], carry: C
    ) -> tuple[jax.Array, C]:
        def without(index: int, heads: Heads, carry: C) -> tuple[jax.Array, C]:
            return heads.q + jnp.repeat(heads.k + heads.v, self.spec.groups, axis=2), carry

        return super().layer(params, index, x, positions, without, carry)


@dataclasses.dataclass(frozen=True)
class _Weighted:
    network: Decoder
    params: Params


def _without_attention(model: LanguageModel) -> _Weighted:
    """A model whose prompts cost everything but attention and its cache."""
    return _Weighted(_Products(model.spec), model.params)


def main() -> None:
    """Answer until standard input ends."""
    worker = Worker()
    answer(
        {
            name: getattr(worker, name)
            for name in ("load", "prefill", "fill", "start", "decode", "bytes", "memory")
        }
    )


if __name__ == "__main__":
    main()
