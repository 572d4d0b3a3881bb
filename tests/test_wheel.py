"""The wheel alone: what it carries, and that it generates, plans and tunes away from a checkout."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MOST = 27e6
"""Bytes of the wheel."""

BUILD = "from setuptools import build_meta; print(build_meta.build_wheel({!r}))"
GENERATE = """
import kvjax
model = kvjax.load()
policies = ("full", "write_gate(window=32)", "kvp + uniform(0.5)", "topk(0.1) + phi", "duo(0.5)")
for policy in policies:
    run = kvjax.generate(model, policy, ["The old man walked slowly to the harbour."], max_new_tokens=1)
    assert len(run.tokens[0]) == 1
aggressive = kvjax.weights_for("write_gate", model, "aggressive")
print(kvjax.__file__)
"""
PLAN = "kvjax.plan --model qwen2.5-7b --policy full --context 4096 --rows 8 --tpu v5e:4x4"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built from a copy: building leaves folders behind."""
    home = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, home / name)
    for name in ("kvjax", "pallas_kernels", "benchmarks", "train", "studies"):
        shutil.copytree(ROOT / name, home / name, ignore=shutil.ignore_patterns("__pycache__"))
    built = subprocess.run(
        [sys.executable, "-c", BUILD.format(str(home / "dist"))], cwd=home, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    return next((home / "dist").glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """A folder that holds the unpacked wheel and nothing else of ours."""
    home = tmp_path_factory.mktemp("installed")
    zipfile.ZipFile(wheel).extractall(home)
    return home


def run(installed: Path, *words: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(installed)}
    return subprocess.run(
        [sys.executable, *words], cwd=installed, env=environment, capture_output=True, text=True
    )


def test_it_carries_the_library_and_one_file_for_each_learned_part(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names if not name.split("/")[0].endswith(".dist-info")}
    assert tops == {"kvjax", "pallas_kernels"}
    assert "kvjax/py.typed" in names
    assert not [name for name in names if name.endswith((".png", ".jsonl"))]
    weights = {
        name.split("weights/")[1] for name in names if name.endswith(".safetensors") and "weights/" in name
    }
    parts = ("duo", "expected_attention", "fast_kvzip", "kvp", "kvzap", "phi", "qfilter")
    parts += ("tri_attention", "trim_kv", "write_gate")
    files = {f"{part}/default.safetensors" for part in parts}
    assert weights == files | {"write_gate/aggressive.safetensors"}
    assert wheel.stat().st_size <= MOST, f"{wheel.stat().st_size / 1e6:.1f} MB"


def test_it_generates_away_from_a_checkout(installed):
    done = run(installed, "-c", GENERATE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().startswith(str(installed))


@pytest.mark.parametrize("command", ["kvjax.tune --help", "kvjax.serve --prompt Hello --max-new-tokens 1"])
def test_its_commands_run(installed, command):
    done = run(installed, "-m", *command.split())
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is not None, reason="the compiler is there")
def test_a_plan_without_the_compiler_says_how_to_get_it(installed):
    done = run(installed, "-m", *PLAN.split())
    assert done.returncode == 2
    assert "kvjax[aot]" in done.stderr


@pytest.mark.aot
def test_it_plans(installed):
    done = run(installed, "-m", *PLAN.split())
    assert done.returncode == 0, done.stderr


def test_weights_that_it_leaves_out_are_named_with_the_way_to_them(installed):
    words = ("--prompt", "Hello", "--policy", "write_gate", "--gates", "conservative")
    done = run(installed, "-m", "kvjax.serve", *words)
    assert done.returncode == 2
    assert "checkout" in done.stderr
