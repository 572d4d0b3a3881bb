"""Measuring without a device: the whole program on interpreted bodies, its parts by hand."""

from __future__ import annotations

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import benchmarks.kernels.device
import benchmarks.kernels.on_device
from benchmarks.kernels import rivals
from benchmarks.kernels.operations import Rival, Target, module
from pallas_kernels import compat, dispatch, lowering, records, tuning
from pallas_kernels.measure import device, on_device, timing
from pallas_kernels.measure.candidates import CANDIDATES, TINY
from pallas_kernels.measure.work import OPERATIONS, Check, TimedCall, agreement, work
from pallas_kernels.tuning import Blocks

KINDS = {"ms", "cannot"}
DRAWN = np.random.default_rng(0).normal(size=(1, 4, 40, 32))


@pytest.mark.parametrize(("off", "agrees"), [(0.0, True), (1e-3, False), (np.nan, False)])
def test_agreement_is_refused_beyond_tolerance(off, agrees):
    x = np.linspace(-1, 1, 9)
    assert agreement([x + off], [x], 9, "float32")["agrees"] is agrees


def test_agreement_wants_the_same_infinities_and_shapes():
    x = np.array([0.0, -np.inf])
    assert agreement([x], [x], 2, "float32")["agrees"]
    assert not agreement([np.zeros(2)], [x], 2, "float32")["agrees"]
    assert not agreement([np.zeros((2, 1))], [np.zeros(2)], 2, "float32")["agrees"]


def test_sixteen_bits_may_be_off_by_a_rounding():
    x = np.ones(4)
    assert agreement([x + 2.0**-8], [x], 4, "bfloat16")["agrees"]
    assert not agreement([x + 2.0**-5], [x], 4, "bfloat16")["agrees"]


def test_a_body_that_a_compiler_refuses_is_recorded_with_the_reason():
    def run(impl):
        def body(x):
            raise compat.MosaicError("no such reduction")

        return body

    said = on_device.run_check(Check("a", run, (np.ones(3, np.float32),), 1, "float32"), "mosaic_tpu")
    assert said == {"agrees": False, "why": "MosaicError: no such reduction"}


def test_a_median_is_of_one_call(monkeypatch):
    """By a clock that only calls move: a slow one among fast ones does not count."""
    now, calls = [0.0], []

    def call():
        calls.append(1)
        now[0] += 1.0 if len(calls) == 20 else 0.001

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    assert timing.median(call, 0.05) == pytest.approx(0.001)
    assert len(calls) == 1 + 5 * 10
    assert timing.median(call, 0.0) == pytest.approx(0.001)
    assert len(calls) == 52


def test_blocks_are_said_and_read_back():
    default = Blocks(q=64, k=64, warps=4, stages=2)
    key = tuning.key("forward", jnp.dtype("bfloat16"), 96)
    assert key == "forward/bfloat16/128"
    blocks_read = tuning.recorded(
        {"blocks": {key: {"chosen": {"q": 128, "warps": 8}}, "backward/x/1": {"chosen": {}}}}
    )
    assert blocks_read == ((key, Blocks(q=128, warps=8)),)
    assert tuning.pick(blocks_read, "forward", "bfloat16", 128, default) == Blocks(128, 64, 0, 8, 2)
    assert tuning.pick(blocks_read, "forward", "bfloat16", 64, default) == default
    assert tuning.pick(blocks_read, "backward", "bfloat16", 128, default) == default
    assert tuning.pick((16, 32), "forward", "bfloat16", 128, default) == Blocks(16, 32, 0, 4, 2)
    assert tuning.pick(None, "forward", "bfloat16", 128, default) == default


def test_a_body_gets_the_blocks_of_its_own_record_and_of_what_is_tried(monkeypatch, tmp_path):
    monkeypatch.setattr(dispatch, "TUNED", tmp_path)
    folder = tmp_path / records.slug(jax.devices()[0].device_kind)
    folder.mkdir()
    record = {"impl": "triton", "blocks": {"sums/float32/32": {"chosen": {"k": 16}}}}
    (folder / "phi.json").write_text(json.dumps(record))
    dispatch.record.cache_clear()

    def blocks_of(op, impl):
        with dispatch.interpreted():
            return dispatch.choose(op, impl, {impl: lambda *, interpret, blocks=(): blocks})()

    try:
        assert blocks_of("phi_build", "triton") == (("sums/float32/32", Blocks(k=16)),)
        assert blocks_of("phi_build", "mosaic_tpu") == ()
        assert blocks_of("gated", "triton") == ()
        with tuning.trying("phi", ()):
            assert blocks_of("phi_evaluate", "triton") == ()
    finally:
        dispatch.record.cache_clear()


BODIES = [
    pytest.param(op, impl, what, marks=() if impl == "triton" and what != "backward" else pytest.mark.slow)
    for (op, impl), passes in CANDIDATES.items()
    for what in passes
]


def program(call, impl):
    """What is traced; Mosaic GPU's bodies, which no jax before 0.12 interprets, as for their device."""
    hopper = impl == "mosaic_gpu"
    device = lowering.for_device("NVIDIA H200", 132, "gpu") if hopper else dispatch.interpreted(races=False)
    with device:
        return str(jax.make_jaxpr(call.run(impl))(*call.args))


@pytest.mark.parametrize(("op", "impl", "what"), BODIES)
def test_blocks_reach_the_body(op, impl, what, monkeypatch):
    """Each pass that can be tuned is another program with other blocks, and the same one with none."""
    sizes = work(op).TINY
    long = {name: 300 for name in ("T", "S") if getattr(sizes, name, 0) >= 40}
    if op == "ragged_decode":
        long |= {"M": 64, "P": 258}
    if impl == "mosaic_gpu":
        pytest.importorskip("pallas_kernels.hopper", exc_type=ImportError)
        long["H"] = 64
    monkeypatch.setattr(work(op), "TINY", sizes._replace(**long))
    (call,) = (x for x in work(op).searches(True) if x.tunes == what)
    key = tuning.key(what, *call.key)
    other = CANDIDATES[op, impl][what][-1] if impl == "mosaic_gpu" else TINY[impl][0]
    plain = program(call, impl)
    with tuning.trying(op, ((key, other),)):
        assert program(call, impl) != plain
    with tuning.trying(op, ((f"{key}0", other),)):
        assert program(call, impl) == plain


def into(results):
    return lambda part, name, value: results.__setitem__((part, name), json.loads(json.dumps(value)))


def test_the_fastest_blocks_that_agree_are_chosen(monkeypatch):
    """Of four: slower, wrong though fastest, refused by the compiler, and faster."""
    times = {0: 1.0, 1: 1.5, 2: 0.1, 4: 0.5}

    def measured(call, impl, spend):
        which = dict(tuning._trying.get()["gated"]).get("forward/bfloat16/32", Blocks()).q
        if which == 3:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: too much")
        return times[which], jnp.ones(3) * (2 if which == 2 else 1)

    monkeypatch.setattr(on_device, "measured", measured)
    call, results = TimedCall("x", None, (), tunes="forward", key=("bfloat16", 32)), {}
    tried = tuple(Blocks(q=i) for i in (1, 2, 3, 4))
    chosen = on_device.tune("gated", call, tried, (), "triton", on_device.Deadline(60), into(results))
    assert chosen == (("forward/bfloat16/32", Blocks(q=4)),)
    entry = results["blocks", "forward/bfloat16/32"]
    assert entry["chosen"] == {"q": 4}
    assert "RESOURCE_EXHAUSTED" in entry["tried"][2]["cannot"]
    assert [x.get("ms") for x in entry["tried"]] == [1500, 100, None, 500]
    late = on_device.tune("gated", call, tried, (), "triton", on_device.Deadline(-1), into(results))
    assert late == ()
    assert results["blocks", "forward/bfloat16/32"]["cut_short"]


def test_a_rival_is_the_same_function_or_says_why_it_cannot_run():
    q, k, v = (jnp.asarray(DRAWN[:, :n], jnp.bfloat16) for n in (4, 2, 2))
    compare = benchmarks.kernels.on_device.compare
    call, others = next(x for x in module("blockwise").timings(True) if x.call.name.startswith("forward"))
    out = call.run("ref")(*call.args)
    with dispatch.interpreted(races=False):
        compared = {x.name: compare(call, x, out, "ref", 0.0) for x in others}
    assert compared["xla"]["differs"] < 0.02
    assert compared["jax_pallas_gpu"]["differs"] < 0.02
    assert all(len(KINDS & set(x)) == 1 for x in compared.values())
    assert "cannot" in compared["cudnn"]
    wrong = Rival("wrong", lambda impl: lambda: out + 1, like=lambda x: x)
    assert compare(call, wrong, out, "ref", 0.0)["differs"] > 0.1
    for x in rivals.prompt(q, k, v):
        if x.name.startswith("jax_"):
            assert "this is cpu" in compare(call, x, out, "ref", 0.0)["cannot"]


@pytest.mark.parametrize(
    ("case", "met"), [(Target("x", 0.9, 0.8, True), True), (Target("x", 0.9, 0.8, False), False)]
)
def test_a_target_is_met_or_not(case, met):
    assert case.row()["met"] is met


def test_targets_are_ratios_of_what_was_measured():
    limits = {"copy_gb_s": 4000.0}
    reads = {"32k_bfloat16": {"ms": 1.0, "gb_s": 3000.0}, "32k_bfloat16_ragged": {"ms": 1.0, "gb_s": 2000.0}}
    aims = module("ragged_decode").targets({"cases": reads, "compared": {}}, limits)
    assert [(x.ratio, x.bound) for x in aims] == [(0.75, 0.8), (0.5, 0.8), (1.5, 1.1)]
    beside = {"forward_8192/cudnn": {"ms": 2.0}, "forward_2048/cudnn": {"cannot": "absent"}}
    prompts = {"cases": {"forward_8192": {"ms": 4.0}, "forward_2048": {"ms": 4.0}}, "compared": beside}
    assert [x.ratio for x in module("blockwise").targets(prompts, limits)] == [0.5]
    beside = {"quarter_131072/cudnn": {"ms": 9.0}, "quarter_131072/torch_sdpa": {"ms": 8.0}}
    aims = {"cases": {"quarter_131072": {"ms": 2.0}}, "compared": beside}
    assert [x.ratio for x in module("vertical_slash").targets(aims, limits)] == [4.0]
    beside = {"forward_8192/cudnn": {"ms": 1.0}, "gradient_8192/cudnn": {"ms": 3.0}}
    aims = {"cases": {"forward_8192": {"ms": 2.0}, "gradient_8192": {"ms": 8.0}}, "compared": beside}
    assert [x.ratio for x in module("gated").targets(aims, limits)] == [3.0]


def test_time_is_shared_by_what_is_left_to_do():
    tasks = device._tasks("triton", False, (), benchmarks.kernels.device.EXTRA)
    speeds = [x for x in tasks if x["what"] == "speed"]
    assert [x["op"] for x in speeds] == list(OPERATIONS)
    assert tasks.index(speeds[0]) == 1 + len(OPERATIONS)
    left, spent = 400.0, []
    for i, task in enumerate(speeds):
        spent.append(device._box(task, left, speeds[i + 1 :]))
        left -= spent[-1]
    assert spent[0] == pytest.approx(380 * 0.3)
    assert sum(spent) < 400
    assert math.isclose(device._box(tasks[1], 9.0, tasks[2:]), 9.0)


def test_a_cpu_is_not_measured():
    if jax.default_backend() != "cpu":
        pytest.skip("this is not a CPU")
    with pytest.raises(ValueError, match="needs a GPU or TPU"):
        device.measure(1)


@pytest.mark.slow
def test_a_task_that_dies_or_hangs_is_lost_alone(tmp_path, monkeypatch):
    """One process dies of the first task, another is stopped in the second, the third does its own."""
    first = {"what": "numerics", "op": "no_such", "impl": "triton", "tiny": True}
    third = {"what": "ceilings", "impl": "triton", "tiny": True}
    second = {**third, "box": 0}
    monkeypatch.setattr(device, "_tasks", lambda *_: [first, second, third])
    monkeypatch.setattr(device, "_box", lambda task, *_: -device.GRACE if "box" in task else 60.0)
    printed = []
    monkeypatch.setattr(device, "print", lambda line, flush: printed.append(line), raising=False)
    results = benchmarks.kernels.device.measure(5, folder=tmp_path, tiny="triton")
    assert "No module named 'pallas_kernels.no_such'" in results["no_such"]["problems"]["numerics"]["lost"]
    assert not results["no_such"]["agrees"]
    assert json.loads((tmp_path / "no_such.json").read_text()) == results["no_such"]
    assert "ceilings: lost: no end after 0 s" in printed
    assert "copy_gb_s" in printed[-1]


def test_an_operation_agrees_when_all_its_checks_were_made(tmp_path):
    records = device.Records(tmp_path, {"device": "x"})

    def written():
        return json.loads((tmp_path / "phi.json").read_text())

    records.add("phi", "checks", "one", {"agrees": True})
    assert not written()["agrees"]  # there may be more to come
    records.of("phi")["checked"] = True
    records.add("phi", "blocks", "sums/float32/64", {"chosen": {"k": 16}})
    assert written()["agrees"]
    records.add("phi", "checks", "one_tuned", {"agrees": False})
    records.add("phi", "blocks", "", {"refused": "they disagree"})
    assert written()["agrees"]
    assert written()["blocks"] == {"sums/float32/64": {"chosen": {}, "refused": "they disagree"}}
    records.add("phi", "checks", "two", {"agrees": False})
    assert not written()["agrees"]
    assert list(tmp_path.iterdir()) == [tmp_path / "phi.json"]


def test_nothing_starts_when_time_is_over(tmp_path):
    results = benchmarks.kernels.device.measure(0, folder=tmp_path, tiny="triton", only=("phi",))
    assert results["phi"]["problems"] == {x: {"lost": "the time was over"} for x in ("numerics", "speed")}
    assert not results["phi"]["agrees"]


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["triton", "mosaic_tpu"])
@pytest.mark.parametrize("op", OPERATIONS)
def test_the_whole_program(op, impl, tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    result = benchmarks.kernels.device.measure(8, folder=tmp_path, tiny=impl, only=(op,))[op]
    assert result["agrees"]
    assert result["interpreted"]
    assert result["problems"] == {}
    assert json.loads((tmp_path / f"{op}.json").read_text()) == result
    for entry in result["blocks"].values():
        assert [x["blocks"] for x in entry["tried"]] == [x.set_sizes() for x in TINY[impl]]
        assert all("ms" in x and x["differs"] < 0.05 for x in entry["tried"])
    assert set(result["blocks"]) == {tuning.key(x.tunes, *x.key) for x in work(op).searches(True)}
    timings = list(module(op).timings(True))
    assert set(result["cases"]) == {x.call.name for x in timings}
    assert all("ms" in x for x in result["cases"].values())
    assert set(result["compared"]) == {f"{x.call.name}/{rival.name}" for x in timings for rival in x.rivals}
    assert all(len(KINDS & set(x)) == 1 for x in result["compared"].values())
    assert all(x.get("differs", 0) < 0.05 for x in result["compared"].values())
