"""The stopwatch, the child process and the CPU benchmark."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels
from benchmarks.kernels import __main__ as bench
from benchmarks.kernels import on_cpu
from benchmarks.kernels.operations import ALL, module
from pallas_kernels.measure import timing
from pallas_kernels.measure.child import Child, LostError
from pallas_kernels.measure.timing import CompileTime

TRACE, LOWER, COMPILE = timing._KINDS


@pytest.fixture
def heard(monkeypatch):
    """A clock that stands where it is put, and the stretches of time that are noted by it."""
    now = [0.0]
    monkeypatch.setattr(timing, "_busy", [])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def hear(event, start, end):
        now[0] = end
        timing._heard(event, end - start)

    return hear


def test_compile_time_is_tracing_lowering_and_compiling_each_second_once(heard):
    heard(TRACE, 1, 2)
    heard(COMPILE, 3, 3.5)  # of a constant, while the outer function is traced
    heard(TRACE, 0, 5)
    heard(LOWER, 5, 6)
    heard("/jax/compilation_cache/compile_time_saved_sec", 0, 6)
    heard(COMPILE, 7, 11)
    spent = timing.compile_time()
    assert spent == CompileTime(4.5, 1.0, 4.5)
    assert spent.total == 10
    assert spent.since(CompileTime(4.0, 1.0, 0.5)) == CompileTime(0.5, 0.0, 4.0)


def test_compiling_is_timed():
    before = timing.compile_time()
    jax.jit(lambda x: jnp.sin(x) @ x).lower(jax.ShapeDtypeStruct((8, 8), "float32")).compile()
    assert all(seconds > 0 for seconds in timing.compile_time().since(before))


def test_turns_are_taken_and_said():
    times = on_cpu.in_turns({"once": (jnp.sin, (1.0,)), "twice": (lambda x: x + x, (1.0,))}, repeats=3)
    assert set(times) == {"once", "twice"}
    line = on_cpu.line("op", "s", "float32", {"a": 1e-3, "b": 2e-3}, "a", {"b": 1.5})
    assert "a 1.00 ms (1.00x)" in line
    assert "b 2.00 ms (2.00x, at most 1.5: MISSED)" in line


def test_every_operation_has_a_benchmark():
    folders = {file.parent.name for file in Path(pallas_kernels.__file__).parent.glob("*/api.py")}
    assert set(ALL) == folders
    for op in ALL:
        assert module(op).BENCH
        assert not set(module(op).BENCH) & set(module(op).LARGE)


@pytest.mark.skipif(
    int(version("jaxlib").split(".")[1]) < 8, reason="XLA of jaxlib 0.7 has no small bfloat16 products on CPU"
)
def test_the_benchmark_prints_a_line_a_dtype(monkeypatch, capsys):
    monkeypatch.setitem(module("gated").BENCH, "small_2k", module("gated").TINY)
    assert bench.main(["--only", "gated", "--shape", "small_2k"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines] == [
        ["gated", "small_2k", "float32"],
        ["gated", "small_2k", "bfloat16"],
    ]
    assert all("gated gradient" in line for line in lines)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--only", "gatd"], "no operation has that name. Use one of blockwise, decode_step, gated"),
        (["--shape", "ring"], "Name it with --only"),
        (["--only", "gated", "--shape", "ring"], "it has small_512, small_2k, llama8b_8k"),
    ],
)
def test_the_benchmark_says_what_it_has(args, says, capsys):
    with pytest.raises((SystemExit, ValueError)) as error:
        bench.main(args)
    assert says in capsys.readouterr().err + str(error.value)


def test_a_child_that_dies_is_lost_with_its_last_words(tmp_path):
    (tmp_path / "talks.py").write_text(
        "import sys\nfrom pallas_kernels.measure.child import answer\nprint('noise')\n"
        "answer({'twice': 2 * int(sys.stdin.readline())})\nsys.stdin.readline()\nraise ValueError('enough')\n"
    )
    root = Path(pallas_kernels.__file__).parents[1]
    with Child.running("talks", env={"PYTHONPATH": f"{tmp_path}:{root}"}) as child:
        child.tell(21)
        assert child.hear(60.0) == {"twice": 42}
        with pytest.raises(LostError, match="no answer in time"):
            child.hear(0.0)
        child.tell(0)
        with pytest.raises(LostError, match="ended with code 1: ValueError: enough"):
            child.hear(60.0)
