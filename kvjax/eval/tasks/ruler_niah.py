"""RULER's eight needle tasks (https://arxiv.org/abs/2404.06654): keys, values and questions in numbers.

Scaled as recorded here: numbers have five digits up to 1024 tokens and seven beyond; "uuid" is eight hex
digits below 2048 tokens and a uuid4 from there on; essays are Emerson's; what may be written is what the
answer needs and a little more. Keys are of the evaluation's fifth of the word list.
"""

from __future__ import annotations

import dataclasses
import functools
import uuid
from collections.abc import Sequence

import numpy as np

from kvjax.eval.tasks import scorers
from kvjax.eval.tasks.maker import Maker, Piece, join, woven
from kvjax.eval.tasks.sample import Sample
from kvjax.eval.tasks.task import Task
from kvjax.eval.tasks.words import DECIMAL, HEX, NOISE, Rng, listed, shuffled, strings


@dataclasses.dataclass(frozen=True, kw_only=True)
class NeedleForm:
    """One of the tasks.

    Attributes:
      hay: book, noise or needles.
      keys, values, asked: needles' keys, values of each key, and keys asked for; in training at most so many.
      key, value: words, number or uuid.
    """

    hay: str
    keys: int = 1
    values: int = 1
    asked: int = 1
    key: str = "words"
    value: str = "number"

    def intro(self) -> str:
        return (
            f"Some special magic {self.value}s are hidden in the following text. "
            f"Remember them: the question at its end is about these {self.value}s.\n"
        )

    def question(self, keys: Sequence[str], answers: int) -> tuple[str, str]:
        """(the subject of a question about these keys, "is" or "are")."""
        kind, verb = (self.value + "s", "are") if answers > 1 else (self.value, "is")
        return f"the special magic {kind} for {listed(keys)} mentioned in the provided text", verb


FORMS = {
    "single_1": NeedleForm(hay="noise"),
    "single_2": NeedleForm(hay="book"),
    "single_3": NeedleForm(hay="book", value="uuid"),
    "multikey_1": NeedleForm(hay="book", keys=4),
    "multikey_2": NeedleForm(hay="needles"),
    "multikey_3": NeedleForm(hay="needles", key="uuid", value="uuid"),
    "multivalue": NeedleForm(hay="book", values=4),
    "multiquery": NeedleForm(hay="book", keys=4, asked=4),
}


def make(form: NeedleForm, rng: Rng, maker: Maker) -> Sample:
    """One sample."""

    def hex_string() -> str:
        if maker.length < 2048:
            return strings(rng, 1, 8, HEX)[0]
        return str(uuid.UUID(bytes=rng.bytes(16), version=4))

    def draw_keys(count: int, without: Sequence[str] = ()) -> list[str]:
        if form.key == "uuid":
            return [hex_string() for _ in range(count)]
        return maker.words(rng, count, parts=2, without=without)

    def draw_value() -> str:
        if form.value == "uuid":
            return hex_string()
        return "".join(DECIMAL[i] for i in rng.integers(0, 10, 5 if maker.length <= 1024 else 7))

    def sentence(key: str, value: str) -> str:
        return f"One of the special magic {form.value}s for {key} is: {value}."

    keys = draw_keys(form.keys)
    hidden = {key: [draw_value() for _ in range(form.values)] for key in keys}
    asked = shuffled(rng, keys)[: form.asked]
    answers = [value for key in asked for value in hidden[key]]
    needles: list[Piece] = [(sentence(key, value), key in asked) for key in keys for value in hidden[key]]
    essay = form.hay == "book"
    if essay:
        units = maker.window(rng, maker.data.essays())
        # Different ones of 40 evenly spaced depths, as in RULER.
        marks = np.sort(rng.permutation(40)[: len(needles)]) / 39
    else:
        units = [NOISE] * (maker.length // 15)
        if form.hay == "needles":
            units = [sentence(key, draw_value()) for key in draw_keys(len(units), keys)]
        marks = np.sort(rng.random(len(needles)))
    what, verb = form.question(asked, len(answers))
    from_end = round(100 * (1 - float(marks[[marked for _, marked in needles].index(True)])))

    def build(count: int) -> Sample:
        shown = units[:count]
        at = [maker.at_depth(shown, mark) if essay else int(mark * (count + 1)) for mark in marks]
        hay = woven(shown, list(zip(at, needles)), " " if essay else "\n")
        return maker.sample(
            join([(form.intro(), False), *hay]),
            f"\nWhat {verb} {what}?",
            f" T{what[1:]} {verb}",
            " " + ", ".join(answers),
            answers,
            tags={"depth_from_end": from_end},
        )

    return maker.fit(build, len(units), least=1)


TASKS = tuple(
    Task(
        name=f"niah_{name}",
        group="ruler",
        fits=384 if form.keys * form.values > 1 or form.key == "uuid" else 256,
        make=functools.partial(make, form),
        score=scorers.all_found,
    )
    for name, form in FORMS.items()
)
