"""AIME25 and MATH-500 from rows made here: columns, prompt, the final answer, what counts as equal."""

from __future__ import annotations

import json
from fractions import Fraction

import numpy as np
import pytest

from kvjax.eval.__main__ import main
from kvjax.eval.errors import EvalError
from kvjax.eval.measure import store
from kvjax.eval.suites import mathematics, measure, prompt, rows
from kvjax.eval.suites.suite import named
from kvjax.loading import load

AIME, MATH = named("aime25"), named("math500")


def made(answer, question="What is $6\\cdot 7$?", **more) -> dict:
    """A row in the form of both data sets of the hub."""
    return {"context": " ", "question": question, "answer_prefix": "", "answer": answer} | {
        "max_new_tokens": 40,
        **more,
    }


def file_of(folder, made_rows):
    file = folder / "data.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in made_rows))
    return file


def test_rows_have_the_columns_of_the_hub_and_get_their_task(tmp_path):
    read, place = rows.read(AIME, file_of(tmp_path, [made(42), made("70")]))
    assert place == "data.jsonl"
    assert [row["task"] for row in read] == ["aime25", "aime25"]
    assert [AIME.refs(row) for row in read] == [("42",), ("70",)]
    assert (AIME.dataset, MATH.dataset) == ("alessiodevoto/aime25", "alessiodevoto/math500")
    math, _ = rows.read(
        MATH, file_of(tmp_path, [made("\\frac{1}{2}", subject="Algebra", level=3, unique_id="a")])
    )
    assert measure.chosen(math, None) == {"math500": [0]}
    for wrong in ({"answer": 4.5}, {"max_new_tokens": "40"}, {"question": None}):
        with pytest.raises(EvalError, match=f"{next(iter(wrong))!r} is "):
            rows.read(AIME, file_of(tmp_path, [made(42) | wrong]))
    without = made(42)
    del without["answer_prefix"]
    with pytest.raises(EvalError, match="it has no column 'answer_prefix', where str is expected"):
        rows.read(AIME, file_of(tmp_path, [without]))


@pytest.mark.slow
@pytest.mark.usefixtures("no_pack")
def test_a_run_compresses_the_answer_and_says_how_long_it_is(tiny_folder, tmp_path, capsys):
    """Random weights write no box; under a small budget the cache stays small while they write."""
    file = file_of(tmp_path, [made("1"), made("2", "What is one + one?")])
    words = ["run", "--suite", "math500", "--model", str(tiny_folder), "--rows", str(file)]
    words += ["--policy", "knorm + uniform(24, every_step) + recent(8)", "--out", str(tmp_path / "out")]
    assert main(words) == 0
    full, cut = store.read(tmp_path / "out")
    assert full.score == cut.score == 0
    assert (full.mean_fraction, full.cell.samples, full.group) == (1, 2, "math500")
    # 24 of the 25 to 64 tokens that a row has seen, whatever it has written; the reference has two.
    assert cut.mean_fraction < 0.65
    assert all(0 < n <= 40 for n in full.each.written)
    metrics = next((tmp_path / "out" / "kvpress").glob("math500__model__no_press__0.00/metrics.json"))
    assert json.loads(metrics.read_text()) == {"correct": 0, "accuracy": 0.0, "total": 2}
    assert main([*words, "--protocol", "answer"]) == 2
    assert "a suite's answers are its model's own" in capsys.readouterr().err


class Template:
    """A tokenizer of bytes with a chat template that trims nothing."""

    def __init__(self, text):
        self.encode, self.bos = text.encode, None

    def render(self, messages, *, enable_thinking):
        assert not enable_thinking
        (message,) = messages
        return f"<user>{message['content']}</user><assistant>"


def test_a_problem_is_asked_as_it_stands_behind_a_blank():
    """As in kvpress: no word about boxes is added, and nothing but the blank can be compressed before it."""
    text = load().text
    row = made(42) | {"task": "aime25"}
    sample, encoded = prompt.encoded(AIME, row, 0, Template(text), chat=True, aware=False, most=512)
    assert text.decode(encoded.context) == "<user> "
    assert text.decode(encoded.question) == row["question"] + "</user><assistant>"
    assert (sample.answer, sample.refs, sample.max_new) == (" 42", ("42",), 40)
    with pytest.raises(EvalError, match="leaves no room"):
        prompt.encoded(AIME, row | {"max_new_tokens": 32_000}, 0, text, chat=False, aware=False, most=512)


@pytest.mark.parametrize(
    ("output", "answer"),
    [
        ("so the answer is \\boxed{042}.", "042"),
        ("first \\boxed{1}, no: \\boxed{\\frac{3}{4}}", "\\frac{3}{4}"),
        ("\\boxed{\\left\\{ {1}, \\text{a} \\right\\}} ends", "\\left\\{ {1}, \\text{a} \\right\\}"),
        ("\\fbox{7}", "7"),
        ("$\\boxed 5$ apples", "5"),
        ("\\boxed{8} and then \\boxed{9 is cut", "8"),
        ("the answer is 5", None),
        ("boxed{5}", None),
        ("", None),
    ],
)
def test_the_last_whole_box_is_the_answer(output, answer):
    assert mathematics.boxed(output) == answer


EQUAL = [
    ("\\frac{3}{4}", "0.75"), ("3/4", "\\dfrac34"), ("-\\frac{6}{8}", "-.75"), ("1\\frac12", "1.5"),
    ("1,000", "1000"), ("12{,}345", "12345"), ("070", "70"), ("5\\text{ cm}^2", "5"), ("5 cm", "5"),
    ("5\\mbox{ inches}", "5"), ("30^\\circ", "30"), ("50\\%", "50"), ("\\$3.50", "3.5"), ("x = 4", "4"),
    ("(1, 2)", "\\left(1,2\\right)"), ("(0.5, 3)", "(\\frac12,3)"), ("1, -2", "-2,1"), ("\\{1,2\\}", "2, 1"),
    ("\\text{Evelyn}", "Evelyn"), ("\\text{(C)}", "C"), ("2\\sqrt3", "2\\sqrt{3}"), ("p - q", "p-q"),
    ("[0,\\infty)", "\\left[0,\\infty\\right)"), ("+7", "7"),
]  # fmt: skip
OTHER = [
    ("x=abc=5", "abc=5"),
    ("\\frac{3}{4}", "\\frac{4}{3}"), ("0.75", "0.7"), ("1,000", "1,0000"), ("70", "700"), ("-5", "5"),
    ("(1, 2)", "(2, 1)"), ("(1,2)", "[1,2]"), ("1,2", "1,2,3"), ("1,1,2", "1,2,2"), ("(1,2)", "1,2"),
    ("\\text{Evelyn}", "Eva"), ("\\sqrt3", "3"), ("x+1", "x+2"), ("\\frac{1}{0}", "\\frac{2}{0}"), ("", "0"),
    ("5", "x"), ("[0,1)", "[0,1]"),
]  # fmt: skip


@pytest.mark.parametrize(("one", "other"), EQUAL)
def test_equal_answers_are_equal(one, other):
    assert mathematics.same(one, other)
    assert mathematics.same(other, one)
    assert mathematics.score(f"I get \\boxed{{{one}}}", [other]) == 1


@pytest.mark.parametrize(("one", "other"), OTHER)
def test_other_answers_are_not(one, other):
    assert not mathematics.same(one, other)
    assert not mathematics.same(other, one)
    assert mathematics.score(f"I get \\boxed{{{one}}}", [other]) == 0
    assert mathematics.score(other, [other]) == 0  # no box


def test_numbers_are_those_of_python():
    """Fractions, decimals and separators in every spelling of random rationals."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        above, below = int(rng.integers(-10_000, 10_000)), int(rng.integers(1, 50))
        value = Fraction(above, below)
        assert mathematics.number(f"\\frac{{{above}}}{{{below}}}") == value
        assert mathematics.number(f"{above}/{below}") == value
        assert mathematics.number(f"{above:,}") == above
        assert mathematics.number(f"{above / 8}") == Fraction(above, 8)
        other = f"\\frac{{{above + 1}}}{{{below}}}"
        assert mathematics.same(f"{above}/{below}", other) is False
    assert mathematics.number("\\pi") is mathematics.number("1/x") is mathematics.number("") is None


def test_totals_are_those_of_kvpress():
    assert MATH.totals({"math500": [1.0, 0.0, 1.0, 1.0]}) == {"correct": 3, "accuracy": 0.75, "total": 4}
    row = {"task": "math500"} | made("1")
    assert MATH.score("math500", "\\boxed{1}", MATH.refs(row), ()) == 1
