"""HELMET's rules (https://arxiv.org/abs/2410.02694): recall, RAG, re-ranking, in-context learning, summaries.

Citation and the tasks that a language model judges are left out. An output is scored twice, raw and by the
line that follows "Answer:"; the better of the two counts, as the best of several reference answers does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from kvjax.eval.suites import rouge
from kvjax.eval.suites.longbench import normal
from kvjax.eval.tasks import scorers


def _answers(output: str, prefix: str = "Answer:") -> list[str]:
    """The output, and what its line says behind the first ``prefix``; its first line where there is none."""
    mark = re.escape(prefix)
    said = re.search(rf"{mark}(.*)", output, re.IGNORECASE)
    line = said[1] if said else output.split("\n")[0]
    return [output, re.sub(f"^{mark}", "", line.strip(), flags=re.IGNORECASE).strip()]


def recall(output: str, refs: Sequence[str]) -> float:
    """JSON key-value and RULER's needles: share of references found as lower-case substrings."""
    return sum(ref.lower() in output.lower() for ref in refs) / len(refs)


def contained(output: str, refs: Sequence[str]) -> float:
    """RAG: 1 if a reference in normal form is part of the output in normal form."""
    return float(any(normal(ref) in normal(text) for text in _answers(output) for ref in refs))


def exact(output: str, refs: Sequence[str]) -> float:
    """In-context learning: 1 if the output, or what follows "label:", is a label, both in normal form."""
    said = _answers(output, "label:")
    return float(any(normal(ref) == normal(text) for text in said for ref in refs))


def reranking(output: str, grades: Mapping[int, int], k: int = 10) -> float:
    """Re-ranking: NDCG@k of the longest chain "ID3 > ID1 > ..."."""
    return scorers.ndcg(scorers.ranking(output), grades, k)


def summary(output: str, refs: Sequence[str], stem: Callable[[str], str] | None = None) -> dict[str, float]:
    """Summaries: F of ROUGE-L and ROUGE-Lsum, each the best over references; ``stem`` as in ``rouge_l``."""
    kinds = {"rougeL": rouge.rouge_l, "rougeLsum": rouge.rouge_lsum}
    return {
        name: max(kind(text, ref, stem) for text in _answers(output) for ref in refs)
        for name, kind in kinds.items()
    }
