"""Samples: pure in their seeds, no longer than asked, of unseen keys, and solvable by another program."""

from __future__ import annotations

import re
import zlib

import numpy as np
import pytest
from eval_solvers import SOLVERS

from kvjax.eval import tasks as registry
from kvjax.eval.errors import EvalError
from kvjax.eval.measure import runner
from kvjax.eval.tasks import data as texts
from kvjax.eval.tasks.data import Data
from kvjax.eval.tasks.maker import Maker
from kvjax.eval.tasks.sample import Sample, encode, length
from kvjax.eval.tasks.words import held_out_word
from kvjax.loading import load
from train import text as training

NAMES = tuple(registry.tasks())
SOURCES = {"twin": Data(None), "pack": texts.find()}


@pytest.fixture(scope="module")
def model():
    return load()


EVERY = [
    (name, source)
    for name, task in registry.tasks().items()
    for source in SOURCES
    if source == "pack" or not task.needs
]
"""(task, source) of all that exist: what needs the pack has no twin."""


def drawn(model, name: str, size: int, count: int = 2, source: str = "twin", seed: int = 0):
    """Samples; skips what needs the data pack where there is none."""
    task, data = registry.tasks()[name], SOURCES[source]
    if source == "pack" and data.folder is None:
        pytest.skip(f"no data pack for {name}: set KVJAX_DATA to its folder")
    return runner.draw(task, model, data, length=size, seed=seed, count=count)


@pytest.mark.parametrize(("name", "source"), EVERY)
def test_samples_fit_from_where_the_task_says(model, name, source):
    task = registry.tasks()[name]
    for size in (task.fits, 2 * task.fits):
        for sample, encoded in drawn(model, name, size, source=source):
            held = length(encoded, sample.max_new)
            assert held <= size
            assert len(encoded.answer) > 0
            assert (encoded.scored >= 0).any()
            assert encoded.context[0] == model.text.bos
            for a, b in sample.spans:
                assert 0 <= a < b <= len(sample.context)
            text = sample.context + sample.question + sample.prefix + sample.answer
            ids = encoded.context + encoded.question + encoded.prefix + encoded.answer
            assert model.text.decode(ids) == text


@pytest.mark.parametrize("name", NAMES)
def test_samples_are_pure_in_seed_and_index(model, name):
    size = registry.tasks()[name].fits
    source = "pack" if registry.tasks()[name].needs else "twin"
    one, again = (drawn(model, name, size, 3, source) for _ in range(2))
    assert [s for s, _ in one] == [s for s, _ in again]
    assert len({s.context + s.answer for s, _ in one}) == 3
    if not name.startswith(("ppl", "text")):  # windows are the same for every seed
        assert [s for s, _ in drawn(model, name, size, 3, source, seed=1)] != [s for s, _ in one]


@pytest.mark.parametrize("name", sorted(SOLVERS))
def test_another_program_finds_the_answer(model, name):
    source = "pack" if registry.tasks()[name].needs else "twin"
    size = max(512, registry.tasks()[name].fits)
    for sample, _ in drawn(model, name, size, 4, source):
        answer = SOLVERS[name](sample.context, sample.question + sample.prefix)
        assert answer == sample.answer.strip(), sample.question
        score = registry.tasks()[name].score
        if score is not None:
            assert score(sample.answer + ".", sample) == 1
            assert score(" nothing", sample) == 0


@pytest.mark.parametrize(
    "name", ["niah", "niah_word", "niah_multikey_2", "cwe", "dialogue_recall", "mqar", "json_kv"]
)
def test_key_words_are_those_training_never_sees(model, name):
    patterns = {
        "niah": r"number for (\w+)-(\w+)",
        "niah_word": r"word for (\w+)-(\w+)",
        "niah_multikey_2": r"numbers for (\w+)-(\w+)",
        "cwe": r"\d+\. (\w+)",
        "dialogue_recall": r"about (\w+)\.",
        "mqar": r"(?m)^(\w+) -> (\w+)$",
        "json_kv": r'"(\w+)"',
    }
    for source in SOURCES if SOURCES["pack"].folder else ["twin"]:
        for sample, _ in drawn(model, name, max(512, registry.tasks()[name].fits), source=source):
            matches = re.findall(patterns[name], sample.context + sample.question)
            keys = {word for match in matches for word in ([match] if isinstance(match, str) else match)}
            assert keys
            assert all(zlib.crc32(key.lower().encode()) % 5 == 0 for key in keys)


def test_training_splits_words_by_the_same_rule():
    assert training.held_out_word is held_out_word
    words = ["stone", "river", "house", "tree", "water", "light", "music", "apple"]
    assert [word for word in words if held_out_word(word)] == ["house", "water", "music"]


def test_spans_hold_the_needles(model):
    for name, ref in (("niah", 1), ("niah_multivalue", 4), ("niah_multiquery", 4), ("vt", 5)):
        for sample, encoded in drawn(model, name, 1024):
            marked = [sample.context[a:b] for a, b in sample.spans]
            assert len(marked) == len(sample.refs) == ref
            # Every reference stands in a marked piece, and the marked tokens are those pieces.
            assert all(any(ref in piece for piece in marked) for ref in sample.refs)
            kept = model.text.decode(np.asarray(encoded.context)[encoded.needed])
            assert all(re.sub(r"\s", "", piece) in re.sub(r"\s", "", kept) for piece in marked)


def test_a_word_that_is_asked_for_is_one_token_where_the_vocabulary_has_it(model):
    for sample, encoded in drawn(model, "niah_word", 512, 10):
        assert len(encoded.answer) == 1
        assert sample.refs[0].isalpha()
    assert all(len(encoded.answer) > 1 for _, encoded in drawn(model, "niah", 512, 10))


def test_needles_stand_at_their_depth(model):
    counted = Maker(text=model.text, data=SOURCES["twin"], length=512)
    for sample, encoded in drawn(model, "niah", 512, 10):
        first = np.flatnonzero(encoded.needed)[0]
        share = 100 * (1 - first / len(encoded.context))
        assert abs(share - sample.tags["depth_from_end"]) < 12
    units = ["a b c."] * 10
    assert [counted.at_depth(units, d) for d in (0, 0.09, 0.5, 1)] == [0, 0, 5, 10]


def test_mqar_gaps_and_scored_words_belong_together(model):
    for sample, encoded in drawn(model, "mqar", 1024):
        words = [sample.answer[a:b] for a, b in sample.scored]
        assert len(words) == len(sample.tags["gap"]) == 16
        assert sorted(set(encoded.scored.tolist())) == [-1, *range(16)]
        assert sample.tags["gap"] == sorted(sample.tags["gap"])


def test_a_length_that_is_too_short_is_refused(model):
    task = registry.tasks()["vt"]
    with pytest.raises(EvalError, match="does not fit into 128"):
        runner.draw(task, model, SOURCES["twin"], length=128, seed=0, count=1)


def test_tokens_on_a_border_belong_to_where_they_end(model):
    sample = Sample(context="One two", question=" three?", prefix=" It", answer=" is.", spans=((4, 7),))
    encoded = encode(model.text, sample)
    assert model.text.decode(encoded.question) == " three?"
    assert model.text.decode(np.asarray(encoded.context)[encoded.needed]) == " two"
    assert length(encoded, 9) == length(encoded, 0) - len(encoded.answer) + 9
