"""README is true: its code runs, its commands exist, its table is what discovery finds."""

from __future__ import annotations

import functools
import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import kvjax
import kvjax.policies
from kvjax import catalogue
from kvjax.catalogue import _discovery as discovery
from kvjax.catalogue import _table as table
from kvjax.serve.arguments import parse
from kvjax.serve.http import arguments as http

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
BLOCKS = [(match[1], match[2]) for match in FENCE.finditer(README)]
PROMPT = "The secret number for apple-river is 48213. What is it? The secret number for apple-river is"


def blocks(language: str) -> list[str]:
    return [text for kind, text in BLOCKS if kind == language]


@pytest.mark.parametrize("code", blocks("python")[1:])
def test_the_other_python_blocks_run(code):
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})


def test_the_example_prints_what_readme_shows(capsys):
    code = blocks("python")[0]
    shown = next(after for (kind, text), (_, after) in zip(BLOCKS, BLOCKS[1:]) if text == code)
    exec(compile(code, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    # What a cache that lost the number makes up may differ between releases of JAX; that it lost it may not.
    answer = re.compile(r"' .*'")
    for line, promised in zip(printed.splitlines(), shown.splitlines(), strict=True):
        assert answer.sub("", line) == answer.sub("", promised)
        assert ("48213" in line) == ("48213" in promised)
    assert "48213" in shown


def forget() -> None:
    """Discovery looks again."""
    for function in vars(discovery).values():
        if isinstance(function, functools._lru_cache_wrapper):
            function.cache_clear()


@pytest.fixture
def dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The method that README writes out, as one more file among the policies."""
    (where,) = re.findall(r"^`(kvjax/policies/\w+\.py)`, complete:$", README, re.MULTILINE)
    (code,) = [code for code in blocks("python") if "EXAMPLES = " in code]
    file = tmp_path / Path(where).name
    file.write_text(code, encoding="utf-8")
    monkeypatch.setattr(kvjax.policies, "__path__", [*kvjax.policies.__path__, str(tmp_path)])
    forget()
    name = f"kvjax.policies.{file.stem}"
    assert name not in sys.modules
    yield next(module for module in discovery._modules() if module.__name__ == name)
    del sys.modules[name]
    monkeypatch.undo()
    forget()


def test_the_method_in_one_file_is_found_and_answers(dropped):
    (word,) = [kind.name for kind in catalogue.parts().values() if kind.__module__ == dropped.__name__]
    assert f'--policy "{word} + uniform(0.25)"' in README
    policy = kvjax.policy(f"{word} + uniform(0.25)")
    assert kvjax.policy(repr(policy)) == policy
    assert kvjax.Policy(eviction=dropped.VATP(), budget=dropped.Uniform(0.25)) == policy
    assert parse(["--policy", f"{word} + uniform(0.25)", "--prompt", "x"])

    model = kvjax.load()
    ids = model.text.encode(PROMPT)
    full, kept = (kvjax.generate(model, p, [ids], max_new_tokens=2) for p in (kvjax.Policy(), policy))
    live = [kvjax.nbytes(run.state).total["live"] for run in (kept, full)]
    assert 0.2 * live[1] < live[0] < 0.4 * live[1]

    summary, source = catalogue.described(dropped)
    row = f"| `{word}` | {summary} [Paper]({source}) | eviction |"
    assert row in table.table()
    assert row not in README  # the file is not really there


def test_the_table_of_methods_is_what_discovery_finds():
    assert table.placed(README) == README, f"run: {table.BEGIN[14:-4]}"
    for method in ("snapkv", "ada", "int8", "window"):
        assert f"| `{method}` |" in table.table()


def test_the_idea_stands_before_the_table_in_a_thousand_words():
    before = README.partition(table.BEGIN)[0]
    assert len(before.split()) <= 1000
    first_screen = before.splitlines()[:12]
    assert any(line.startswith("![") and len(line) > 200 for line in first_screen)


def serve_commands() -> list[list[str]]:
    """The words behind ``python -m kvjax.serve`` on every command line shown."""
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    shown = [line.partition("python -m kvjax.serve")[2] for line in lines if "python -m kvjax.serve" in line]
    return [shlex.split(words) for words in shown]


def test_the_commands_shown_are_understood():
    assert len(serve_commands()) >= 4
    for words in serve_commands():
        http.parse(words[1:]) if words[:1] == ["http"] else parse(words)


def test_the_set_up_is_two_complete_lines():
    lines = blocks("bash")[0].splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("pip install -e . && python -m kvjax.serve ")
    assert lines[1] == "pip install -e '.[test]' && pytest"


PAGES = (
    "README.md",
    "notebooks/README.md",
    "results/README.md",
    "results/bench/README.md",
    "results/bench/SPEED.md",
)


@pytest.mark.parametrize("page", PAGES)
def test_links_to_files_lead_somewhere(page):
    file = ROOT / page
    text = file.read_text(encoding="utf-8")
    targets = [t for t in re.findall(r"\]\(([^)#\s]+)", text) if not t.startswith("http")]
    assert targets
    assert [t for t in targets if not (file.parent / t).exists()] == []


def test_the_figures_of_the_quickstart_are_those_of_the_executed_notebook():
    output = json.loads((ROOT / "notebooks/quickstart.ipynb").read_text(encoding="utf-8"))
    printed = "".join(
        line for cell in output["cells"] for part in cell.get("outputs", ()) for line in part.get("text", ())
    )
    ran = re.findall(
        r"^(\S.*?) +' (\d+)[^']*' +live +([\d,]+) +allocated +([\d,]+) bytes$", printed, re.MULTILINE
    )
    assert len(ran) == 6
    table = (ROOT / "results/README.md").read_text(encoding="utf-8")
    for spec, answer, live, allocated in ran:
        assert f"| `{spec}` | {answer} | {live} | {allocated} |" in table
