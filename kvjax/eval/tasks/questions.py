"""RULER's qa_1 and qa_2 (https://arxiv.org/abs/2404.06654) on the data at hand, and a generated twin.

qa_1: XQuAD's English paragraphs, others of the same article first as distractors. qa_2: HotpotQA's ten
paragraphs of a question and random ones. qa_twin: "X works for Y.", "Y is based in Z."; where is the
employer of X based? The answer's paragraphs (qa_twin: its two sentences) are the spans.
"""

from __future__ import annotations

import functools
import json
from typing import Any

from kvjax.eval.errors import EvalError, TooLongError
from kvjax.eval.tasks import scorers
from kvjax.eval.tasks.data import Data
from kvjax.eval.tasks.maker import Maker, Piece, join
from kvjax.eval.tasks.sample import Sample
from kvjax.eval.tasks.task import Task
from kvjax.eval.tasks.words import Rng, shuffled

XQUAD, HOTPOT = "qa/xquad.en.json.gz", "qa/hotpot_distractor_100.jsonl.gz"
HEAD = "Answer the question based on the given documents. Give only the answer.\n"
MOST = 200
"""Documents."""


def _sample(
    maker: Maker, rng: Rng, question: str, answers: tuple[str, ...], needed: list[str], others: list[str]
) -> Sample:
    """Documents in random order: those needed, and as many others as fit, from the front of their list."""
    place = rng.random(len(needed) + len(others))

    def build(count: int) -> Sample:
        shown = [(text, True) for text in needed] + [(text, False) for text in others[:count]]
        pieces: list[Piece] = [(HEAD, False)]
        for number, i in enumerate(sorted(range(len(shown)), key=lambda i: place[i]), 1):
            pieces += [(f"\nDocument {number}:\n", False), shown[i]]
        return maker.sample(
            join(pieces),
            f"\n\n{HEAD}\nQuestion: {question}",
            "\nAnswer:",
            f" {answers[0]}",
            answers,
            max_new=16,
        )

    return maker.fit(build, len(others))


@functools.cache
def _xquad(data: Data) -> list[tuple[str, tuple[str, ...], str, list[str]]]:
    """(question, answers, its paragraph, the article's others)."""
    rows = []
    for article in json.loads(data.raw(XQUAD))["data"]:
        texts = [paragraph["context"] for paragraph in article["paragraphs"]]
        for paragraph in article["paragraphs"]:
            others = [text for text in texts if text != paragraph["context"]]
            for qa in paragraph["qas"]:
                answers = tuple(dict.fromkeys(answer["text"] for answer in qa["answers"]))
                rows.append((qa["question"], answers, paragraph["context"], others))
    return rows


def squad(rng: Rng, maker: Maker) -> Sample:
    """One question over one paragraph; of those whose paragraph fits."""
    rows = _xquad(maker.data)
    everyone = list(dict.fromkeys(text for _, _, text, _ in rows))
    for _ in range(100):
        question, answers, needed, others = rows[int(rng.integers(len(rows)))]
        further = [text for text in shuffled(rng, everyone) if text != needed and text not in others]
        near = [*shuffled(rng, others), *further][: maker.length // 60]
        try:
            return _sample(maker, rng, question, answers, [needed], near)
        except TooLongError:
            continue  # this paragraph alone is too long; another question
    raise EvalError(
        f"qa_1 found no paragraph that fits into {maker.length} tokens. Ask for a larger --lengths."
    )


@functools.cache
def _hotpot(data: Data) -> list[dict[str, Any]]:
    return data.lines(HOTPOT)


def hotpot(rng: Rng, maker: Maker) -> Sample:
    """One question over two of its ten paragraphs."""
    rows = _hotpot(maker.data)
    row = rows[int(rng.integers(len(rows)))]
    own = {title: text for title, text in row["paragraphs"]}
    needed = [text for title, text in own.items() if title in row["support"]]
    near = shuffled(rng, [text for title, text in own.items() if title not in row["support"]])
    further = shuffled(rng, [text for other in rows if other is not row for _, text in other["paragraphs"]])
    return _sample(maker, rng, row["question"], (row["answer"],), needed, [*near, *further][:MOST])


def twin(rng: Rng, maker: Maker) -> Sample:
    """One generated question of two hops; each document holds four sentences."""
    count = max(4, min(maker.length // 12, len(maker.key_words()) // 4))
    names = [word.capitalize() for word in maker.words(rng, 3 * count)]
    people, firms, towns = (names[i * count : (i + 1) * count] for i in range(3))
    facts = [(f"{p} works for {f}.", f"{f} is based in {t}.") for p, f, t in zip(people, firms, towns)]
    place = rng.random(2 * count)

    def build(units: int) -> Sample:
        sentences = [(sentence, i == 0) for i in range(units) for sentence in facts[i]]
        pieces: list[Piece] = [(HEAD, False)]
        for number, i in enumerate(sorted(range(len(sentences)), key=lambda i: place[i])):
            gap = f"\nDocument {number // 4 + 1}:\n" if number % 4 == 0 else " "
            pieces += [(gap, False), sentences[i]]
        question = f"\n\nQuestion: Where is the employer of {people[0]} based?"
        return maker.sample(join(pieces), question, "\nAnswer:", f" {towns[0]}", (towns[0],))

    return maker.fit(build, count, least=2)


TASKS = (
    Task(name="qa_1", group="ruler", fits=512, make=squad, score=scorers.any_found, needs=(XQUAD,)),
    Task(name="qa_2", group="ruler", fits=2048, make=hotpot, score=scorers.any_found, needs=(HOTPOT,)),
    Task(name="qa_twin", group="ruler", fits=256, make=twin, score=scorers.any_found),
)
