"""Word problems: a generated twin with worked steps, and the likelihood of GSM8K's gold solutions.

gsm_synth: numbers below 100, two to four steps, as many solved problems in front as fit (GSM8K's form,
https://arxiv.org/abs/2110.14168); exact match of the number after "####". gsm8k_nll: solved test problems
in front of another one; all tokens of its solution count, in gsm8k_numbers only its numbers that the
question holds.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from typing import Any

from kvjax.eval.tasks import scorers
from kvjax.eval.tasks.data import Data
from kvjax.eval.tasks.maker import Maker
from kvjax.eval.tasks.sample import Sample, Span
from kvjax.eval.tasks.task import Task
from kvjax.eval.tasks.words import Rng, pick

GSM8K = "gsm8k/test.jsonl.gz"
MOST = 100
"""Above every number of the twin."""
STEPS = {
    "+": ("{who} gets {n} more.", "{who} buys {n} more.", "{who} finds {n} more."),
    "-": ("{who} gives {n} away.", "{who} loses {n} of them.", "{who} sells {n} of them."),
    "* 2": ("Then their number doubles.", "Soon there are twice as many."),
    "* 3": ("Then their number triples.", "Soon there are three times as many."),
    "/ 2": ("Then half of them are gone.", "{who} keeps only half of them."),
}
Order = Callable[[Iterable[tuple[str, int]]], list[tuple[str, int]]]


def problem(
    rng: Rng, who: str, thing: str, steps: int | None = None, order: Order = list
) -> tuple[str, str, str]:
    """(question, worked solution, final number).

    Args:
      rng: consumed.
      who, thing: key words.
      steps: None draws 2 to 4.
      order: ``list`` or ``sorted``: of the possible steps before one is drawn. Samples depend on it.
    """
    number = int(rng.integers(2, 40))
    sentences, worked = [f"{who} has {number} boxes of {thing}."], []
    for _ in range(int(rng.integers(2, 5)) if steps is None else steps):
        possible: dict[str, int] = {}
        if number + 2 < MOST:
            more = int(rng.integers(2, min(50, MOST - number)))
            possible[f"+ {more}"] = number + more
        if number > 3:
            less = int(rng.integers(2, number))
            possible[f"- {less}"] = number - less
        possible |= {f"* {times}": number * times for times in (2, 3) if number * times < MOST}
        if number % 2 == 0:
            possible["/ 2"] = number // 2
        step, result = pick(rng, order(possible.items()))
        forms = STEPS[step] if step in STEPS else STEPS[step[0]]
        sentences.append(pick(rng, forms).format(who=who, n=step[2:]))
        worked.append(f"{number} {step} = {result}.")
        number = result
    question = f"Question: {' '.join(sentences)} How many boxes of {thing} are there?"
    return question, f" {' '.join(worked)}\n#### {number}", str(number)


def twin(rng: Rng, maker: Maker) -> Sample:
    """One problem behind four to eight solved ones, fewer where they do not fit."""
    words = maker.words(rng, 18)
    problems = [problem(rng, words[2 * i].capitalize(), words[2 * i + 1]) for i in range(9)]
    question, answer, final = problems[0]
    text = maker.window(rng, maker.data.novel())

    def build(units: int) -> Sample:
        shots, filler = problems[1 : 1 + min(units, 8)], text[: max(0, units - 8)]
        front = (" ".join(filler) + "\n\n") if filler else ""
        context = front + "\n\n".join(f"{shot}\nAnswer:{solution}" for shot, solution, _ in shots)
        most = maker.count(answer) + 8
        return maker.sample((context, ()), f"\n\n{question}", "\nAnswer:", answer, (final,), max_new=most)

    return maker.fit(build, 8 + len(text), least=1)


@functools.cache
def _gsm8k(data: Data) -> list[dict[str, Any]]:
    rows = data.lines(GSM8K)
    return [row | {"answer": re.sub(r"<<[^>]*>>", "", row["answer"])} for row in rows]


def _copied(row: dict[str, Any]) -> list[Span]:
    """Characters of the solution's numbers that also stand in the question."""
    numbers = set(re.findall(r"\d+", row["question"]))
    return [match.span() for match in re.finditer(r"\d+", row["answer"]) if match.group() in numbers]


def gold(numbers: bool, rng: Rng, maker: Maker) -> Sample:
    """One test problem behind as many others as fit; ``numbers`` scores copied numbers alone."""
    rows = _gsm8k(maker.data)
    order = rng.permutation(len(rows))[: 2 + maker.length // 60].tolist()
    kept = [i for i in order if maker.count(rows[i]["question"] + rows[i]["answer"]) < maker.length // 2]
    chosen = next(i for i in kept if _copied(rows[i]))
    last, others = rows[chosen], [rows[i] for i in kept if i != chosen]
    scored = tuple((a + 1, b + 1) for a, b in _copied(last)) if numbers else None

    def build(count: int) -> Sample:
        return Sample(
            context="\n\n".join(f"Question: {o['question']}\nAnswer: {o['answer']}" for o in others[:count]),
            question=f"\n\nQuestion: {last['question']}",
            prefix="\nAnswer:",
            answer=f" {last['answer']}",
            scored=scored,
        )

    return maker.fit(build, len(others), least=1)


TASKS = (
    Task(name="gsm_synth", group="gsm", fits=384, make=twin, score=scorers.gsm8k, newline=False),
    *(
        Task(
            name=name,
            group="gsm",
            fits=512,
            make=functools.partial(gold, numbers),
            metric="perplexity",
            needs=(GSM8K,),
        )
        for name, numbers in (("gsm8k_nll", False), ("gsm8k_numbers", True))
    ),
)
