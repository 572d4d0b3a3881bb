"""The learned weights a policy needs with a model, wherever they are."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path

from kvjax.algebra import Part, Policy, PolicyError
from kvjax.types import Params, Weighted
from kvjax.weights._file import Learned, WeightsError, read_weights
from kvjax.weights._fingerprint import SIZES, fingerprint, name_of, sizes

SHIPPED = "gates"
"""Folder inside a model's folder."""


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
    mine, theirs = sizes(model), {name: found.notes[name] for name in SIZES}
    if mine != theirs:
        has = "{layers} layers of {kv_heads} KV heads of {head_dim}"
        raise WeightsError(
            f"{found.file} was made for {found.notes['model']} with {has.format(**theirs)}, the model "
            f"({name_of(model)}) has {has.format(**mine)}. Give weights trained for this model."
        )
    if found.notes["fingerprint"] != fingerprint(model):
        raise WeightsError(
            f"{found.file} was made for {found.notes['model']}, whose weights differ from those of this "
            f"model ({name_of(model)}) of the same shape. Give weights trained for this model."
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
            f"gates {text!r} are not there: the model ({name_of(model)}) {has}. Give one of its names, or a "
            "file: train.gates writes them, and python -m kvjax.weights converts published ones."
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
        f"{part!r} reads learned weights of {part.learns!r}, and the model ({name_of(model)}) ships none. "
        "Give a file (--gates FILE, or weights=kvjax.weights_for(policy, model, FILE)); train.gates and "
        "train.duo write them."
    )
