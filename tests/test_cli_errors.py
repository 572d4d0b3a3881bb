"""Bad input: one sentence that names the call, the rule and the way out; exit code 2, nothing printed."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kvjax
from kvjax.decode import RequestError
from kvjax.serve.__main__ import main


@pytest.fixture
def refused(capsys):
    """Runs the command, checks how it fails, and gives the message."""

    def call(*words: str) -> str:
        code = main(list(words))
        out, err = capsys.readouterr()
        assert code == 2
        assert out == ""
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        assert "Traceback" not in err
        return err

    return call


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--policy", "snapkw"], ["policy('snapkw')", "no 'snapkw'", "Did you mean 'snapkv'?"]),
        (["--policy", "snapkv(windw=3)"], ["snapkv", "'windw'", "Its arguments: window"]),
        (["--policy", "snapkv("], ["policy('snapkv(')", "Write a sum"]),
        (["--policy", "knorm + uniform([1])"], ["uniform([1])", "Give tokens"]),
        (["--policy", "snapkv + ada(9, floor=[1])"], ["ada", "is not a valid share", "Give a number"]),
        (["--policy", "knorm + uniform(8, every())"], ["every()", "Use numbers"]),
        (["--policy", "window(8) + window(9)"], ["admission twice", "Keep one"]),
        (
            ["--policy", "knorm + uniform(10) + sinks(4) + recent(8)"],
            ["10 slots", "12 protected", "at least 12"],
        ),
        (["--policy", "window(16) + int8(128)"], ["window(16)", "int8", "Protect at most 16"]),
        (["--temperature", "-1"], ["--temperature -1", "Give 0 (greedy) or more"]),
        (["--temperature", "inf"], ["--temperature inf", "Give 0"]),
        (["--temperature", "warm"], ["--temperature warm", "Give 0"]),
        (["--max-new-tokens", "0"], ["--max-new-tokens 0", "1 or more"]),
        (["--max-new-tokens", "1.5"], ["--max-new-tokens 1.5", "whole number"]),
        (["--top-k", "-3"], ["--top-k -3", "0 (all) or more"]),
        (["--top-p", "0"], ["--top-p 0", "at most 1"]),
        (["--top-p", "nan"], ["--top-p nan", "at most 1"]),
        (["--seed", "4294967296"], ["--seed 4294967296", "2**32 - 1"]),
        (["--chunk", "0"], ["--chunk 0", "1 or more"]),
        (["--dtype", "int4"], ["--dtype", "'int4'", "float32"]),
        (["--pormpt", "x"], ["--pormpt", "--help"]),
        (["--prompt-file", "x"], ["--prompt-file", "--prompt", "--help"]),
        (["http", "--prompt", "x"], ["--prompt", "python -m kvjax.serve http --help"]),
        (["http", "--port", "x"], ["--port x", "0 (any that is free) to 65535"]),
        (["--prompt", ""], ["--prompt is empty", "Give at least one character"]),
    ],
)
def test_words_are_refused_before_a_model_is_read(refused, words, says):
    start = [] if words[0] in ("http", "--prompt") else ["--prompt", "x", "--model", "/nowhere"]
    message = refused(*words, *start) if words[0] == "http" else refused(*start, *words)
    for part in says:
        assert part in message


def test_a_bad_policy_is_named_before_an_empty_input(refused, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    assert "policy('snapkw')" in refused("--policy", "snapkw")
    assert "uniform(2) leaves a KV head 2 slots" in refused("--policy", "snapkv + uniform(2)", "--json")
    assert "standard input is empty" in refused("--policy", "snapkv")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, ["cannot be read", "No such file", "Give a text file"]),
        (b"", ["is empty", "Give at least"]),
        (b"caf\xe9 au lait", ["not UTF-8", "byte 3", "Convert it"]),
    ],
)
def test_prompt_files(refused, tmp_path, content, says):
    file = tmp_path / "prompt.txt"
    if content is not None:
        file.write_bytes(content)
    message = refused("--prompt-file", str(file))
    for part in [f"--prompt-file {file}", *says]:
        assert part in message


def test_a_prompt_longer_than_the_model_allows(refused, tiny_folder):
    message = refused("--model", str(tiny_folder), "--prompt", "x" * 512)
    assert "--prompt has 513 tokens" in message
    assert "trained for 512" in message
    assert "Shorten it" in message


def test_prompt_and_answer_longer_than_the_model_allows(refused, tiny_folder):
    message = refused("--model", str(tiny_folder), "--prompt", "x" * 500, "--max-new-tokens", "12")
    assert "--max-new-tokens 12 after 501 prompt tokens" in message
    assert "at most 11" in message


# --- folders -------------------------------------------------------------------------------------


def cut(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])


def rot(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(b"\xff" * 64 + weights.read_bytes()[64:])


def empty(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def forget(name: str):
    return lambda folder: (folder / name).unlink()


def break_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "qwen2", ')


def other_family(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "mamba"}
    (folder / "config.json").write_text(json.dumps(config))


def more_layers(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 3}
    config.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(config))


def break_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (cut, ["model.safetensors", "not a whole safetensors file"]),
        (rot, ["model.safetensors", "not a whole safetensors file"]),
        (empty, ["model.safetensors", "not a whole safetensors file"]),
        (forget("model.safetensors"), ["holds neither model.safetensors nor"]),
        (forget("config.json"), ["holds no config.json", "no model in HF format"]),
        (forget("tokenizer.json"), ["no tokenizer.json"]),
        (break_config, ["config.json is not readable JSON"]),
        (other_family, ["'mamba'", "llama, qwen2"]),
        (more_layers, ["model.layers.2.self_attn.q_proj.weight is missing"]),
        (break_tokenizer, ["tokenizer.json is not a readable tokenizer"]),
    ],
)
def test_spoilt_model_folders(refused, tiny_folder, tmp_path, spoil, says):
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    spoil(folder)
    before = sorted(tmp_path.rglob("*"))
    message = refused("--model", str(folder), "--prompt", "x")
    for part in [str(folder), *says]:
        assert part in message
    assert sorted(tmp_path.rglob("*")) == before, "something was written"


@pytest.mark.parametrize("name", ["/nowhere/at/all", "../nowhere", "no spaces here", "x" * 5000])
def test_models_that_are_nowhere(refused, name):
    assert name in refused("--model", name, "--prompt", "x")


def test_a_file_is_no_model(refused, tmp_path):
    file = tmp_path / "weights.bin"
    file.write_bytes(b"x")
    assert "the folder that holds config.json" in refused("--model", str(file), "--prompt", "x")


# --- the process, and the library behind it ------------------------------------------------------


def test_the_process_exits_with_2_and_no_traceback():
    command = [sys.executable, "-m", "kvjax.serve", "--policy", "snapkv + uniform(2)"]
    done = subprocess.run(command, input="some text", capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: uniform(2) leaves a KV head 2 slots")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("prompts", "says"),
    [
        ([], "no row"),
        ([[]], "row 0 is empty"),
        ([[1, 2], []], "row 1 is empty"),
        ([[1], [1] * 513], "row 1 has 513 tokens"),
    ],
)
def test_rows_the_library_refuses(tiny_folder, prompts, says):
    model = kvjax.load(tiny_folder)
    with pytest.raises(RequestError, match=says):
        kvjax.prefill(model, kvjax.policy("full"), prompts)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_new_tokens": 0}, r"max_new_tokens=0"),
        ({"max_new_tokens": 512}, r"exceeds the model's 512 positions"),
        ({"chunk_size": 0}, r"chunk_size=0"),
        ({"temperature": -1.0}, r"temperature=.*out of range"),
        ({"top_p": 0.0}, r"top_p=.*out of range"),
    ],
)
def test_numbers_the_library_refuses(tiny_folder, options, says):
    model = kvjax.load(tiny_folder)
    with pytest.raises(ValueError, match=says):
        kvjax.generate(model, kvjax.policy("full"), [[1, 2, 3]], **options)
