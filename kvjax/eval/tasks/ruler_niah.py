"""RULER's eight needle tasks (https://arxiv.org/abs/2404.06654): keys, values and questions in numbers.

Scaled as recorded here: numbers have five digits up to 1024 tokens and seven beyond; "uuid" is eight hex
digits below 2048 tokens and a uuid4 from there on; essays are Emerson's; what may be written is what the
answer needs and a little more. Keys are of the evaluation's fifth of the word list.
"""

from __future__ import annotations

import dataclasses
import functools
import uuid

from kvjax.eval.tasks import hay, scorers
from kvjax.eval.tasks.maker import Maker, Piece, Rng, join, listed, shuffled, strings
from kvjax.eval.tasks.sample import Sample
from kvjax.eval.tasks.task import Task

HEX, DECIMAL = "0123456789abcdef", "0123456789"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """One of the tasks: haystack, how many keys, values of a key and keys asked for, and of what kind."""

    hay: str
    keys: int = 1
    values: int = 1
    asked: int = 1
    key: str = "word"
    value: str = "number"


FORMS = {
    "niah_single_1": Form(hay="noise"),
    "niah_single_2": Form(hay="essay"),
    "niah_single_3": Form(hay="essay", value="uuid"),
    "niah_multikey_1": Form(hay="essay", keys=4),
    "niah_multikey_2": Form(hay="needles"),
    "niah_multikey_3": Form(hay="needles", key="uuid", value="uuid"),
    "niah_multivalue": Form(hay="essay", values=4),
    "niah_multiquery": Form(hay="essay", keys=4, asked=4),
}


def make(form: Form, rng: Rng, maker: Maker) -> Sample:
    """One sample."""
    keys = _keys(form, rng, maker, form.keys)
    hidden = {key: [_value(form, rng, maker) for _ in range(form.values)] for key in keys}
    asked = shuffled(rng, keys)[: form.asked]
    found = [value for key in asked for value in hidden[key]]
    needles: list[Piece] = [
        (_sentence(form, key, value), key in asked) for key in keys for value in hidden[key]
    ]
    units = _units(form, rng, maker, set(keys))
    marks = hay.depths(rng, len(needles)) if form.hay == "essay" else rng.random(len(needles))
    marks.sort()
    kind, verb = (form.value + "s", "are") if len(found) > 1 else (form.value, "is")
    what = f"the special magic {kind} for {listed(asked)} mentioned in the provided text"
    intro = (
        f"Some special magic {form.value}s are hidden in the following text. "
        f"Remember them: the question at its end is about these {form.value}s.\n"
    )
    gap = " " if form.hay == "essay" else "\n"
    answer = " " + ", ".join(found)

    def build(count: int) -> Sample:
        shown = units[:count]
        if form.hay == "essay":
            at = [hay.at_depth(maker, shown, depth) for depth in marks]
        else:
            at = [int(mark * (count + 1)) for mark in marks]
        context, spans = join([(intro, False), *hay.woven(shown, list(zip(at, needles)), gap)])
        return Sample(
            context=context,
            question=f"\nWhat {verb} {what}?",
            prefix=f" T{what[1:]} {verb}",
            answer=answer,
            refs=tuple(found),
            spans=spans,
            max_new=maker.count(answer) + 4,
            tags={"depth_from_end": round(100 * (1 - float(marks[[n[1] for n in needles].index(True)])))},
        )

    return maker.fit(build, len(units), least=1)


def _sentence(form: Form, key: str, value: str) -> str:
    return f"One of the special magic {form.value}s for {key} is: {value}."


def _keys(form: Form, rng: Rng, maker: Maker, count: int, without: set[str] = frozenset()) -> list[str]:  # type: ignore[assignment]
    if form.key == "uuid":
        return [_uuid(rng, maker) for _ in range(count)]
    return maker.words(rng, count, parts=2, without=without)


def _value(form: Form, rng: Rng, maker: Maker) -> str:
    if form.value == "uuid":
        return _uuid(rng, maker)
    return "".join(DECIMAL[i] for i in rng.integers(0, 10, 5 if maker.length <= 1024 else 7))


def _uuid(rng: Rng, maker: Maker) -> str:
    if maker.length < 2048:
        return strings(rng, 1, 8, HEX)[0]
    return str(uuid.UUID(bytes=rng.bytes(16), version=4))


def _units(form: Form, rng: Rng, maker: Maker, taken: set[str]) -> list[str]:
    """More haystack than fits."""
    if form.hay == "essay":
        return maker.window(rng, maker.data.essays())
    if form.hay == "noise":
        return hay.noise(maker.length // 15)
    count = maker.length // 15
    keys = _keys(form, rng, maker, count, taken)
    return [_sentence(form, key, _value(form, rng, maker)) for key in keys]


def score(output: str, sample: Sample) -> float:
    """Share of the values found."""
    return scorers.all_found(output, sample.refs)


TASKS = tuple(
    Task(
        name=name,
        group="ruler",
        fits=384 if form.keys * form.values > 1 or form.key == "uuid" else 256,
        make=functools.partial(make, form),
        score=score,
    )
    for name, form in FORMS.items()
)
