"""Rows in the chat template: whole rows, what is asked and answered in them, and the teacher read once."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest
from gates_tiny import config_at, records, written

from kvjax import load
from kvjax.eval.tasks.words import held_out_word
from kvjax.text import Text
from train import chat_rows, distill, gate_settings, gates, kept_states
from train.config import ConfigError
from train.rows import ANSWER

CHATML = (
    "{% for m in messages %}{{ '[' + m.role + '] ' + m.content + '[end]' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant] ' }}{% endif %}"
)
CHAT = {"kind": "chat", "tokens": 512, "lengths": [256], "shares": [1], "mix": {"facts": 3, "books": 1}}
LONG = 1600
"""Tokens of a row, which are bytes."""
CHECK = {"lengths": [256], "rows": 2}


def write(folder, name, text):
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(gzip.compress(text.encode()))


@pytest.fixture
def pack(tmp_path, monkeypatch):
    """A data pack of a few lines."""
    folder = tmp_path / "pack"
    book = (
        "The old house stood by the river. Nobody came there in winter. The garden was wide and still. " * 300
    )
    write(folder, "books/train/a.txt.gz", book)
    write(folder, "books/heldout/b.txt.gz", book.replace("river", "sea"))
    write(folder, f"books/heldout/{chat_rows.text.ESSAYS}.txt.gz", " " * 25_305 + book)
    words = [
        a + b
        for a in ("stone", "apple", "water", "maple", "tiger")
        for b in ("bay", "den", "hill", "ton", "field")
    ]
    write(folder, "wordlists/common_words.txt.gz", "\n".join(words))
    lines = [
        {"question": f"What is {i} + 1?", "answer": f"It is <<{i}+1>>{i + 1}.\n#### {i + 1}"}
        for i in range(60)
    ]
    write(folder, "gsm8k/train.jsonl.gz", "\n".join(map(json.dumps, lines)))
    story = "1 Mary went to the {}.\n2 Where is Mary?\t{}\t1\n"
    told = "".join(story.format(place, place) for place in ("garden", "office", "kitchen") * 20)
    write(folder, "babi/en-10k/qa1_single-supporting-fact_train.txt.gz", told)
    pairs = "".join(f"please do thing {i} of {n},intent_{n}\n" for n in range(12) for i in range(8))
    write(folder, "icl/banking77_train.csv.gz", "text,category\n" + pairs)
    monkeypatch.setenv("KVJAX_DATA", str(folder))
    return folder


@pytest.fixture
def text(tiny_folder):
    """The tiny model's bytes with a template."""
    plain = load(tiny_folder).text
    return Text(plain.tokenizer, bos=256, eos=(257,), template=CHATML)


@pytest.mark.parametrize("kind", sorted(chat_rows.KINDS))
def test_a_row_has_the_length_asked_for_and_takes_turns(kind, text, pack):
    train, held = chat_rows.material(text, None, seed=0)
    for own in (train, held):
        for seed in range(8):
            row = chat_rows.KINDS[kind](np.random.default_rng(seed), own, LONG)
            if row is None:
                continue
            ids, weight = row
            assert ids.shape == weight.shape == (LONG,)
            shown = text.tokenizer.decode(ids.tolist(), skip_special_tokens=False)
            assert shown.startswith("[user] ")
            assert "[end][assistant] " in shown
            answers = text.tokenizer.decode(ids[weight >= ANSWER].tolist())
            if kind in ("facts", "stories", "labels"):
                assert shown.split("[assistant] ")[1].split("[end]")[0] in answers != ""
            else:
                assert answers == ""
        assert row is not None or (kind == "labels" and own is held)  # five messages fill no row


def test_what_is_asked_stands_in_the_text(text, pack):
    train, _ = chat_rows.material(text, None, seed=0)
    for seed in range(5):
        ids, _ = chat_rows.facts(np.random.default_rng(seed), train, LONG)
        shown = text.tokenizer.decode(ids.tolist())
        body, *exchanges = shown.split("[assistant] ")
        assert all(answer.split("[end]")[0] in body for answer in exchanges)
        ids, weight = chat_rows.stories(np.random.default_rng(seed), train, LONG)
        shown, answer = (
            text.tokenizer.decode(ids.tolist()),
            text.tokenizer.decode(ids[weight >= ANSWER].tolist()),
        )
        assert f"Mary went to the {answer.lower()}." in shown
    _, ids, _ = chat_rows.draw(np.random.default_rng(0), train, LONG, {"problems": 1.0})
    shown = text.tokenizer.decode(ids.tolist())
    assert "<<" not in shown
    assert "The answer is" in shown


def test_checks_have_examples_and_words_of_their_own(text, pack):
    train, held = chat_rows.material(text, None, seed=0)
    for name in ("stories", "problems"):
        assert len(getattr(held, name)) == 3
        assert len(getattr(train, name)) == 57
    intents = {intent for own in (train, held) for pairs in own.labelled for _, intent in pairs}
    assert intents
    assert not any(held_out_word(intent) for intent in intents), "evaluation's intents"
    words = [{*own.source.short, *own.source.long} for own in (train, held)]
    assert not words[0] & words[1]
    assert "sea" in text.tokenizer.decode(held.source.text[:200].tolist())


def test_kinds_without_files_are_left_out_and_some_kind_must_stay(text, monkeypatch, capsys):
    monkeypatch.setenv("KVJAX_DATA", "/nowhere")
    train, _ = chat_rows.material(text, None, seed=0)
    assert chat_rows.shares({"facts": 1, "labels": 2}, train, "data.mix") == {"facts": 1.0}
    assert "no files for rows of labels" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="needs files of KVJAX_DATA"):
        chat_rows.shares({"stories": 1}, train, "data.mix")
    with pytest.raises(ConfigError, match="names others than facts, stories"):
        chat_rows.shares({"needles": 1}, train, "data.mix")
    with pytest.raises(ConfigError, match="too short"):
        chat_rows.draw(np.random.default_rng(0), train, 30, {"facts": 1.0})


def test_the_teacher_is_read_once_for_all_lambdas_and_changes_nothing(
    tmp_path, tiny_folder, monkeypatch, capsys
):
    monkeypatch.setenv("KVJAX_DATA", "/nowhere")
    plan = {"steps": 3, "check_every": 3, "check_first": True}
    kept = config_at(tmp_path / "kept", tiny_folder, data=CHAT, check=CHECK, plan=plan, keep_teacher=True)
    plain = config_at(tmp_path / "plain", tiny_folder, data=CHAT, check=CHECK, plan=plan)
    for config, folder in ((kept, tmp_path / "kept"), (plain, tmp_path / "plain")):
        assert gates.main(["--config", str(written(folder, config))]) == 0
    for one, other in zip(records(tmp_path / "kept"), records(tmp_path / "plain"), strict=True):
        assert one == pytest.approx(other, rel=1e-4)
    assert [r["step"] for r in records(tmp_path / "kept")] == [0, 1, 2, 3, 3]
    made = []
    real = distill.teacher_states
    monkeypatch.setattr(distill, "teacher_states", lambda *x: made.append(x[2].shape) or real(*x))
    assert gates.main(["--config", str(tmp_path / "kept" / "config.yaml"), "--strength", "none"]) == 0
    assert (2, 256) not in made, "a batch's teacher was made again"
    files = sorted(file.name for file in (tmp_path / "kept/run" / kept_states.TEACHER).iterdir())
    assert files == ["00000.npy", "00001.npy", "00002.npy", "about.json"]
    other = written(tmp_path / "kept", kept | {"seed": 1})
    assert gates.main(["--config", str(other), "--strength", "none"]) == 2
    assert "another seed" in capsys.readouterr().err


def test_the_model_is_an_option_and_files_may_be_float16(tmp_path, tiny_folder, monkeypatch):
    from safetensors.numpy import load_file

    monkeypatch.setenv("KVJAX_DATA", "/nowhere")
    config = config_at(tmp_path, "/no/such/model", data=CHAT, check=CHECK, plan={"steps": 1})
    path, file = written(tmp_path, config), tmp_path / "gates.safetensors"
    assert gates.main(["--config", str(path), "--model", str(tiny_folder)]) == 0
    words = [
        "--config",
        str(path),
        "--model",
        str(tiny_folder),
        "--export",
        str(file),
        "--export-dtype",
        "float16",
    ]
    assert gates.main(words) == 0
    assert load_file(file)["admission.0.w1"].dtype == np.float16
    assert gate_settings.read(path, source="elsewhere").source == "elsewhere"
