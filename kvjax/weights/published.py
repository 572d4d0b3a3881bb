"""Weights that authors publish: ``python -m kvjax.weights convert FILE --model DIR --out FILE.safetensors``.

A file's content says whose they are. Torch is not needed.

WG-KV: a ``.pt`` of tensors (``kvjax.weights.gates``).

KVzap (huggingface.co/nvidia/KVzap-linear-*, KVzap-mlp-*): the ``model.safetensors`` that transformers writes.
For layer i of a model of width D with K KV heads, and F hidden units:

  layers.<i>.weight, .bias       [K, D], [K]      w2, b2: a linear map
  layers.<i>.0.weight, .0.bias   [F, D], [F]      w1 [D, F], b1: a network
  layers.<i>.2.weight, .2.bias   [K, F], [K]      w2, b2

Fast KVzip (huggingface.co/Jang-Hyun/Fast-KVzip, q<G>_dim<d>_sink<S>.pt): a ``.pt`` whose ``module`` is a list
with the tensors of one layer each; the authors' losses beside it are not read. G query heads a KV head:

  q_proj.weight, q_proj.bias     [K G d, D], [K G d]    w_q [K, G, d, D], b_q
  k_proj.weight                  [K d, D]               w_k [K, d, D]
  q_norm.weight, k_norm.weight   [d]                    scale_q, scale_k
  k_base                         [K, 1, S, d]           sinks [K, S, d]
  b                              [K, 1, G]              b [K, G]

LU-KV (github.com/baidu-baige/LU-KV, evaluation/curve_data, *.npy): shares [99, L, K] that are removed of each
head when 1 to 99 % go: removed [K, 99] of a layer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  teaches NumPy the name "bfloat16"
import numpy as np

from kvjax.algebra import Part, PolicyError
from kvjax.budgets.lu_kv import LUKV, SHARES
from kvjax.policies.fast_kvzip import FastKVzip
from kvjax.policies.kvzap import KVzap
from kvjax.policies.wg_kv import WriteGate
from kvjax.types import Network, Params
from kvjax.weights import WeightsError, gates, save_weights
from kvjax.weights.torch_file import read_saved, read_tensors

_OF_KVZAP = re.compile(r"layers\.(\d+)\.(?:([02])\.)?(weight|bias)")
_OF_FAST = ("q_proj.weight", "q_proj.bias", "k_proj.weight", "q_norm.weight", "k_norm.weight", "k_base", "b")


def convert(file: Path, model: str, out: Path, weight: str | None = None) -> tuple[str, str]:
    """Reads a published file and writes ours, bound to the model; a preset and the part that read it.

    Args:
      file: the authors'.
      model: folder or hub id of the model the weights are for.
      out: file to write.
      weight: WG-KV's lambda, for the notes; by default what the file's name says.

    Raises:
      TorchFileError, WeightsError, ModelError: what cannot be read, or does not fit.
    """
    from kvjax.loading import load

    part: Part
    tensors: Any
    layers_of: Callable[[Any, Network, str], list[Params]]
    if file.suffix == ".safetensors":
        part, tensors, layers_of, preset = KVzap(), _read_safetensors(file), kvzap_layers, "kvzap"
    elif file.suffix == ".npy":
        part, tensors, layers_of, preset = LUKV(), _read_array(file), lu_kv_layers, "lu-kv"
    else:
        saved = read_saved(file, beside=True)
        if isinstance(saved, dict) and "module" in saved:
            part, tensors, layers_of, preset = FastKVzip(), saved["module"], fast_kvzip_layers, "fast-kvzip"
        else:
            part, tensors, layers_of, preset = WriteGate(), read_tensors(file), gates.converted, "wg-kv"
    backbone = load(model)
    layers = layers_of(tensors, backbone.network, str(file))
    notes: dict[str, Any] = {"source": file.name}
    if isinstance(part, WriteGate):
        notes |= gates.notes_of(file, weight)
    save_weights(out, backbone, part, layers, notes=notes)
    return preset, part.name


def kvzap_layers(tensors: Mapping[str, np.ndarray], network: Network, source: str) -> list[Params]:
    """KVzap's maps as ``kvjax.policies.kvzap`` reads them, float32, one dict a layer.

    Raises:
      WeightsError: names that are missing or unknown, or shapes of another model.
    """
    layers: dict[int, dict[str, np.ndarray]] = {}
    for name, value in tensors.items():
        match = _OF_KVZAP.fullmatch(name)
        if match is None:
            raise WeightsError(
                f"{source} holds {name!r}, which no published KVzap model has. Give its weights only."
            )
        place = f"{'w' if match[3] == 'weight' else 'b'}{1 if match[2] == '0' else 2}"
        value = np.asarray(value, np.float32)
        layers.setdefault(int(match[1]), {})[place] = value.T if place == "w1" else value
    return _fitting(KVzap(), [layers.get(i, {}) for i in range(max(layers, default=-1) + 1)], network, source)


def fast_kvzip_layers(saved: Any, network: Network, source: str) -> list[Params]:
    """Fast KVzip's gates as ``kvjax.policies.fast_kvzip`` reads them, float32, one dict a layer.

    Raises:
      WeightsError: names that are missing or unknown, or shapes of another model.
    """
    if not isinstance(saved, list) or not all(isinstance(layer, dict) for layer in saved):
        raise WeightsError(
            f"{source} holds a 'module' that is not a list of layers. Give a published Fast KVzip gate."
        )
    k, group = network.num_kv_heads, network.num_heads // network.num_kv_heads
    layers = []
    for index, layer in enumerate(saved):
        if set(layer) != set(_OF_FAST):
            raise WeightsError(
                f"{source}, layer {index}, holds {', '.join(map(str, layer))}; a Fast KVzip gate has "
                f"{', '.join(_OF_FAST)}. Give a published gate with sinks."
            )
        x = {name: np.asarray(value, np.float32) for name, value in layer.items()}
        dim, width = x["q_norm.weight"].size, x["q_proj.weight"].shape[-1]
        right = {
            "q_proj.weight": (k * group * dim, width),
            "q_proj.bias": (k * group * dim,),
            "k_proj.weight": (k * dim, width),
            "k_norm.weight": (dim,),
            "k_base": (k, 1, x["k_base"].shape[-2], dim),
            "b": (k, 1, group),
        }
        wrong = [name for name, shape in right.items() if x[name].shape != shape]
        if wrong:
            name = wrong[0]
            raise WeightsError(
                f"{source}, layer {index}, has {name} of shape {x[name].shape}; a model of "
                f"{network.num_heads} query and {k} KV heads needs {right[name]}. Give the model the gates "
                "were trained for."
            )
        layers.append(
            {
                "w_q": x["q_proj.weight"].reshape(k, group, dim, width),
                "b_q": x["q_proj.bias"].reshape(k, group, dim),
                "w_k": x["k_proj.weight"].reshape(k, dim, width),
                "scale_q": x["q_norm.weight"],
                "scale_k": x["k_norm.weight"],
                "sinks": x["k_base"][:, 0],
                "b": x["b"][:, 0],
            }
        )
    return _fitting(FastKVzip(), layers, network, source)


def lu_kv_layers(table: np.ndarray, network: Network, source: str) -> list[Params]:
    """LU-KV's table as ``kvjax.budgets.lu_kv`` reads it, float32, one dict a layer.

    Raises:
      WeightsError: another shape, or numbers that are no shares.
    """
    shape = SHARES, network.num_layers, network.num_kv_heads
    if table.shape != shape or not ((table >= 0) & (table <= 1)).all():
        raise WeightsError(
            f"{source} holds an array of shape {table.shape}; a table of LU-KV for a model of "
            f"{network.num_layers} layers of {network.num_kv_heads} KV heads has shares from 0 to 1 of shape "
            f"{shape}. Give the table that was made for the model."
        )
    return [{"removed": np.asarray(layer, np.float32)} for layer in np.moveaxis(table, 0, -1)]


def _fitting(part: Part, layers: Sequence[Params], network: Network, source: str) -> list[Params]:
    """The layers, if they are the model's."""
    if len(layers) != network.num_layers:
        raise WeightsError(
            f"{source} holds {len(layers)} layers, the model has {network.num_layers}. Give the model they "
            "were trained for."
        )
    try:
        part.check_weights(layers, network)
    except PolicyError as error:
        raise WeightsError(f"{source} does not fit. {error}") from None
    return list(layers)


def _read_safetensors(file: Path) -> dict[str, np.ndarray]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy") as reader:
            return {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118  (no mapping)
    except OSError as error:
        raise WeightsError(f"{file} cannot be read ({error.strerror or error}). Check the path.") from error
    except SafetensorError as error:
        raise WeightsError(f"{file} is not a safetensors file ({error}). Download it again.") from error


def _read_array(file: Path) -> np.ndarray:
    try:
        return np.asarray(np.load(file, allow_pickle=False))
    except OSError as error:
        raise WeightsError(f"{file} cannot be read ({error.strerror or error}). Check the path.") from error
    except ValueError as error:
        raise WeightsError(f"{file} is not an array of numbers ({error}). Download it again.") from error
