"""Word problems: a generated twin with worked steps, and the likelihood of GSM8K's gold solutions.

gsm_synth: numbers below 100, two to four steps, as many solved problems in front as fit (GSM8K's form,
https://arxiv.org/abs/2110.14168); exact match of the number after "####". gsm8k_nll: solved test problems
in front of another one; all tokens of its solution count, in gsm8k_numbers only its numbers that the
question holds.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from kvjax.eval.tasks import scorers
from kvjax.eval.tasks.data import Data
from kvjax.eval.tasks.maker import Maker, Rng, pick
from kvjax.eval.tasks.sample import Sample, Span
from kvjax.eval.tasks.task import Task

GSM8K = "gsm8k/test.jsonl.gz"
MOST = 100
"""No number of the twin reaches it."""
SAID = {
    "+": ("{who} gets {n} more.", "{who} buys {n} more.", "{who} finds {n} more."),
    "-": ("{who} gives {n} away.", "{who} loses {n} of them.", "{who} sells {n} of them."),
    "* 2": ("Then their number doubles.", "Soon there are twice as many."),
    "* 3": ("Then their number triples.", "Soon there are three times as many."),
    "/ 2": ("Then half of them are gone.", "{who} keeps only half of them."),
}


def step(rng: Rng, number: int) -> tuple[str, int]:
    """("+ 7", the new number), or another step that is possible."""
    can: list[tuple[str, int]] = []
    if number + 2 < MOST:
        more = int(rng.integers(2, min(50, MOST - number)))
        can.append((f"+ {more}", number + more))
    if number > 3:
        less = int(rng.integers(2, number))
        can.append((f"- {less}", number - less))
    can += [(f"* {times}", number * times) for times in (2, 3) if number * times < MOST]
    if number % 2 == 0:
        can.append(("/ 2", number // 2))
    return pick(rng, can)


def problem(rng: Rng, who: str, thing: str) -> tuple[str, str, str]:
    """(question, worked solution, final number)."""
    number = int(rng.integers(2, 40))
    told, worked = [f"{who} has {number} boxes of {thing}."], []
    for _ in range(int(rng.integers(2, 5))):
        done, value = step(rng, number)
        said = SAID[done] if done in SAID else SAID[done[0]]
        told.append(pick(rng, said).format(who=who, n=done[2:]))
        worked.append(f"{number} {done} = {value}.")
        number = value
    question = f"Question: {' '.join(told)} How many boxes of {thing} are there?"
    return question, f" {' '.join(worked)}\n#### {number}", str(number)


def twin(rng: Rng, maker: Maker) -> Sample:
    """One problem behind four to eight solved ones, fewer where they do not fit."""
    words = maker.words(rng, 18)
    made = [problem(rng, words[2 * i].capitalize(), words[2 * i + 1]) for i in range(9)]
    question, answer, final = made[0]
    text = maker.window(rng, maker.data.novel())

    def build(units: int) -> Sample:
        shots, filler = made[1 : 1 + min(units, 8)], text[: max(0, units - 8)]
        front = (" ".join(filler) + "\n\n") if filler else ""
        context = front + "\n\n".join(f"{asked}\nAnswer:{solved}" for asked, solved, _ in shots)
        return Sample(
            context=context,
            question=f"\n\n{question}",
            prefix="\nAnswer:",
            answer=answer,
            refs=(final,),
            max_new=maker.count(answer) + 8,
        )

    return maker.fit(build, 8 + len(text), least=1)


@functools.cache
def _gsm8k(data: Data) -> list[dict[str, Any]]:
    rows = data.lines(GSM8K)
    return [row | {"answer": re.sub(r"<<[^>]*>>", "", row["answer"])} for row in rows]


def _copied(row: dict[str, Any]) -> list[Span]:
    """Characters of the solution's numbers that stand in the question."""
    asked = set(re.findall(r"\d+", row["question"]))
    return [found.span() for found in re.finditer(r"\d+", row["answer"]) if found.group() in asked]


def gold(numbers: bool, rng: Rng, maker: Maker) -> Sample:
    """One test problem behind as many others as fit."""
    rows = _gsm8k(maker.data)
    order = rng.permutation(len(rows))[: 2 + maker.length // 60].tolist()
    kept = [i for i in order if maker.count(rows[i]["question"] + rows[i]["answer"]) < maker.length // 2]
    chosen = next(i for i in kept if _copied(rows[i]))
    asked, others = rows[chosen], [rows[i] for i in kept if i != chosen]
    question, answer = f"Question: {asked['question']}", f" {asked['answer']}"
    scored = tuple((a + 1, b + 1) for a, b in _copied(asked)) if numbers else None

    def build(count: int) -> Sample:
        context = "\n\n".join(f"Question: {o['question']}\nAnswer: {o['answer']}" for o in others[:count])
        return Sample(
            context=context, question=f"\n\n{question}", prefix="\nAnswer:", answer=answer, scored=scored
        )

    return maker.fit(build, len(others), least=1)


def score(output: str, sample: Sample) -> float:
    """1 if the final number is right."""
    return scorers.gsm8k(output, sample.refs[0])


TASKS = (
    Task(name="gsm_synth", group="gsm", fits=384, make=twin, score=score, newline=False),
    Task(
        name="gsm8k_nll",
        group="gsm",
        fits=512,
        make=functools.partial(gold, False),
        metric="perplexity",
        needs=(GSM8K,),
    ),
    Task(
        name="gsm8k_numbers",
        group="gsm",
        fits=512,
        make=functools.partial(gold, True),
        metric="perplexity",
        needs=(GSM8K,),
    ),
)
