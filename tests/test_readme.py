"""README is true: its code runs, its commands exist, its table is what discovery finds."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from tiny import quick_compiles  # noqa: F401

from kvjax import catalogue
from kvjax.serve.arguments import parse

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
BLOCKS = [(match[1], match[2]) for match in FENCE.finditer(README)]


def blocks(language: str) -> list[str]:
    return [text for kind, text in BLOCKS if kind == language]


@pytest.mark.parametrize("code", blocks("python")[1:])
def test_the_other_python_blocks_run(code):
    exec(compile(code, "README.md", "exec"), {})


def test_the_example_prints_what_readme_shows(capsys):
    code = blocks("python")[0]
    shown = next(after for (kind, text), (_, after) in zip(BLOCKS, BLOCKS[1:]) if text == code)
    exec(compile(code, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    # What a cache that lost the number makes up may differ between releases of JAX; that it lost it may not.
    answer = re.compile(r"' (\d+)'")
    for line, promised in zip(printed.splitlines(), shown.splitlines(), strict=True):
        assert answer.sub("", line) == answer.sub("", promised)
        assert ("48213" in line) == ("48213" in promised)
    assert "48213" in shown


def test_the_table_of_methods_is_what_discovery_finds():
    assert catalogue.placed(README) == README, f"run: {catalogue.BEGIN[14:-4]}"
    for method in ("snapkv", "ada", "int8", "window"):
        assert f"| `{method}` |" in catalogue.table()


def serve_commands() -> list[list[str]]:
    """The words behind ``python -m kvjax.serve`` on every command line shown."""
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    shown = [line.partition("python -m kvjax.serve")[2] for line in lines if "python -m kvjax.serve" in line]
    return [shlex.split(words) for words in shown]


def test_the_commands_shown_are_understood():
    assert len(serve_commands()) >= 4
    for words in serve_commands():
        parse(words)


def test_the_set_up_is_two_complete_lines():
    lines = blocks("bash")[0].splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("pip install -e . && python -m kvjax.serve ")
    assert lines[1] == "pip install -e '.[test]' && pytest"


def test_links_to_files_lead_somewhere():
    targets = [t for t in re.findall(r"\]\(([^)#]+)\)", README) if not t.startswith("http")]
    assert targets
    assert [t for t in targets if not (ROOT / t).exists()] == []
