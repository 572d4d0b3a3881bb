"""Training rows: answers by small solvers that read the text alone, exact lengths, splits, purity."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from task_solvers import SOLVE, solve_chains, solve_labels, solve_needles, solve_pairs, solve_story

from kvjax.eval.tasks.pairs import gaps
from train import rows, text
from train.embedded import tasks
from train.embedded.tasks import dialogue, labels, niah, pairs, stories, tracking, words

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("train/embedded/tasks", "kvjax/eval/tasks")
CODE = [file for folder in FOLDERS for file in sorted((ROOT / folder).glob("*.py"))]
"""Modules that hold the templates."""


@pytest.fixture(scope="module", autouse=True)
def _no_data():
    patch = pytest.MonkeyPatch()
    patch.setenv("KVJAX_DATA", "/nowhere")  # the generated stand-in, on every machine
    yield
    patch.undo()


@pytest.fixture(scope="module")
def sources(_no_data):
    """(training, held-out) sources whose tokenizer knows the words of the templates."""
    corpus = text.corpus(None)
    tokenizer = text.train_tokenizer([*corpus.train, *[path.read_text() for path in CODE] * 4], 3072)
    ids = text.token_array(tokenizer, corpus.train)
    return tuple(rows.make_source(tokenizer, ids, corpus.words, held_out=held) for held in (False, True))


def answers(source: rows.Source, row: tasks.Row) -> list[str]:
    """What stands under each run of answer weight."""
    ids, weight = row
    edges = np.flatnonzero(np.diff(np.r_[0, weight == rows.ANSWER, 0]))
    runs = [source.tokenizer.decode(ids[a:b].tolist()) for a, b in edges.reshape(-1, 2)]
    assert all(run.startswith(" ") for run in runs)
    return [run[1:] for run in runs]


def made(make: tasks.RowFn, seed: int, source: rows.Source, length: int) -> tasks.Row:
    row = make(np.random.default_rng(seed), source, length)
    assert row is not None
    return row


def check(source: rows.Source, row: tasks.Row, length: int, solve: Callable[[str], list[str]]) -> None:
    ids, weight = row
    assert (ids.shape, ids.dtype, weight.shape, weight.dtype) == ((length,), np.int32, (length,), np.float32)
    assert ids[0] == text.BOS
    assert (weight[1:] > 0).all()
    want = solve(source.tokenizer.decode(ids.tolist()))
    assert want
    assert answers(source, row) == want


@pytest.mark.parametrize("name", SOLVE)
def test_answers_are_right_and_weights_mark_exactly_them(sources, name):
    for source in sources:
        for length in (tasks.FITS[name], 701, 1024, 2048):
            for seed in range(8):
                row = tasks.TASKS[name](np.random.default_rng(seed), source, length)
                if row is not None:
                    check(source, row, length, SOLVE[name])


@pytest.mark.parametrize("form", niah.FORMS)
def test_every_needle_task_hides_and_asks_what_it_says(sources, form):
    task = niah.FORMS[form]
    for seed in range(4):
        row = made(partial(niah.row, form=form, full=True), seed, sources[0], 768)
        check(sources[0], row, 768, solve_needles)
        shown = sources[0].tokenizer.decode(row[0].tolist())
        assert len(answers(sources[0], row)) == task.asked * task.values
        needles = len(re.findall("One of the special", shown))
        assert needles > 8 if task.hay == "needles" else needles == task.keys * task.values


def test_rows_of_many_questions_ask_for_more_than_the_evaluations(sources):
    for make, one, solve in (
        (niah.many, niah.row, solve_needles),
        (tracking.many, tracking.row, solve_chains),
    ):
        counts = []
        for row_of in (make, one):
            rows_of = [made(row_of, seed, sources[0], 1024) for seed in range(16)]
            counts.append(sum(len(answers(sources[0], row)) for row in rows_of))
            for row in rows_of:
                check(sources[0], row, 1024, solve)
        assert counts[0] > 1.25 * counts[1]
    for seed in range(16):
        shown = sources[0].tokenizer.decode(made(tracking.many, seed, sources[0], 1024)[0].tolist())
        numbers = re.findall(r"Question: .* value (\d+)", shown)
        assert len(set(numbers)) == len(numbers), "every chain is asked for once"


@pytest.mark.parametrize("kind", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("hidden", [False, True])
def test_stories_of_every_kind(sources, kind, hidden):
    for seed in range(8):
        row = made(partial(stories.row, kind=kind, hidden=hidden), seed, sources[0], 1024)
        check(sources[0], row, 1024, solve_story)


def test_the_worked_examples_fit_where_they_must(sources):
    for seed in range(8):
        row = made(partial(words.cwe, full=True), seed, sources[0], 1024)
        check(sources[0], row, 1024, SOLVE["cwe"])
        assert len(answers(sources[0], row)) == 20
        row = made(partial(tracking.row, example=True, hops=4), seed, sources[0], 1024)
        check(sources[0], row, 1024, solve_chains)
        assert [len(answer.split()) for answer in answers(sources[0], row)] == [5, 5]


def test_pairs_of_tokens_come_back_at_power_law_gaps(sources):
    for seed in range(8):
        ids, weight = made(partial(pairs.row, form="token", pairs=8), seed, sources[0], 256)
        keys, values = ids[1:17:2], ids[2:17:2]
        assert len(set(keys)) == 8
        assert (keys < values.min()).all()
        again = [np.flatnonzero(ids == key) for key in keys]
        assert all(len(places) == 2 for places in again)
        np.testing.assert_array_equal(ids[[places[1] + 1 for places in again]], values)
        assert set(np.flatnonzero(weight[1:]) + 1) == {places[1] + 1 for places in again}
        assert set(weight[1:]) == {0.0, rows.ANSWER}
        assert not any(text.held_out_word(str(key)) for key in keys)
    drawn = np.concatenate([gaps(np.random.default_rng(seed), 4, 100) for seed in range(400)])
    # Without replacement 4 of 100 by 1/g^0.99: the first draw alone has 0.56 of its mass below 10.
    assert 0.45 < (drawn < 10).mean() < 0.56
    assert (drawn >= 50).mean() > 0.08


def test_pairs_of_words_come_back(sources):
    for seed in range(8):
        row = made(partial(pairs.row, form="text", pairs=6), seed, sources[0], 512)
        check(sources[0], row, 512, solve_pairs)
        assert len(answers(sources[0], row)) == 6


@pytest.mark.parametrize("name", tasks.TASKS)
def test_rows_fit_from_the_stated_length_on(sources, name):
    for source in sources:
        for length in sorted({tasks.FITS[name], 1024}):
            drawn = [tasks.TASKS[name](np.random.default_rng(seed), source, length) for seed in range(40)]
            assert sum(row is not None for row in drawn) >= 38
            assert all(len(row[0]) == length for row in drawn if row is not None)


@pytest.mark.parametrize("name", tasks.TASKS)
def test_rows_are_a_pure_function_of_the_generator(sources, name):
    first, again, other = (made(tasks.TASKS[name], seed, sources[0], 1024) for seed in (3, 3, 4))
    np.testing.assert_array_equal(first[0], again[0])
    np.testing.assert_array_equal(first[1], again[1])
    assert not np.array_equal(first[0], other[0])


@pytest.mark.parametrize("name", sorted(set(tasks.TASKS) - {"pairs"}))
def test_tokens_are_those_of_the_whole_text(sources, name):
    plain = "The dog saw. " * 4
    source = dataclasses.replace(sources[0], text=np.asarray(sources[0].encode(" " + plain.strip()) * 400))
    source = dataclasses.replace(source, ends=np.flatnonzero(source.text == source.encode(".")[0]) + 1)
    for seed in range(6):
        ids, _ = made(tasks.TASKS[name], seed, source, 1024)
        again = source.encode(source.tokenizer.decode(ids.tolist()))
        assert again[-990:] == ids[-990:].tolist()  # a line of the haystack may be cut at the front


@pytest.mark.parametrize("name", tasks.TASKS)
def test_held_out_rows_show_no_key_of_training(sources, name):
    train, held = sources
    code = " ".join(path.read_text() for path in CODE)
    template = set(re.findall(r"\w+", code.lower()))
    make = partial(pairs.row, form="text") if name == "pairs" else tasks.TASKS[name]
    keys = set(train.short + train.long) - template
    assert len(keys) > 300
    bare = np.asarray(held.encode(" The wind is cold.") * 700)
    mute = [dataclasses.replace(s, text=bare, ends=np.arange(5, len(bare), 5)) for s in sources]
    shown = []
    for source in mute:
        drawn = [made(make, seed, source, 1024)[0] for seed in range(8)]
        joined = " ".join(source.tokenizer.decode(ids.tolist()) for ids in drawn)
        shown.append(set(re.findall(r"[a-z]{4,}", joined.lower())))
    assert not keys & shown[1]
    if name not in ("tracking", "chains", "fwe", "stories"):  # these have no key words of the list
        assert keys & shown[0]
        assert set(held.short + held.long) & shown[1]


@pytest.mark.parametrize(
    ("make", "pattern"),
    [(tracking.row, r"\bVAR ([A-Z]{3,5})\b"), (words.fwe, r"\b([a-z]{6})(?= \.\.\.)")],
)
def test_random_names_are_split_as_key_words_are(sources, make, pattern):
    for source, held in zip(sources, (False, True)):
        row = made(make, 0, source, 1024)
        names = set(re.findall(pattern, source.tokenizer.decode(row[0].tolist())))
        assert len(names) > 1
        assert {text.held_out_word(name) for name in names} == {held}


def test_draw_mixes_by_share_and_falls_back_to_text(sources):
    rng = np.random.default_rng(0)
    drawn = [tasks.draw(rng, sources[0], 512, {"niah": 3.0, "pairs": 1.0})[0] for _ in range(120)]
    assert set(drawn) == {"niah", "pairs"}
    assert 70 <= drawn.count("niah") <= 108
    name, ids, weight = tasks.draw(rng, sources[0], 64)
    assert (name, ids.shape, set(weight)) == ("text", (64,), {rows.TEXT})
    assert {tasks.draw(rng, sources[0], 1024)[0] for _ in range(150)} == {
        name for name, share in tasks.SHARES.items() if share
    }
    assert sum(tasks.SHARES.values()) == pytest.approx(1.0)
    assert set(tasks.SHARES) == set(tasks.FITS) == set(tasks.TASKS)
    with pytest.raises(ValueError, match="names no task: nothing"):
        tasks.draw(rng, sources[0], 512, {"nothing": 1.0})


def test_a_dialogue_asks_for_one_of_the_facts_told(sources):
    row = made(partial(dialogue.row, count=5), 0, sources[0], 1024)
    shown = sources[0].tokenizer.decode(row[0].tolist())
    assert len(re.findall(r"[Mm]y [a-z ]+ is \w+\.", shown)) == 5


@pytest.fixture
def folder(monkeypatch):
    monkeypatch.delenv("KVJAX_DATA")
    pack = text.data_folder()
    if pack is None or not (pack / "babi").is_dir():
        pytest.skip("no data pack beside the checkout")
    return pack


@pytest.mark.parametrize("kind", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("split", ["train", "test"])
def test_the_solver_agrees_with_the_real_stories(folder, kind, split):
    read = stories.real_stories(folder, kind, split)[:400]
    if (kind, split) == (3, "train"):
        assert read == ()
        return
    wrong = 0
    for story in read:
        ((question, answer),) = story.questions
        wrong += solve_story(" ".join(story.facts), [question]) != [answer]
    assert wrong <= (0.01 * len(read) if kind == 5 else 0)  # the files' own: not always the latest gift


def test_real_intents_of_training_leave_a_fifth_to_evaluation(folder, sources):
    sets = labels.intents(folder)
    assert [len(own) for own in sets] == [64, 129]
    assert not any(text.held_out_word(name) for own in sets for name in own)
    texts = {line: (i, name) for i, own in enumerate(sets) for name, all_ in own.items() for line in all_}
    row = made(partial(labels.row, real=True), 0, sources[0], 2048)
    named: dict[str, tuple[int, str]] = {}
    shots = re.findall(r"text: (.*)\nlabel: (\w)", sources[0].tokenizer.decode(row[0].tolist()))
    for line, label in shots:
        assert named.setdefault(label, texts[line]) == texts[line]
    assert len(set(named.values())) == len(named) >= 3
    assert [label for _, label in shots[len(named) :]] == answers(sources[0], row)
    held = made(partial(labels.row, real=True), 0, sources[1], 2048)
    assert answers(sources[1], held) == solve_labels(sources[1].tokenizer.decode(held[0].tolist()))
