"""RULER's eight needle tasks (arXiv 2404.06654): one to four keys, several values, several keys asked for.

A needle is one sentence, "One of the special magic numbers for <key> is: <value>.", in one of three
haystacks: book text, lines that say nothing, lines of other needles. Keys are key words or 8 hex
digits; values are numbers (5 digits, also 7 beyond 1024 tokens) or 8 hex digits. Asked for are one
key, one key with all its values (in text order), or several keys (in the order asked).
A row of the evaluation's form has one question, a handful of answer tokens; ``many`` asks about more of
what is hidden, so that a row teaches as much as its text allows.
Both fit from 256 tokens on.
"""

from __future__ import annotations

import numpy as np

from kvjax.eval.tasks.ruler_niah import FORMS, NeedleForm
from kvjax.eval.tasks.words import DECIMAL, HEX, pick
from train.embedded.tasks.pieces import (
    Part,
    Row,
    book,
    distinct,
    join,
    lines,
    noise,
    plain,
    scatter,
    stack,
    strings,
)
from train.rows import ANSWER, HAYSTACK, MAGIC, TAIL, Source

__all__ = ["FITS", "FORMS", "many", "row"]

FITS = 256

QUESTIONS = (6, 12)
"""Most questions of a row of ``many``: of a short one, and from 1024 tokens on."""
DRAWN = {
    "single_1": 1,
    "single_2": 1,
    "single_3": 1,
    "multikey_1": 2,
    "multikey_2": 2,
    "multikey_3": 2,
    "multivalue": 3,
    "multiquery": 3,
}
"""How often ``many`` takes each form."""


def row(
    rng: np.random.Generator, source: Source, length: int, *, form: str | None = None, full: bool = False
) -> Row | None:
    """One row of a form; ``full``: as many keys and values as it allows, else their numbers are drawn."""
    task = FORMS[form or pick(rng, tuple(FORMS))]
    keys, values, count = (
        most if full or most == 1 else int(rng.integers(2, (most if length >= 384 else 2) + 1))
        for most in (task.keys, task.values, task.asked)
    )
    words = 2 if task.hay == "needles" else int(rng.integers(1, 3))
    names = _names(rng, source, task, keys, words)
    if len(names) < keys:
        return None
    digits = 5 if length <= 1024 else pick(rng, (5, 7))
    hidden = {name: [_value(rng, task, digits) for _ in range(values)] for name in names}
    needles = [(name, value) for name, own in hidden.items() for value in own]
    intro = task.intro() if rng.random() < 0.5 else ""
    order = [names[i] for i in rng.permutation(keys)[: min(count, keys)]]
    tail = join(source, _question(rng, task, hidden, order))
    return _row(rng, source, length, task, needles, intro, tail, digits)


def many(rng: np.random.Generator, source: Source, length: int) -> Row | None:
    """One row with several needles and several questions about them.

    Keys are as many as the length allows, up to twelve, each asked for once; among lines of needles they
    stand anywhere. A question of several keys asks for any two to four, in any order.
    """
    chances = np.asarray(list(DRAWN.values()), float)
    task = FORMS[list(DRAWN)[int(rng.choice(len(chances), p=chances / chances.sum()))]]
    values = int(rng.integers(2, 5)) if task.values > 1 else 1
    most = max(1, min(12, length // (64 * values)))
    count = max(int(rng.integers((most + 1) // 2, most + 1)), min(task.keys, 2))
    names = _names(rng, source, task, count, 2 if task.hay == "needles" else int(rng.integers(1, 3)))
    if len(names) < count:
        return None
    digits = 5 if length <= 1024 else pick(rng, (5, 7))
    needles = [(name, _value(rng, task, digits)) for name in names for _ in range(values)]
    # Shuffled as a whole, so that one key's values are not neighbours; its answer is in their new order.
    needles = [needles[i] for i in rng.permutation(len(needles))]
    hidden = {name: [value for other, value in needles if other == name] for name in names}
    intro = task.intro() if rng.random() < 0.5 else ""
    room = _room(source, length, task, needles, intro)
    parts: list[Part] = []
    tail: Row | None = None
    for i in range(min(count, QUESTIONS[length >= 1024])):
        parts = parts + _question(rng, task, hidden, _drawn_names(rng, task, names, i))
        longer = join(source, parts)
        if len(longer[0]) > room - 8 or (tail is not None and len(longer[0]) > length // 2):
            break
        tail = longer
    return None if tail is None else _row(rng, source, length, task, needles, intro, tail, digits)


def _encoded(source: Source, task: NeedleForm, needles: list[tuple[str, str]]) -> list[list[int]]:
    lead = " " if task.hay == "book" else "\n"
    return [source.encode(lead + _sentence(task, key, value)) for key, value in needles]


def _room(source: Source, length: int, task: NeedleForm, needles: list[tuple[str, str]], intro: str) -> int:
    """Tokens for the haystack and the questions."""
    head = join(source, [(intro, HAYSTACK)])
    return length - 1 - len(head[0]) - sum(map(len, _encoded(source, task, needles)))


def _row(
    rng: np.random.Generator,
    source: Source,
    length: int,
    task: NeedleForm,
    needles: list[tuple[str, str]],
    intro: str,
    tail: Row,
    digits: int,
) -> Row | None:
    """The intro, needles in a haystack that fills the length, and the questions."""
    room = _room(source, length, task, needles, intro) - len(tail[0])
    if room < 8:
        return None
    if task.hay == "book":
        hay = book(rng, source, room)
    elif task.hay == "noise":
        hay = noise(source, room)
    else:
        shortest = len(source.encode("\n" + _sentence(task, "", "")))
        taken = {key for key, _ in needles}
        names = [name for name in _names(rng, source, task, room // shortest + 2, 2) if name not in taken]
        hay = lines(source, [_sentence(task, name, _value(rng, task, digits)) for name in names], room)
    body = plain(scatter(rng, hay, _encoded(source, task, needles)))
    return stack(join(source, [(intro, HAYSTACK)]), body, tail)


def _drawn_names(rng: np.random.Generator, task: NeedleForm, names: list[str], turn: int) -> list[str]:
    """The keys of one question: the next one, or any two to four where the form asks for several."""
    if task.asked == 1:
        return [names[turn]]
    count = int(rng.integers(2, min(task.asked, len(names)) + 1))
    return [names[i] for i in rng.permutation(len(names))[:count]]


def _sentence(task: NeedleForm, key: str, value: str) -> str:
    return MAGIC.hide.format(key=key, value=value).strip().replace("numbers", task.value + "s")


def _names(rng: np.random.Generator, source: Source, task: NeedleForm, count: int, words: int) -> list[str]:
    if task.key == "uuid":
        return strings(rng, source, count, 8, HEX)
    return distinct(rng, source, count, words=words)


def _value(rng: np.random.Generator, task: NeedleForm, digits: int) -> str:
    letters, size = (HEX, 8) if task.value == "uuid" else (DECIMAL, digits)
    return "".join(letters[i] for i in rng.integers(0, len(letters), size))


def _question(
    rng: np.random.Generator, task: NeedleForm, hidden: dict[str, list[str]], order: list[str]
) -> list[Part]:
    """The question, in the singular for one value; every value asked for is an answer of its own."""
    gap = pick(rng, (" ", "\n"))
    values = [value for name in order for value in hidden[name]]
    what, verb = task.question(order, len(values))
    every = "all " if len(values) > 1 else ""
    parts: list[Part] = [(f"{gap}What {verb} {every}{what}? {what[0].upper()}{what[1:]} {verb}", TAIL)]
    for i, value in enumerate(values):
        parts += [("," if i else "", TAIL), (f" {value}", ANSWER)]
    return [*parts, (".", TAIL)]
