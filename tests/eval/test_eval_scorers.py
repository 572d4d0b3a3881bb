"""Scoring rules on the vectors of the specification, and on outputs that must not score."""

from __future__ import annotations

import math

import pytest

from kvjax.eval.report import stats
from kvjax.eval.tasks import scorers
from kvjax.eval.tasks.sample import Sample


def of(*refs: str, question: str = "") -> Sample:
    return Sample(context="", question=question, answer="", refs=refs)


def test_ndcg_of_the_worked_example():
    names = {"A": 1, "B": 2, "C": 3, "D": 4}
    grades = {1: 3, 2: 2, 3: 0, 4: 1}
    ranked = [names[x] for x in "ACB"]
    assert scorers.ndcg(ranked, grades) == pytest.approx(4 / (3 + 2 / math.log2(3) + 1 / 2))
    assert round(scorers.ndcg(ranked, grades), 4) == 0.8400
    assert scorers.ndcg([1, 2, 4, 3], grades) == 1
    assert scorers.ndcg([3], grades) == 0
    assert scorers.ndcg([3, 3, 1], grades, k=2) == 0


@pytest.mark.parametrize(
    ("output", "ids"),
    [
        ("ID3 > ID1 > ID2", [3, 1, 2]),
        (" 37 > 12 > 37 > 55.", [37, 12, 55]),
        ("see 4, then 9 > 8", [9, 8]),
        ("none", []),
        ("12", [12]),
    ],
)
def test_the_longest_chain_is_the_ranking(output, ids):
    assert scorers.ranking(output) == ids


def test_ruler_counts_references_as_lower_case_substrings():
    assert scorers.all_found("ABCDE fghij", of("abcde", "FGHIJ", "KLMNO")) == pytest.approx(2 / 3)
    assert scorers.all_found("1234", of("12345")) == 0
    assert scorers.all_found("x\x1f12345", of("12345")) == 1
    assert scorers.any_found("in Paris, France", of("London", "paris")) == 1
    assert scorers.any_found("", of("London")) == 0


@pytest.mark.parametrize(
    ("output", "score"),
    [
        (" kitchen.", 1),
        (" The kitchen. Then the garden.", 1),
        ("garden or kitchen", 0),
        ("hallway kitchen", 1),  # the question's own label does not count
        ("hallway", 0),
        ("", 0),
    ],
)
def test_babilong_wants_exactly_the_target(output, score):
    rooms = ("kitchen", "garden", "hallway")
    sample = of("kitchen", question="Where was the apple before the hallway?")
    assert scorers.babilong(rooms, output, sample) == score


@pytest.mark.parametrize(
    ("output", "ref", "score"),
    [
        ("5 * 3 = 15.\n#### 15", "15", 1),
        ("#### $1,234", "1234", 1),
        ("#### 1,2345", "1234", 0),
        ("15", "15", 0),
        ("#### -3", "-3", 1),
    ],
)
def test_gsm8k_takes_the_number_behind_the_marks(output, ref, score):
    assert scorers.gsm8k(output, of(ref)) == score


def test_labels_and_digits():
    label = of("B")
    assert [scorers.first_letter(output, label) for output in (" B.", "b", "CB", "")] == [1, 1, 0, 0]
    assert scorers.digits_right(" 12945", "12345") == 0.8
    assert scorers.digits_right("no", "12345") == 0


def test_intervals_are_of_the_pairs():
    full = [1.0, 0.0] * 50
    same = stats.difference(full, full)
    assert same == (0.0, 0.0, 0.0)
    worse = [x if i % 10 else 0.0 for i, x in enumerate(full)]
    mean, low, high = stats.difference(worse, full)
    assert mean == pytest.approx(-0.1)
    assert low < mean < high < 0
    # Unpaired, the same data could not tell them apart.
    spread = stats.interval(full)
    assert spread[2] - spread[1] > 1.5 * (high - low)
    assert stats.interval([1.0, 3.0], [3.0, 1.0])[0] == 1.5
    with pytest.raises(ValueError, match="same samples"):
        stats.difference([1.0], [1.0, 2.0])
