"""Needle in a haystack: one secret number in essays, at five depths counted from the end.

After https://github.com/gkamradt/LLMTest_NeedleInAHaystack with CONF-KV's depths (10 % is next to the
recent window, 90 % is old). Needle, key words and number are new in every sample.
"""

from __future__ import annotations

from kvjax.eval.tasks import hay, scorers
from kvjax.eval.tasks.maker import Maker, Rng, join
from kvjax.eval.tasks.sample import Sample
from kvjax.eval.tasks.task import Task

FROM_END = (10, 30, 50, 70, 90)
"""Percent of the text that stands behind the needle; samples take turns."""
DIGITS = 5


def make(rng: Rng, maker: Maker) -> Sample:
    """One sample."""
    from_end = FROM_END[maker.index % len(FROM_END)]
    (key,) = maker.words(rng, 1, parts=2)
    number = "".join(map(str, rng.integers(0, 10, DIGITS)))
    text = maker.window(rng, maker.data.essays())

    def build(units: int) -> Sample:
        shown = text[:units]
        place = hay.at_depth(maker, shown, 1 - from_end / 100)
        needle = (f"The secret number for {key} is {number}.", True)
        context, spans = join(hay.woven(shown, [(place, needle)], " "))
        return Sample(
            context=context,
            question=f"\nWhat is the secret number for {key}?",
            prefix=f" The secret number for {key} is",
            answer=f" {number}",
            refs=(number,),
            spans=spans,
            max_new=DIGITS + 2,
            tags={"depth_from_end": from_end},
        )

    return maker.fit(build, len(text), least=1)


def score(output: str, sample: Sample) -> float:
    """1 if the number occurs."""
    return scorers.all_found(output, sample.refs)


TASKS = (Task(name="niah", group="niah", fits=128, make=make, score=score),)
