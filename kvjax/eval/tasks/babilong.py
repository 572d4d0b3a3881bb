"""BABILong, QA1 to QA5 (https://arxiv.org/abs/2406.10149): facts of a bAbI story among sentences of a book.

Stories are bAbI's test files (en-10k) where the data pack is there, else generated (``world``); stories
of more than (L - instruction) / 8 facts are left out. Facts keep their order and stand at gaps drawn with
replacement. One line of instruction and no worked examples, for a model that was trained on the task.
"""

from __future__ import annotations

import functools

from kvjax.eval.tasks import scorers
from kvjax.eval.tasks.data import Data
from kvjax.eval.tasks.maker import Maker, join, woven
from kvjax.eval.tasks.sample import Sample
from kvjax.eval.tasks.task import Task
from kvjax.eval.tasks.words import Rng
from kvjax.eval.tasks.world import GIVERS, ROOMS, STORIES, THINGS, Story

TASK = "Read the text and remember where people and things are. Answer each question with one word.\n"
FILES = {
    1: "qa1_single-supporting-fact",
    2: "qa2_two-supporting-facts",
    3: "qa3_three-supporting-facts",
    4: "qa4_two-arg-relations",
    5: "qa5_three-arg-relations",
}
GENERATED = {1: (2, 10), 2: (4, 28), 3: (8, 80), 4: (2, 2), 5: (4, 40)}
"""Facts of a generated story, at least and at most."""
A_FACT = 12
"""Tokens of a fact and the room it needs, so that facts alone leave some background."""
LABELS = {kind: ROOMS if kind < 5 else (*GIVERS, *THINGS) for kind in FILES}


def parsed(text: str) -> list[Story]:
    """Every question of a bAbI file with the facts before it."""
    stories: list[Story] = []
    facts: list[str] = []
    for line in text.splitlines():
        number, _, content = line.partition(" ")
        if number == "1":
            facts = []
        if "\t" in content:
            question, answer, _ = content.split("\t")
            stories.append((list(facts), question.strip(), answer))
        else:
            facts.append(content)
    return stories


@functools.cache
def _stories(data: Data, kind: int) -> list[Story]:
    name = f"babi/en-10k/{FILES[kind]}_test.txt.gz"
    return parsed(data.raw(name).decode()) if data.has(name) else []


def make(kind: int, rng: Rng, maker: Maker) -> Sample:
    """One question of a kind."""
    most = max(2, (maker.length - 64) // A_FACT)
    known = [story for story in _stories(maker.data, kind) if len(story[0]) <= most]
    if known:
        facts, question, answer = known[int(rng.integers(len(known)))]
    else:
        low, high = GENERATED[kind]
        count = int(rng.integers(low, max(low, min(high, most // 2)) + 1))
        facts, question, answer = STORIES[kind](rng, count)
    text = maker.window(rng, [s for s in maker.data.novel() if len(s) >= 40])
    marks = sorted(rng.random(len(facts)))

    def build(count: int) -> Sample:
        needles = [(int(mark * (count + 1)), (fact, True)) for mark, fact in zip(marks, facts)]
        return maker.sample(
            join([(TASK, False), *woven(text[:count], needles, " ")]),
            f"\nQuestion: {question}",
            "\nAnswer:",
            f" {answer}",
            (answer,),
            labels=tuple(f" {label}" for label in LABELS[kind]),
            max_new=6,
        )

    return maker.fit(build, len(text))


TASKS = tuple(
    Task(
        name=f"babilong_qa{kind}",
        group="babilong",
        fits=1024 if kind == 3 else 256,
        make=functools.partial(make, kind),
        score=functools.partial(scorers.babilong, LABELS[kind]),
    )
    for kind in FILES
)
