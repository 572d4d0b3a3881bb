"""The sliding windows of a config.json, in all their spellings, to one window a layer and back.

A family has none, one for all layers, or some for some layers; these it names by ``layer_types``, or in
older files by the first layer that slides (Qwen) or by every how many layers one does not (Gemma).
"""

from __future__ import annotations

from typing import Any

from kvjax.models.families import Family
from kvjax.models.hf_values import ModelError, count
from kvjax.models.spec import ModelSpec

FULL, SLIDING = "full_attention", "sliding_attention"
"""The types of layers."""


def read_windows(config: dict[str, Any], family: Family, layers: int, file: str) -> tuple[int | None, ...]:
    """Per layer the sliding window; a llama has none and, as in transformers, no such keys."""
    if family.windows == "none":
        return (None,) * layers
    slides = config.get("sliding_window") is not None
    if family.windows == "from_layer":
        slides = slides and bool(config.get("use_sliding_window"))
    types = config.get("layer_types")
    types = _usual_types(config, family, layers, slides) if types is None else types
    known = {FULL, SLIDING} if slides else {FULL}
    if family.windows == "all_layers":
        known = {SLIDING if slides else FULL}
    if not isinstance(types, list) or len(types) != layers or not known.issuperset(types):
        switch = "use_sliding_window" if family.windows == "from_layer" else "sliding_window"
        raise ModelError(
            f"{file} has layer_types {types} with {switch}={config.get(switch)}; for {layers} layers "
            f"kvjax needs {layers} of {', '.join(sorted(known))}. Correct the list or {switch}."
        )
    window = count(config, "sliding_window", file) if slides else 0
    # A window that no context outgrows (Phi-3's is 262144 of 131072) is none, and leaves the layer to
    # policies; but a layer's window may also say which of two ropes is its own.
    idle = len(family.thetas) == 1 and window >= count(config, "max_position_embeddings", file)
    if not slides or idle:
        return (None,) * layers
    return tuple(window if kind == SLIDING else None for kind in types)


def _usual_types(config: dict[str, Any], family: Family, layers: int, slides: bool) -> list[str] | None:
    """The layers' types by the older keys; None if these have no legal values."""
    if family.windows == "all_layers":
        return [SLIDING if slides else FULL] * layers
    if family.windows == "by_type":
        pattern = config.get("sliding_window_pattern")
        if not isinstance(pattern, int) or pattern < 1:
            return None
        return [SLIDING if slides and (index + 1) % pattern else FULL for index in range(layers)]
    first = config.get("max_window_layers", 28)
    if not isinstance(first, int):
        return None
    return [SLIDING if slides and index >= first else FULL for index in range(layers)]


def write_windows(spec: ModelSpec, family: Family) -> dict[str, Any]:
    """The keys of both spellings."""
    sliding = [index for index, window in enumerate(spec.windows) if window is not None]
    window = spec.windows[sliding[0]] if sliding else None
    types = [FULL if w is None else SLIDING for w in spec.windows]
    if family.windows == "none":
        return {}
    if family.windows == "all_layers":
        return {"sliding_window": window}
    if family.windows == "by_type":
        return {"sliding_window": window or 4096, "layer_types": types}
    return {
        "use_sliding_window": bool(sliding),
        "sliding_window": window,
        "max_window_layers": sliding[0] if sliding else spec.num_layers,
        "layer_types": types,
    }
