"""Tasks for a model with a chat template: its turns are taken, and the cache is cut where kvpress cuts it."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from eval_rows import LENGTH

from kvjax.eval import tasks
from kvjax.eval.__main__ import main
from kvjax.eval.measure import runner, store
from kvjax.eval.measure.protocol import cut
from kvjax.eval.measure.row import as_json
from kvjax.eval.tasks.data import Data
from kvjax.eval.tasks.sample import length
from kvjax.loading import LanguageModel, load

pytestmark = pytest.mark.usefixtures("no_pack")

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '[' + message['role'] + ']' + message['content'] | trim + '[end]' }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
HEAD, MIDDLE = "<bos>[user]", "[end][assistant]"


@pytest.fixture(scope="module")
def chat_folder(tiny_folder, tmp_path_factory) -> Path:
    """The tiny model with a chat template that writes BOS itself."""
    folder = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(tiny_folder, folder)
    config = {"bos_token": "<bos>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def model(chat_folder) -> LanguageModel:
    return load(chat_folder)


def drawn(model: LanguageModel, name: str = "niah", **how):
    return runner.draw(tasks.tasks()[name], model, Data(None), length=LENGTH, seed=0, count=3, **how)


def spelled(model: LanguageModel, ids: list[int]) -> str:
    return model.text.tokenizer.decode(ids, skip_special_tokens=False)


def test_context_and_question_are_the_users_turn_and_the_answer_begins_the_assistants(model):
    for sample, encoded in drawn(model, chat=True):
        assert spelled(model, encoded.context) == HEAD + sample.context
        assert spelled(model, encoded.question) == sample.question
        assert spelled(model, encoded.prefix) == MIDDLE + sample.prefix.lstrip()
        assert spelled(model, encoded.answer) == sample.answer
        messages = [
            {"role": "user", "content": sample.context + sample.question},
            {"role": "assistant", "content": sample.prefix.strip()},
        ]
        shown = model.text.render(messages, add_generation_prompt=False, continue_final_message=True)
        assert shown == HEAD + sample.context + sample.question + MIDDLE + sample.prefix.strip()


def test_the_cache_is_cut_where_kvpress_cuts_it(model):
    """An unseen question follows what is compressed; a seen one is in it, and the turn's end follows."""
    for sample, encoded in drawn(model, chat=True):
        context, rest = (spelled(model, ids) for ids in cut(encoded, "agnostic"))
        assert context == HEAD + sample.context
        assert rest == sample.question + MIDDLE + sample.prefix.lstrip()
        context, rest = (spelled(model, ids) for ids in cut(encoded, "aware"))
        assert context == HEAD + sample.context + sample.question
        assert rest == MIDDLE + sample.prefix.lstrip()


def test_spans_and_scored_tokens_move_with_the_template(model):
    for sample, encoded in drawn(model, chat=True):
        held = np.asarray(encoded.context)[encoded.needed].tolist()
        assert spelled(model, held) == "".join(sample.context[a:b] for a, b in sample.spans)
        assert (encoded.scored == 0).all()


@pytest.mark.parametrize("name", ["niah", "qa_twin", "json_kv"])
def test_the_templates_tokens_count_towards_the_length(model, name):
    sizes = [length(encoded, sample.max_new) for sample, encoded in drawn(model, name, chat=True)]
    assert max(sizes) <= LENGTH
    without = [sample.context for sample, _ in drawn(model, name)]
    assert sum(map(len, without)) > sum(len(sample.context) for sample, _ in drawn(model, name, chat=True))


def test_without_chat_a_template_changes_nothing(model, tiny_folder):
    bare = load(tiny_folder)
    for (sample, ours), (other, theirs) in zip(drawn(model), drawn(bare)):
        assert sample == other
        for name, value in dataclasses.asdict(ours).items():
            np.testing.assert_array_equal(value, getattr(theirs, name))


def words(folder: Path, out: Path, *more: str) -> list[str]:
    names = ["--task", "niah,ppl_books", "--model", str(folder), "--lengths", str(LENGTH)]
    return [
        "run",
        *names,
        "--samples",
        "2",
        "--policy",
        "snapkv(8) + uniform(0.25)",
        "--out",
        str(out),
        *more,
    ]


def test_rows_say_how_the_model_was_asked_and_one_folder_has_one_way(chat_folder, tmp_path, capsys):
    turns, bare = tmp_path / "turns", tmp_path / "bare"
    assert main(words(chat_folder, turns)) == 0
    assert main(words(chat_folder, bare, "--raw")) == 0
    ways = [{(row.cell.task, row.cell.prompt) for row in store.read(folder)} for folder in (turns, bare)]
    # A text that goes on has no turns.
    assert ways == [{("niah", "chat"), ("ppl_books", "raw")}, {("niah", "raw"), ("ppl_books", "raw")}]
    first, second = ({row.cell.task: row.nll for row in store.read(folder)} for folder in (turns, bare))
    assert first["ppl_books"] == second["ppl_books"]
    assert first["niah"] != second["niah"]
    pieces = next(row.example.pieces for row in store.read(turns) if row.cell.task == "niah")
    assert "".join(pieces).startswith("[user]")
    assert main(words(chat_folder, turns)) == 0  # nothing is left to do
    capsys.readouterr()
    assert main(words(chat_folder, turns, "--raw")) == 2
    error = capsys.readouterr().err
    assert "asked through the chat template" in error
    assert "another --out" in error


def test_rows_without_a_template_are_those_of_before(finished):
    for row in store.read(finished):
        assert row.cell.prompt == "raw"
        assert "prompt" not in as_json(row)["cell"]


@pytest.mark.parametrize(
    "template", ["nothing of it", "{% for m in messages %}{{ m['content'] }}{{ m['content'] }}{% endfor %}"]
)
def test_a_template_without_the_two_turns_is_refused(chat_folder, tmp_path, capsys, template):
    folder = tmp_path / "model"
    shutil.copytree(chat_folder, folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    assert main(words(folder, tmp_path / "out")) == 2
    error = capsys.readouterr().err
    assert "--raw" in error
    assert len(error.strip().splitlines()) == 1
