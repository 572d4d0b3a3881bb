"""Needle in a haystack: one secret number or word in essays, at five depths counted from the end.

After https://github.com/gkamradt/LLMTest_NeedleInAHaystack with CONF-KV's depths (10 % is next to the
recent window, 90 % is old). Needle, key words and value are new in every sample. ``niah`` asks for five
digits, several tokens of most vocabularies; ``niah_word`` for a word that is one token, where the tokenizer
has such: a policy that follows attention may keep a value's first token and lose the others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from kvjax.eval.tasks import hay, scorers
from kvjax.eval.tasks.maker import Maker, Rng, join, pick
from kvjax.eval.tasks.sample import Sample
from kvjax.eval.tasks.task import Task

FROM_END = (10, 30, 50, 70, 90)
"""Percent of the text that stands behind the needle; samples take turns."""
DIGITS = 5

Value = Callable[[Rng, Maker], str]


def number(rng: Rng, maker: Maker) -> str:
    """Five random digits."""
    del maker
    return "".join(map(str, rng.integers(0, 10, DIGITS)))


def word(rng: Rng, maker: Maker) -> str:
    """One key word, of those that are one token behind a blank if there are any."""
    return pick(rng, maker.short_words())


def make(kind: str, value: Value, rng: Rng, maker: Maker) -> Sample:
    """One sample.

    Args:
      kind: what the value is called.
      value: draws it.
      rng: of this sample.
      maker: length and texts.
    """
    from_end = FROM_END[maker.index % len(FROM_END)]
    (key,) = maker.words(rng, 1, parts=2)
    secret = value(rng, maker)
    text = maker.window(rng, maker.data.essays())

    def build(units: int) -> Sample:
        shown = text[:units]
        place = hay.at_depth(maker, shown, 1 - from_end / 100)
        needle = (f"The secret {kind} for {key} is {secret}.", True)
        context, spans = join(hay.woven(shown, [(place, needle)], " "))
        return Sample(
            context=context,
            question=f"\nWhat is the secret {kind} for {key}?",
            prefix=f" The secret {kind} for {key} is",
            answer=f" {secret}",
            refs=(secret,),
            spans=spans,
            max_new=DIGITS + 2,
            tags={"depth_from_end": from_end},
        )

    return maker.fit(build, len(text), least=1)


def score(output: str, sample: Sample) -> float:
    """1 if the value occurs."""
    return scorers.all_found(output, sample.refs)


TASKS = tuple(
    Task(name=name, group="niah", fits=128, make=functools.partial(make, kind, value), score=score)
    for name, kind, value in (("niah", "number", number), ("niah_word", "word", word))
)
