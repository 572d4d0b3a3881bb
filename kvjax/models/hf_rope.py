"""The rope of a config.json, in all its spellings, to ``Rope`` and back.

transformers 4 says ``rope_theta`` and ``rope_scaling`` at the top level (Gemma 3: ``rope_local_base_freq``
for the sliding layers; Phi: ``partial_rotary_factor`` and ``original_max_position_embeddings``),
transformers 5 one dict ``rope_parameters`` (Gemma 3: one for each type of layer). Both are read, a file
that says two different things is refused, and both are written.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from kvjax.models.families import Family
from kvjax.models.hf_values import ModelError, count, number, numbers
from kvjax.models.rope import LinearScaling, Llama3Scaling, LongRope, Rope, Yarn
from kvjax.models.spec import ModelSpec

_ORIGINAL = "original_max_position_embeddings"


def read_ropes(config: dict[str, Any], family: Family, head_dim: int, file: str) -> tuple[Rope, Rope | None]:
    """The rope of full-attention layers and, where they have one of their own, of sliding layers."""
    if family.traits.get("positions") == "learned":
        return Rope(), None
    config = {**config, "head_dim": head_dim}
    if len(family.thetas) == 1:
        return _one(config, family, file), None
    new, old = config.get("rope_parameters"), config.get("rope_scaling")
    if new is None or config.get("rope_theta") is not None:
        local = {"rope_theta": config.get("rope_local_base_freq")}
        full = {"rope_theta": config.get("rope_theta"), **_flat(old, file)}
        both = _rope(full, config, family, 0, file), _rope(local, config, family, 1, file)
    if new is None:
        return both
    if not isinstance(new, dict) or not set(new) <= {"full_attention", "sliding_attention"}:
        raise ModelError(
            f"{file} has rope_parameters {new!r}; gemma3 holds one rope for 'full_attention' and one for "
            "'sliding_attention'. Correct the dict."
        )
    names = ("full_attention", "sliding_attention")
    pair = [_rope(_flat(new.get(name), file), config, family, i, file) for i, name in enumerate(names)]
    if config.get("rope_theta") is not None and tuple(pair) != both:
        raise _twice(file)
    return pair[0], pair[1]


def write_ropes(spec: ModelSpec) -> dict[str, Any]:
    """The keys of both spellings."""
    if spec.positions == "learned":
        return {}
    rope = _written(spec.rope, spec)
    top: dict[str, Any] = {"rope_theta": spec.rope.theta, "rope_scaling": rope if spec.rope.scaling else None}
    if isinstance(spec.rope.scaling, LongRope):
        # transformers 4 takes these three keys and no others, the length from the top level.
        top[_ORIGINAL] = spec.rope.scaling.original_max_position_embeddings
        kept = {k: v for k, v in rope.items() if k not in ("rope_type", _ORIGINAL)}
        top["rope_scaling"] = {"type": "longrope", **kept}
    if spec.rope.fraction != 1:
        top["partial_rotary_factor"] = rope["partial_rotary_factor"] = spec.rope.fraction
    full = {**rope, "rope_theta": spec.rope.theta}
    if spec.local_rope is None:
        return {**top, "rope_parameters": full}
    local = {**_written(spec.local_rope, spec), "rope_theta": spec.local_rope.theta}
    both = {"full_attention": full, "sliding_attention": local}
    return {**top, "rope_local_base_freq": spec.local_rope.theta, "rope_parameters": both}


def _one(config: dict[str, Any], family: Family, file: str) -> Rope:
    theta = {"rope_theta": config["rope_theta"]} if config.get("rope_theta") is not None else {}
    spellings = [_flat(config.get(key), file) for key in ("rope_parameters", "rope_scaling")]
    ropes = [_rope({**theta, **spelling}, config, family, 0, file) for spelling in spellings if spelling]
    ropes = ropes or [_rope({**family.rope, **theta}, config, family, 0, file)]
    thetas = {rope.theta for rope in ropes} | {float(value) for value in theta.values()}
    if len(set(ropes)) > 1 or len(thetas) > 1:
        raise _twice(file)
    return ropes[0]


def _flat(spelling: Any, file: str) -> dict[str, Any]:
    flat = not spelling or isinstance(spelling, dict)
    if not flat or any(isinstance(value, dict) for value in (spelling or {}).values()):
        raise ModelError(
            f"{file} has a rope that is no flat dict, and kvjax computes one rope for all layers of this "
            "family. Choose a checkpoint with a single rope."
        )
    return dict(spelling or {})


def _twice(file: str) -> ModelError:
    return ModelError(
        f"{file} spells its rope twice and differently (rope_theta / rope_scaling and rope_parameters). "
        "Keep the one the model was trained with."
    )


def _rope(rope: dict[str, Any], config: dict[str, Any], family: Family, which: int, file: str) -> Rope:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if family.partial and kind in ("su", "yarn"):  # what Phi-3 called LongRoPE at first
        kind = "longrope"
    fraction = rope.get("partial_rotary_factor")
    fraction = config.get("partial_rotary_factor") if fraction is None else fraction
    fraction = number({"partial_rotary_factor": fraction}, "partial_rotary_factor", file, 1.0)
    if kind not in _KINDS or fraction > 1 or (fraction != 1 and not family.partial):
        raise ModelError(
            f"{file} has a rope of type {kind!r} with partial_rotary_factor {fraction}; kvjax computes "
            f"{', '.join(map(repr, _KINDS))}, and partial ropes for phi3 alone. Choose a checkpoint with "
            "one of these."
        )
    theta = number(rope, "rope_theta", file, family.thetas[which])
    return Rope(theta=theta, scaling=_KINDS[kind](rope, config, fraction, file), fraction=fraction)


def _original(rope: dict[str, Any], config: dict[str, Any], file: str) -> int:
    # The order of precedence is transformers' own.
    longest = config.get("max_position_embeddings")
    return count({_ORIGINAL: config.get(_ORIGINAL, rope.get(_ORIGINAL, longest))}, _ORIGINAL, file)


def _linear(rope: dict[str, Any], config: dict[str, Any], fraction: float, file: str) -> LinearScaling:
    return LinearScaling(factor=number(rope, "factor", file))


def _llama3(rope: dict[str, Any], config: dict[str, Any], fraction: float, file: str) -> Llama3Scaling:
    low, high = (number(rope, key, file) for key in ("low_freq_factor", "high_freq_factor"))
    if low >= high:
        raise ModelError(f"{file} has low_freq_factor {low} >= high_freq_factor {high}; it must be below.")
    return Llama3Scaling(
        factor=number(rope, "factor", file),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=_original(rope, config, file),
    )


def _longrope(rope: dict[str, Any], config: dict[str, Any], fraction: float, file: str) -> LongRope:
    original = _original(rope, config, file)
    pairs = int(config["head_dim"] * fraction) // 2
    longest = count(config, "max_position_embeddings", file)
    # The default of transformers: the paper's rule over the ratio of the lengths.
    factor = number(rope, "factor", file, longest / original)
    return LongRope(
        short=numbers(rope, "short_factor", pairs, file),
        long=numbers(rope, "long_factor", pairs, file),
        original_max_position_embeddings=original,
        attention_factor=number(rope, "attention_factor", file, _gain(factor, original)),
    )


def _gain(factor: float, original: int) -> float:
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def _yarn(rope: dict[str, Any], config: dict[str, Any], fraction: float, file: str) -> Yarn:
    original = _original(rope, config, file)
    factor = number(rope, "factor", file, count(config, "max_position_embeddings", file) / original)
    fast, slow = number(rope, "beta_fast", file, 32.0), number(rope, "beta_slow", file, 1.0)
    if slow >= fast:
        raise ModelError(f"{file} has beta_slow {slow} >= beta_fast {fast}; it must be below.")
    return Yarn(
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=fast,
        beta_slow=slow,
        truncate=bool(rope.get("truncate", True)),
        attention_factor=number(rope, "attention_factor", file, _yarn_gain(rope, factor, file)),
    )


def _yarn_gain(rope: dict[str, Any], factor: float, file: str) -> float:
    """The paper's temperature as a factor; a ratio of two where a file names both (DeepSeek)."""

    def gain(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return gain(number(rope, "mscale", file)) / gain(number(rope, "mscale_all_dim", file))
    return gain(1.0)


_KINDS: dict[str, Any] = {
    "default": lambda *_: None,
    "linear": _linear,
    "llama3": _llama3,
    "longrope": _longrope,
    "yarn": _yarn,
}


def _written(rope: Rope, spec: ModelSpec) -> dict[str, Any]:
    s = rope.scaling
    if isinstance(s, LinearScaling):
        return {"rope_type": "linear", "factor": s.factor}
    if isinstance(s, Llama3Scaling):
        return {
            "rope_type": "llama3",
            "factor": s.factor,
            "low_freq_factor": s.low_freq_factor,
            "high_freq_factor": s.high_freq_factor,
            _ORIGINAL: s.original_max_position_embeddings,
        }
    if isinstance(s, Yarn):
        return {"rope_type": "yarn", **dataclasses.asdict(s)}
    if s is None:
        return {"rope_type": "default"}
    factors = {"short_factor": list(s.short), "long_factor": list(s.long)}
    written = {"rope_type": "longrope", **factors, _ORIGINAL: s.original_max_position_embeddings}
    usual = _gain(spec.max_positions / s.original_max_position_embeddings, s.original_max_position_embeddings)
    return written if s.attention_factor == usual else {**written, "attention_factor": s.attention_factor}
