"""How facts are worded: a grammar of frames and relations, sentences with verbs of their own, and ten kept
apart.

A wording hides a fact ({k} key, {v} value) and asks for it. What training may draw and what only evaluation
may is decided by the wording, not by its words: frames and relations whose checksum falls into the held-out
fifth, and all of the file's untrained ones, are never trained.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import yaml

from train.text import held_out_word


@dataclasses.dataclass(frozen=True)
class Wording:
    """One way to say a fact and ask for it; each text has {k}, ``hide`` has {v} as well.

    Attributes:
      kind: of the value, one of ``train.tasks.values.VALUES``.
      hide: the statement.
      ask: questions up to where the value follows; the first repeats the statement where it ends in the
      value.
    """

    kind: str
    hide: str
    ask: tuple[str, ...]


RELATIONS: dict[str, tuple[str, ...]] = {
    "number": (
        "secret number", "locker number", "room number", "ticket number", "score", "weight in grams", "house
        number",
        "phone extension", "page", "seat", "magic number", "number of sheep", "height in feet", "distance in
        miles",
    ),
    "word": (
        "secret word", "favourite word", "password", "colour", "trade", "nickname", "instrument", "mark",
        "animal",
        "motto", "fruit", "badge",
    ),
    "words": (
        "code phrase", "title", "full motto", "team name", "brand", "chosen phrase", "inscription", "file
        name",
        "song", "ship",
    ),
    "code": (
        "access code", "booking code", "licence plate", "serial code", "order code", "flight", "product code",
        "case reference", "voucher", "reference",
    ),
    "name": (
        "owner", "teacher", "doctor", "brother", "captain", "author", "partner", "guardian", "neighbour",
        "editor",
        "manager", "witness",
    ),
    "price": ("price", "rent", "fee", "debt", "wage", "cost", "reward", "bill", "deposit", "fine"),
    "place": (
        "home town", "birthplace", "destination", "meeting place", "station", "harbour", "village", "school",
        "office", "address",
    ),
    "date": (
        "birthday", "deadline", "wedding day", "start date", "date of the trial", "opening day", "due date",
        "date of arrival", "anniversary", "renewal date",
    ),
    "log": ("last log line", "status line", "latest entry", "error message", "final report", "last event"),
}  # fmt: skip

STATEMENTS = (
    "The {r} of {k} is {v}.",
    "The {r} for {k} is {v}.",
    "{k} has the {r} {v}.",
    "The {r} that belongs to {k} is {v}.",
    "For {k}, the {r} is {v}.",
    "Remember that the {r} of {k} is {v}.",
    "Note the {r} of {k}: {v}.",
    "As for {k}, the {r} was {v}.",
    "{v} is the {r} of {k}.",
    "Under {k} the book gives {v} as the {r}.",
    "It was {v} that {k} had as {r}.",
    "They say that the {r} of {k} has always been {v}.",
    "We set the {r} for {k} to {v}.",
    "{k} was given {v} as {r}.",
    "In the list, {k} stands with {v} for the {r}.",
    "The {r} was {v} in the case of {k}.",
    "{k} ({r}): {v}.",
    "{r} of {k} = {v}.",
    "Do not forget that {k} goes with {v}, which is the {r}.",
    "When asked for the {r}, {k} answered: {v}.",
    "{v}, that is the {r} written down for {k}.",
    "The clerk read out {k}, and then the {r}, {v}.",
    "Everybody knew {v} to be the {r} of {k}.",
    "What {k} had for a {r} was {v}.",
    "By the way, my {r} for {k} is {v}.",
    "{k} | {r} | {v}",
    "{k} came first; the {r} there was {v}.",
    "Of all of them only {k} had {v} as the {r}.",
)

QUESTIONS = (
    "What is the {r} of {k}? The {r} of {k} is",
    "What is the {r} for {k}? Answer:",
    "Which {r} does {k} have? It is",
    "Tell me the {r} of {k}. It is",
    "Question: what is the {r} of {k}?\nAnswer:",
    "Q: {r} of {k}\nA:",
    "What did the text say about the {r} of {k}? It said",
    "Do you remember the {r} of {k}? Yes, it is",
    "The {r} that was mentioned for {k} is",
    "Which {r} goes with {k}? The answer is",
    "Say the {r} of {k}:",
    "So the {r} for {k} was",
    "Please look up {k} and give the {r}:",
    "The {r} of {k} is",
    "{k} has the {r}",
    "For {k} the {r} was",
    "What {r} was given to {k}? It was",
    "We were told the {r} of {k}, namely",
)


@functools.cache
def written(group: str) -> tuple[Wording, ...]:
    """The sentences of ``wordings.yaml``: "trained" ones or those for evaluation alone, "untrained"."""
    rows = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())[group]
    return tuple(Wording(row["kind"], row["hide"], tuple(row["ask"])) for row in rows)


def _allowed(text: str, held: bool) -> bool:
    return held_out_word(text) == held


@functools.cache
def grammar(held: bool) -> tuple[Wording, ...]:
    """Wordings of training, or those whose frame or relation is held out (the file's untrained ones are in
    neither).

    A trained wording has a trained statement, relation and questions; a held-out one a statement that is not.
    """
    found = []
    for kind, relations in RELATIONS.items():
        for relation in (r for r in relations if not _allowed(r, True)):
            asks = tuple(_filled(q, relation) for q in QUESTIONS if not _allowed(q, True))
            for frame in STATEMENTS:
                if _allowed(frame, held):
                    found.append(Wording(kind, _filled(frame, relation), _asks(frame, relation, asks)))
    return tuple(found) if held else (*found, *written("trained"))


def _filled(frame: str, relation: str) -> str:
    text = frame.replace("{r}", relation)
    return text[0].upper() + text[1:] if text[0].isalpha() else text


def _asks(frame: str, relation: str, asks: tuple[str, ...]) -> tuple[str, ...]:
    """The statement itself up to its value, where it ends in that, before the questions."""
    if not frame.endswith(("{v}.", "{v}")) or frame.index("{v}") < frame.index("{k}"):
        return asks
    return (_filled(frame[: frame.index("{v}")].rstrip(), relation), *asks)
