"""The script behind the release checklist, on the one stack that runs these tests."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import sys
from pathlib import Path

import matrix
import matrix_parts
import pytest

HERE = f"{sys.version_info[0]}.{sys.version_info[1]}"


def test_an_absent_interpreter_is_named_and_fails_the_table(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    assert matrix.main(["--only", "S12", "--home", str(tmp_path / "made")]) == 1
    said = capsys.readouterr()
    assert "there is no Python 3.12: not on the search path, nor among pyenv's" in said.err
    assert said.out.splitlines()[1].split()[:2] == ["S12", "FAILED"]


def test_an_interpreter_that_answers_is_found(tmp_path, monkeypatch):
    shim = tmp_path / f"python{HERE}"
    shim.write_text("#!/bin/sh\nexit 127\n")  # pyenv leaves such shims for versions that are not switched on
    shim.chmod(0o755)
    good = tmp_path / "versions" / f"{HERE}.1" / "bin" / "python"
    good.parent.mkdir(parents=True)
    good.write_text(f"#!/bin/sh\necho Python {HERE}.1\n")
    good.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    assert matrix.interpreter(HERE) == good


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--env", "S99=python"], "'S99=python' names no stack. Write one of S07, S10, S12"),
        (["--env", "S07=/nowhere/python"], "/nowhere/python is not a program"),
        (["--only", "S10", "--env", f"S07={sys.executable}"], "--only leaves out one of them"),
    ],
)
def test_a_command_line_without_sense_ends_with_2(words, said, capsys):
    try:
        code = matrix.main(words)
    except SystemExit as end:  # argparse's way
        code = end.code
    assert code == 2
    assert said in capsys.readouterr().err


def test_pins_are_compared_with_what_is_installed():
    stack = matrix.Stack(
        HERE, {name: importlib.metadata.version(name) for name in ("jax", "orbax-checkpoint")}
    )
    matrix._check_pins(Path(sys.executable), stack)
    other = dataclasses.replace(stack, pins=stack.pins | {"jax": "0.0.1"})
    with pytest.raises(matrix.StackError, match="jax is .*, not 0.0.1"):
        matrix._check_pins(Path(sys.executable), other)


def test_a_package_that_would_be_replaced_fails_a_stack():
    matrix._check_moved([])
    with pytest.raises(matrix.StackError, match="replaces what the stack ships: jax 0.7.2 to 0.10.2"):
        matrix._check_moved(["jax 0.7.2 to 0.10.2"])


@pytest.mark.slow  # the script itself does it on three stacks
def test_this_stack_generates(tmp_path):
    matrix_parts.generate(tmp_path)


@pytest.mark.slow
def test_this_stack_trains_saves_and_loads(tmp_path, monkeypatch):
    monkeypatch.setenv("KVJAX_DATA", "/nowhere")
    for part in (matrix_parts.train, matrix_parts.save, matrix_parts.load):
        part(tmp_path)
