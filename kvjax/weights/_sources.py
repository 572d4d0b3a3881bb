"""The sources of a policy's learned weights, as given in Python or on a command line.

A source is a file, or the name of a file that the model's folder ships for the part. Parts go by the names
with which a policy prints them: ``{"write_gate": "default", "kvp": "rankers.safetensors"}`` in Python,
``--weights write_gate=default,kvp=rankers.safetensors`` on a command line. ``values=other`` beside them takes
files of the same model in other values, such as those of another quantisation (``load_weights``).
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvjax.algebra import Part, Policy
from kvjax.weights._file import WeightsError

DEFAULT = "default"
"""The shipped weights that a part takes unless others are given."""

GATES = "gates"
"""Instead of a part's name: the part that learns what to admit, or else the only part that learns."""

VALUES, OTHER = "values", "other"
"""``values=other``: weights may be of the same model in other values."""

Source = str | Path

Sources = Source | Mapping[str, Source] | None
"""By part; a single one where exactly one part learns; None for those the model ships."""

_SAID = re.compile(r"\s*([a-z][a-z0-9_]*)\s*=(.*)", re.DOTALL)
_NEXT = re.compile(r",(?=\s*[a-z][a-z0-9_]*\s*=)")


def sources(policy: Policy, weights: Sources = None, *, others: Iterable[Policy] = ()) -> dict[str, Source]:
    """A source for every learned part of the policy, by the part's name; ``default`` if none is given.

    ``values=other`` stays beside them.

    Args:
      policy: whose parts.
      weights: the sources that were given.
      others: more policies of the same run; sources of their parts are ignored here.

    Raises:
      WeightsError: a source for an unknown part or one that learns nothing, or two sources for one part.
    """
    learned = [part.name for part in policy.learned]
    if isinstance(weights, str | Path):
        if len(learned) > 1:
            raise WeightsError(
                f"weights {str(weights)!r} are given, and {len(learned)} parts of '{policy!r}' learn. "
                f"Say whose they are: {' or '.join(f'{name}={weights}' for name in learned)}."
            )
        weights = dict.fromkeys(learned, weights) or {"": weights}
    if not isinstance(weights, Mapping | None):
        raise WeightsError(
            f"weights {_short(weights)} name no file. Give a file or a name for each part, such as "
            "{'write_gate': 'default'}."
        )
    chosen: dict[str, Source] = {}
    for name, source in (weights or {}).items():
        if name == VALUES:
            if source != OTHER:
                raise WeightsError(
                    f"weights {VALUES}={_short(source)} says nothing. Write {VALUES}={OTHER} for weights of "
                    "the same model in other values, or leave it out."
                )
            chosen[VALUES] = OTHER
            continue
        if not isinstance(source, str | Path) or not str(source):
            raise WeightsError(
                f"weights {name}={_short(source)} name no file. Give a file, or the name of weights the "
                f"model ships, such as {DEFAULT!r}."
            )
        part = _meant(policy, name)
        if part is None and any(_meant(other, name) for other in others):
            continue  # of another policy of the run
        if part is None:
            raise _in_vain(name, source, policy, tuple(others))
        if part.name in chosen:
            raise WeightsError(
                f"weights {part.name}={chosen[part.name]} and {name}={source} are both given, for the same "
                "part. Keep one of them."
            )
        chosen[part.name] = source
    kept = {VALUES: OTHER} if VALUES in chosen else {}
    return {name: chosen.get(name, DEFAULT) for name in learned} | kept


def _short(value: Any) -> str:
    """A value of a wrong kind, without printing arrays."""
    return repr(value) if isinstance(value, str | int | float | None) else f"({type(value).__name__})"


def _meant(policy: Policy, name: str) -> Part | None:
    """The learned part that a name means, ``GATES`` and "" included."""
    learned = policy.learned
    if name in (GATES, ""):
        first = [part for part in learned if part.place == "admission"]
        return first[0] if first else learned[0] if len(learned) == 1 else None
    return next((part for part in learned if part.name == name), None)


def _in_vain(name: str, source: Source, policy: Policy, others: tuple[Policy, ...]) -> WeightsError:
    """The error of a source that belongs to no part of the policy."""
    policies = dict.fromkeys((policy, *others))
    call = f"weights {name}={source} are given" if name else f"weights {str(source)!r} are given"
    call = f"--gates {source} is given" if name == GATES else call
    where = f"the policy '{policy!r}'" if len(policies) == 1 else "any policy of the run"
    learned = list(dict.fromkeys(part.name for one in policies for part in one.learned))
    if not learned:
        return WeightsError(
            f"{call}, but nothing in {where} is learned. Leave it out, or use a policy with a learned part."
        )
    if name == GATES:
        return WeightsError(
            f"{call}, but it is not clear for which of {', '.join(learned)}. Use --weights PART={source}."
        )
    idle = next((part for one in policies for part in one.parts if part.name == name), None)
    why = f"{idle!r} learns nothing" if idle else f"no part of {where} is called {name}"
    return WeightsError(f"{call}, but {why}. Parts that learn: {', '.join(learned)}.")


# --- on a command line ---------------------------------------------------------------------------


def parse_sources(text: str) -> dict[str, str]:
    """``part=source,part=source`` as a mapping; a comma that no ``part=`` follows belongs to a file's name.

    Raises:
      WeightsError: words of another form, or a part twice.
    """
    parsed: dict[str, str] = {}
    for word in _NEXT.split(text):
        match = _SAID.fullmatch(word)
        if match is None or not match[2].strip():
            raise WeightsError(
                f"--weights {text} is not a list of PART=FILE or PART=NAME. Write it like --weights "
                f"write_gate={DEFAULT}, with parts as the policy prints them."
            )
        if match[1] in parsed:
            raise WeightsError(f"--weights {text} gives {match[1]} twice. Keep one of them.")
        parsed[match[1]] = match[2].strip()
    return parsed


def add_options(parser: argparse._ActionsContainer) -> None:
    """Adds ``--weights`` and its short form ``--gates``; parsed, both are ``weights``: a mapping, or None."""
    parser.add_argument(
        "--weights",
        action=_Collect,
        metavar="PART=FILE|NAME,...",
        help="learned weights of the policy's parts: files, or names of those the model ships "
        f"(default: those it ships as {DEFAULT!r}); {VALUES}={OTHER} also takes those of the same model in "
        "other values",
    )
    parser.add_argument(
        "--gates",
        dest="weights",
        action=_Collect,
        metavar="FILE|NAME",
        help="short for the weights of the part that learns what to admit, or of the only part that learns",
    )


class _Collect(argparse.Action):
    """Joins several options about weights into one mapping."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option: str | None = None,
    ) -> None:
        before = getattr(namespace, self.dest) or {}
        try:
            more = {GATES: values} if option == "--gates" else parse_sources(values)
        except WeightsError as error:
            parser.error(str(error))
        twice = sorted(before.keys() & more.keys())
        if twice:
            parser.error(f"{option} {values} gives {twice[0]} again. Keep one of them.")
        setattr(namespace, self.dest, before | more)
