"""What ranking takes: processor time beside prefill, and FLOPs of models of any size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import decode
from kvjax.loading import LanguageModel
from kvjax.models.spec import ModelSpec
from kvjax.policies import kvp
from kvjax.types import Params
from studies import processor

BUDGET = "kvp + uniform(256)"


def measured(model: LanguageModel, layers: list[Params], lengths: Sequence[int]) -> list[dict[str, Any]]:
    """Least processor seconds of a prompt by length: reading it, ranking it, and reading it under ``BUDGET``.

    Ranking is the agents' scores of all layers; what compressing adds besides (sorting, packing) is in
    ``compressed``. Prompts are random tokens: only their number counts. Rotations have no end, so lengths may
    exceed what the model was trained for.
    """
    entries = []
    for length in lengths:
        seconds = _seconds(model, layers, length)
        share = seconds["ranking"] / seconds["reading"]
        print(f"{length} tokens: ranking {100 * share:.1f} % of reading, {seconds}", flush=True)
        entries.append({"length": length, "cpu_seconds": seconds, "ranking_over_reading": share})
    return entries


def _seconds(model: LanguageModel, layers: list[Params], length: int) -> dict[str, float]:
    wide = processor.wide(model, length + 1)
    ids = [np.random.default_rng(0).integers(3, model.spec.vocab_size, length).tolist()]
    shape = (1, model.spec.num_kv_heads, length, model.spec.head_dim)
    k, at = jax.random.normal(jax.random.key(0), shape), jnp.arange(length)[None]
    rank = jax.jit(lambda layers, k: [kvp.scores(layer, k, k, k, at) for layer in layers])
    weights = {"eviction": layers}
    return {
        "reading": processor.least(lambda: decode.read_full(wide, ids, context=length).inputs[-1]),
        "ranking": processor.least(lambda: rank(layers, k)),
        "compressed": processor.least(
            lambda: decode.prefill(wide, BUDGET, ids, context=length, weights=weights)[1]
        ),
    }


def flops(spec: ModelSpec, parameters: int, length: int) -> dict[str, float]:
    """Multiplications and additions of a prompt of that length: of its prefill and of its ranking.

    Args:
      spec: the model's sizes; every layer attends fully, the last token alone has logits.
      parameters: of one agent.
      length: tokens.
    """
    d, h = spec.model_dim, spec.head_dim
    matrices = d * h * (2 * spec.num_heads + 2 * spec.num_kv_heads) + 3 * d * spec.mlp_dim
    attention = 4 * spec.num_heads * h * (length + 1) / 2  # scores and sums over the tokens so far
    prefill = length * spec.num_layers * (2 * matrices + attention) + 2 * d * spec.vocab_size
    ranking = 2.0 * length * spec.num_layers * spec.num_kv_heads * parameters
    return {"prefill": prefill, "ranking": ranking, "share": ranking / prefill}


def agent_parameters(layer: Params) -> int:
    """Of one agent of a layer's."""
    sizes = [int(leaf.size) for name, leaf in layer.items() if name != kvp.GATE]
    return sum(sizes) // int(layer["b1"].shape[0])
