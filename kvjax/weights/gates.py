"""WG-KV gates: published ones for ``kvjax.weights.published``, and random ones.

The authors (https://github.com/EMCLab-Sinica/WG-KV) publish gates for Llama-3.1-8B-Instruct and Qwen3-4B-2507
as ``torch.save`` files named ``<model>-<lambda>.pt``. Torch is not needed. Their names, for layer i of a
model of K KV heads of H, with F hidden units (4 H for Llama, 1.5 H for Qwen3):

  model.layers.<i>.self_attn.g_predictors.      ours
    conv1.weight          [K F, 2 H, 1]         w1 [K, 2H, F]   grouped by head; input: key before, after RoPE
    conv1.bias            [K F]                 b1 [K, F]
    conv2.weight          [K, F, 1]             w2 [K, F]
    conv2.bias            [K]                   b2 [K]
    pre_key_norm.weight   [H]                   norm [2H], the first half; absent in gates without norms
    post_key_norm.weight  [H]                   norm [2H], the second half

``python -m kvjax.weights random --model DIR --share 0.25 --out FILE`` makes untrained gates that admit a
given share of any text's tokens, for measuring speed and memory:
they know nothing, but cost what trained ones do.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from kvjax.policies.wg_kv import WriteGate, random_gates
from kvjax.types import Network, Params
from kvjax.weights import WeightsError, save_weights

_NAME = re.compile(r"model\.layers\.(\d+)\.self_attn\.g_predictors\.(\w+\.\w+)")
_NORMS = ("pre_key_norm.weight", "post_key_norm.weight")
_PARTS = ("conv1.weight", "conv1.bias", "conv2.weight", "conv2.bias")

PUBLISHED = {"tau": "0.1", "window": "256"}
"""What the authors' gates are meant to be used with."""


def converted(tensors: dict[str, np.ndarray], network: Network, source: str = "the file") -> list[Params]:
    """Published gates as ``WriteGate`` reads them, float32, one dict a layer.

    Args:
      tensors: by the names in the module's docstring.
      network: the model they are for.
      source: for messages.

    Raises:
      WeightsError: names that are missing or unknown, or shapes of another model.
    """
    layers: list[dict[str, np.ndarray]] = [{} for _ in range(network.num_layers)]
    for name, value in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None or match[2] not in _PARTS + _NORMS:
            raise WeightsError(
                f"{source} holds {name!r}, which no published WG-KV gate has. Give gates only."
            )
        if int(match[1]) >= len(layers):
            raise WeightsError(
                f"{source} holds gates of layer {match[1]}, the model has {len(layers)} layers. Give the "
                "model they were trained for."
            )
        layers[int(match[1])][match[2]] = np.asarray(value, np.float32)
    return [_layer(layer, index, network, source) for index, layer in enumerate(layers)]


def _layer(tensors: dict[str, np.ndarray], index: int, network: Network, source: str) -> Params:
    k, h = network.num_kv_heads, network.head_dim
    norms = [name for name in _NORMS if name in tensors]
    missing = [name for name in _PARTS if name not in tensors] + (list(_NORMS) if len(norms) == 1 else [])
    if missing:
        raise WeightsError(f"{source} lacks {', '.join(missing)} of layer {index}. Download it again.")
    hidden = tensors["conv1.bias"].size // k
    right = {"conv1.weight": (k * hidden, 2 * h, 1), "conv1.bias": (k * hidden,)}
    right |= {"conv2.weight": (k, hidden, 1), "conv2.bias": (k,)} | dict.fromkeys(norms, (h,))
    shapes = {name: value.shape for name, value in tensors.items()}
    if shapes != right:
        raise WeightsError(
            f"{source}, layer {index}, has shapes {shapes}; a model of {k} KV heads of {h} needs {right}. "
            "Give the model the gates were trained for."
        )
    ours = {
        "w1": tensors["conv1.weight"].reshape(k, hidden, 2 * h).swapaxes(1, 2),
        "b1": tensors["conv1.bias"].reshape(k, hidden),
        "w2": tensors["conv2.weight"].reshape(k, hidden),
        "b2": tensors["conv2.bias"],
    }
    return ours | ({"norm": np.concatenate([tensors[name] for name in norms])} if norms else {})


def notes_of(file: Path, weight: str | None) -> dict[str, str]:
    """For the header: what published gates are meant for, and lambda, by default as the file's name says."""
    named = re.search(r"-(\d+(\.\d+)?)$", file.stem)
    return PUBLISHED | {"lambda": weight or (named[1] if named else "unknown"), "seed": "unknown"}


# --- gates that know nothing ---------------------------------------------------------------------


def make_random(model: str, share: float, out: Path) -> None:
    """Writes random gates for the preset ``wg-kv``, bound to the model.

    Raises:
      PolicyError, ModelError: a share out of range, no such model.
    """
    from kvjax.loading import load

    backbone, gate = load(model), WriteGate()
    tokens = min(1024, backbone.network.max_positions)
    notes = {"lambda": "none", "tau": gate.tau, "window": gate.window, "seed": 0, "share": share}
    layers = random_gates(backbone, share, gate, tokens=tokens)
    save_weights(out, backbone, WriteGate(), layers, notes=notes)
