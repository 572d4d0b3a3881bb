"""From an output and its sample to a score in [0, 1]: the benchmarks' own rules."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from kvjax.eval.tasks.sample import Sample


def _lower(output: str) -> str:
    """RULER's post-processing: stripped, control characters to line breaks; here in lower case, too."""
    return re.sub(r"[\x00-\x1f]", "\n", output.strip()).strip().lower()


def all_found(output: str, sample: Sample) -> float:
    """RULER's string_match_all: share of references found as lower-case substrings."""
    text = _lower(output)
    return sum(ref.lower() in text for ref in sample.refs) / len(sample.refs)


def any_found(output: str, sample: Sample) -> float:
    """RULER's string_match_part: 1 if any reference is found."""
    text = _lower(output)
    return float(any(ref.lower() in text for ref in sample.refs))


def first_letter(output: str, sample: Sample) -> float:
    """1 if the output begins with the reference, a label of one letter."""
    return float(_lower(output.strip()[:1]) == sample.refs[0].lower())


def digits_right(output: str, ref: str) -> float:
    """Share of the reference's digits that stand at their place in the output's first number."""
    number = re.search(r"\d+", output)
    return sum(a == b for a, b in zip(number.group() if number else "", ref)) / len(ref)


def babilong(labels: Sequence[str], output: str, sample: Sample) -> float:
    """BABILong: labels found in the first sentence, less those of the question, are exactly the target."""
    text = output.lower().split(".")[0]
    text = re.split(r"<context>|<example>|question", text)[0]
    found = {label for label in labels if label.lower() in text}
    found -= {label for label in labels if label.lower() in sample.question.lower()}
    return float(found == {sample.refs[0]})


def ranking(output: str) -> list[int]:
    """The longest chain of integers joined by ">", without repeats; "ID3" and "3" are the same."""
    chains = re.findall(r"(?:ID)?:?\s*\d+(?:\s*>\s*(?:ID)?:?\s*\d+)*", output)
    longest = max(chains, key=lambda chain: chain.count(">"), default="")
    return list(dict.fromkeys(int(number) for number in re.findall(r"\d+", longest)))


def ndcg(ranked: Sequence[int], grades: Mapping[int, int], k: int = 10) -> float:
    """trec_eval's NDCG@k: gain = grade, discount log2(rank + 1); a passage not listed is not retrieved."""

    def dcg(gains: Sequence[int]) -> float:
        return sum(gain / math.log2(rank + 2) for rank, gain in enumerate(gains[:k]))

    ideal = dcg(sorted(grades.values(), reverse=True))
    return dcg([grades.get(item, 0) for item in ranked]) / ideal if ideal else 0.0


def reranked(output: str, sample: Sample) -> float:
    """NDCG@10 of references "identifier:grade"; @5 where there are only eight passages."""
    grades = {int(number): int(grade) for number, grade in (ref.split(":") for ref in sample.refs)}
    return ndcg(ranking(output), grades, 5 if len(grades) <= 8 else 10)


def gsm8k(output: str, sample: Sample) -> float:
    """GSM8K: 1 if the number after "####" is the reference, commas and currency signs removed."""
    number = re.search(r"####\s*([-$€£]*[\d,]*\.?\d+)", output)
    found, ref = (re.sub(r"[,$€£]", "", text) for text in (number[1] if number else "", sample.refs[0]))
    return float(number is not None and found == ref)
