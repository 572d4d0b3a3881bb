"""From an output and its references to a number in [0, 1]: the benchmarks' own rules."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence


def plain(output: str) -> str:
    """RULER's post-processing: stripped, control characters to line breaks."""
    return re.sub(r"[\x00-\x1f]", "\n", output.strip()).strip()


def all_found(output: str, refs: Sequence[str]) -> float:
    """RULER's string_match_all: share of references found as lower-case substrings."""
    text = plain(output).lower()
    return sum(ref.lower() in text for ref in refs) / len(refs)


def any_found(output: str, refs: Sequence[str]) -> float:
    """RULER's string_match_part: 1 if any reference is found."""
    text = plain(output).lower()
    return float(any(ref.lower() in text for ref in refs))


def digits_right(output: str, ref: str) -> float:
    """Share of the reference's digits that stand at their place in the output's first number."""
    found = re.search(r"\d+", output)
    written = found.group() if found else ""
    return sum(a == b for a, b in zip(written, ref)) / len(ref)


def exact(output: str, ref: str) -> float:
    """1 if the stripped output is the reference, a closing full stop aside."""
    return float(plain(output).removesuffix(".").strip().lower() == ref.strip().lower())


def babilong(output: str, ref: str, question: str, labels: Sequence[str]) -> float:
    """BABILong: labels found in the first sentence, less those of the question, are exactly the target."""
    text = output.lower().split(".")[0]
    text = re.split(r"<context>|<example>|question", text)[0]
    found = {label for label in labels if label.lower() in text}
    found -= {label for label in labels if label.lower() in question.lower()}
    return float(found == {ref})


def ranking(output: str) -> list[int]:
    """The longest chain of integers joined by ">", without repeats; "ID3" and "3" are the same."""
    chains = re.findall(r"(?:ID)?:?\s*\d+(?:\s*>\s*(?:ID)?:?\s*\d+)*", output)
    longest = max(chains, key=lambda chain: chain.count(">"), default="")
    return list(dict.fromkeys(int(number) for number in re.findall(r"\d+", longest)))


def ndcg(ranked: Sequence[int], grades: Mapping[int, int], k: int = 10) -> float:
    """trec_eval's NDCG@k: gain = grade, discount log2(rank + 1); what is not listed is not retrieved."""

    def dcg(gains: Sequence[int]) -> float:
        return sum(gain / math.log2(rank + 2) for rank, gain in enumerate(gains[:k]))

    ideal = dcg(sorted(grades.values(), reverse=True))
    return dcg([grades.get(item, 0) for item in ranked]) / ideal if ideal else 0.0


def final_number(output: str) -> str | None:
    """GSM8K: the number after "####", commas and currency signs removed; None where there is none."""
    found = re.search(r"####\s*([-$€£]*[\d,]*\.?\d+)", output)
    return re.sub(r"[,$€£]", "", found.group(1)) if found else None


def gsm8k(output: str, ref: str) -> float:
    """1 if the final numbers are equal."""
    return float(final_number(output) == re.sub(r"[,$€£]", "", ref))
