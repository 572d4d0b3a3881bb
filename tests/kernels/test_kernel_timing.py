"""The stopwatch, the child process and the shapes that everything is measured by."""

from __future__ import annotations

from importlib.metadata import version

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import bench
from pallas_kernels.measure import timing
from pallas_kernels.measure.child import Child, LostError
from pallas_kernels.measure.timing import CompileTime
from pallas_kernels.measure.work import Shapes, operations, work

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
    found = timing.compile_time()
    assert found == CompileTime(4.5, 1.0, 4.5)
    assert found.total == 10
    assert found.since(CompileTime(4.0, 1.0, 0.5)) == CompileTime(0.5, 0.0, 4.0)


def test_compiling_is_timed_and_its_program_runs():
    program, took = timing.compiled(lambda x: jnp.sin(x) @ x, jax.ShapeDtypeStruct((8, 8), "float32"))
    assert all(seconds > 0 for seconds in took)
    assert program(jnp.ones((8, 8))).shape == (8, 8)


def test_turns_are_taken_and_said():
    times = timing.in_turns({"once": (jnp.sin, (1.0,)), "twice": (lambda x: x + x, (1.0,))}, repeats=3)
    assert set(times) == {"once", "twice"}
    line = timing.report("op", "s", "float32", {"a": 1e-3, "b": 2e-3}, "a", {"b": 1.5})
    assert "a 1.00 ms (1.00x)" in line
    assert "b 2.00 ms (2.00x, at most 1.5: MISSED)" in line


def test_a_shape_has_one_name_and_its_tags():
    shapes = Shapes(("test chip", "a", 1), ("test", "b", 2))
    assert shapes.tagged("test") == {"a": 1, "b": 2}
    assert shapes.tagged("chip") == {"a": 1}
    with pytest.raises(ValueError, match="names a shape twice"):
        Shapes(("test", "a", 1), ("bench", "a", 2))


@pytest.mark.parametrize("op", operations())
def test_every_shape_is_of_some_use(op):
    known = {"test", "blocked", "bench", "large", "chip", "check", "tiny", "timed"}
    assert all(tags and tags <= known for tags in work(op).SHAPES.tags.values())
    assert work(op).SHAPES.tagged("test")
    assert work(op).SHAPES.tagged("bench")


@pytest.mark.skipif(
    int(version("jaxlib").split(".")[1]) < 8, reason="XLA of jaxlib 0.7 has no small bfloat16 products on CPU"
)
def test_the_benchmark_prints_a_line_a_dtype(monkeypatch, capsys):
    monkeypatch.setitem(work("gated").SHAPES, "small_2k", work("gated").SHAPES["tiny"])
    monkeypatch.setattr("sys.argv", ["bench", "--only", "gated", "--shape", "small_2k"])
    assert bench.main() == 0
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
def test_the_benchmark_says_what_it_has(args, says, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["bench", *args])
    with pytest.raises((SystemExit, ValueError)) as error:
        bench.main()
    assert says in capsys.readouterr().err + str(error.value)


def test_a_child_that_dies_is_lost_with_its_last_words(tmp_path):
    (tmp_path / "talks.py").write_text(
        "import sys\nfrom pallas_kernels.measure.child import answer\nprint('noise')\n"
        "answer({'twice': 2 * int(sys.stdin.readline())})\nsys.stdin.readline()\nraise ValueError('enough')\n"
    )
    with Child.running(
        "talks", env={"PYTHONPATH": f"{tmp_path}:{bench.__file__.rpartition('/')[0]}/.."}
    ) as child:
        child.tell(21)
        assert child.hear(60.0) == {"twice": 42}
        with pytest.raises(LostError, match="no answer in time"):
            child.hear(0.0)
        child.tell(0)
        with pytest.raises(LostError, match="ended with code 1: ValueError: enough"):
            child.hear(60.0)
