"""BABILong, QA1 to QA5 (https://arxiv.org/abs/2406.10149): facts of a bAbI story among sentences of a book.

Stories are bAbI's test files (en-10k) where the data pack is there, else generated (``world``); stories
of more than (L - instruction) / 8 facts are left out. Facts keep their order and stand at gaps drawn with
replacement. One line of instruction and no worked examples, for a model that was trained on the task.
"""

from __future__ import annotations

import functools

from kvjax.eval.tasks import hay, scorers
from kvjax.eval.tasks.data import Data
from kvjax.eval.tasks.maker import Maker, Rng, join
from kvjax.eval.tasks.sample import Sample
from kvjax.eval.tasks.task import Task
from kvjax.eval.tasks.world import GIVERS, ROOMS, STORIES, THINGS, Story

TASK = "Read the text and remember where people and things are. Answer each question with one word.\n"
FILES = {
    1: "qa1_single-supporting-fact",
    2: "qa2_two-supporting-facts",
    3: "qa3_three-supporting-facts",
    4: "qa4_two-arg-relations",
    5: "qa5_three-arg-relations",
}
MADE = {1: (2, 10), 2: (4, 28), 3: (8, 80), 4: (2, 2), 5: (4, 40)}
"""Facts of a generated story, at least and at most."""
A_FACT = 12
"""Tokens of a fact and the room it needs, so that facts alone leave some background."""


@functools.cache
def stories(data: Data, kind: int) -> list[Story]:
    """Every question of a test file with the facts before it; [] without the file."""
    name = f"babi/en-10k/{FILES[kind]}_test.txt.gz"
    if not data.has(name):
        return []
    found: list[Story] = []
    facts: list[str] = []
    for line in data.raw(name).decode().splitlines():
        number, _, said = line.partition(" ")
        if number == "1":
            facts = []
        if "\t" in said:
            question, answer, _ = said.split("\t")
            found.append((list(facts), question.strip(), answer))
        else:
            facts.append(said)
    return found


def make(kind: int, rng: Rng, maker: Maker) -> Sample:
    """One question."""
    most = max(2, (maker.length - 64) // A_FACT)
    known = [story for story in stories(maker.data, kind) if len(story[0]) <= most]
    if known:
        facts, question, answer = known[int(rng.integers(len(known)))]
    else:
        low, high = MADE[kind]
        facts, question, answer = STORIES[kind](
            rng, int(rng.integers(low, max(low, min(high, most // 2)) + 1))
        )
    text = maker.window(rng, [s for s in maker.data.novel() if len(s) >= 40])
    marks = sorted(rng.random(len(facts)))

    def build(count: int) -> Sample:
        needles = [(int(mark * (count + 1)), (fact, True)) for mark, fact in zip(marks, facts)]
        body, spans = join([(TASK, False), *hay.woven(text[:count], needles, " ")])
        return Sample(
            context=body,
            question=f"\nQuestion: {question}",
            prefix="\nAnswer:",
            answer=f" {answer}",
            refs=(answer,),
            spans=spans,
            labels=tuple(f" {label}" for label in LABELS[kind]),
            max_new=6,
        )

    return maker.fit(build, len(text))


LABELS = {kind: ROOMS if kind < 5 else (*GIVERS, *THINGS) for kind in FILES}


def score(kind: int, output: str, sample: Sample) -> float:
    """BABILong's rule: the labels of the first sentence, without the question's, are the target alone."""
    return scorers.babilong(output, sample.refs[0], sample.question, LABELS[kind])


TASKS = tuple(
    Task(
        name=f"babilong_qa{kind}",
        group="babilong",
        fits=1024 if kind == 3 else 256,
        make=functools.partial(make, kind),
        score=functools.partial(score, kind),
    )
    for kind in FILES
)
