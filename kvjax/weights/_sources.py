"""Where each learned part of a policy has its weights from, as said in Python or on a command line.

A source is a file, or the name of a file that the model's folder ships for the part. Parts go by the names
with which a policy prints them: ``{"write_gate": "default", "kvp": "rankers.safetensors"}`` in Python,
``--weights write_gate=default,kvp=rankers.safetensors`` on a command line.
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
"""The shipped weights that a part takes where nothing else is said."""

GATES = "gates"
"""Instead of a part's name: the part that learns what to admit, or else the only part that learns."""

Source = str | Path

Sources = Source | Mapping[str, Source] | None
"""By part; a single one where exactly one part learns; None for the model's own."""

_SAID = re.compile(r"\s*([a-z][a-z0-9_]*)\s*=(.*)", re.DOTALL)
_NEXT = re.compile(r",(?=\s*[a-z][a-z0-9_]*\s*=)")


def sources(policy: Policy, given: Sources = None, *, others: Iterable[Policy] = ()) -> dict[str, Source]:
    """A source for every learned part of the policy, by the part's name; ``default`` where none is given.

    Args:
      policy: whose parts.
      given: what was said.
      others: more policies of the same run; what is said of their parts is passed over here.

    Raises:
      WeightsError: a source for what is no part, or learns nothing, or two sources for one part.
    """
    learned = {part.name: part for part in policy.learned}
    if isinstance(given, str | Path):
        if len(learned) > 1:
            raise WeightsError(
                f"weights {str(given)!r} are given, and {len(learned)} parts of '{policy!r}' learn. "
                f"Say whose they are: {' or '.join(f'{name}={given}' for name in learned)}."
            )
        given = dict.fromkeys(learned, given) or {"": given}
    if not isinstance(given, Mapping | None):
        raise WeightsError(
            f"weights {_short(given)} name no file. Give a file or a name for each part, such as "
            "{'write_gate': 'default'}."
        )
    found: dict[str, Source] = {}
    for name, source in (given or {}).items():
        _check_source(name, source)
        part = _meant(policy, name)
        if part is None and any(_meant(other, name) for other in others):
            continue  # of another policy of the run
        if part is None:
            raise _in_vain(name, source, policy, tuple(others))
        if part.name in found:
            raise WeightsError(
                f"weights {part.name}={found[part.name]} and {name}={source} are both given, for the same "
                "part. Keep one of them."
            )
        found[part.name] = source
    return {name: found.get(name, DEFAULT) for name in learned}


def _check_source(name: Any, source: Any) -> None:
    if not isinstance(source, str | Path) or not str(source):
        raise WeightsError(
            f"weights {name}={_short(source)} name no file. Give a file, or the name of weights the model "
            f"ships, such as {DEFAULT!r}."
        )


def _short(value: Any) -> str:
    """A value of a wrong kind, without printing arrays."""
    return repr(value) if isinstance(value, str | int | float | None) else f"({type(value).__name__})"


def _meant(policy: Policy, name: str) -> Part | None:
    """The learned part that a name stands for, ``GATES`` and "" included."""
    learned = policy.learned
    if name in (GATES, ""):
        first = [part for part in learned if part.place == "admission"]
        return first[0] if first else learned[0] if len(learned) == 1 else None
    return next((part for part in learned if part.name == name), None)


def _in_vain(name: str, source: Source, policy: Policy, others: tuple[Policy, ...]) -> WeightsError:
    """Why a source is for no part of the policy."""
    asked = dict.fromkeys((policy, *others))
    said = f"weights {name}={source} are given" if name else f"weights {str(source)!r} are given"
    said = f"--gates {source} is given" if name == GATES else said
    where = f"the policy '{policy!r}'" if len(asked) == 1 else "any policy of the run"
    learned = list(dict.fromkeys(part.name for one in asked for part in one.learned))
    if not learned:
        return WeightsError(
            f"{said}, but nothing in {where} is learned. Leave it out, or use a policy with a learned part."
        )
    if name == GATES:
        return WeightsError(
            f"{said}, but it is not clear for which of {', '.join(learned)}. Use --weights PART={source}."
        )
    idle = next((part for one in asked for part in one.parts if part.name == name), None)
    why = f"{idle!r} learns nothing" if idle else f"no part of {where} is called {name}"
    return WeightsError(f"{said}, but {why}. Parts that learn: {', '.join(learned)}.")


# --- on a command line ---------------------------------------------------------------------------


def parse_sources(text: str) -> dict[str, str]:
    """``part=source,part=source`` as a mapping; a comma that no ``part=`` follows belongs to a file's name.

    Raises:
      WeightsError: words of another form, or a part twice.
    """
    found: dict[str, str] = {}
    for word in _NEXT.split(text):
        match = _SAID.fullmatch(word)
        if match is None or not match[2].strip():
            raise WeightsError(
                f"--weights {text} is no list of PART=FILE or PART=NAME. Write it like --weights "
                f"write_gate={DEFAULT}, with parts as the policy prints them."
            )
        if match[1] in found:
            raise WeightsError(f"--weights {text} gives {match[1]} twice. Keep one of them.")
        found[match[1]] = match[2].strip()
    return found


def add_options(parser: argparse._ActionsContainer) -> None:
    """Adds ``--weights`` and its short form ``--gates``; parsed, both are ``weights``: a mapping, or None."""
    parser.add_argument(
        "--weights",
        action=_Collect,
        metavar="PART=FILE|NAME,...",
        help="learned weights of the policy's parts: files, or names of those the model ships "
        f"(default: those it ships as {DEFAULT!r})",
    )
    parser.add_argument(
        "--gates",
        dest="weights",
        action=_Collect,
        metavar="FILE|NAME",
        help="short for the weights of the part that learns what to admit, or of the only part that learns",
    )


class _Collect(argparse.Action):
    """Joins what several options say about weights into one mapping."""

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
