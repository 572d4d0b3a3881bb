"""Needle in a haystack: one secret number or word in essays, at five depths counted from the end.

After https://github.com/gkamradt/LLMTest_NeedleInAHaystack with CONF-KV's depths (10 % is next to the
recent window, 90 % is old). Needle, key words and value are new in every sample. ``niah`` asks for five
digits, several tokens of most vocabularies. ``niah_word`` asks for a word that is one token, if the tokenizer
has such words: a policy that follows attention may keep a value's first token and lose the others.
"""

from __future__ import annotations

import functools

from kvjax.eval.tasks import scorers
from kvjax.eval.tasks.maker import Maker, join, woven
from kvjax.eval.tasks.sample import Sample
from kvjax.eval.tasks.task import Task
from kvjax.eval.tasks.words import Rng, pick

FROM_END = (10, 30, 50, 70, 90)
"""Percent of the text that stands behind the needle; samples take turns."""
DIGITS = 5


def make(kind: str, rng: Rng, maker: Maker) -> Sample:
    """One sample that hides a "number" or a "word"."""
    from_end = FROM_END[maker.index % len(FROM_END)]
    (key,) = maker.words(rng, 1, parts=2)
    if kind == "number":
        secret = "".join(map(str, rng.integers(0, 10, DIGITS)))
    else:
        pool = maker.key_words()
        secret = pick(rng, tuple(word for word in pool if maker.count(f" {word}") == 1) or pool)
    text = maker.window(rng, maker.data.essays())

    def build(units: int) -> Sample:
        shown = text[:units]
        needle = (f"The secret {kind} for {key} is {secret}.", True)
        return maker.sample(
            join(woven(shown, [(maker.at_depth(shown, 1 - from_end / 100), needle)], " ")),
            f"\nWhat is the secret {kind} for {key}?",
            f" The secret {kind} for {key} is",
            f" {secret}",
            (secret,),
            max_new=DIGITS + 2,
            tags={"depth_from_end": from_end},
        )

    return maker.fit(build, len(text), least=1)


TASKS = tuple(
    Task(name=name, group="niah", fits=128, make=functools.partial(make, kind), score=scorers.all_found)
    for name, kind in (("niah", "number"), ("niah_word", "word"))
)
