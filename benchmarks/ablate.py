"""The process behind ``profile``: times the ladder of ``ladder.py`` on a synthetic state, in turns."""

from __future__ import annotations

import functools
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import machine
from benchmarks.child import answer
from benchmarks.fill import filled, untrained
from benchmarks.host import cost
from benchmarks.ladder import Cut
from kvjax import decode, metrics
from kvjax.algebra import Policy
from kvjax.cache.state import KVState
from kvjax.catalogue import policy
from kvjax.loading import LanguageModel, load
from kvjax.sampling import sampling
from kvjax.types import EMPTY, Network, Params

HOST_CALLS = 50


class Bench:
    """A model, and the ladder on one state after the other."""

    def __init__(self) -> None:
        self.model: LanguageModel | None = None

    def load(self, folder: str, dtype: str) -> dict[str, Any]:
        """Read the model."""
        self.model = load(folder, dtype=dtype)
        return machine.resident()

    def profile(
        self, spec: str, context: int, tokens: int, warm: int, rounds: int, seed: int
    ) -> dict[str, Any]:
        """Median seconds a token of every rung, host seconds a token, bytes."""
        assert self.model is not None  # noqa: S101  (the order of requests is ours)
        jax.clear_caches()
        chosen, network = policy(spec), self.model.network
        new = 1 + tokens * (warm + rounds)
        dtype = self.model.params["embed"].dtype
        weights = untrained(self.model, chosen, seed)
        state = filled(network, chosen, weights, context - new, context, dtype, seed, new)
        cut = functools.partial(Cut, network.spec, chosen)
        rungs: dict[str, Network] = {"weights": cut("weights"), "ring": cut("ring")}
        if state.layers[0].pages is not None:
            rungs["read"] = cut("read")
        rungs |= {"all": network, "alone": cut("all", weights=False)}
        bytes_ = metrics.nbytes(state).total
        seconds = self._ladder(chosen, weights, rungs, state, tokens, warm, rounds)
        found = {name: statistics.median(times) for name, times in seconds.items()}
        _, host = cost(self.model.params, chosen, jax.tree.map(jnp.copy, state), HOST_CALLS)
        moved = sum(leaf.nbytes for leaf in jax.tree.leaves((self.model.params, weights)))
        return {
            "policy": repr(chosen),
            "seconds": found,
            "rounds": {name: [round(t, 7) for t in times] for name, times in seconds.items()},
            "host": host / tokens,
            "live_bytes": bytes_["live"],
            "allocated_bytes": bytes_["allocated"],
            "weight_bytes": moved,
        }

    def _ladder(
        self,
        chosen: Policy,
        weights: Params,
        rungs: dict[str, Network],
        state: KVState,
        tokens: int,
        warm: int,
        rounds: int,
    ) -> dict[str, list[float]]:
        """Seconds a token of every rung, one segment each in turns."""
        assert self.model is not None  # noqa: S101
        run = decode.DecodeRows(
            token=jnp.zeros(1, jnp.int32),
            done=jnp.zeros(1, bool),
            left=jnp.full(1, 2**30, jnp.int32),
            stops=jnp.asarray([EMPTY], jnp.int32),
            how=sampling(1),
        )
        held = {name: (jax.tree.map(jnp.copy, state), run) for name in rungs}
        times: dict[str, list[float]] = {name: [] for name in rungs}
        for _ in range(warm + rounds):
            for name, network in rungs.items():
                before, run = held[name]
                begun = time.perf_counter()
                params = self.model.params
                after, run, out = decode.decode_steps(network, chosen, tokens, params, weights, before, run)
                np.asarray(out)
                times[name].append((time.perf_counter() - begun) / tokens)
                held[name] = (after, run)
        return {name: found[warm:] for name, found in times.items()}


def main() -> None:
    """Answer until standard input ends."""
    bench = Bench()
    answer({"load": bench.load, "profile": bench.profile})


if __name__ == "__main__":
    main()
