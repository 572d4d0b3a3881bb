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

import dataclasses

import numpy as np

from train.rows import ANSWER, HAYSTACK, MAGIC, TAIL, Source
from train.tasks.pieces import (
    Part,
    Row,
    book,
    distinct,
    join,
    lines,
    noise,
    pick,
    plain,
    scatter,
    stack,
    strings,
)

FITS = 256

QUESTIONS = (6, 12)
"""Of a row of ``many`` at most: a short one, and from 1024 tokens on."""
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

HEX, DECIMAL = "0123456789abcdef", "0123456789"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """One of the tasks.

    Attributes:
      hay: book, noise or needles.
      keys: needles' keys, at most; rows of the training mixture draw fewer, too.
      values: of each key, at most.
      asked: keys asked for, at most.
      key, value: words, number or uuid.
    """

    hay: str
    keys: int = 1
    values: int = 1
    asked: int = 1
    key: str = "words"
    value: str = "number"


FORMS = {
    "single_1": Form(hay="noise"),
    "single_2": Form(hay="book"),
    "single_3": Form(hay="book", value="uuid"),
    "multikey_1": Form(hay="book", keys=4),
    "multikey_2": Form(hay="needles"),
    "multikey_3": Form(hay="needles", key="uuid", value="uuid"),
    "multivalue": Form(hay="book", values=4),
    "multiquery": Form(hay="book", keys=4, asked=4),
}


def row(
    rng: np.random.Generator, source: Source, length: int, *, form: str | None = None, full: bool = False
) -> Row | None:
    """One row.

    Args:
      rng: consumed.
      source: text and key words.
      length: N, tokens of the row.
      form: a name of ``FORMS``; None draws one.
      full: as many keys and values as the form allows; else a number up to that is drawn.

    Returns:
      (ids int32 [N], loss weight float32 [N]); None when it does not fit.
    """
    task = FORMS[form or pick(rng, tuple(FORMS))]
    keys, values, asked = (
        most if full or most == 1 else int(rng.integers(2, (most if length >= 384 else 2) + 1))
        for most in (task.keys, task.values, task.asked)
    )
    words = 2 if task.hay == "needles" else int(rng.integers(1, 3))
    names = _names(rng, source, task, keys, words)
    if len(names) < keys:
        return None
    digits = 5 if length <= 1024 else pick(rng, (5, 7))
    hidden = {name: [_value(rng, task, digits) for _ in range(values)] for name in names}
    lead = " " if task.hay == "book" else "\n"
    needles = [source.encode(lead + sentence(task, k, v)) for k, vs in hidden.items() for v in vs]
    intro = _intro(task) if rng.random() < 0.5 else ""
    order = [names[i] for i in rng.permutation(keys)[: min(asked, keys)]]
    head, tail = join(source, [(intro, HAYSTACK)]), join(source, _question(rng, task, hidden, order))
    room = length - 1 - len(head[0]) - len(tail[0]) - sum(map(len, needles))
    if room < 8:
        return None
    hay = _hay(rng, source, task, room, digits, set(names))
    return stack(head, plain(scatter(rng, hay, needles)), tail)


def many(rng: np.random.Generator, source: Source, length: int) -> Row | None:
    """One row with several needles and several questions about them.

    Keys are as many as the length allows, up to twelve, each asked for once; among lines of needles they
    stand anywhere. A question of several keys asks for any two to four, in any order.

    Args:
      rng: consumed.
      source: text and key words.
      length: N, tokens of the row.

    Returns:
      (ids int32 [N], loss weight float32 [N]); None when it does not fit.
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
    hidden = {name: [_value(rng, task, digits) for _ in range(values)] for name in names}
    lead = " " if task.hay == "book" else "\n"
    flat = [(name, value) for name, found in hidden.items() for value in found]
    # Shuffled as a whole, so that one key's values are not neighbours; its answer is in their new order.
    flat = [flat[i] for i in rng.permutation(len(flat))]
    hidden = {name: [value for other, value in flat if other == name] for name in names}
    needles = [source.encode(lead + sentence(task, name, value)) for name, value in flat]
    head = join(source, [(_intro(task) if rng.random() < 0.5 else "", HAYSTACK)])
    room = length - 1 - len(head[0]) - sum(map(len, needles))
    parts: list[Part] = []
    tail: Row | None = None
    for i in range(min(count, QUESTIONS[length >= 1024])):
        parts = parts + _question(rng, task, hidden, _asked(rng, task, names, i))
        longer = join(source, parts)
        if len(longer[0]) > room - 8 or (tail is not None and len(longer[0]) > length // 2):
            break
        tail = longer
    if tail is None:
        return None
    hay = _hay(rng, source, task, room - len(tail[0]), digits, set(names))
    return stack(head, plain(scatter(rng, hay, needles)), tail)


def _asked(rng: np.random.Generator, task: Form, names: list[str], turn: int) -> list[str]:
    """The keys of one question: the next one, or any two to four where the form asks for several."""
    if task.asked == 1:
        return [names[turn]]
    count = int(rng.integers(2, min(task.asked, len(names)) + 1))
    return [names[i] for i in rng.permutation(len(names))[:count]]


def sentence(task: Form, key: str, value: str) -> str:
    """A needle."""
    return MAGIC.hide.format(key=key, value=value).strip().replace("numbers", task.value + "s")


def _names(rng: np.random.Generator, source: Source, task: Form, count: int, words: int) -> list[str]:
    if task.key == "uuid":
        return strings(rng, source, count, 8, HEX)
    return distinct(rng, source, count, words=words)


def _value(rng: np.random.Generator, task: Form, digits: int) -> str:
    letters, size = (HEX, 8) if task.value == "uuid" else (DECIMAL, digits)
    return "".join(letters[i] for i in rng.integers(0, len(letters), size))


def _intro(task: Form) -> str:
    return (
        f"Some special magic {task.value}s are hidden in the following text. "
        f"Remember them: the question at its end is about these {task.value}s.\n"
    )


def _question(
    rng: np.random.Generator, task: Form, hidden: dict[str, list[str]], order: list[str]
) -> list[Part]:
    """The question, in the singular for one value; every value asked for is an answer of its own."""
    gap = pick(rng, (" ", "\n"))
    found = [value for name in order for value in hidden[name]]
    names = ", ".join(order[:-1]) + ", and " + order[-1] if len(order) > 1 else order[0]
    kind = task.value + ("s" if len(found) > 1 else "")
    what = f"the special magic {kind} for {names} mentioned in the provided text"
    verb, wanted = ("are", f"What are all {what}?") if len(found) > 1 else ("is", f"What is {what}?")
    parts: list[Part] = [(f"{gap}{wanted} {what[0].upper()}{what[1:]} {verb}", TAIL)]
    for i, value in enumerate(found):
        parts += [("," if i else "", TAIL), (f" {value}", ANSWER)]
    return [*parts, (".", TAIL)]


def _hay(
    rng: np.random.Generator, source: Source, task: Form, room: int, digits: int, taken: set[str]
) -> tuple[np.ndarray, np.ndarray]:
    if task.hay == "book":
        return book(rng, source, room)
    if task.hay == "noise":
        return noise(source, room)
    shortest = len(source.encode("\n" + sentence(task, "", "")))
    names = [name for name in _names(rng, source, task, room // shortest + 2, 2) if name not in taken]
    return lines(source, [sentence(task, name, _value(rng, task, digits)) for name in names], room)
