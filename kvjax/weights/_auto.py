"""``auto(0.2)``, ``auto(64MiB)``: the policy that measured best at so many bytes, once the model is known.

The measurements are ``front.json`` in a model's folder (``python -m kvjax.eval frontier``). A model without
one, or with one of another fingerprint, uses those of the embedded model, without learned parts.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvjax import catalogue
from kvjax.algebra import Policy, PolicyError
from kvjax.types import Weighted
from kvjax.weights._file import WeightsError
from kvjax.weights._find import EMBEDDED, find
from kvjax.weights._fingerprint import fingerprint

FRONT = "front.json"
_WORD = re.compile(r"\s*auto\((.*)\)\s*")
_BYTES = re.compile(r"['\"]?(\d+)(B|KiB|MiB|GiB)['\"]?")
_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def is_auto(spec: object) -> bool:
    """Whether that is ``auto(...)``."""
    return isinstance(spec, str) and _WORD.fullmatch(spec) is not None


def chosen(spec: str, model: Weighted) -> tuple[Policy, str]:
    """The policy that ``auto(...)`` stands for on this model, and a sentence with the reason.

    A share is of the 16-bit bytes of a cache that keeps everything; bytes are of a row, whatever its length.
    Of the measurements at the greatest length, question unseen, the best score within the share counts.

    Args:
      spec: ``auto(share)`` or ``auto(64MiB)``.
      model: that it is for.

    Raises:
      PolicyError: neither a share nor bytes, no measurements or damaged ones, or none that small.
    """
    match = _WORD.fullmatch(spec)
    text = match[1].strip() if match else ""
    size = _BYTES.fullmatch(text)
    share = _share_of(int(size[1]) * _UNITS[size[2]], model) if size else _share(text)
    if share is None:
        raise PolicyError(
            f"policy({spec!r}): auto takes a share of the cache in (0, 1] or bytes of a row. Write auto(0.2) "
            "or auto(64MiB)."
        )
    measured, own = _table(model)
    amount = f"{size[1]}{size[2]}" if size else share
    ranked = sorted(_longest(measured["front"]), key=lambda x: -x["score"])
    for entry in ranked:
        for policy in _at(entry, amount, share):
            if not policy.learned or (own and _has_weights(policy, model)):
                where = "this model" if own else "the embedded model; learned parts are left out here"
                return policy, (
                    f"{spec} is {policy!r}: {entry['score']:.0f} % at {100 * entry['share']:.0f} % of the "
                    f"bytes over {entry['tasks']} tasks of {entry['length']} tokens, measured on {where} "
                    f"({measured['command']})."
                )
    raise PolicyError(f"policy({spec!r}): nothing that small was measured. Give more, or name a policy.")


def _share(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 < number <= 1 else None


def _share_of(size: int, model: Weighted) -> float:
    """Bytes as a share of a full 16-bit cache of the model's longest sequence."""
    network = model.network
    full = 4 * network.num_layers * network.num_kv_heads * network.head_dim * network.max_positions
    return min(1.0, size / full) if size else 0.0


def _table(model: Weighted) -> tuple[dict[str, Any], bool]:
    """The measurements, and whether they were made with this model."""
    for folder in (getattr(model, "folder", None), EMBEDDED):
        file = None if folder is None else Path(folder) / FRONT
        if file is not None and file.is_file():
            measured = _read(file)
            own = measured["fingerprint"] == fingerprint(model)
            if own or folder == EMBEDDED:
                return measured, own
    raise PolicyError(
        f"auto(...) has no measurements to choose by: there is no {FRONT} beside the model. Run 'python -m "
        f"kvjax.eval frontier --out DIR' and put its {FRONT} into the model's folder, or name a policy."
    )


def _read(file: Path) -> dict[str, Any]:
    try:
        measured: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        for entry in measured["front"]:
            catalogue.policy(entry["policy"])
            _ = [float(entry[name]) for name in ("share", "kept", "score", "length", "tasks")]
            _ = entry["protocol"]
        _ = measured["fingerprint"], measured["command"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PolicyError(
            f"auto(...) chooses by the {FRONT} of the model's folder, which cannot be used "
            f"({type(error).__name__}: {error}). Write it again with 'python -m kvjax.eval frontier', or "
            "name a policy."
        ) from error
    return measured


def _longest(front: list[dict[str, Any]]) -> list[dict[str, Any]]:
    most = max((x["length"] for x in front), default=0)
    of_longest = [x for x in front if x["length"] == most]
    return [x for x in of_longest if x["protocol"] == "agnostic"] or of_longest


def _at(entry: dict[str, Any], amount: float | str, share: float) -> Iterator[Policy]:
    """The measured policy with its budget set to ``amount``; as it stands where it has none to set.

    A budget of slots counts as its share of the prompt; tokens after the prompt were held in addition.
    """
    policy = catalogue.policy(entry["policy"])
    budget: Any = policy.budget
    slots = getattr(budget, "amount", None)
    each = entry["share"] / entry["kept"]  # bytes of a slot, over those of one at 16 bits
    if (slots / entry["length"] * each if isinstance(slots, int) else entry["share"]) > 1.02 * share:
        return
    if slots is not None:
        # Codes are smaller than what they stand for: as many more slots.
        slots = amount if isinstance(amount, str) else min(1.0, amount / each)
        yield dataclasses.replace(policy, budget=dataclasses.replace(budget, amount=slots))
    elif not isinstance(amount, str):
        yield policy


def _has_weights(policy: Policy, model: Weighted) -> bool:
    try:
        find(policy, model)
    except WeightsError:
        return False
    return True
