"""Writes tests/golden/suite_scores.json: what other programs give for made outputs, to the digit.

python tests/make_scores_golden.py

with lm_eval, rouge, fuzzywuzzy, jieba and rouge-score installed (none of them is needed by the tests). Each
case is [rule, task, output, references, classes, score].
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from lm_eval.tasks.hendrycks_math import utils as mathematics
from lm_eval.tasks.longbench import metrics
from lm_eval.tasks.ruler import common_utils as ruler
from rouge_score import rouge_scorer

FILE = Path(__file__).parent / "golden" / "suite_scores.json"

WORDS = [
    "the",
    "a",
    "an",
    "cat",
    "sat",
    "on",
    "mat,",
    "dog",
    "ran.",
    "fast",
    "slow;",
    "river",
    "bank",
    "money",
    "report",
    "says",
    "that",
    "House",
    "(Senate)",
    "voted",
    "12",
    "7",
    "Paragraph",
    "3",
    "Paragraph",
    "12",
    "unanswerable",
    "yes",
    "no",
    "`code`",
    "#",
    "note",
    "return",
    "x",
    "==",
    "y",
]
CHINESE = [
    "今天",
    "天气",
    "很好",
    "，",
    "我们",
    "去",
    "公园",
    "散步",
    "。",
    "段落3",
    "段落12",
    "会议",
    "总结",
    "：",
    "经济",
    "增长",
    "新闻",
    "体育",
]
CLASSES = [
    "Date",
    "location",
    "other",
    "Another location",
    "City",
    "Individual",
    "Other entity",
    "Entity",
    "Number of something",
]
LSHT = ["体育", "新闻", "经济 增长"]

BY_TASK = {
    "narrativeqa": metrics.get_qa_f1_score,
    "multifieldqa_zh": metrics.get_qa_f1_zh_score,
    "vcsum": metrics.get_rouge_zh_score,
    "gov_report": metrics.get_rouge_score,
    "samsum": metrics.get_rouge_score,
    "trec": metrics.get_classification_score,
    "lsht": metrics.get_classification_score,
    "passage_retrieval_en": metrics.get_retrieval_score,
    "passage_count": metrics.get_count_score,
    "passage_retrieval_zh": metrics.get_retrieval_zh_score,
    "lcc": metrics.get_code_sim_score,
}


def text(rng: np.random.Generator, words: list[str], most: int) -> str:
    """Some words, with blanks, full stops and line breaks between them."""
    drawn = [words[i] for i in rng.integers(0, len(words), int(rng.integers(0, most)))]
    gaps = rng.choice([" ", " ", " ", "  ", ". ", ".", "\n", "\n\n", "\x07"], len(drawn))
    return "".join(word + gap for word, gap in zip(drawn, gaps))


def longbench(rng: np.random.Generator, task: str) -> list[object]:
    """A case of LongBench."""
    words = CHINESE if task in ("multifieldqa_zh", "vcsum") else WORDS
    classes = {"trec": CLASSES, "lsht": LSHT}.get(task, [])
    output = text(rng, [*words, *classes], 12 if classes else 40)
    refs = [text(rng, words, 30) or "yes" for _ in range(int(rng.integers(1, 4)))]
    if classes:
        refs = [str(rng.choice(classes))]
        output += refs[0] if rng.random() < 0.7 else ""
    elif "retrieval" in task:
        refs = [("段落" if task.endswith("zh") else "Paragraph ") + str(rng.choice([3, 12]))]
        output += refs[0] if rng.random() < 0.5 else ""
    elif task == "passage_count":
        refs = [str(rng.choice([3, 7, 12]))]
    elif rng.random() < 0.3:
        output = refs[0] + " " + output
    (score,) = BY_TASK[task]({"answers": refs, "all_classes": classes}, [output]).values()
    return ["longbench", task, output, refs, classes, float(score)]


def matched(rng: np.random.Generator, task: str) -> list[object]:
    """A case of RULER."""
    output = text(rng, WORDS, 30)
    refs = [str(ref) for ref in rng.choice(["CAT", "dog", "River", "48213", "12"], int(rng.integers(1, 4)))]
    how = ruler.process_results_part if task == "qa_1" else ruler.process_results
    return [
        "ruler",
        task,
        output,
        refs,
        [],
        float(how({"max_length": 4096, "outputs": refs}, [output])["4096"]),
    ]


FORMS = [
    "\\frac{1}{2}", "\\frac12", "\\dfrac{1}{2}", "1/2", "0.5", " .5", "x = 0.5", "\\frac{-1}{2}", "-\\frac12",
    "\\sqrt3", "\\sqrt{3}", "\\left(1, 2\\right)", "(1,2)", "90^\\circ", "90^{\\circ}", "90", "90\\%",
    "90\\text{ cm}", "\\$90", "9 0", "10/20", "01/2", "1,000", "1000", "\\frac{.5}{2}", "\\frac{0.5}{2}",
    "x=y=2",
]  # fmt: skip


def equal(rng: np.random.Generator, task: str) -> list[object]:
    """A case of MATH: two answers, half of the time of neighbours, which are mostly equal."""
    at = int(rng.integers(len(FORMS) - 1))
    other = FORMS[at + 1] if rng.random() < 0.7 else FORMS[int(rng.integers(len(FORMS)))]
    return ["math", task, FORMS[at], [other], [], float(mathematics.is_equiv(FORMS[at], other))]


def google(rng: np.random.Generator, kind: str) -> list[object]:
    """A case of rouge-score."""
    ref = text(rng, WORDS, 60)
    output = text(rng, WORDS, 40) + (ref if rng.random() < 0.3 else "")
    score = rouge_scorer.RougeScorer([kind]).score(ref, output)[kind].fmeasure
    return ["rouge", kind, output, [ref], [], float(score)]


def main() -> None:
    rng = np.random.default_rng(41)
    cases = [longbench(rng, task) for task in BY_TASK for _ in range(30)]
    cases += [matched(rng, task) for task in ("niah_multivalue", "qa_1") for _ in range(30)]
    cases += [google(rng, kind) for kind in ("rougeL", "rougeLsum") for _ in range(30)]
    own = np.random.default_rng(38)
    cases += [equal(own, "normal form") for _ in range(30)]
    FILE.write_text(
        "[\n" + ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases) + "\n]\n", "utf-8"
    )
    print(len(cases), "cases;", sum(0 < case[-1] < 1 for case in cases), "between 0 and 1")


if __name__ == "__main__":
    main()
