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
from benchmarks.results import Row
from kvjax import decode, metrics
from kvjax.algebra import Policy
from kvjax.cache.state import KVState
from kvjax.catalogue import policy
from kvjax.loading import LanguageModel, load
from kvjax.sampling import sampling
from kvjax.types import EMPTY, Network, Params

HOST_CALLS = 50


class Ladder:
    """A model, and the ladder of programs on one state after the other."""

    model: LanguageModel

    def load(self, folder: str, dtype: str) -> Row:
        self.model = load(folder, dtype=dtype)
        return machine.resident()

    def profile(self, spec: str, context: int, tokens: int, warm: int, rounds: int, seed: int) -> Row:
        """Median seconds a token of every program, host seconds a token, bytes."""
        jax.clear_caches()
        chosen, network = policy(spec), self.model.network
        new = 1 + tokens * (warm + rounds)
        dtype = self.model.params["embed"].dtype
        weights = untrained(self.model, chosen, seed)
        state = filled(network, chosen, weights, context - new, context, dtype, seed, new)
        cut = functools.partial(Cut, network.spec, network.mesh, chosen)
        networks: dict[str, Network] = {"weights": cut("weights"), "ring": cut("ring")}
        if state.layers[0].pages is not None:
            networks["read"] = cut("read")
        networks |= {"all": network, "alone": cut("all", weights=False)}
        bytes_ = metrics.nbytes(state).total
        seconds = self._in_turns(chosen, weights, networks, state, tokens, warm + rounds)
        timed = {name: times[warm:] for name, times in seconds.items()}
        _, host = cost(self.model.params, chosen, jax.tree.map(jnp.copy, state), HOST_CALLS)
        moved = sum(leaf.nbytes for leaf in jax.tree.leaves((self.model.params, weights)))
        return {
            "policy": repr(chosen),
            "seconds": {name: statistics.median(times) for name, times in timed.items()},
            "rounds": {name: [round(t, 7) for t in times] for name, times in timed.items()},
            "host": host / tokens,
            "live_bytes": bytes_["live"],
            "allocated_bytes": bytes_["allocated"],
            "weight_bytes": moved,
        }

    def _in_turns(
        self,
        chosen: Policy,
        weights: Params,
        networks: dict[str, Network],
        state: KVState,
        tokens: int,
        rounds: int,
    ) -> dict[str, list[float]]:
        """Seconds a token of every program, one multi-step decode of each in turns."""
        rows = decode.DecodeRows(
            token=jnp.zeros(1, jnp.int32),
            done=jnp.zeros(1, bool),
            left=jnp.full(1, 2**30, jnp.int32),
            stops=jnp.asarray([EMPTY], jnp.int32),
            how=sampling(1),
        )
        held: dict[str, list[Any]] = {name: [jax.tree.map(jnp.copy, state), rows] for name in networks}
        times: dict[str, list[float]] = {name: [] for name in networks}
        params = self.model.params
        for name, network in list(networks.items()) * rounds:
            begun = time.perf_counter()
            *held[name], out = decode.decode_steps(network, chosen, tokens, params, weights, *held[name])
            np.asarray(out)
            times[name].append((time.perf_counter() - begun) / tokens)
        return times


def main() -> None:
    """Answer until standard input ends."""
    ladder = Ladder()
    answer({"load": ladder.load, "profile": ladder.profile})


if __name__ == "__main__":
    main()
