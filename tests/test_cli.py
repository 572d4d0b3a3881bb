"""What every command shares: outcomes become exit codes, compiled programs are kept where the user says."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvjax import cli
from kvjax.algebra import PolicyError
from kvjax.cli import InputError
from kvjax.decode import RequestError
from kvjax.models.hf_config import ModelError
from kvjax.programs import EVERY, Folder
from kvjax.weights.torch_file import TorchFileError

COMMANDS = {
    "kvjax.serve": "kvjax.serve.__main__",
    "kvjax.eval": "kvjax.eval.__main__",
    "benchmarks": "benchmarks.__main__",
    "kvjax.weights": "kvjax.weights.__main__",
    "kvjax.plan": "kvjax.plan.__main__",
    "kvjax.catalogue": "kvjax.catalogue._table",
    "kvjax.doctor": "kvjax.doctor",
}

# --- outcomes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("word", ["--pormpt", "--hel"])
def test_every_command_refuses_what_it_does_not_know(command, word, capsys):
    assert importlib.import_module(COMMANDS[command]).main([word]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.endswith(f"See python -m {command} --help.\n")
    assert err.count("\n") == 1


@pytest.mark.parametrize("kind", [InputError, PolicyError, ModelError, RequestError, TorchFileError])
def test_a_refusal_is_one_line_and_exit_code_2(kind, capsys):
    def command(words):
        raise kind(f"{words[0]} is\n  not a word.")

    assert cli.run(command, ["x"]) == 2
    assert capsys.readouterr().err == "error: x is not a word.\n"


def test_a_fault_of_ours_is_no_refusal():
    def command(words):
        raise ValueError("operands could not be broadcast together")

    with pytest.raises(ValueError, match="broadcast"):
        cli.run(command, [])


def test_ctrl_c_and_success_have_their_codes(capsys):
    def stopped(words):
        raise KeyboardInterrupt

    assert cli.run(stopped, []) == 130
    assert capsys.readouterr().err == "\n"
    assert cli.run(lambda words: None, []) == 0


@pytest.mark.parametrize("text", ["0", "-3", "1.5", "many", ""])
def test_numbers_name_the_option_the_rule_and_the_way_out(text):
    parser = cli.Parser(prog="it")
    parser.add_argument("--rows", type=cli.whole())
    with pytest.raises(InputError) as refused:
        parser.parse_args([f"--rows={text}"])
    assert str(refused.value) == f"--rows {text} is out of range. Give a whole number, 1 or more."
    assert parser.parse_args(["--rows", "7"]).rows == 7


# --- compiled programs ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "system", "folder"),
    [
        ({}, "linux", "~/.cache/kvjax/programs"),
        ({"XDG_CACHE_HOME": "/x"}, "linux", "/x/kvjax/programs"),
        ({"XDG_CACHE_HOME": "/x", "KVJAX_CACHE": "/mine"}, "linux", "/mine/programs"),
        ({}, "darwin", "~/Library/Caches/kvjax/programs"),
        ({"LOCALAPPDATA": "/local"}, "win32", "/local/kvjax/programs"),
        ({"KVJAX_CACHE": "off"}, "linux", None),
        ({"KVJAX_CACHE": "OFF", "XDG_CACHE_HOME": "/x"}, "darwin", None),
        ({"JAX_COMPILATION_CACHE_DIR": "/theirs", "KVJAX_CACHE": "/mine"}, "linux", None),
    ],
)
def test_where_programs_are_kept(environment, system, folder):
    folder_used = cli.programs_folder(environment, system)
    assert folder_used == (None if folder is None else Path(folder).expanduser())


PROGRAM = """
import jax
from kvjax import cli
def main():
    jax.jit(lambda x: x * 3 + 1)(2.0)
    print(jax.config.jax_compilation_cache_dir)
    return 0
cli.start(main)
"""


def started(cache: Path | str, *command: str, **more: str) -> subprocess.CompletedProcess:
    """A process of its own, whose user has said nothing of caches but ``cache``."""
    environment = {name: value for name, value in os.environ.items() if "CACHE" not in name}
    environment |= {"KVJAX_CACHE": str(cache)} | more
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment)


def test_the_second_start_fetches_what_the_first_compiled(tmp_path):
    first = started(tmp_path, "-c", PROGRAM)
    assert (first.returncode, first.stderr) == (0, "")
    kept = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "programs").iterdir()}
    assert any(name.startswith("jit_") for name in kept), "a program of a millisecond is kept, too"
    watched = "import logging; logging.basicConfig(level=logging.DEBUG)\n" + PROGRAM
    again = started(tmp_path, "-c", watched)
    assert "Persistent compilation cache hit for 'jit__lambda'" in again.stderr
    assert kept == {file.name: file.stat().st_mtime_ns for file in (tmp_path / "programs").iterdir()}


def test_the_folder_of_programs_stays_below_its_limit(tmp_path):
    """The least recently used go, until three quarters of the limit are left; a read counts as a use."""
    for age, name in enumerate("abcdefgh"):
        (tmp_path / name).write_bytes(bytes(100))
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    os.utime(tmp_path / "h", (2000, 993))  # written first, read last
    assert Folder(tmp_path, 800).bound() == 800
    assert Folder(tmp_path, 799).bound() == 500
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a", "b", "c", "d", "h"]
    folder = Folder(tmp_path, 300)
    for _ in range(EVERY - 1):
        folder.on_event("/jax/compilation_cache/cache_misses")
    assert len(list(tmp_path.iterdir())) == 5
    folder.on_event("/jax/compilation_cache/cache_misses")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a", "h"]


@pytest.mark.parametrize(
    ("text", "size"), [("", cli.PROGRAMS), ("64KiB", 2**16), ("3 GiB", 3 * 2**30), ("64", None), ("x", None)]
)
def test_the_limit_is_the_users(text, size):
    if size is None:
        with pytest.raises(cli.InputError, match=f"KVJAX_CACHE_SIZE={text} is not a size"):
            cli.programs_size({"KVJAX_CACHE_SIZE": text})
    else:
        assert cli.programs_size({"KVJAX_CACHE_SIZE": text}) == size


def test_a_command_bounds_what_it_keeps(tmp_path):
    """Files of earlier runs are more than the limit; what this run compiles comes after them and stays."""
    (tmp_path / "programs").mkdir()
    for name in ("old-cache", "older-cache"):
        (tmp_path / "programs" / name).write_bytes(bytes(80_000))
    os.utime(tmp_path / "programs" / "older-cache", (1000, 1000))
    done = started(tmp_path, "-c", PROGRAM, KVJAX_CACHE_SIZE="128KiB")
    assert (done.returncode, done.stderr) == (0, "")
    names = {file.name for file in (tmp_path / "programs").iterdir()}
    assert "old-cache" in names
    assert "older-cache" not in names
    assert any(name.startswith("jit_") for name in names)


def test_off_keeps_nothing_and_a_folder_of_jax_is_the_users(tmp_path):
    off = started("off", "-c", PROGRAM, XDG_CACHE_HOME=str(tmp_path))
    assert (off.stdout.strip(), off.stderr, list(tmp_path.iterdir())) == ("None", "", [])
    theirs = str(tmp_path / "theirs")
    own = started(tmp_path / "ours", "-c", PROGRAM, JAX_COMPILATION_CACHE_DIR=theirs)
    assert own.stdout.strip() == theirs
    assert not (tmp_path / "ours").exists()


def test_a_folder_that_cannot_be_written_is_told_once(tmp_path):
    (tmp_path / "file").write_text("in the way")
    done = started(tmp_path / "file" / "cache", "-c", PROGRAM)
    assert (done.returncode, done.stdout.strip()) == (0, "None")
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("note: compiled programs are not kept (")
    assert "KVJAX_CACHE=off" in done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_keeps_its_programs(tmp_path, command):
    done = started(tmp_path, "-m", command, "--pormpt")
    assert done.returncode == 2
    assert (tmp_path / "programs").is_dir()
