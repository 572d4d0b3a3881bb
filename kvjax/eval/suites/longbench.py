"""LongBench's scores, as lm-eval has them.

Version 1: https://arxiv.org/abs/2308.14508; version 2, letters: https://arxiv.org/abs/2412.15204.

The best over all reference answers counts. lm-eval strips an output before it is scored (not code) and stops
few-shot tasks at a line break; kvpress, whose prompts these suites use, cuts few-shot outputs afterwards.
"""

from __future__ import annotations

import difflib
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

from kvjax.eval.errors import EvalError
from kvjax.eval.suites import rouge

_CHINESE = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃"
    "》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
)


def normal(text: str) -> str:
    """SQuAD's normal form: lower case, no ASCII punctuation, no articles, single blanks."""
    kept = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


def f1(output: Sequence[str], ref: Sequence[str]) -> float:
    """F1 of two bags of words."""
    same = sum((Counter(output) & Counter(ref)).values())
    if not same:
        return 0.0
    precision, recall = same / len(output), same / len(ref)
    return 2 * precision * recall / (precision + recall)


def _answer(output: str, ref: str, classes: Sequence[str]) -> float:
    return f1(normal(output).split(), normal(ref).split())


def _cut_chinese(text: str) -> list[str]:
    """Words of a Chinese text.

    Raises:
      EvalError: the package that knows them is missing.
    """
    try:
        import jieba
    except ModuleNotFoundError as error:
        raise EvalError("LongBench's Chinese tasks need jieba. Run: pip install jieba") from error
    return list(jieba.cut(text, cut_all=False))


def _chinese_answer(output: str, ref: str, classes: Sequence[str]) -> float:
    dropped = set(string.punctuation + _CHINESE)

    def words(text: str) -> list[str]:
        cut = (
            "".join("".join(c for c in word.lower() if c not in dropped).split())
            for word in _cut_chinese(text)
        )
        return [word for word in cut if word]

    return f1(words(output), words(ref))


def _summary(output: str, ref: str, classes: Sequence[str]) -> float:
    return rouge.summary(output, ref)


def _chinese_summary(output: str, ref: str, classes: Sequence[str]) -> float:
    return rouge.summary(" ".join(_cut_chinese(output)), " ".join(_cut_chinese(ref)))


def _label(output: str, ref: str, classes: Sequence[str]) -> float:
    """One over the number of class names in the output, if the right one is among them.

    A class whose name is part of the right one's does not count; names are removed while they are walked
    through, so that of two such neighbours the second one stays. LongBench does so, and so does lm-eval.
    """
    named = [name for name in classes if name in output]
    for name in named:
        if name in ref and name != ref:
            named.remove(name)  # noqa: B909
    return 1.0 / len(named) if ref in named else 0.0


def _share(output: str, number: str) -> float:
    numbers = re.findall(r"\d+", output)
    return numbers.count(number) / len(numbers) if numbers else 0.0


def _count(output: str, ref: str, classes: Sequence[str]) -> float:
    return _share(output, ref)


def _paragraph(output: str, ref: str, classes: Sequence[str]) -> float:
    return _share(output, re.findall(r"Paragraph (\d+)", ref)[0])


def _chinese_paragraph(output: str, ref: str, classes: Sequence[str]) -> float:
    return _share(output, re.findall(r"段落(\d+)", ref)[0])


def _code(output: str, ref: str, classes: Sequence[str]) -> float:
    """Likeness of the first line of code: not blank, no fence, no comment; to a hundredth."""
    lines = (line for line in output.split("\n") if line.strip())
    first = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    if not first or not ref:
        return 0.0
    return round(100 * difflib.SequenceMatcher(None, first, ref).ratio()) / 100


Score = Callable[[str, str, Sequence[str]], float]

SCORES: dict[str, Score] = {
    "narrativeqa": _answer,
    "qasper": _answer,
    "multifieldqa_en": _answer,
    "multifieldqa_zh": _chinese_answer,
    "hotpotqa": _answer,
    "2wikimqa": _answer,
    "musique": _answer,
    "dureader": _chinese_summary,
    "gov_report": _summary,
    "qmsum": _summary,
    "multi_news": _summary,
    "vcsum": _chinese_summary,
    "trec": _label,
    "triviaqa": _answer,
    "samsum": _summary,
    "lsht": _label,
    "passage_count": _count,
    "passage_retrieval_en": _paragraph,
    "passage_retrieval_zh": _chinese_paragraph,
    "lcc": _code,
    "repobench-p": _code,
}
"""By task; (output, reference, names of all classes) to [0, 1]."""

CODE = ("lcc", "repobench-p")
FEW_SHOT = ("trec", "triviaqa", "samsum", "lsht")
"""Tasks whose outputs end at a line break."""


def score(task: str, output: str, refs: Sequence[str], classes: Sequence[str] = ()) -> float:
    """The score in [0, 1] of one output, as lm-eval's ``process_results`` counts it.

    Raises:
      EvalError: a Chinese task without jieba.
    """
    text = output if task in CODE else output.strip()
    return max((SCORES[task](text, ref, classes) for ref in refs), default=0.0)


def kvpress(task: str, output: str, refs: Sequence[str], classes: Sequence[str] = ()) -> float:
    """The same of an output that did not stop at a line break where the task is few-shot."""
    if task in FEW_SHOT:
        output = output.lstrip().split("\n")[0]
    return score(task, output, refs, classes)


def letter(output: str, ref: str) -> float:
    """LongBench v2: 1 if the output is the sentence that was asked for, with the right letter."""
    said = output.replace("*", "").strip()
    return float(said in (f"The correct answer is ({ref})", f"The correct answer is {ref}"))
