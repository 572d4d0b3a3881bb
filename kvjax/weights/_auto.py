"""``auto(0.2)``, ``auto(64MiB)``: the policy that measured best at so many bytes, once the model is known.

A share is of the 16-bit bytes of a cache that keeps everything. Bytes are a row's own, of prompt and answer.
Policies that feed a prompt twice are not among the measurements.

The measurements are ``front.json`` in a model's folder (``python -m kvjax.eval frontier``). A model without
one, or with one of another fingerprint, uses those of SmolLM2-135M-Instruct, and where these have nothing
that small those of the embedded model; without learned parts.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

from kvjax import catalogue
from kvjax.algebra import Policy, PolicyError
from kvjax.types import Weighted
from kvjax.weights._bytes import live_bytes
from kvjax.weights._file import WeightsError
from kvjax.weights._find import EMBEDDED, find
from kvjax.weights._fingerprint import fingerprint

FRONT = "front.json"

SHIPPED = (EMBEDDED.with_name("smollm2-135m-instruct"), EMBEDDED)
"""Folders whose measurements serve models that have none of their own; the better model first."""

_WORD = re.compile(r"\s*auto\((.*)\)\s*")
_BYTES = re.compile(r"['\"]?(\d+)(B|KiB|MiB|GiB)['\"]?")
_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def is_auto(spec: object) -> bool:
    """Whether that is ``auto(...)``."""
    return isinstance(spec, str) and _WORD.fullmatch(spec) is not None


def chosen(spec: str, model: Weighted, *, prompt: int | None = None, answer: int = 0) -> tuple[Policy, str]:
    """The policy that ``auto(...)`` stands for on this model, and a sentence with the reason.

    A share takes the measurements at the greatest length, bytes those at the length nearest to the request's;
    question unseen. The best score that fits counts. Where bytes hold the whole cache, that is ``full``.

    Args:
      spec: ``auto(share)`` or ``auto(64MiB)``.
      model: that it is for.
      prompt, answer: tokens of the longest row, for bytes; without them the model's greatest context.

    Raises:
      PolicyError: neither a share nor bytes, no measurements or damaged ones, or none that small.
    """
    match = _WORD.fullmatch(spec)
    text = match[1].strip() if match else ""
    size, share = _BYTES.fullmatch(text), _share(text)
    if size:
        most = model.network.max_positions
        tokens = (most, 0) if prompt is None else (min(prompt, most), min(answer, max(most - prompt, 0)))
        return _for_bytes(spec, int(size[1]) * _UNITS[size[2]], model, *tokens)
    if share is None:
        raise PolicyError(
            f"policy({spec!r}): auto takes a share of the cache in (0, 1] or bytes of a row. Write auto(0.2) "
            "or auto(64MiB)."
        )
    for table in _tables(model):
        for entry in sorted(_longest(table.front), key=lambda x: (-x["score"], x["share"])):
            policy = _at(entry, share)
            if policy is not None and _usable(policy, model, table.own):
                return policy, f"{spec} is {policy!r}: {table.measured(entry)}"
    raise PolicyError(f"policy({spec!r}): nothing that small was measured. Give more, or name a policy.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Table:
    """Measurements of one model.

    Attributes:
      front: an entry a policy and length.
      name: of the model.
      command: that measured.
      own: were they made with the model that they now serve?
    """

    front: list[dict[str, Any]]
    name: str
    command: str
    own: bool

    def measured(self, entry: dict[str, Any]) -> str:
        """What speaks for an entry, in words."""
        where = "this model" if self.own else f"{self.name}, for want of figures of this model's own"
        return (
            f"{entry['score']:.0f} % at {100 * entry['share']:.0f} % of the bytes over {entry['tasks']} "
            f"tasks of {entry['length']} tokens, measured on {where} ({self.command})."
        )


def _for_bytes(spec: str, size: int, model: Weighted, prompt: int, answer: int) -> tuple[Policy, str]:
    """The best entry whose live bytes at this context fit; its budget as a share of the prompt."""
    dtype, tokens = model.params["embed"].dtype, prompt + answer
    whole = live_bytes(Policy(), model.network, dtype, tokens, tokens)
    if whole <= size:
        return Policy(), f"{spec} is full: a cache of {tokens} tokens takes {_written(whole)} whole."
    least: tuple[float, Policy] | None = None
    best: tuple[tuple[float, float], Policy, str] | None = None
    for table in _tables(model):
        for entry in _nearest(table.front, tokens):
            policy = _as_measured(entry)
            if not _usable(policy, model, table.own):
                continue
            held = live_bytes(policy, model.network, dtype, tokens, _slots(policy, entry, prompt, answer))
            least = min(least or (held, policy), (held, policy), key=lambda x: x[0])
            if held <= size and (best is None or (entry["score"], -held) > best[0]):
                best = (entry["score"], -held), policy, table.measured(entry)
        if best is not None:
            break
    if best is None:
        small = "" if least is None else f", the smallest measured policy {least[1]!r} {_written(least[0])}"
        raise PolicyError(
            f"policy({spec!r}): a cache of {tokens} tokens takes {_written(whole)} whole{small}. "
            "Give at least that, or name a policy."
        )
    (_, held), policy, reason = best
    return policy, f"{spec} is {policy!r}: {_written(-held)} for {tokens} tokens; {reason}"


def _written(size: float) -> str:
    """Bytes for people."""
    unit = max((u for u in _UNITS if _UNITS[u] <= max(size, 1)), key=lambda u: _UNITS[u])
    return f"{size / _UNITS[unit]:.4g} {unit}"


def _share(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 < number <= 1 else None


def _tables(model: Weighted) -> list[_Table]:
    """The model's own measurements; without them those shipped, in the order to ask them."""
    folder, mark = getattr(model, "folder", None), fingerprint(model)
    places = [] if folder is None else [Path(folder)]
    found = []
    for place in dict.fromkeys([*places, *SHIPPED]):
        if not (place / FRONT).is_file():
            continue
        measured = _read(place / FRONT)
        table = _Table(
            front=measured["front"],
            name=measured["model"],
            command=measured["command"],
            own=measured["fingerprint"] == mark,
        )
        if table.own:
            return [table]
        if place in SHIPPED:
            found.append(table)
    if found:
        return found
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
        _ = measured["fingerprint"], measured["command"], measured["model"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PolicyError(
            f"auto(...) chooses by the {FRONT} of the model's folder, which cannot be used "
            f"({type(error).__name__}: {error}). Write it again with 'python -m kvjax.eval frontier', or "
            "name a policy."
        ) from error
    return measured


def _longest(front: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return _of_length(front, max((x["length"] for x in front), default=0))


def _nearest(front: list[dict[str, Any]], tokens: int) -> list[dict[str, Any]]:
    lengths = sorted({x["length"] for x in front})
    return _of_length(front, min(lengths, key=lambda n: abs(math.log(n / max(tokens, 1))), default=0))


def _of_length(front: list[dict[str, Any]], length: int) -> list[dict[str, Any]]:
    there = [x for x in front if x["length"] == length]
    return [x for x in there if x["protocol"] == "agnostic"] or there


def _amount(entry: dict[str, Any]) -> float | None:
    """The share of a prompt that the measured budget keeps; None where no such budget is set."""
    amount = getattr(catalogue.policy(entry["policy"]).budget, "amount", None)
    if isinstance(amount, str):
        return float(entry["kept"])
    return min(1.0, amount / entry["length"]) if isinstance(amount, int) else amount


def _with_amount(policy: Policy, amount: float | None) -> Policy:
    if amount is None:
        return policy
    budget: Any = policy.budget
    return dataclasses.replace(policy, budget=dataclasses.replace(budget, amount=amount))


def _at(entry: dict[str, Any], share: float) -> Policy | None:
    """The measured policy with its budget set to ``share``, or as it stands without one; None if too large.

    A budget of slots counts as its share of the prompt; tokens after the prompt were held in addition.
    """
    amount, each = _amount(entry), entry["share"] / entry["kept"]  # bytes of a slot, over those at 16 bits
    if (entry["share"] if amount is None else amount * each) > 1.02 * share:
        return None
    # Codes are smaller than what they stand for: as many more slots.
    return _with_amount(catalogue.policy(entry["policy"]), None if amount is None else min(1.0, share / each))


def _as_measured(entry: dict[str, Any]) -> Policy:
    """The measured policy, with its budget as a share of the prompt."""
    amount = _amount(entry)
    return _with_amount(catalogue.policy(entry["policy"]), amount and float(f"{amount:.4g}"))


def _slots(policy: Policy, entry: dict[str, Any], prompt: int, answer: int) -> float:
    """Slots of a KV head once the answer is written, where this entry kept its share when measured."""
    tokens, length, amount = prompt + answer, entry["length"], _amount(entry)
    measured = entry["kept"] * length
    if policy.decides_later and amount is None:  # a number of slots, whatever the length
        return float(min(measured, tokens))
    if policy.decides_later:
        return float(entry["kept"] * tokens)
    if amount is not None:  # what came after the prompt was held in addition
        return float(min(tokens, amount * prompt + max(measured - amount * length, 0) + answer))
    if policy.whole_prompt:
        return float(entry["kept"] * prompt + answer)
    window = policy.window(tokens)
    rate = max(measured - window, 0) / max(length - window, 1)
    return float(min(tokens, window + rate * max(tokens - window, 0)))


def _usable(policy: Policy, model: Weighted, own: bool) -> bool:
    return not policy.learned or (own and _has_weights(policy, model))


def _has_weights(policy: Policy, model: Weighted) -> bool:
    try:
        find(policy, model)
    except WeightsError:
        return False
    return True
