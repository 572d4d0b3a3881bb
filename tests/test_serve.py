"""``python -m kvjax.serve``: what it prints is what the library computes."""

from __future__ import annotations

import io
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from tiny import by_layer  # noqa: F401

import kvjax
from kvjax import catalogue, metrics, timing
from kvjax.serve.__main__ import main
from kvjax.serve.answer import format_bytes, timings
from kvjax.serve.arguments import parse
from kvjax.serve.chat import chat
from kvjax.serve.command import run

PROMPT = "The quick brown fox jumps over the lazy dog. " * 3
NEW = 12

FACTS = re.compile(
    r"\[(\d+) tokens after (\d+)(?: \((\d+) read before\))?(, \d+ tokens/s)?; "
    r"first token [\d.]+ s \(compiling [\d.]+ s in all\); "
    r"KV cache [\d.]+ [KMG]?i?B live, [\d.]+ [KMG]?i?B allocated, [\d.]+ [KMG]?i?B if full\]"
)


@pytest.fixture
def say(tiny_folder, capsys):
    """Runs the command in this process: (exit code, standard output, standard error)."""

    def call(*words: str) -> tuple[int, str, str]:
        code = main(["--model", str(tiny_folder), "--max-new-tokens", str(NEW), *words])
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def stdin(monkeypatch):
    """Puts bytes into standard input."""

    def put(content: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))

    return put


def generated(folder: Path, policy: str, prompt: str) -> tuple[str, list[int], kvjax.KVState]:
    """The library's own answer."""
    model = kvjax.load(folder)
    ids = model.text.encode(prompt)
    generation = kvjax.generate(model, kvjax.policy(policy), [ids], max_new_tokens=NEW, stops=model.spec.eos)
    return model.text.decode(generation.tokens[0]), generation.tokens[0], generation.state


def test_text_on_stdout_and_one_line_of_facts_on_stderr(say, tiny_folder):
    code, out, err = say("--prompt", PROMPT)
    text, tokens, _ = generated(tiny_folder, "full", PROMPT)
    assert code == 0
    assert out == text + "\n"
    facts = FACTS.fullmatch(err.strip())
    assert facts
    assert int(facts[1]) == len(tokens) == NEW
    assert int(facts[2]) == len(PROMPT) + 1  # bytes and BOS


@pytest.mark.parametrize("policy", ["full", "window(16) + sinks(4)", "knorm + uniform(0.5)"])
def test_json_holds_what_the_library_computes(say, tiny_folder, policy):
    code, out, err = say("--prompt", PROMPT, "--policy", policy, "--json")
    _, tokens, state = generated(tiny_folder, policy, PROMPT)
    got = json.loads(out)
    assert (code, err) == (0, "")
    assert set(got) == {
        "text",
        "tokens",
        "prompt_tokens",
        "timings",
        "kv_bytes",
        "policy",
        "weights",
        "model",
    }
    assert got["tokens"] == tokens
    assert kvjax.policy(got["policy"]) == kvjax.policy(policy)
    held = metrics.nbytes(state).total
    seen = len(PROMPT) + 1 + NEW - 1  # the last token was written and never fed
    full = seen * 2 * 2 * 2 * 8 * 4  # K and V, layers, KV heads, head dim, float32
    assert got["kv_bytes"] == {"live": held["live"], "allocated": held["allocated"], "full": full}
    assert 0 < got["timings"]["first_token"] <= got["timings"]["total"]


def test_a_draft_changes_no_text(say, tiny_folder):
    code, out, err = say("--prompt", PROMPT, "--draft", "quest(chunks=2)")
    assert (code, out) == (0, generated(tiny_folder, "full", PROMPT)[0] + "\n")
    assert FACTS.fullmatch(err.strip())
    drafted = json.loads(say("--prompt", PROMPT, "--draft", "quest(chunks=2)", "--json")[1])
    assert kvjax.policy(drafted["policy"]) == kvjax.policy("full + draft(quest(chunks=2))")


def test_file_and_pipe_give_the_same_answer_as_the_prompt(say, stdin, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT)
    spoken = say("--prompt", PROMPT, "--json")[1]
    read = say("--prompt-file", str(file), "--json")[1]
    stdin(PROMPT.encode())
    piped = say("--json")[1]
    texts = {json.loads(out)["text"] for out in (spoken, read, piped)}
    assert len(texts) == 1


def test_a_seed_repeats_an_answer_and_another_seed_does_not(say):
    def drawn(seed: str) -> list[int]:
        return json.loads(say("--prompt", PROMPT, "--json", "--temperature", "2", "--seed", seed)[1])[
            "tokens"
        ]

    assert drawn("5") == drawn("5") != drawn("6")


def test_chunk_changes_nothing(say):
    answers = {
        json.loads(say("--prompt", PROMPT, "--json", "--chunk", n)[1])["text"] for n in ("7", "1000000")
    }
    assert len(answers) == 1


def test_stops_at_eos_and_does_not_show_it(say, tiny_folder, tmp_path, capsys):
    _, tokens, _ = generated(tiny_folder, "full", PROMPT)
    at = max(tokens.index(token) for token in tokens)  # the last token that is new
    assert at > 0, "the answer is one token over and over"
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    for name in ("config.json", "generation_config.json"):
        config = json.loads((folder / name).read_text()) | {"eos_token_id": tokens[at]}
        (folder / name).write_text(json.dumps(config))
    assert main(["--model", str(folder), "--prompt", PROMPT, "--max-new-tokens", str(NEW), "--json"]) == 0
    got = json.loads(capsys.readouterr().out)
    assert got["tokens"] == tokens[: at + 1]
    assert got["text"] == kvjax.load(folder).text.decode(tokens[:at])


def test_without_a_number_the_answer_ends_with_the_models_context(tiny_folder, capsys):
    prompt = "x" * 480  # 481 tokens with BOS, of 512
    assert main(["--model", str(tiny_folder), "--prompt", prompt, "--json"]) == 0
    got = json.loads(capsys.readouterr().out)
    assert len(got["tokens"]) == 512 - 481


@pytest.mark.parametrize(("policy", "work"), [("full", "tokens"), ("knorm + uniform(0.5)", "layers")])
def test_progress_counts_tokens_or_layers(say, policy, work):
    err = say("--prompt", PROMPT, "--policy", policy, "--json", "--progress")[2]
    total = {"tokens": len(PROMPT) + 1, "layers": 2}[work]
    assert re.search(rf"reading: 100%.*{total}/{total}.*{work}", err)
    assert "reading" not in say("--prompt", PROMPT, "--policy", policy, "--json")[2]


def test_help_lists_every_preset_and_part(capsys):
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    out = capsys.readouterr().out
    assert left.value.code == 0
    for name in {*catalogue.PRESETS, *(kind.name for kind in catalogue.parts().values())}:
        assert re.search(rf"\b{re.escape(name)}\b", out), name


def test_the_models_own_window_is_announced(tiny_folder, tmp_path, capsys):
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}
    config["layer_types"] = ["full_attention", "sliding_attention"]
    (folder / "config.json").write_text(json.dumps(config))
    words = ["--model", str(folder), "--prompt", PROMPT, "--json", "--max-new-tokens", "2"]
    note = "note: the policy has no effect in layers with a sliding window of the model's own "
    note += "(1 of 2; layer: tokens = 1: 32)"
    for _ in range(2):  # each run says it, and once
        assert main([*words, "--policy", "window(16)"]) == 0
        assert capsys.readouterr().err.splitlines() == [f"{note}."]
    assert main(words) == 0
    assert capsys.readouterr().err == ""


def test_a_budget_below_the_window_is_a_note(say):
    err = say("--prompt", PROMPT, "--policy", "snapkv(64) + uniform(0.1)", "--json")[2]
    assert re.fullmatch(r"note: snapkv\(64\) \+ uniform\(0\.1\) leaves .* 64 protected tokens .*\n", err)


# --- a model with a chat template ------------------------------------------------------------------

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
NOTE = "note: {} is a user's turn in the model's chat template; --raw sends the bare words."


@pytest.fixture
def talks(tiny_folder, tmp_path):
    """The folder, with a chat template."""
    folder = tmp_path / "talks"
    shutil.copytree(tiny_folder, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def test_a_prompt_is_a_users_turn_where_the_model_has_a_template(talks, tiny_folder, stdin, tmp_path, capsys):
    (tmp_path / "prompt.txt").write_text(PROMPT)
    turn, bare = f"<user>{PROMPT}<assistant>", PROMPT
    ways = [
        (["--prompt", PROMPT], turn, "--prompt"),
        (["--prompt-file", str(tmp_path / "prompt.txt")], turn, f"--prompt-file {tmp_path / 'prompt.txt'}"),
        ([], turn, "standard input"),
        (["--prompt", PROMPT, "--system", "Be terse."], f"<system>Be terse.{turn}", "--prompt"),
        (["--prompt", PROMPT, "--raw"], bare, None),
    ]
    model = kvjax.load(tiny_folder)
    for words, rendered, source in ways:
        stdin(PROMPT.encode())
        assert main(["--model", str(talks), "--max-new-tokens", str(NEW), *words]) == 0
        out, err = capsys.readouterr()
        ids = model.text.encode(rendered, bos=rendered == bare)
        run = kvjax.generate(model, "full", [ids], max_new_tokens=NEW)
        assert out == model.text.decode(run.tokens[0]) + "\n"
        notes = err.splitlines()[:-1]
        assert notes == ([] if source is None else [NOTE.format(source)])


@pytest.mark.parametrize(
    ("templated", "words", "message"),
    [
        (
            True,
            ["--prompt", "x", "--system", "y", "--raw"],
            "--system needs the chat template, and --raw goes",
        ),
        (
            False,
            ["--prompt", "x", "--system", "y"],
            "--system needs a chat template, and the model .* has none",
        ),
    ],
)
def test_a_system_text_without_a_template_is_refused(templated, words, message, talks, tiny_folder, capsys):
    assert main(["--model", str(talks if templated else tiny_folder), *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(f"error: {message}.*\n", err)


def test_a_template_that_is_refused_is_one_sentence(talks, capsys):
    (talks / "chat_template.jinja").write_text("{% if %}")
    assert main(["--model", str(talks), "--prompt", "x"]) == 2
    err = capsys.readouterr().err
    assert re.fullmatch(
        r"error: --prompt: chat\(\.\.\.\) cannot read the chat template in .*chat_template.jinja .*\n", err
    )


def test_a_chat_begins_with_the_systems_text(talks, tiny_folder, capsys):
    talk(talks, ["first", "/clear", "first", EOFError], "--system", "Be terse.")
    model = kvjax.load(tiny_folder)
    ids = model.text.encode("<system>Be terse.<user>first<assistant>", bos=False)
    run = kvjax.generate(model, "full", [ids], max_new_tokens=NEW)
    said = model.text.decode(run.tokens[0])
    assert capsys.readouterr().out == f"{said}\n{said}\n\n"


# --- chat ----------------------------------------------------------------------------------------


def talk(folder: Path, lines: list[str | type], *words: str) -> None:
    """A chat in which somebody types these lines (an exception class is raised instead)."""
    left = iter(lines)

    def ask(prompt: str) -> str:
        line = next(left)
        if isinstance(line, str):
            return line
        raise line

    options = parse(["--model", str(folder), "--max-new-tokens", str(NEW), *words])
    chat(kvjax.load(folder), options, ask)
    assert list(left) == [], "the chat ended early"


@pytest.mark.slow
def test_chat_goes_on_where_the_answer_ended(tiny_folder, capsys):
    first = "x y z " * 30
    talk(tiny_folder, [first, "second", EOFError], "--chunk", "64")
    out, err = capsys.readouterr()
    one, _, _ = generated(tiny_folder, "full", first.strip())
    two, _, _ = generated(tiny_folder, "full", f"{first.strip()}\n{one}\nsecond")
    assert out == f"{one}\n{two}\n\n"
    turns = FACTS.findall(err)
    assert len(turns) == 2
    # The next turn reads no chunk of what it shares with the one before, and of its answer what is no other
    # bytes as text.
    assert turns[0][2] == ""
    assert int(turns[1][2]) >= int(turns[0][1]) // 64 * 64 == 128


@pytest.mark.slow
def test_chat_commands(tiny_folder, capsys):
    talk(tiny_folder, ["first", "/clear", "", "/nonsense", KeyboardInterrupt, "first", "/exit"])
    out, err = capsys.readouterr()
    one, _, _ = generated(tiny_folder, "full", "first")
    assert out == f"{one}\n\n{one}\n"
    assert "/nonsense is not a command. Use /clear or /exit." in err


def test_chat_survives_a_conversation_that_is_too_long(tiny_folder, capsys):
    talk(tiny_folder, ["x" * 600, "first", EOFError])
    out, err = capsys.readouterr()
    one, _, _ = generated(tiny_folder, "full", "first")
    assert "the conversation has 601 tokens" in err
    assert "/clear" in err
    assert out == f"{one}\n\n"  # the refused line is not in the history


def test_ctrl_c_stops_an_answer_and_keeps_what_was_said(tiny_folder, capsys, monkeypatch):
    class Interrupted(io.StringIO):
        """A terminal whose user presses Ctrl-C after the second piece of text."""

        pieces = 0

        def write(self, text: str) -> int:
            super().write(text)
            self.pieces += 1
            if self.pieces == 2:
                raise KeyboardInterrupt
            return len(text)

    screen = Interrupted()
    monkeypatch.setattr(sys, "stdout", screen)
    talk(tiny_folder, ["first", "second", EOFError], "--max-new-tokens", "40")
    monkeypatch.undo()
    shown, _, rest = screen.getvalue().partition(" [stopped]\n")
    whole = json_answer(tiny_folder, capsys, "first", 40)
    assert shown
    assert whole.startswith(shown)
    assert len(shown) < len(whole)
    assert rest == json_answer(tiny_folder, capsys, f"first\n{shown}\nsecond", 40) + "\n\n"


def test_ctrl_c_behind_an_answer_ends_neither_the_chat_nor_the_history(tiny_folder, capsys, monkeypatch):
    """It comes while the line of facts is printed."""

    class Interrupted(io.StringIO):
        late = True

        def write(self, text: str) -> int:
            if "tokens after" in text and self.late:
                self.late = False
                raise KeyboardInterrupt
            return len(text)

    monkeypatch.setattr(sys, "stderr", Interrupted())
    talk(tiny_folder, ["first", "second", EOFError])
    one, _, _ = generated(tiny_folder, "full", "first")
    two, _, _ = generated(tiny_folder, "full", f"first\n{one}\nsecond")
    assert capsys.readouterr().out == f"{one}\n\n{two}\n\n"


def json_answer(folder: Path, capsys, prompt: str, new: int) -> str:
    run(parse(["--model", str(folder), "--prompt", prompt, "--max-new-tokens", str(new), "--json"]))
    return json.loads(capsys.readouterr().out)["text"]


# --- facts ---------------------------------------------------------------------------------------


def test_compile_time_is_heard_and_is_part_of_the_wall_clock():
    start = timing.now()
    jax.jit(lambda x: jnp.sin(x) @ jnp.cos(x).T)(jnp.ones((3, 3)))
    middle = timing.now()
    time.sleep(0.05)
    end = timing.now()
    assert 0 < middle.compiling - start.compiling <= middle.wall - start.wall
    assert end.compiling == middle.compiling


def test_speed_leaves_out_the_first_token_and_the_compiler():
    start, first, end = timing.Moment(0, 0), timing.Moment(3, 2.5), timing.Moment(6, 4.5)
    measured = timings(start, first, end, tokens=11)
    assert measured == {"first_token": 3, "total": 6, "compile": 4.5, "tokens_per_second": 10}
    assert timings(start, first, end, tokens=1)["tokens_per_second"] is None


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (1023 * 2**10, "1023 KiB"),
        (5 * 2**30, "5 GiB"),
    ],
)
def test_sizes_read_well(count, text):
    assert format_bytes(count) == text


# --- the process ---------------------------------------------------------------------------------


def start(folder: Path, *words: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "kvjax.serve", "--model", str(folder), *words]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        # A shell's background job ignores Ctrl-C, and so would all it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL) and None,
    )


def test_the_command_streams_and_leaves_quietly_when_nobody_reads(tiny_folder):
    process = start(tiny_folder, "--prompt", "Hello", "--max-new-tokens", "400")
    assert process.stdout is not None
    assert process.stdout.read(1)  # long before the answer is complete
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    assert process.wait() in (141, 0)


def test_ctrl_c_leaves_quietly(tiny_folder):
    process = start(tiny_folder, "--prompt", "Hello", "--max-new-tokens", "400", "--progress")
    assert process.stderr is not None
    bar = process.stderr.read(1)  # the prompt's program is being compiled, or fetched
    process.send_signal(signal.SIGINT)
    err = bar + process.communicate()[1]
    assert process.returncode == 130
    assert b"Traceback" not in err
    assert b"rror" not in err
