"""The learned weights that a policy needs with a model.

A model's folder ships them as ``weights/<part>/<name>.safetensors``, as ``weights/duo/default.safetensors``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.resources
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

from kvjax import catalogue
from kvjax.algebra import Part, Policy, PolicyError
from kvjax.sharding.head_order import in_order
from kvjax.types import Params, Weighted
from kvjax.weights._file import Learned, WeightsError, read_weights
from kvjax.weights._fingerprint import SIZES, fingerprint, name_of, sizes
from kvjax.weights._sources import VALUES, Source, Sources, sources

AGREE = 0.9
"""Least share of signs in which two quantisations of one model agree; those of two models agree by half."""

FOLDER = "weights"
"""Inside a model's folder; in it a folder for each part."""

EMBEDDED = Path(str(importlib.resources.files("kvjax"))) / "assets" / "embedded"
"""The folder of the model in the package."""

ONLY_IN_A_CHECKOUT = {
    "write_gate": ("conservative",),
    "kvp": ("ruler", "text"),
    "phi": ("dropped", "prompt-512", "prompt-2048"),
}
"""Weights of that model which the wheel leaves out (``pyproject.toml``)."""


@dataclasses.dataclass(frozen=True, eq=False)
class Found:
    """Learned weights of a policy, read and checked.

    Attributes:
      weights: as the decode loop takes them, ``{place: [one dict a layer]}``; ``{}`` where nothing is
        learned.
      files: where they were read from, by the part's name.
      remarks: a sentence for each argument that differs from the one that weights were trained for.
    """

    weights: Params
    files: dict[str, Path]
    remarks: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """Their name in results: ``name@digest``, with sixteen hex digits of the file's SHA-256.

        Where several parts learn: ``part=name@digest``, comma-separated. "" where nothing is learned.
        """
        digests = {part: hashlib.sha256(file.read_bytes()).hexdigest() for part, file in self.files.items()}
        labels = {part: f"{file.stem}@{digests[part][:16]}" for part, file in self.files.items()}
        if len(labels) == 1:
            return next(iter(labels.values()))
        return ",".join(f"{part}={name}" for part, name in labels.items())


def weights_for(policy: Policy | str, model: Weighted, weights: Sources = None) -> Params:
    """The learned weights a policy needs with a model: ``{}`` where it learns nothing.

    Warns where they were trained for other arguments than the policy's, such as another window.

    Args:
      policy: what to serve, also in the one-string form.
      model: a loaded model; its folder may ship weights.
      weights: a file, or the name of shipped weights, by part: ``{"write_gate": "default", "kvp": "FILE"}``;
        or a single one where exactly one part learns. A part that is not named takes the model's "default".
        ``"values": "other"`` beside them takes weights of the same model in other values, with a warning.

    Raises:
      WeightsError: weights that are missing, do not fit model or method, or belong to no part of the policy.
    """
    learned = find(catalogue.policy(policy), model, weights)
    for remark in learned.remarks:
        warnings.warn(remark, stacklevel=2)
    return learned.weights


def find(policy: Policy, model: Weighted, weights: Sources = None) -> Found:
    """``weights_for`` for commands: with the files, and with remarks instead of warnings."""
    source_of = sources(policy, weights)
    other = VALUES in source_of
    read = {part: _weights_of(part, model, source_of[part.name], other) for part in policy.learned}
    return Found(
        weights={part.place: learned.layers for part, learned in read.items()},
        files={part.name: learned.file for part, learned in read.items()},
        remarks=tuple(
            remark for part, learned in read.items() for remark in _trained_otherwise(part, learned)
        ),
    )


def _trained_otherwise(part: Part, learned: Learned) -> Iterator[str]:
    """A sentence for other values of the model, and for each argument of another value than trained for."""
    if learned.agreement is not None:
        yield (
            f"{part!r}: {learned.file.name} was made for {learned.notes['model']} in other values; "
            f"{100 * learned.agreement:.1f} % of the signs sampled from its weights are this model's."
        )
    for name in part.fitted:
        trained, value = learned.notes.get(name), getattr(part, name)
        if trained is not None and trained != str(value):
            yield (
                f"{part!r}: the weights of {learned.file.name} were trained with {name}={trained} and are "
                f"read with {name}={value}. Write {name}={trained}, or use weights trained for {value}."
            )


def _weights_of(part: Part, model: Weighted, source: Source, other: bool) -> Learned:
    learned = load_weights(_file(part, model, source), model, other_values=other)
    if learned.notes["method"] != part.learns:
        raise WeightsError(
            f"weights {part.name}={source}: {learned.file} holds weights of {learned.notes['method']!r}, "
            f"{part!r} reads those of {part.learns!r}. Give a file of that method."
        )
    try:
        part.check_weights(learned.layers, model.network)
    except PolicyError as error:
        raise WeightsError(f"weights {part.name}={source}: {learned.file} does not fit. {error}") from None
    if learned.notes["fingerprint"] == getattr(model, "origin", None):
        layers = [  # their heads in the order of the model's
            {name: x if name in part.shared else in_order(x, order) for name, x in layer.items()}
            for layer, order in zip(learned.layers, model.heads, strict=True)  # type: ignore[attr-defined]
        ]
        learned = dataclasses.replace(learned, layers=layers)
    return learned


def _file(part: Part, model: Weighted, source: Source) -> Path:
    """The file a source means: a bare word as the name of a shipped file, a path as it is."""
    text, names = str(source), shipped(model, part)
    if isinstance(source, str) and text in names:
        return _home(model, part) / f"{text}.safetensors"
    if isinstance(source, Path) or Path(text).suffix or os.sep in text or Path(text).is_file():
        return Path(source)
    if not names:
        raise missing(part, model)
    if text in ONLY_IN_A_CHECKOUT.get(part.name, ()) and _folder(model) == EMBEDDED:
        file = f"kvjax/assets/embedded/{FOLDER}/{part.name}/{text}.safetensors"
        raise WeightsError(
            f"weights {part.name}={text} are in a checkout of kvjax, not in the installed package. Give the "
            f"checkout's file ({file}), or one of {', '.join(names)}."
        )
    raise WeightsError(
        f"weights {part.name}={text}: the model ({name_of(model)}) ships no {text!r} for {part.name}; it "
        f"has {', '.join(names)}. Give one of these names, or a file.{_made(part)}"
    )


def load_weights(file: Source, model: Weighted, *, other_values: bool = False) -> Learned:
    """Reads a file of learned weights, of whatever part, that was made for the model.

    Args:
      file: to read.
      model: that will use it.
      other_values: take also a file of the same model in other values: of the same architecture, with at
        least nine in ten of the sampled signs alike.

    Raises:
      WeightsError: no such file, not a file of learned weights, or weights of another model.
    """
    learned = read_weights(file)
    needed, stored = sizes(model), {name: learned.notes[name] for name in SIZES}
    if needed != stored:
        has = "{layers} layers of {kv_heads} KV heads of {head_dim}"
        raise WeightsError(
            f"{learned.file} was made for {learned.notes['model']} with {has.format(**stored)}, the model "
            f"({name_of(model)}) has {has.format(**needed)}. Give weights trained for this model."
        )
    if learned.notes["fingerprint"] in (fingerprint(model), getattr(model, "origin", None)):
        return learned
    made = f"{learned.file} was made for {learned.notes['model']}, "
    if not other_values:
        raise WeightsError(
            f"{made}whose weights differ from those of this model ({name_of(model)}) of the same shape. Give "
            "weights trained for this model."
        )
    if getattr(model, "origin", None) is not None:
        raise WeightsError(
            f"weights values=other: {made}and this model's KV heads are in another order. Load it without "
            "heads."
        )
    share = learned.agreement_with(model)
    if share < AGREE:
        raise WeightsError(
            f"weights values=other: {made}and {100 * share:.1f} % of the signs sampled from its weights are "
            f"those of this model ({name_of(model)}); {100 * AGREE:.0f} % is the least. Give weights trained "
            "for this model."
        )
    return dataclasses.replace(learned, agreement=share)


def _folder(model: Weighted) -> Path:
    return Path(getattr(model, "folder", None) or os.devnull)


def _home(model: Weighted, part: Part) -> Path:
    """The folder of a part's name, else that of what it learns, which a part of another place may share."""
    folder = _folder(model) / FOLDER
    own = folder / part.name
    return own if own.is_dir() else folder / part.learns


def shipped(model: Weighted, part: Part) -> list[str]:
    """Names of the learned weights that the model's folder has for a part."""
    return sorted(file.stem for file in _home(model, part).glob("*.safetensors"))


def missing(part: Part, model: Weighted) -> WeightsError:
    """The error of a part that has no weights, with the ways out."""
    call = "weights=kvjax.weights_for(policy, model"
    if shipped(model, part):
        return WeightsError(f"{part!r} reads learned weights, and got none. Pass {call}).")
    return WeightsError(
        f"{part!r} reads learned weights of {part.learns!r}, and the model ({name_of(model)}) ships none "
        f"for {part.name}. Give a file (--weights {part.name}=FILE, or {call}, "
        f"{{{part.name!r}: FILE}})).{_made(part)}"
    )


def _made(part: Part) -> str:
    return f" To make one: {part.trained_by}." if part.trained_by else ""
