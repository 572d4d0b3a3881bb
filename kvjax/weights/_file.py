"""Learned weights of a policy's parts: one safetensors file each, bound to the model they were trained for.

  tensors    <place>.<layer>.<name>, such as admission.0.w1, float32 or float16
  header     strings: ``format``, ``method``, ``place``, ``layers``, ``kv_heads``, ``head_dim``,
             ``fingerprint``, ``model``, ``kvjax``, and whatever the trainer notes (WG-KV: ``lambda``,
             ``tau``, ``window``, ``seed``); ``architecture``, ``signs`` (base64 of bits) in newer files,
             by which the same model is known in other values, such as those of another quantisation

A model folder may ship such files as ``weights/<part>/<name>.safetensors``; ``weights_for`` finds them.
"""

from __future__ import annotations

import base64
import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from kvjax.algebra import Part, PolicyError
from kvjax.types import Params, Weighted
from kvjax.version import __version__
from kvjax.weights._fingerprint import architecture_and_signs, fingerprint, name_of, sizes

FORMAT = "kvjax learned weights 1"

EXACT = 16
"""Tensors of fewer numbers, such as a length, are always float32."""

_NAME = re.compile(r"([a-z]+)\.(\d+)\.(\w+)")


class WeightsError(PolicyError):
    """Learned weights that are missing, unreadable, or made for something else."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Learned:
    """A file of learned weights in memory.

    Attributes:
      file: where it was read from.
      layers: one dict of float32 arrays a layer.
      notes: its header.
      agreement: share of signs in which the model that it is read for agrees with the one it was made for;
        None where both have the same values.
    """

    file: Path
    layers: list[Params]
    notes: dict[str, str]
    agreement: float | None = None

    def agreement_with(self, model: Weighted) -> float:
        """Share of the file's sampled signs that the model has too: 0 with another architecture.

        Raises:
          WeightsError: an older file, without signs.
        """
        if "signs" not in self.notes:
            raise WeightsError(
                f"weights values=other: {self.file} holds no signs of {self.notes['model']} to compare with "
                "this model's. Write it again with this version of kvjax."
            )
        shapes, own = architecture_and_signs(model)
        if self.notes["architecture"] != shapes:
            return 0.0
        packed = np.frombuffer(base64.b64decode(self.notes["signs"]), np.uint8)
        return float(np.mean(np.unpackbits(packed, count=len(own)) == own))


def save_weights(
    file: str | Path,
    model: Weighted,
    part: Part,
    layers: Sequence[Mapping[str, Any]],
    *,
    notes: Mapping[str, Any] | None = None,
    dtype: Literal["float32", "float16"] = "float32",
) -> None:
    """Writes learned weights; the file appears complete or not at all.

    Args:
      file: to be written, or replaced.
      model: the backbone they were trained for.
      part: that reads them. Arguments that weights are trained for (``fitted``) are noted.
      layers: one dict of arrays a layer.
      notes: for the header, such as lambda, tau and seed; values are written as text.
      dtype: of the numbers in the file; they are read as float32.

    Raises:
      WeightsError: a part that learns nothing, layers that do not fit the model or the part, or numbers too
        large for the dtype.
    """
    if not part.learns:
        raise WeightsError(
            f"save_weights({str(file)!r}): {part!r} learns nothing. Give the part that reads them."
        )
    counts = sizes(model)
    if len(layers) != int(counts["layers"]):
        raise WeightsError(
            f"save_weights(layers=...) holds {len(layers)} layers, the model ({name_of(model)}) has "
            f"{counts['layers']}. Give one dict a layer."
        )
    try:
        part.check_weights([dict(layer) for layer in layers], model.network)
    except PolicyError as error:
        raise WeightsError(f"save_weights({str(file)!r}): {error}") from None
    noted = {name: getattr(part, name) for name in part.fitted} | dict(notes or {})
    header = {name: str(value) for name, value in noted.items()} | counts
    header |= {"format": FORMAT, "method": part.learns, "place": part.place, "kvjax": __version__}
    header |= {"fingerprint": fingerprint(model), "model": name_of(model)}
    header["architecture"], signs = architecture_and_signs(model)
    header["signs"] = base64.b64encode(np.packbits(signs).tobytes()).decode()
    tensors = {
        f"{part.place}.{layer}.{name}": _rounded(file, f"{part.place}.{layer}.{name}", value, dtype)
        for layer, params in enumerate(layers)
        for name, value in params.items()
    }
    _write(Path(file), tensors, header)


def _rounded(file: str | Path, name: str, value: Any, dtype: str) -> np.ndarray:
    value = np.ascontiguousarray(value, np.float32)
    with np.errstate(over="ignore"):
        rounded = value if value.size < EXACT else value.astype(dtype)
    if np.any(np.isfinite(value) & ~np.isfinite(rounded)):
        raise WeightsError(
            f"save_weights({str(file)!r}): {name} has numbers that are too large for {dtype}. Write float32."
        )
    return rounded


def _write(file: Path, tensors: dict[str, np.ndarray], header: dict[str, str]) -> None:
    from safetensors.numpy import save_file

    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f".{file.name}.part-{os.getpid()}")
    try:
        save_file(tensors, part, metadata=header)
        part.chmod(0o644)  # safetensors writes for the owner alone
        os.replace(part, file)
    finally:
        part.unlink(missing_ok=True)


def read_weights(file: str | Path) -> Learned:
    """Reads a file of learned weights, of any model.

    Raises:
      WeightsError: no such file, or not one that ``save_weights`` wrote.
    """
    from safetensors import SafetensorError, safe_open

    file = Path(file)
    try:
        with safe_open(file, framework="numpy") as reader:
            notes = dict(reader.metadata() or {})
            tensors = {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118  (no mapping)
    except OSError as error:
        reason = error.strerror or error
        raise WeightsError(f"{file} cannot be read ({reason}). Check the path.") from error
    except SafetensorError as error:
        hint = (
            "If it holds published WG-KV gates, python -m kvjax.weights convert reads it."
            if file.suffix == ".pt"
            else "Download or train it again."
        )
        raise WeightsError(f"{file} is not a safetensors file ({error}). {hint}") from error
    if notes.get("format") != FORMAT:
        raise WeightsError(
            f"{file} is a safetensors file, but not one of a policy's learned weights (its header lacks "
            f"format '{FORMAT}'). Give one that kvjax.save_weights wrote."
        )
    layers: list[Params] = [{} for _ in range(int(notes["layers"]))]
    for name, value in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None or match[1] != notes["place"] or int(match[2]) >= len(layers):
            raise WeightsError(
                f"{file} holds a tensor {name!r} that its header does not name. Write it again."
            )
        layers[int(match[2])][match[3]] = jnp.asarray(value, jnp.float32)
    return Learned(file=file, layers=layers, notes=notes)
