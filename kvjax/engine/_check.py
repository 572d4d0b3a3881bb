"""A request made sense of before it waits: its tokens, its policy, its learned weights, its space."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvjax import decode
from kvjax.algebra import Policy
from kvjax.decode import RequestError
from kvjax.engine._request import MOST_LOGPROBS, Request
from kvjax.engine._segment import STOPS
from kvjax.sharding.mesh import mesh_of
from kvjax.types import Params, Weighted
from kvjax.weights import Source, find, shipped, sources

if TYPE_CHECKING:
    from jaxtyping import Int


@dataclasses.dataclass(frozen=True, eq=False)
class Learned:
    """Learned weights of a policy, read once.

    Attributes:
      weights: as the decode loop takes them.
      label: which files they are of; equal labels are equal weights.
      sources: by part name, what finds them again: the name of shipped weights, or a file.
    """

    weights: Params
    label: str
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)


class Shelf:
    """The learned weights that were asked for so far; any thread."""

    def __init__(self, model: Weighted) -> None:
        self._model = model
        self._read: dict[str, Learned] = {}

    def get(self, policy: Policy, given: Mapping[str, Source] | None) -> Learned:
        """The weights that a policy needs.

        Raises:
          WeightsError: as ``kvjax.weights_for``.
        """
        if not policy.learned and not given:
            return Learned({}, "")
        said = {name: str(source) for name, source in (given or {}).items()}
        # Parts of one structure read the same files, whatever their dials.
        key = json.dumps([policy.structure, said], sort_keys=True)
        if key not in self._read:
            found = find(policy, self._model, given)
            weights = decode.on_mesh(self._model, policy, found.weights, mesh_of(self._model.params))[1]
            self._read[key] = Learned(weights, found.label, self._sources(policy, given, found.files))
        return self._read[key]

    def _sources(
        self, policy: Policy, given: Mapping[str, Source] | None, files: Mapping[str, Path]
    ) -> dict[str, str]:
        chosen = sources(policy, given)
        return {
            part.name: str(chosen[part.name])
            if chosen[part.name] in shipped(self._model, part)
            else str(files[part.name].resolve())
            for part in policy.learned
        }


def prompt_ids(model: Weighted, prompt: Any) -> Int[np.ndarray, " T"]:
    """Token ids the model has.

    Raises:
      RequestError: no list of whole numbers, or ids that the vocabulary does not have.
    """
    try:
        ids = np.asarray(prompt)
    except ValueError:
        ids = np.empty((0, 0))
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise RequestError("Request(prompt=...) is no list of token ids. Give whole numbers ([1, 2, 3]).")
    most = model.params["embed"].shape[0]
    wrong = np.flatnonzero((ids < 0) | (ids >= most))
    if wrong.size:
        raise RequestError(
            f"Request(prompt=...) has the token id {ids[wrong[0]]} at {wrong[0]}, the model knows 0 to "
            f"{most - 1}. Encode the text with the model's own tokenizer."
        )
    return ids.astype(np.int32)


def check_numbers(request: Request) -> None:
    """Refuses numbers out of range.

    Raises:
      RequestError: naming the field, the rule and the way out.
    """
    least = 0 if request.echo else 1
    rules = (
        ("max_new_tokens", _whole(request.max_new_tokens, least), f"a whole number, {least} or more"),
        ("temperature", _number(request.temperature, 0, math.inf), "a number, 0 (greedy) or more"),
        ("top_k", _whole(request.top_k, 0), "a whole number, 0 (all) or more"),
        ("top_p", _number(request.top_p, 0, 1) and request.top_p > 0, "a number above 0, at most 1"),
        ("seed", _whole(request.seed, 0, 2**32 - 1), "a whole number from 0 to 2**32 - 1"),
        ("draw", _whole(request.draw, 0, 2**31 - 1), "a whole number from 0 to 2**31 - 1"),
        (
            "logprobs",
            request.logprobs is None or _whole(request.logprobs, 0, MOST_LOGPROBS),
            f"None, or a whole number from 0 to {MOST_LOGPROBS}",
        ),
        (
            "deadline",
            request.deadline is None or _number(request.deadline, 0, math.inf) and request.deadline > 0,
            "None, or seconds above 0",
        ),
        ("stop_tokens", all(_whole(x, 0) for x in request.stop_tokens), "token ids"),
    )
    for name, good, rule in rules:
        if not good:
            raise RequestError(f"Request({name}={getattr(request, name)!r}) is out of range. Give {rule}.")


def _whole(value: Any, least: int, most: float = math.inf) -> bool:
    good = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return bool(good and least <= value <= most)


def _number(value: Any, low: float, high: float) -> bool:
    good = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    return bool(good and math.isfinite(value) and low <= value <= high)


def check_space(prompt: int, request: Request, context: int) -> None:
    """Refuses a text that would be longer than the engine holds.

    Raises:
      RequestError: with the numbers.
    """
    if prompt < 1:
        raise RequestError("Request(prompt=[]) has nothing to continue. Give at least one token.")
    if prompt + request.max_new_tokens > context:
        raise RequestError(
            f"Request(max_new_tokens={request.max_new_tokens}) after {prompt} prompt tokens exceeds the "
            f"{context} positions of a row. Ask for at most {max(context - prompt, 0)}, or shorten the "
            "prompt."
        )


def chosen_policy(request: Request, default: Policy, model: Weighted) -> Policy:
    """The policy a request asks for on this model.

    Raises:
      PolicyError: one that cannot be built.
    """
    return default if request.policy is None else decode.read_policy(request.policy, model)


def checked_stops(stops: tuple[int, ...]) -> tuple[int, ...]:
    """The ids that end a text, each once.

    Raises:
      RequestError: too many.
    """
    found = tuple(dict.fromkeys(int(stop) for stop in stops))
    if len(found) > STOPS:
        raise RequestError(
            f"Request(stop_tokens=...) ends at {len(found)} ids. Give at most {STOPS}, the model's own "
            "included."
        )
    return found
