"""A method is one file: dropped into somebody else's package it is found, served, judged and measured.

The package is made in a temporary folder, with an entry point as an installed one has it; no other file
changes.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvjax
from benchmarks import profile
from kvjax import catalogue
from kvjax.algebra import PolicyError
from kvjax.catalogue import _discovery, _table
from kvjax.eval.__main__ import main as evaluate
from kvjax.eval.measure import store
from kvjax.eval.report import table
from kvjax.serve.arguments import parse

ROOT = Path(__file__).parents[1]

METHOD = '''"""Striped: every third token is worth more than its neighbours, and deep layers get less.

A toy, to show what one file is enough for. https://example.org/striped
"""

import dataclasses

import jax.numpy as jnp

from kvjax.algebra import Budget, Eviction, Number, Policy, Whole


@dataclasses.dataclass(frozen=True, repr=False)
class Striped(Eviction):
    """Score = 1 for positions that ``every`` divides."""

    name = "striped"
    keeps = ("mark",)
    needs = frozenset({"k"})
    arguments = {"every": Whole(1, "distance")}
    traced = ("every",)
    every: int = 3

    def arrive(self, params, observed):
        mark = (observed.pos % self.every == 0)[:, None, :].astype(jnp.float32)
        return {"mark": jnp.broadcast_to(mark, observed.k.shape[:3])}

    def score(self, params, slots):
        return slots.meta["mark"]


@dataclasses.dataclass(frozen=True, repr=False)
class Halving(Budget):
    """Each layer may keep half of what the one below it keeps."""

    name = "halving"
    arguments = {"first": Number(0, 1, open="low")}
    traced = ("first",)
    first: float = 0.5

    def targets(self, frame, length, scores):
        """The share of the first layer, halved once a layer."""
        share = self.first * 0.5 ** jnp.asarray(frame.layer, jnp.float32)
        return jnp.maximum(jnp.floor(share * length), 1).astype(jnp.int32)[:, None]


PRESETS = {"toy": "striped + halving"}

EXAMPLES = (Policy(eviction=Striped(), budget=Halving(0.75), sinks=2),)
'''

WORDS = "striped(3) + halving(0.6) + sinks(2)"


def forget() -> None:
    """Discovery looks again."""
    for value in vars(_discovery).values():
        if isinstance(value, functools._lru_cache_wrapper):
            value.cache_clear()


def install(folder: Path, points: str) -> None:
    """What pip leaves of a package with a module ``toy_methods.striped``."""
    (folder / "toy_methods").mkdir()
    (folder / "toy_methods/__init__.py").write_text("")
    (folder / "toy_methods/striped.py").write_text(METHOD)
    info = folder / "toy_methods-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-methods\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{_discovery.GROUP}]\n{points}\n")


@pytest.fixture(scope="module")
def dropped(tmp_path_factory) -> Iterator[Path]:
    """The folder that holds the package, while it is on the path."""
    folder = tmp_path_factory.mktemp("site")
    install(folder, "striped = toy_methods.striped")
    sys.path.insert(0, str(folder))
    forget()
    yield folder
    sys.path.remove(str(folder))
    for name in [name for name in sys.modules if name.startswith("toy_methods")]:
        del sys.modules[name]
    forget()


def test_it_is_found_and_parses_back(dropped):
    policy = kvjax.policy(WORDS)
    assert repr(policy) == WORDS
    assert kvjax.policy("toy") == kvjax.policy("striped + halving")
    assert "striped" in {method.name for method in catalogue.methods()}
    with pytest.raises(PolicyError, match=r"striped\(True\): every=True is not a valid distance"):
        kvjax.policy("striped(True) + halving")


def test_it_is_in_the_help_and_understood(dropped, capsys):
    with pytest.raises(SystemExit):
        parse(["--help"])
    out = capsys.readouterr().out
    assert "striped + halving" in out
    assert "striped" in out.split("eviction:")[1].split("selection:")[0]
    assert parse(["--policy", "toy", "--prompt", "x"]).policy == kvjax.policy("toy")


def test_it_has_a_row_in_the_table(dropped):
    says = METHOD.partition("\n")[0].removeprefix('"""')
    row = f"| `striped` | {says} [Paper](https://example.org/striped) | eviction | `toy` |"
    assert row in _table.table()


@pytest.mark.slow
def test_it_obeys_the_conformance_laws(dropped):
    words = ["-q", "-p", "no:cacheprovider", "-o", "addopts=", "-k", "striped", "tests/test_conformance.py"]
    path = os.pathsep.join([str(dropped), str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    passed = int(done.stdout.rsplit(" passed", 1)[0].split()[-1])
    assert passed >= 8, "the laws that hold of every policy"


@pytest.mark.slow
def test_it_is_evaluated_and_its_points_are_one_curve(dropped, tiny_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("KVJAX_DATA", str(tmp_path / "none"))
    words = ["run", "--task", "niah", "--model", str(tiny_folder), "--lengths", "256", "--samples", "2"]
    words += ["--policy", "striped + halving(0.4)", "--policy", "striped + halving(0.8)"]
    assert evaluate([*words, "--out", str(tmp_path / "out"), "--no-progress"]) == 0
    rows = [row for row in store.read(tmp_path / "out") if row.cell.policy != "full"]
    assert {row.policy["family"] for row in rows} == {"striped(3) + halving(…)"}
    assert rows[0].kept_fraction < rows[1].kept_fraction
    assert rows[0].policy["size"] == {"first": {"number": 0.4, "unit": "ratio"}}
    assert len({table.family(row) for row in rows}) == 1, "a curve of figures.against_bytes is a family"


def test_it_is_benchmarked(dropped):
    assert "toy" in profile.shipped()


def test_a_module_that_cannot_be_imported_is_named(tmp_path, monkeypatch):
    install(tmp_path, "broken = toy_methods.nowhere")
    monkeypatch.syspath_prepend(str(tmp_path))
    forget()
    with pytest.raises(
        PolicyError, match=r"broken = toy_methods.nowhere of 'kvjax.methods' cannot be imported"
    ):
        catalogue.parts()
    monkeypatch.undo()
    forget()
    assert "snapkv" in catalogue.parts()
