"""Learned weights of a policy's parts: one safetensors file each, bound to the model they were trained for.

  tensors    <place>.<layer>.<name>, such as admission.0.w1, float32
  header     strings: ``format``, ``method``, ``place``, ``layers``, ``kv_heads``, ``head_dim``,
             ``fingerprint``, ``model``, ``kvjax``, and whatever the trainer notes (WG-KV: ``lambda``,
             ``tau``, ``window``, ``seed``)

A model folder may ship such files as ``gates/<name>.safetensors``; ``weights_for`` finds them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.policy import Part, Policy, PolicyError
from kvjax.types import Params, Weighted

FORMAT = "kvjax learned weights 1"

SHIPPED = "gates"
"""Folder inside a model's folder."""

SAMPLED = 256
"""Entries of each weight matrix that the fingerprint looks at."""

_NAME = re.compile(r"([a-z]+)\.(\d+)\.(\w+)")
_SIZES = ("layers", "kv_heads", "head_dim")


class WeightsError(PolicyError):
    """Learned weights that are missing, unreadable, or made for something else."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Learned:
    """A file of learned weights in memory.

    Attributes:
      file: where it was read from.
      layers: one dict of arrays a layer.
      notes: its header.
    """

    file: Path
    layers: list[Params]
    notes: dict[str, str]

    @property
    def weights(self) -> Params:
        """As the decode loop takes them: ``{place: [layer, ...]}``."""
        return {self.notes["place"]: self.layers}


# --- whose ---------------------------------------------------------------------------------------


def fingerprint(model: Weighted) -> str:
    """Sixteen hex digits that tell models apart, the same whatever dtype a model was loaded in.

    SHA-256 over layers, KV heads and head dim, the name and shape of every parameter, and the signs of 256
    entries spread over each weight matrix: rounding to another float type keeps signs, any training of the
    model flips some.
    """
    network, digest = model.network, hashlib.sha256()
    digest.update(f"{network.num_layers} {network.num_kv_heads} {network.head_dim}".encode())
    leaves = jax.tree_util.tree_leaves_with_path(model.params)
    for path, leaf in sorted(leaves, key=lambda pair: jax.tree_util.keystr(pair[0])):
        digest.update(f"{jax.tree_util.keystr(path)} {tuple(leaf.shape)}".encode())
        if leaf.ndim >= 2:
            digest.update(np.packbits(np.signbit(_sample(leaf))).tobytes())
    return digest.hexdigest()[:16]


def _sample(x: Any) -> np.ndarray:
    """Entries at fixed places all over a matrix, as float32."""
    spread = np.arange(SAMPLED, dtype=np.uint64) * np.uint64(2654435761)  # golden ratio: hits every row
    at = np.unravel_index((spread % np.uint64(x.size)).astype(np.int64), x.shape)
    here = isinstance(x, np.ndarray) or all(device.platform == "cpu" for device in x.devices())
    # Beside the device only the sample is copied.
    return np.asarray(np.asarray(x)[at] if here else x[at]).astype(np.float32)


def _sizes(model: Weighted) -> dict[str, str]:
    network = model.network
    return dict(zip(_SIZES, map(str, (network.num_layers, network.num_kv_heads, network.head_dim))))


def _named(model: Weighted) -> str:
    """The model's name without the path to it."""
    return Path(getattr(model, "name", "this model")).name


# --- on disk -------------------------------------------------------------------------------------


def save_weights(
    file: str | Path,
    model: Weighted,
    method: str,
    layers: Sequence[Mapping[str, Any]],
    *,
    place: str = "admission",
    notes: Mapping[str, Any] | None = None,
) -> None:
    """Writes learned weights; the file appears complete or not at all.

    Args:
      file: to be written, or replaced.
      model: the backbone they were trained for.
      method: ``Part.learns`` of the part that reads them: "wg-kv", "duo".
      layers: one dict of arrays a layer.
      place: the place of that part.
      notes: for the header, such as lambda, tau, window and seed; values are written as text.

    Raises:
      WeightsError: not one dict a layer of the model.
    """
    import kvjax

    sizes = _sizes(model)
    if len(layers) != int(sizes["layers"]):
        raise WeightsError(
            f"save_weights(layers=...) holds {len(layers)} layers, the model ({_named(model)}) has "
            f"{sizes['layers']}. Give one dict a layer."
        )
    header = {name: str(value) for name, value in (notes or {}).items()} | sizes
    header |= {"format": FORMAT, "method": method, "place": place, "fingerprint": fingerprint(model)}
    header |= {"model": _named(model), "kvjax": kvjax.__version__}
    tensors = {
        f"{place}.{layer}.{name}": np.ascontiguousarray(value, np.float32)
        for layer, params in enumerate(layers)
        for name, value in params.items()
    }
    _write(Path(file), tensors, header)


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
    """Reads a file of learned weights, whomever they are for.

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
        raise WeightsError(f"{file} cannot be read ({reason}). Check the path, or train gates.") from error
    except SafetensorError as error:
        hint = (
            "python -m kvjax.gates convert reads it."
            if file.suffix == ".pt"
            else "Download or train it anew."
        )
        raise WeightsError(f"{file} is no safetensors file ({error}). {hint}") from error
    if notes.get("format") != FORMAT:
        raise WeightsError(
            f"{file} is a safetensors file, but holds no learned weights of a policy (its header lacks "
            f"format '{FORMAT}'). Give one that train.gates, train.duo or kvjax.gates wrote."
        )
    layers: list[Params] = [{} for _ in range(int(notes["layers"]))]
    for name, value in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None or match[1] != notes["place"] or int(match[2]) >= len(layers):
            raise WeightsError(
                f"{file} holds a tensor {name!r} that its header does not announce. Write it anew."
            )
        layers[int(match[2])][match[3]] = jnp.asarray(value)
    return Learned(file=file, layers=layers, notes=notes)


# --- for whom ------------------------------------------------------------------------------------


def load_gates(source: str | Path, model: Weighted) -> Params:
    """Learned weights as ``weights=`` takes them.

    Args:
      source: a file, or the name of one that the model's folder ships, such as "default".
      model: the model they are for.

    Raises:
      WeightsError: no such file, not a file of learned weights, or weights of another model.
    """
    return _load(source, model).weights


def _load(source: str | Path, model: Weighted) -> Learned:
    found = read_weights(_file(source, model))
    mine, theirs = _sizes(model), {name: found.notes[name] for name in _SIZES}
    if mine != theirs:
        has = "{layers} layers of {kv_heads} KV heads of {head_dim}"
        raise WeightsError(
            f"{found.file} was made for {found.notes['model']} with {has.format(**theirs)}, the model "
            f"({_named(model)}) has {has.format(**mine)}. Give weights trained for this model."
        )
    if found.notes["fingerprint"] != fingerprint(model):
        raise WeightsError(
            f"{found.file} was made for {found.notes['model']}, whose weights differ from those of this "
            f"model ({_named(model)}) of the same shape. Give weights trained for this model."
        )
    return found


def _file(source: str | Path, model: Weighted) -> Path:
    """The file a source means: a path as it is, a bare word as the name of a shipped file."""
    text = str(source)
    if isinstance(source, Path) or Path(text).suffix or os.sep in text or Path(text).is_file():
        return Path(source)
    names = shipped(model)
    if text not in names:
        has = f"ships {', '.join(names)}" if names else "ships none"
        raise WeightsError(
            f"gates {text!r} are not there: the model ({_named(model)}) {has}. Give one of its names, or a "
            "file: train.gates writes them, and python -m kvjax.gates converts published ones."
        )
    return _folder(model) / f"{text}.safetensors"


def _folder(model: Weighted) -> Path:
    return Path(getattr(model, "folder", None) or os.devnull) / SHIPPED


def shipped(model: Weighted) -> list[str]:
    """Names of the learned weights in the model's folder."""
    return sorted(file.stem for file in _folder(model).glob("*.safetensors"))


def weights_for(policy: Policy, model: Weighted, gates: str | Path | None = None) -> Params:
    """The learned weights a policy needs with a model: ``{}`` where it learns nothing.

    Warns where they were trained for other arguments than the policy's, such as another window.

    Args:
      policy: what to serve.
      model: a loaded model; its folder may ship weights.
      gates: a file, or the name of a shipped one; None takes the one the model ships for the method.

    Raises:
      WeightsError: needed weights that are nowhere, do not fit model or method, or are given in vain.
    """
    weights, remarks = weights_and_remarks(policy, model, gates)
    for remark in remarks:
        warnings.warn(remark, stacklevel=2)
    return weights


def weights_and_remarks(
    policy: Policy, model: Weighted, gates: str | Path | None = None
) -> tuple[Params, list[str]]:
    """``weights_for`` for commands: (weights, the sentences it would warn with)."""
    if gates is not None and not policy.learned:
        raise WeightsError(
            f"gates={str(gates)!r} is given, but nothing in the policy {policy!r} is learned. Leave it out, "
            "or use a policy such as 'wg-kv'."
        )
    found = {part: _weights_of(part, model, gates) for part in policy.learned}
    remarks = [remark for part, mine in found.items() for remark in _trained_otherwise(part, mine)]
    return {part.place: mine.layers for part, mine in found.items()}, remarks


def _trained_otherwise(part: Part, found: Learned) -> Iterator[str]:
    """A sentence for each argument in which the part differs from what its weights were trained for."""
    for name in part.fitted:
        trained, mine = found.notes.get(name), getattr(part, name)
        if trained is not None and trained != str(mine):
            yield (
                f"{part!r}: the weights of {found.file.name} were trained with {name}={trained} and are read "
                f"with {name}={mine}. Write {name}={trained}, or use weights trained for {mine}."
            )


def _weights_of(part: Part, model: Weighted, gates: str | Path | None) -> Learned:
    if gates is None and part.shipped not in shipped(model):
        raise missing(part, model)
    found = _load(part.shipped if gates is None else gates, model)
    if found.notes["method"] != part.learns or found.notes["place"] != part.place:
        raise WeightsError(
            f"{found.file} holds weights of {found.notes['method']!r}, {part!r} reads those of "
            f"{part.learns!r}. Give a file of that method."
        )
    try:
        part.check_weights(found.layers, model.network)
    except PolicyError as error:
        raise WeightsError(f"{found.file} does not fit. {error}") from None
    return found


def missing(part: Part, model: Weighted) -> WeightsError:
    """The error of a part that has no weights, with the ways out."""
    return WeightsError(
        f"{part!r} reads learned weights of {part.learns!r}, and the model ({_named(model)}) ships none. "
        "Give a file (--gates FILE, or weights=kvjax.weights_for(policy, model, FILE)); train.gates and "
        "train.duo write them."
    )
