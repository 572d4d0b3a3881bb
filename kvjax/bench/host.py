"""``host``: what a decode step costs the host.

Two figures, for a model of ``--layers`` layers so narrow that the arithmetic vanishes:

  per call    time to hand all leaves (weights and state, donated) to a compiled program and take the
              state back: what a loop in Python pays per token
  per token   the same and the look at the page counts before it, spread over the tokens of one segment of
              64: what ``generate`` pays
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import decode
from kvjax.cache.state import KVState
from kvjax.catalogue import policy
from kvjax.models import decoder
from kvjax.models.spec import ModelSpec


def narrow(layers: int) -> ModelSpec:
    """A decoder with many layers and next to no width."""
    return ModelSpec(
        family="qwen2",
        vocab_size=32,
        num_layers=layers,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        model_dim=16,
        mlp_dim=16,
        max_positions=4096,
        qkv_bias=True,
    )


def _median_us(call: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def host(layers: int, spec: str, repeats: int) -> dict[str, float | int | str]:
    """Host microseconds per call and per token of a segment.

    Args:
      layers: L.
      spec: a policy in the one-string form; it decides how many leaves the state has.
      repeats: calls timed; the median is reported.
    """
    network, chosen = decoder.Decoder(narrow(layers)), policy(spec)
    keys = iter(jax.random.split(jax.random.PRNGKey(0), 16 * layers + 16))
    params = jax.tree.map(
        lambda shape: 0.1 * jax.random.normal(next(keys), shape),
        decoder.shapes(network.spec),
        is_leaf=lambda x: isinstance(x, tuple),
    )
    state = decode.empty(network, chosen, rows=1, context=256, dtype=jnp.dtype("float32"))

    def per_call(params: dict, state: KVState, token: jax.Array) -> KVState:
        return state

    # Donated arguments returned untouched: argument handling, donation and result handling, no arithmetic.
    passing = jax.jit(per_call, donate_argnums=1)
    held = [state]

    def call() -> None:
        held[0] = passing(params, held[0], np.zeros(1, np.int32))

    call()
    each = _median_us(call, repeats)

    def look() -> None:
        held[0] = decode.reserve(chosen, held[0], 1, 1)

    look()  # may grow the pools once
    call()
    segment = each + _median_us(look, repeats)
    leaves = len(jax.tree.leaves((params, state)))
    return {
        "policy": repr(chosen),
        "layers": layers,
        "leaves": leaves,
        "host_us_per_call": round(each, 1),
        "host_us_per_token": round(segment / decode.SEGMENT, 2),
        "jax": jax.__version__,
    }
