"""ROUGE-L (Lin, 2004), as the two packages count it that published scores come from.

``summary``: ``rouge`` 1.0.1, of LongBench and lm-eval; sentences end at full stops, words at blanks, and
words count once. ``rouge_l``, ``rouge_lsum``: ``rouge-score`` 0.1.2, of HELMET; lower-case words of letters
and digits, sentences end at line breaks. Both packages are no longer kept, hence this.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np


def _table(a: Sequence[str], b: Sequence[str]) -> np.ndarray:
    """Lengths of the longest common subsequences of all beginnings, int [len(a) + 1, len(b) + 1]."""
    number = {word: i for i, word in enumerate(dict.fromkeys([*a, *b]))}
    right = np.asarray([number[word] for word in b], np.int64)
    table = np.zeros((len(a) + 1, len(b) + 1), np.int32)
    for i, word in enumerate(a, 1):
        longer = np.where(right == number[word], table[i - 1, :-1] + 1, table[i - 1, 1:])
        table[i, 1:] = np.maximum.accumulate(longer)
    return table


def _common(a: Sequence[str], b: Sequence[str], *, first_shorter: bool) -> list[int]:
    """Indices into ``a`` of one longest common subsequence; of several the one these packages find.

    ``first_shorter``: of two equally long ways, is ``a`` the one to be shortened?
    """
    table, i, j, found = _table(a, b), len(a), len(b), []
    while i and j:
        up, left = table[i - 1, j], table[i, j - 1]
        if a[i - 1] == b[j - 1]:
            i, j = i - 1, j - 1
            found.append(i)
        elif up > left or (first_shorter and up == left):
            i -= 1
        else:
            j -= 1
    return found[::-1]


def summary(output: str, ref: str) -> float:
    """F of ROUGE-L over sentences, of different words, as the package ``rouge`` gives it; 0 of an empty text.

    The package cannot walk back through sentences of about a thousand words, for which its callers count 0;
    here they are scored.
    """
    texts = [[" ".join(part.split()) for part in text.split(".") if part] for text in (output, ref)]
    outs, refs = ([sentence.split(" ") for sentence in text] for text in texts)
    if not outs or not refs:
        return 0.0
    union: set[str] = set()
    for sentence in refs:
        for other in outs:
            union |= {sentence[i] for i in _common(sentence, other, first_shorter=False)}
    words = [{word for sentence in text for word in sentence} for text in (outs, refs)]
    precision, recall = (len(union) / len(some) for some in words)
    return 2.0 * ((precision * recall) / (precision + recall + 1e-8))


def _words(text: str, stem: Callable[[str], str] | None) -> list[str]:
    words = re.sub(r"[^a-z0-9]+", " ", text.lower()).split()
    return words if stem is None else [stem(word) if len(word) > 3 else word for word in words]


def _f(hits: int, output: int, ref: int) -> float:
    if not hits:
        return 0.0
    precision, recall = hits / output, hits / ref
    return 2 * precision * recall / (precision + recall)


def rouge_l(output: str, ref: str, stem: Callable[[str], str] | None = None) -> float:
    """F of ROUGE-L over whole texts, as the package ``rouge-score`` gives it.

    Args:
      output, ref: texts.
      stem: of words of more than three letters; HELMET takes NLTK's Porter stemmer. None: words as they are.
    """
    out, right = _words(output, stem), _words(ref, stem)
    return _f(int(_table(right, out)[-1, -1]), len(out), len(right)) if out and right else 0.0


def rouge_lsum(output: str, ref: str, stem: Callable[[str], str] | None = None) -> float:
    """F of ROUGE-Lsum: for each line of the reference the union over the output's lines; see ``rouge_l``."""
    outs, refs = (
        [words for line in text.split("\n") if line and (words := _words(line, stem))]
        for text in (output, ref)
    )
    if not outs or not refs:
        return 0.0
    left = [Counter(word for line in text for word in line) for text in (outs, refs)]
    hits = 0
    for line in refs:
        union = {i for other in outs for i in _common(line, other, first_shorter=True)}
        for word in (line[i] for i in sorted(union)):
            if left[0][word] > 0 and left[1][word] > 0:  # a word counts as often as both texts have it
                hits += 1
                left[0][word] -= 1
                left[1][word] -= 1
    return _f(hits, sum(map(len, outs)), sum(map(len, refs)))
