"""``host``: what a decode step costs the host, for a model so narrow that its arithmetic takes no time.

  per call    time to hand all leaves (weights and state, donated) to a compiled program and take the
              state back: what a loop in Python pays per token
  per token   the same and the read of the page counts before it, spread over the 64 tokens of one multi-step
              decode: what ``generate`` pays

On a mesh one process drives all devices, and reads the page counts of each. Times are of the clock, and of
the processor (this process, its virtual devices included), which other processes disturb less.

``profile`` reports the second figure for real models, measured by the same function.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from benchmarks import random_model
from kvjax import decode
from kvjax.algebra import Policy
from kvjax.cache.state import KVState
from kvjax.catalogue import policy
from kvjax.models import decoder
from kvjax.models.spec import ModelSpec
from kvjax.sharding.mesh import ONE, Mesh
from kvjax.sharding.specs import CONTEXT, DATA, TENSOR
from kvjax.types import Params


def cost(
    params: Params,
    policy: Policy,
    state: KVState,
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[float, float]:
    """Median seconds of a call, and of reading the page counts and a call; the state is donated."""
    # Donated arguments returned untouched: argument handling, donation and result handling, no arithmetic.
    passing = jax.jit(lambda params, state: state, donate_argnums=1)
    calls, both = [], []
    for _ in range(1 + repeats):
        begun = clock()
        state = decode.reserve(policy, state, 1, 1)
        counted = clock()
        state = passing(params, state)
        jax.block_until_ready(state.length)
        ended = clock()
        calls.append(ended - counted)
        both.append(ended - begun)
    return statistics.median(calls[1:]), statistics.median(both[1:])  # the first compiles


def narrow(layers: int, mesh: Mesh = ONE) -> ModelSpec:
    """A decoder with many layers and hardly any width; one KV head for each device along ``tensor``."""
    heads = mesh.size(TENSOR) * mesh.size(CONTEXT)
    return ModelSpec(
        family="qwen2",
        vocab_size=32,
        num_layers=layers,
        num_heads=2 * heads,
        num_kv_heads=mesh.size(TENSOR),
        head_dim=8,
        model_dim=16,
        mlp_dim=16 * heads,
        max_positions=4096,
        qkv_bias=True,
    )


def host(layers: int, spec: str, repeats: int, mesh: Mesh = ONE) -> dict[str, float | int | str]:
    """Host microseconds per call and per token of a multi-step decode.

    Args:
      layers: L.
      spec: a policy in the one-string form; it decides how many leaves the state has.
      repeats: calls timed; the median is reported.
      mesh: devices of this process; a row for each along ``data``.
    """
    network, chosen = decoder.Decoder(narrow(layers, mesh)), policy(spec)
    params = jax.tree.map(jnp.asarray, random_model.draw(network.spec, seed=0))
    if mesh != ONE:
        params = mesh.put(params, mesh.of_model(network, params))
    state = decode.empty(
        network, chosen, rows=mesh.size(DATA), context=256, dtype=jnp.dtype("float32"), mesh=mesh
    )
    leaves = len(jax.tree.leaves((params, state)))
    call, both = cost(params, chosen, jax.tree.map(jnp.copy, state), repeats)
    _, busy = cost(params, chosen, state, repeats, time.process_time)
    return {
        "policy": repr(chosen),
        "layers": layers,
        "mesh": repr(mesh),
        "leaves": leaves,
        "host_us_per_call": round(call * 1e6, 1),
        "host_us_per_token": round(both * 1e6 / decode.MAX_STEPS, 2),
        "cpu_us_per_token": round(busy * 1e6 / decode.MAX_STEPS, 2),
        "jax": jax.__version__,
    }
