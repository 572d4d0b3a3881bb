"""Scores of public benchmarks: those of lm-eval and rouge-score to the digit, and HELMET's rules by hand."""

from __future__ import annotations

import importlib.util
import json
import math
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from kvjax.eval.errors import EvalError
from kvjax.eval.suites import helmet, longbench, mathematics, rouge, ruler

CASES = json.loads((Path(__file__).parents[1] / "golden" / "suite_scores.json").read_text("utf-8"))
CHINESE = {"multifieldqa_zh", "dureader", "vcsum"}
HAS_JIEBA = importlib.util.find_spec("jieba") is not None


def ours(rule, task, output, refs, classes):
    if rule == "longbench":
        return longbench.score(task, output, refs, classes)
    if rule == "math":
        return float(mathematics.normal(output) == mathematics.normal(refs[0]))
    if rule == "ruler":
        return ruler.lm_eval(output, refs)
    return {"rougeL": rouge.rouge_l, "rougeLsum": rouge.rouge_lsum}[task](output, refs[0])


@pytest.mark.parametrize("task", dict.fromkeys(case[1] for case in CASES))
def test_scores_are_those_of_the_other_programs_to_the_digit(task):
    if task in CHINESE and not HAS_JIEBA:
        with pytest.raises(EvalError, match="pip install jieba"):
            longbench.score(task, "今天", ["今天"])
        return
    cases = [case for case in CASES if case[1] == task]
    assert len(cases) == 30
    for *case, score in cases:
        assert ours(*case) == score, case
    assert len({score for *_, score in cases}) > 1  # the cases tell something


def test_all_of_longbench_has_a_score():
    assert len(longbench.SCORES) == 21
    assert set(longbench.FEW_SHOT) | set(longbench.CODE) < set(longbench.SCORES)


def test_a_question_of_ruler_counts_any_reference_for_kvpress_and_the_share_for_lm_eval():
    refs = ["Paris", "London"]
    assert ruler.kvpress("qa_1", "in paris", refs) == 1
    assert ruler.kvpress("niah_multivalue", "in paris", refs) == ruler.lm_eval("in paris", refs) == 0.5
    # kvpress deletes control characters, lm-eval makes line breaks of them.
    assert ruler.kvpress("vt", "Par\x07is", ["Paris"]) == 1
    assert ruler.lm_eval("Par\x07is", ["Paris"]) == 0


def test_kvpress_cuts_what_few_shot_tasks_write_beyond_a_line():
    assert longbench.kvpress("trec", "\nCity\nDate", ["City"], ["City", "Date"]) == 1
    assert longbench.score("trec", "\nCity\nDate", ["City"], ["City", "Date"]) == 0.5
    assert (
        longbench.kvpress("qasper", "no\nyes", ["yes"]) == longbench.score("qasper", "no\nyes", ["yes"]) > 0
    )


def test_letters_count_in_the_sentence_that_was_asked_for():
    assert longbench.letter(" **The correct answer is (B)**\n", "B") == 1
    assert longbench.letter("The correct answer is B", "B") == 1
    for wrong in ("The correct answer is (C)", "B", "The correct answer is (B).", ""):
        assert longbench.letter(wrong, "B") == 0


# --- HELMET, by hand -----------------------------------------------------------------------------


def normal_oracle(text: str) -> str:
    """Character by character."""
    kept = [c for c in text.lower() if not (33 <= ord(c) < 127 and not c.isalnum())]
    return " ".join(word for word in "".join(kept).split() if word not in ("a", "an", "the"))


@pytest.mark.parametrize(
    ("output", "found", "same"),
    [
        ("The Eiffel-Tower!", 1, 1),
        ("It is an eiffel tower, I think\nor not", 0, 0),
        ("well, the eiffeltower", 1, 0),
        ("Answer: Eiffel-Tower\nmore", 1, 0),
        ("label: Eiffel-Tower\nmore", 1, 1),
        ("EIFFEL-TOWER\nQuestion: next", 1, 1),
        ("I say\nEiffel-Tower", 1, 0),
        ("", 0, 0),
    ],
)
def test_rag_and_in_context(output, found, same):
    refs = ["Louvre", "the Eiffel-Tower"]
    assert helmet.contained(output, refs) == found
    assert helmet.exact(output, refs) == same
    # The same by the oracle, on the raw output and the line that is read off it.
    line = re.split(r"(?i)label:", output)[-1].split("\n")[0]
    normals = {normal_oracle(ref) for ref in refs}
    assert helmet.exact(output, refs) == float(bool({normal_oracle(output), normal_oracle(line)} & normals))


def test_recall_and_reranking():
    assert helmet.recall("x 48213 AbC", ["48213", "abc", "777"]) == pytest.approx(2 / 3)
    grades, ranked = {1: 3, 2: 2, 3: 0, 4: 1}, "the ranking: ID1 > ID3 > ID2"
    gains = np.asarray([3, 0, 2]) / np.log2([2, 3, 4])
    ideal = np.asarray([3, 2, 1]) / np.log2([2, 3, 4])
    assert helmet.reranking(ranked, grades) == pytest.approx(gains.sum() / ideal.sum())
    assert helmet.reranking(ranked, grades, k=1) == 1
    assert helmet.reranking("none", grades) == 0


def lcs_oracle(a: list[str], b: list[str]) -> int:
    """By definition: the longest of all subsequences."""
    if not a or not b:
        return 0
    if a[-1] == b[-1]:
        return 1 + lcs_oracle(a[:-1], b[:-1])
    return max(lcs_oracle(a[:-1], b), lcs_oracle(a, b[:-1]))


def test_summaries_by_rouge():
    rng = np.random.default_rng(0)
    for _ in range(20):
        out, ref = ([f"w{i}" for i in rng.integers(0, 4, rng.integers(1, 7))] for _ in range(2))
        common = lcs_oracle(ref, out)
        f = 2 * common / (len(out) + len(ref))
        scores = helmet.summary(" ".join(out), ["unlike", " ".join(ref)])
        assert scores["rougeL"] == pytest.approx(f)
        # Of single lines both kinds count the same words, each as often as both texts have it.
        assert scores["rougeLsum"] == pytest.approx(f)
    assert helmet.summary("words said", ["words sayd"], stem=lambda word: word[:2])["rougeL"] == 1


def test_f1_is_that_of_bags():
    rng = np.random.default_rng(1)
    for _ in range(20):
        out, ref = (rng.integers(0, 5, rng.integers(1, 9)).astype(str).tolist() for _ in range(2))
        same = sum(min(Counter(out)[w], Counter(ref)[w]) for w in set(out))
        assert longbench.f1(out, ref) == pytest.approx(2 * same / (len(out) + len(ref)))
    assert longbench.f1(["x"], ["y"]) == 0
    assert math.isclose(longbench.score("qasper", "The cat.", ["a dog", "cat"]), 1)
