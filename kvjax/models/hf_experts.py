"""The experts of a config.json to ``Experts`` and back.

Qwen3-MoE says ``num_experts`` (in files of transformers 5 ``num_local_experts``), a width of its own, whether
weights are normed, and which layers are dense. Mixtral and gpt-oss have experts in all layers.
"""

from __future__ import annotations

from typing import Any

from kvjax.models.families import Family
from kvjax.models.hf_values import ModelError, count
from kvjax.models.spec import Experts, ModelSpec

_COUNTS = ("num_local_experts", "num_experts")


def read_experts(config: dict[str, Any], family: Family, layers: int, file: str) -> Experts | None:
    """The experts, or None where the family has none."""
    if family.experts == "none":
        return None
    own = family.experts == "own_width"
    keys = _COUNTS[: 1 + own]
    counts = {count(config, key, file) for key in keys if config.get(key) is not None}
    if len(counts) != 1:
        raise ModelError(
            f"{file} has {' and '.join(f'{key} {config.get(key)}' for key in keys)}; kvjax needs one "
            "number of experts. Keep the one the model was trained with."
        )
    experts, chosen = counts.pop(), count(config, "num_experts_per_tok", file)
    if chosen > experts:
        raise ModelError(
            f"{file} has num_experts_per_tok {chosen} of {experts} experts; it must be at most those."
        )
    width = count(config, "moe_intermediate_size" if own else "intermediate_size", file)
    if not own:
        return Experts(count=experts, chosen=chosen, width=width)
    return Experts(
        count=experts,
        chosen=chosen,
        width=width,
        normed=bool(config.get("norm_topk_prob", False)),
        dense_layers=_dense_layers(config, layers, file),
    )


def _dense_layers(config: dict[str, Any], layers: int, file: str) -> tuple[int, ...]:
    every, named = count(config, "decoder_sparse_step", file), config.get("mlp_only_layers") or []
    if not isinstance(named, list) or not set(named) <= set(range(layers)):
        raise ModelError(
            f"{file} has mlp_only_layers {named!r}; it is a list of layers from 0 to {layers - 1}."
        )
    return tuple(layer for layer in range(layers) if layer in named or (layer + 1) % every)


def write_experts(spec: ModelSpec, family: Family) -> dict[str, Any]:
    """The keys of both generations of transformers."""
    experts = spec.experts
    if experts is None:
        return {}
    sizes = {"num_local_experts": experts.count, "num_experts_per_tok": experts.chosen}
    if family.experts == "all_layers":
        return sizes
    return {
        **sizes,
        "num_experts": experts.count,
        "moe_intermediate_size": experts.width,
        "norm_topk_prob": experts.normed,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(experts.dense_layers),
    }


def odd_experts(spec: ModelSpec, family: Family) -> list[str]:
    """What of a spec's experts the family has no keys for."""
    experts = spec.experts
    if experts is None:
        return [] if family.experts == "none" else ["experts=None"]
    plain = Experts(count=experts.count, chosen=experts.chosen, width=spec.mlp_dim)
    return [f"experts={experts!r}"] if family.experts == "all_layers" and experts != plain else []
