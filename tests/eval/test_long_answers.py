"""Long answers: samples that another program solves, own words against a dense model, and their tables."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
import tiny
from eval_rows import BAD, GOOD, changed, row

import kvjax
from kvjax.eval import tasks
from kvjax.eval.arguments import Job
from kvjax.eval.errors import EvalError
from kvjax.eval.measure import batch, grid, runner, tally
from kvjax.eval.measure.protocol import LONG, cut, protocols
from kvjax.eval.report import front, markdown, table
from kvjax.eval.report.table import Results
from kvjax.eval.tasks.data import Data
from kvjax.eval.tasks.long_answers import FARTHEST, HEADING
from kvjax.eval.tasks.sample import Encoded, Sample
from kvjax.loading import load

NAMES = ("said_pairs", "listed_pairs")
LINE = r"(?m)^(\w+) -> (\w+)$"


def drawn(name: str, length: int = 1024, count: int = 3):
    return runner.draw(tasks.tasks()[name], load(), Data(None), length=length, seed=0, count=count)


@pytest.mark.parametrize("name", NAMES)
def test_a_dictionary_of_the_list_answers_every_question(name):
    for sample, encoded in drawn(name):
        head, listed, rest = sample.answer.partition(HEADING)
        assert head == ""
        known: dict[str, str] = {}
        asked = []
        for key, value in re.findall(LINE, listed + rest):
            if key in known:
                asked.append(key)
                assert known[key] == value
            else:
                known[key] = value
        assert sorted(asked) == sorted(known)
        assert [sample.answer[a:b] for a, b in sample.scored] == [f" {known[key]}" for key in asked]
        assert all(sample.answer[:a].endswith(f"\n{key} ->") for key, (a, _) in zip(asked, sample.scored))
        in_context = dict(re.findall(LINE, sample.context))
        assert in_context == (known if name == "listed_pairs" else {})
        assert sorted({*encoded.scored.tolist()}) == [-1, *range(len(asked))]


def test_facts_are_found_by_their_sentence_and_chains_by_following_them():
    for sample, encoded in drawn("said_facts"):
        told = re.findall(r"The secret number for (\S+) is (\d{5})\.", sample.answer)
        said, asked = dict(told[: len(told) // 2]), told[len(told) // 2 :]
        assert sorted(asked) == sorted(said.items())
        assert [sample.answer[a:b] for a, b in sample.scored] == [f" {said[key]}" for key, _ in asked]
        assert "secret" not in sample.context
        assert sample.tags["gap"][0] > 300
        assert len(encoded.answer) > 700
    for sample, encoded in drawn("said_chain"):
        number = re.search(r"assigned the value (\d+) in", sample.answer).group(1)
        names = []
        for name, value in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", sample.answer):
            assert value in (number, *names)
            names.append(name)
        assert len(names) == 5
        assert [sample.answer[a:b] for a, b in sample.scored] == [f" {name}" for name in names]
        assert sample.answer.endswith(" ".join(names))
        assert "VAR" not in sample.context
        assert len(encoded.answer) > 900


def test_said_pairs_are_asked_for_500_to_1500_tokens_later():
    for length in (1024, 2048):
        for sample, encoded in drawn("said_pairs", length):
            text = load().text
            count = len(sample.scored)  # lines of the list, behind a blank one and its heading
            said = len(text.encode("\n".join(sample.answer.split("\n")[: count + 2]), bos=False))
            first = int(np.flatnonzero(encoded.scored >= 0)[0])
            assert len(encoded.context) < 300
            assert 500 <= first - said <= FARTHEST + 60  # with the sentence that is begun, and the first key
            assert len(encoded.answer) > 0.6 * length or sample.tags["gap"][0] > FARTHEST - 60


def rows_of(policy: str, long: bool = True):
    """Two samples of a tiny model; the scored tokens are in two spans."""
    scored = np.asarray([-1, 0, -1, -1, 1, 1, -1, 2])
    samples = []
    for seed in range(2):
        answer = tiny.prompt(40, 7 + seed)[30:38]
        samples.append(
            (
                Sample(context="", answer=""),
                Encoded(
                    context=tiny.prompt(30 - seed, seed), question=[], prefix=[], answer=answer,
                    needed=np.zeros(30 - seed, bool), scored=scored, labels=(), bytes=1,
                ),
            )
        )  # fmt: skip
    result = batch.run(
        tiny.model(), kvjax.policy(policy), samples, protocol=LONG, context=tiny.CONTEXT, rows=2, long=long
    )
    return samples, result.outcomes


def test_scored_words_are_the_models_own_and_are_fed_back():
    """Against a dense model that reads all tokens anew for each of its own."""
    samples, outcomes = rows_of("full")
    # Where an untrained model is right is chance: make every other reference token its own choice.
    for number, (_, encoded) in enumerate(samples):
        tokens, own = list(encoded.context), []
        for i, right in enumerate(encoded.answer):
            best = int(tiny.dense(tokens)[-1].argmax())
            own.append(best)
            tokens.append(best if encoded.scored[i] >= 0 else right)
        hits = [own[i] == encoded.answer[i] for i in range(len(own))]
        wanted = [all(h for h, at in zip(hits, encoded.scored) if at == span) for span in range(3)]
        assert outcomes[number].own.tolist() == wanted
        # And with the answers that it would give, all of them are right.
        right = [own[i] if encoded.scored[i] >= 0 else encoded.answer[i] for i in range(len(own))]
        samples[number] = (samples[number][0], dataclasses.replace(encoded, answer=right))
    again = batch.run(
        tiny.model(), kvjax.policy("full"), samples, protocol=LONG, context=tiny.CONTEXT, rows=2, long=True
    )
    for outcome in again.outcomes:
        assert outcome.own.all()
        assert outcome.recalled.all()


def test_a_wrong_word_of_ones_own_stays_in_the_cache():
    """Teacher-forced a second token is judged after the right first one; else after the written one."""
    samples, outcomes = rows_of("full")
    (sample, encoded), changed_answer = samples[0], list(samples[0][1].answer)
    tokens = [*encoded.context, *encoded.answer[:4]]
    first = int(tiny.dense(tokens)[-1].argmax())
    changed_answer[4] = (first + 1) % tiny.VOCAB  # never the model's own
    changed_answer[5] = int(tiny.dense([*tokens, changed_answer[4]])[-1].argmax())
    scored = np.asarray([-1, -1, -1, -1, -1, 0, -1, -1])
    forced_only = dataclasses.replace(encoded, answer=changed_answer, scored=scored)
    both = dataclasses.replace(forced_only, scored=np.asarray([-1, -1, -1, -1, 1, 0, -1, -1]))
    filled = [(sample, forced_only), (sample, both)]
    one, other = batch.run(
        tiny.model(), kvjax.policy("full"), filled, protocol=LONG, context=tiny.CONTEXT, rows=2, long=True
    ).outcomes
    assert one.recalled.tolist() == one.own.tolist() == [True]
    assert other.recalled.tolist() == [True, False]
    after_own = int(tiny.dense([*tokens, first])[-1].argmax())
    assert other.own.tolist() == [after_own == changed_answer[5], False]


@pytest.mark.slow
def test_a_policy_that_acts_while_decoding_shrinks_what_a_long_answer_holds():
    _, full = rows_of("full", long=False)
    _, cut_ = rows_of("knorm + uniform(12, every_step) + recent(4)", long=False)
    assert all(one.own is None for one in (*full, *cut_))
    assert all(a.mean < b.mean == 1 for a, b in zip(cut_, full))


def test_long_answers_have_a_protocol_of_their_own():
    """Whatever is asked for; other tasks never have it."""
    snap, window = kvjax.policy("snapkv + uniform(64)"), kvjax.policy("window(64)")
    for policy in (snap, window):
        assert protocols(policy, ("agnostic", "aware"), question=False, long=True) == (LONG,)
        assert protocols(policy, (LONG,), question=True) == ()
    assert protocols(snap, ("aware", LONG), question=True) == ("aware",)
    (_, encoded), *_ = drawn("said_pairs", count=1)
    assert cut(encoded, LONG) == (encoded.context, [])
    both = [tasks.tasks()[name] for name in ("niah", "said_pairs")]
    how = {"lengths": [1024], "seeds": [0], "samples": 1}
    cells = grid.build(both, [snap], protocol=("agnostic", LONG), **how).cells
    assert [(cell.task, cell.policy == "full", cell.protocol) for cell in cells] == [
        ("niah", True, "either"),
        ("niah", False, "agnostic"),
        ("said_pairs", True, LONG),
        ("said_pairs", False, LONG),
    ]
    with pytest.raises(
        EvalError, match="--protocol answer is that of tasks with long answers, and niah has none"
    ):
        grid.build(both[:1], [snap], protocol=(LONG,), **how)
    assert Job(tasks=["long"], lengths=[1024], policies=[], protocols=(LONG,)).protocols == (LONG,)


def long(policy: str, scores: list[float], **more):
    return changed(
        row(policy, scores, more.pop("live", 1.0), protocol=LONG, length=1024),
        cell={"task": "said_pairs"},
        group="long",
        metric="recall",
        each={"found": [[1, 1, 1, 0]] * len(scores), "written": [700, 900] * (len(scores) // 2)},
        **more,
    )


def test_the_table_of_long_answers_has_their_length_and_both_ways():
    results = Results(
        (
            long("full", GOOD, live=100.0, mean_fraction=1.0),
            long("snapkv(8) + uniform(256, every_step)", BAD, live=30.0),
        )
    )
    full, cut_ = (
        [x.strip() for x in line.strip("|").split("|")]
        for line in table.long_answers(results).splitlines()[2:]
    )
    assert full[3:] == ["9", "800", "100.0", "100.0", "100.0 (100.0–100.0)", "75.0", "–"]
    assert cut_[:5] == ["`snapkv(8) + uniform(256, every_step)`", "said_pairs", "1024", "9", "800"]
    assert cut_[6] == "30.0"
    assert cut_[7].startswith("50.0 (")
    assert cut_[8] == "75.0"
    assert cut_[9].startswith("-50.0 (")
    page = markdown.text(results)
    assert "## Long answers" in page
    assert "| spans kept % | answer |" in page
    assert table.long_answers(Results((row("full", GOOD),))) == ""


def test_fronts_of_long_answers_are_apart_and_count_what_is_held_while_they_are_written():
    answers = [long("full", GOOD, mean_fraction=1.0), long("snapkv(8) + uniform(64)", BAD, mean_fraction=0.5)]
    other = [
        row("full", GOOD, length=1024),
        row("snapkv(8) + uniform(64)", BAD, protocol="agnostic", length=1024),
    ]
    by_key = front.points(Results((*other, *answers)), 64)
    assert {key: sorted(p.share for p in group) for key, group in by_key.items()} == {
        (1024, "agnostic"): [0.25, 0.25],
        (1024, LONG): [0.5, 1.0],
    }
    assert {key for key in front.points(Results(tuple(answers)), 64)} == {(1024, LONG)}
    page = front.page(Results((*other, *answers)), 64, (0.5,), "command")
    assert "| long answers | 1024 | 60 % of the bytes | `snapkv(8) + uniform(64)` |" in page
    assert page.index("While long answers are written:") < page.rindex("| length |")


def test_answers_are_as_long_as_their_text():
    """Up to its end token, or to its first line break; a long answer is the reference's."""
    _, (outcome, _) = rows_of("full", long=False)
    model, encode = load(), lambda text: len(load().text.encode(text, bos=False))
    texts = [" one two three", " one", ""]
    outcomes = [
        dataclasses.replace(outcome, output=output, written=n)
        for output, n in ((texts[0], 5), (" one\nand more", 9), ("", 1))
    ]
    written = tally._written(tasks.tasks()["niah"], model, texts, [], outcomes)
    assert written == [5, encode(" one"), 1]
    assert tally._written(tasks.tasks()["mqar"], model, texts, [], outcomes) is None
    samples = drawn("said_pairs")
    whole = tally._written(tasks.tasks()["said_pairs"], model, [], samples, outcomes)
    assert whole == [len(encoded.answer) for _, encoded in samples]
