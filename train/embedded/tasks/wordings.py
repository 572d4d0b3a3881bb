"""How facts are worded: a grammar of frames and relations, sentences with verbs of their own, ten held out.

A wording hides a fact ({k} key, {v} value) and asks for it. The wording, not its words, decides whether
training may draw it: frames and relations whose checksum falls into the held-out fifth, and the file's
untrained ones, are never trained.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import yaml

from train.text import held_out_word


@dataclasses.dataclass(frozen=True)
class Wording:
    """One way to say a fact and ask for it; each text has {k}, ``hide`` has {v} as well.

    Attributes:
      kind: of the value, one of ``train.embedded.tasks.values.VALUES``.
      hide: the statement.
      ask: questions up to where the value follows; the first repeats the statement where it ends in the
      value.
    """

    kind: str
    hide: str
    ask: tuple[str, ...]


@functools.cache
def _file() -> dict[str, Any]:
    return yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())


@functools.cache
def written(group: str) -> tuple[Wording, ...]:
    """The sentences of ``wordings.yaml``: "trained" ones or those for evaluation alone, "untrained"."""
    return tuple(Wording(row["kind"], row["hide"], tuple(row["ask"])) for row in _file()[group])


@functools.cache
def grammar(held: bool) -> tuple[Wording, ...]:
    """Wordings of training, or those whose frame or relation is held out (the file's untrained ones are in
    neither).

    A trained wording has a trained statement, relation and questions; a held-out one a statement that is not.
    """
    wordings = []
    for kind, relations in _file()["relations"].items():
        for relation in (r for r in relations if not held_out_word(r)):
            asks = tuple(_filled(q, relation) for q in _file()["questions"] if not held_out_word(q))
            wordings += [
                Wording(kind, _filled(frame, relation), _asks(frame, relation, asks))
                for frame in _file()["statements"]
                if held_out_word(frame) == held
            ]
    return tuple(wordings) if held else (*wordings, *written("trained"))


def _filled(frame: str, relation: str) -> str:
    text = frame.replace("{r}", relation)
    return text[0].upper() + text[1:] if text[0].isalpha() else text


def _asks(frame: str, relation: str, asks: tuple[str, ...]) -> tuple[str, ...]:
    """The statement itself up to its value, where it ends in that, before the questions."""
    if not frame.endswith(("{v}.", "{v}")) or frame.index("{v}") < frame.index("{k}"):
        return asks
    return (_filled(frame[: frame.index("{v}")].rstrip(), relation), *asks)
