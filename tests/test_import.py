"""``import kvjax`` touches jax and numpy only, and is quick."""

from __future__ import annotations

import os
import re
import subprocess
import sys

FORBIDDEN = ["flax", "orbax", "grain", "optax", "transformers", "torch"]
FORBIDDEN += ["tokenizers", "safetensors", "huggingface_hub", "yaml", "tqdm", "jaxtyping"]


def run(code: str, *flags: str, **variables: str) -> subprocess.CompletedProcess:
    words = [sys.executable, *flags, "-c", code]
    return subprocess.run(words, capture_output=True, text=True, check=True, env=os.environ | variables)


def test_import_loads_nothing_heavy():
    out = run("import kvjax, sys; print(*{name.split('.')[0] for name in sys.modules})").stdout
    loaded = set(out.split())
    assert {"kvjax", "jax", "numpy"} <= loaded
    assert loaded.isdisjoint(FORBIDDEN)


SERVED = """
import sys, kvjax
from kvjax.engine import Engine, Request
from kvjax.eval.__main__ import main as evaluate
from kvjax.serve.__main__ import main as serve
assert serve(["--prompt", "Hello", "--max-new-tokens", "1", "--policy", "int8"]) == 0
words = "run --task niah_single_1 --policy full --lengths 256 --samples 1 --out".split()
assert evaluate([*words, sys.argv[1]]) == 0
with Engine(kvjax.load(), max_rows=1, context=64) as engine:
    engine.submit(Request(prompt=[1, 2, 3], max_new_tokens=1)).result()
print("loaded:", *{name.split(".")[0] for name in sys.modules})
"""


def test_serving_and_evaluating_on_one_process_need_no_training_library(tmp_path):
    """flax, optax, orbax and grain serve training, states across processes and Flax models alone."""
    words = [sys.executable, "-c", SERVED, str(tmp_path / "results")]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.splitlines()[-1].split())
    assert {"kvjax", "tokenizers"} <= loaded
    assert loaded.isdisjoint({"flax", "optax", "orbax", "grain"})


def test_import_costs_less_than_half_a_second_beyond_jax(tmp_path):
    """Self times of the modules after jax; of three tries the best, since machines are shared.

    On a machine so busy that jax itself takes seconds, half of jax's own time. The first import writes the
    bytecode, as an installer does for a user: where Python is told to write none, compiling the sources is
    most of an import (0.4 s of 0.65).
    """
    bytecode = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path)}
    run("import kvjax", **bytecode)
    tries = [beyond_jax(**bytecode) for _ in range(3)]
    print("import kvjax beyond jax, and jax itself:", *(f"{ours:.2f}, {jax:.2f} s;" for ours, jax in tries))
    assert any(ours < max(0.5, jax / 2) for ours, jax in tries)


def test_import_sets_nothing_global():
    """Neither JAX's configuration nor the environment nor the garbage collector: that is for commands."""
    code = """
import gc, os, jax
before = dict(os.environ), dict(jax.config.values)
import kvjax, kvjax.cli, kvjax.timing, kvjax.serve.__main__, kvjax.eval.__main__, benchmarks.__main__
import kvjax.serve.command, kvjax.eval.commands, benchmarks.host
print((dict(os.environ), dict(jax.config.values)) == before, gc.get_freeze_count())
"""
    assert run(code).stdout.split() == ["True", "0"]


def beyond_jax(**variables: str) -> tuple[float, float]:
    """Seconds spent in the modules that ``import kvjax`` adds to ``import jax``, and in jax's own."""
    lines = run("import jax; import kvjax", "-X", "importtime", **variables).stderr.splitlines()
    rows = [re.match(r"import time:\s+(\d+) \|\s+\d+ \|( +)(\S+)", line) for line in lines]
    modules = [(int(row[1]), len(row[2]), row[3]) for row in rows if row]
    end_of_jax = max(at for at, (_, depth, name) in enumerate(modules) if name == "jax" and depth == 1)
    after = modules[end_of_jax + 1 :]
    assert any(name == "kvjax" for _, _, name in after), "kvjax was not imported after jax"
    return tuple(sum(cost for cost, _, _ in rows) / 1e6 for rows in (after, modules[: end_of_jax + 1]))


def test_every_public_name_is_there():
    import kvjax

    assert [name for name in kvjax.__all__ if not hasattr(kvjax, name)] == []
