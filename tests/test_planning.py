"""What a plan adds up, against numbers worked out by hand and against states that were really made."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import jax
import numpy as np
import pytest
import tiny

import kvjax
from kvjax import decode, loading
from kvjax.cli import InputError
from kvjax.models import published
from kvjax.models.decoder import shapes
from kvjax.models.hf_config import ModelError
from kvjax.plan import __main__ as command
from kvjax.plan import _arguments, _estimate, _hits, _plan, _programs, _report, _shapes
from kvjax.plan._deployment import Deployment, check
from kvjax.plan._programs import Collective, Compiled, Program, collectives
from kvjax.sharding.mesh import MeshError
from pallas_kernels.measure import aot
from pallas_kernels.measure.chips import CHIPS, Chip
from train.settings import published_spec

LLAMA = published.spec("llama-3.1-8b")
LONG = 131072


def case(policy: str, rows: int = 12, context: int = LONG, **more) -> Deployment:
    """On sixteen devices, six rows and one KV head each."""
    mesh = more.pop("mesh", _estimate.abstract(2, 8, 1))
    return Deployment(LLAMA, kvjax.policy(policy), mesh, rows, context, **more)


def program(**more) -> Program:
    known = {
        "arguments": 0,
        "padding": 0,
        "outputs": 0,
        "temporary": 0,
        "code": 0,
        "host": 0,
        "host_temporary": 0,
        "collectives": {},
        "kernels": "xla",
    }
    return Program(**known | {"depths": (2,)} | more)


# --- named shapes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "parameters"),  # as published with the models
    [
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen2.5-0.5b", 494_032_768),
        ("llama-3.2-1b", 1_235_814_400),
    ],
)
def test_a_named_shape_has_as_many_parameters_as_the_model(name, parameters):
    leaves = jax.tree.leaves(shapes(published.spec(name)), is_leaf=lambda x: isinstance(x, tuple))
    assert sum(int(np.prod(shape)) for shape in leaves) == parameters


def test_a_training_config_may_name_one():
    assert published_spec("llama-3.1-8b") == LLAMA
    assert published_spec(published.CONFIGS["qwen2.5-7b"]) == published.spec("qwen2.5-7b")
    with pytest.raises(ModelError, match="Give one of llama-3.1-8b"):
        published_spec("llama-9")


# --- slots ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "share", "slots"),
    [
        ("full", None, 0),  # the ring holds all
        ("window(256) + sinks(4)", None, 4),
        ("snapkv(32) + uniform(0.25)", None, LONG // 4 - 32),
        ("snapkv(32) + ada(4096)", None, 4096 - 32),
        ("write_gate(0.1)", 0.25, (LONG - 256) // 4),
        ("gvote", 0.125, LONG // 8 - 1),
        ("quest", None, LONG - 1),
    ],
)
def test_slots_of_a_stream(policy, share, slots):
    one = case(policy, share=share)
    window = one.policy.window(LONG)
    expected = {"gvote": LONG // 8 - window, "quest": LONG - window}.get(policy, slots)
    assert _shapes.slots(one) == (expected,) * 32


def test_slots_fall_with_the_layers_of_a_pyramid():
    slots = _shapes.slots(case("snapkv(32) + pyramid(1024, slope=2)"))
    assert slots[0] == 1536 - 32
    assert slots[-1] == 512 - 32
    assert list(slots) == sorted(slots, reverse=True)
    assert _shapes.slots(case("snapkv(32) + pyramid(1024, slope=2)").shallow(3)) == slots[:3]


# --- bytes ----------------------------------------------------------------------------------------


def test_bytes_of_a_full_cache_by_hand():
    held = _estimate.resident(case("full"))
    slots = 6 * 1 * LONG * 32  # rows, heads, tokens, layers of a device
    assert held.allocated == slots * (2 * 128 * 2 + 1)  # a key and a value of bfloat16, an admission bit
    assert held.live == held.allocated
    of_layer = 2 * 4096 * 4096 // 8 + 2 * 4096 * 1024 // 8 + 3 * 4096 * 14336 // 8 + 2 * 4096
    assert held.weights == 2 * (2 * 128256 * 4096 // 8 + 32 * of_layer + 4096)
    assert held.learned == 0


def test_pools_by_hand():
    """32,704 slots a stream are 128 pages of 256; beside them room for what is written next."""
    gated = case("write_gate(0.1)", share=0.25)
    (one,) = _shapes.layer_sizes(gated.shallow(1))
    (pages,) = one.cache.pools
    assert pages.size == 256
    # Six streams: 766 pages of live slots, two further pages each and 512 tokens more: 784, of a class of 64.
    assert pages.count == 16 * 832
    fullest = dataclasses.replace(gated, imbalance=1.5)
    (more,) = _shapes.layer_sizes(fullest.shallow(1))[0].cache.pools
    assert 1.4 * 832 <= more.count / 16 <= 1.6 * 832
    alike = case("snapkv + uniform(1024)", imbalance=1.5)
    assert alike.fullest == 1.0


@pytest.mark.parametrize("policy", ["window(24) + sinks(4)", "snapkv(8) + uniform(64) + int8(16)"])
def test_a_real_state_is_as_large_as_planned(policy):
    """Prompts as long as the context, read, and room made for what is written next."""
    one, policy, context = tiny.model(), kvjax.policy(policy), 192
    prompts = [tiny.prompt(context), tiny.prompt(context, 1)]
    state, _ = kvjax.prefill(one, policy, prompts, context=context, chunk_size=64)
    state = decode.reserve(policy, state, decode.MAX_STEPS, 1, ahead=decode.HORIZON)
    real = sum(leaf.nbytes for leaf in jax.tree.leaves(state.layers))
    mesh = _estimate.abstract(1, 1, 1)
    planned = Deployment(one.network.spec, policy, mesh, 2, context, dtype="float32", chunk=64)
    assert _estimate.resident(planned).allocated == real
    assert _estimate.resident(planned).weights == sum(x.nbytes for x in jax.tree.leaves(one.params))


def test_what_lies_in_host_memory_is_chosen_by_a_step_and_brought_by_a_piece():
    planned = case("quest(chunks=32, chunk=64, dense=0) + host(cache=0.03)")
    slot, layers = 2 * 128 * 2 + 4, 32  # keys, values and a position
    step, piece = (_estimate.resident(planned, reading=reading).linked for reading in (False, True))
    assert step == planned.device_heads * layers * 32 * 64 * slot
    # A minimum and a maximum of the keys of a page, of a pool that has room for the whole context.
    held = _estimate.resident(planned)
    assert held.index / held.host == pytest.approx(2 * 128 * 2 / (64 * slot), rel=1e-6)
    near = planned.policy.near(LONG, 0)
    assert near.units == LONG * 0.03 // 64
    # Of each unit which it is and when it was read, of every unit where it is, and three counts.
    cached = near.units * (64 * slot + 2 * 4) + LONG // 64 * 4 + 3 * 4
    assert held.cached == planned.device_heads * layers * cached
    assert piece / (planned.device_heads * layers * LONG * slot) == pytest.approx(1, rel=0.01)
    assert _estimate.resident(case("quest(chunks=32, chunk=64, dense=0)")).linked == 0


@pytest.fixture
def measured_hits(tmp_path, monkeypatch) -> None:
    """Rates of a cache of one, two and four choices, of chunks of 16 and 64 and of tokens."""
    rows = [
        {"selection": kind, "unit": unit, "ratio": ratio, "hits": hits + unit / 1024}
        for kind, unit in (("quest", 64), ("quest", 16), ("topk", 1))
        for ratio, hits in ((1.0, 0.25), (2.0, 0.5), (4.0, 0.75))
    ]
    (tmp_path / "hits.json").write_text(json.dumps(rows))
    monkeypatch.setattr(loading, "embedded_folder", lambda: tmp_path)


@pytest.mark.parametrize(
    ("policy", "hits"),
    [
        ("quest(chunks=32, chunk=64, dense=0) + host(cache=0.016)", (0.25 + 64 / 1024, 1.0)),
        ("quest(chunks=32, chunk=64, dense=0) + host(cache=0.03)", (0.5 + 64 / 1024, 2.0)),
        ("quest(chunks=32, dense=2) + int8(32) + host(cache=0.5)", (0.75 + 16 / 1024, 4.0)),
        ("topk(0.02) + host(cache=0.05)", (0.5 + 1 / 1024, 2.0)),
        ("topk_pages(0.02) + host(cache=0.05)", None),
        ("topk(0.02)", None),
    ],
)
def test_the_nearest_measured_rate_of_hits(measured_hits, policy, hits):
    found = _hits.nearest(case(policy))
    assert found == (hits and _hits.Hits(*hits))


def test_a_plan_says_what_a_step_brings_at_the_measured_hits(measured_hits):
    words = "--model llama-3.1-8b --context 131072 --rows 12 --tpu v5e:4x4 --mesh data=2,tensor=8"
    link = 6 * 32 * 32 * 64 * (2 * 128 * 2 + 4)  # streams, layers, chunks, tokens, bytes of a slot

    def said(policy: str) -> tuple[str, dict[str, Any]]:
        question = _arguments.parse([*words.split(), "--policy", policy])
        step = Compiled(case=question.case, program=program())
        plan = _plan.DevicePlan(
            kind="TPU v5 lite",
            step=step,
            prefill=None,
            decoding=_estimate.bytes_like(question.case, step),
            reading=None,
            roofline=_estimate.roofline(question.case, step, question.chip),
            most_rows=12,
            most_read=0,
            longest=LONG,
            remedies=[],
            wheels={},
        )
        return "\n".join(_report.lines(question, plan)), _report.as_json(question, plan)

    text, answer = said("quest(chunks=32, chunk=64, dense=0) + host(cache=0.03)")
    measured = "about, a step at the 56 % hits measured on the embedded model's text (cache 2 x a choice)"
    assert f"{link / 2**30:.3f}         -  at most" in text
    assert re.search(rf"of it index +{answer['step']['index'] / 2**30:.3f}", text)
    assert "of it cache" in text
    assert f"{(1 - 0.5625) * link / 2**30:.3f}            {measured}" in text
    assert answer["hits"] == {"rate": 0.5625, "ratio": 2.0, "brought": round((1 - 0.5625) * link)}
    text, answer = said("topk_pages(0.02) + host(cache=0.05)")
    assert "at most" in text
    assert "hits" not in text
    assert answer["hits"] is None


def test_a_prompt_that_is_fed_twice_takes_a_full_cache_while_it_is_read():
    read = Compiled(case=case("snapkv + uniform(0.25)"), program=program(), reading=True)
    once, twice = (
        _estimate.bytes_like(case(f"{word} + uniform(0.25)"), read).temporary for word in ("snapkv", "kvzip")
    )
    # Six rows, one KV head, 32 layers of keys and values of bfloat16 with a score; a piece of one layer.
    assert twice - once == 6 * LONG * (32 * (2 * 128 * 2 + 4) + 2 * 128 * 2)


def test_one_threshold_for_all_layers_takes_a_full_cache_without_a_piece():
    read = Compiled(case=case("snapkv + uniform(0.25)"), program=program(), reading=True)
    layers, every = (
        _estimate.bytes_like(case(f"snapkv + {word}(0.25)"), read) for word in ("ada", "overall")
    )
    assert every.temporary - layers.temporary == 6 * LONG * 32 * (2 * 128 * 2 + 4)
    assert every.allocated == layers.allocated


def test_learned_weights_have_the_shapes_of_trained_ones():
    one = case("write_gate(0.1) + phi(64) + kvp + uniform(0.25)", share=0.25)
    learned = _shapes.weights(one)
    for part in one.policy.learned:
        part.check_weights(learned[part.place], one.network)
    assert learned["admission"][0]["w1"].shape == (8, 256, 512)
    assert {len(layers) for layers in learned.values()} == {32}
    assert len(learned) == 3


# --- time -----------------------------------------------------------------------------------------


def test_the_roofline_by_hand():
    chip = Chip(name="toy", memory=2**34, bandwidth=1e12, links=1e11, flops=1e15)
    half = Compiled(
        case=case("full", rows=6), program=program(collectives={Collective("all-reduce", 8, 24576): 65})
    )
    least = _estimate.roofline(case("full"), half, chip)
    cache = 6 * LONG * 32 * 2 * 128 * 2
    table = 2 * 128256 * 4096 // 8  # one row a token is read of it
    assert least.cache == least.walked == cache
    assert least.weights == _estimate.resident(case("full")).weights - table
    assert least.sent == 65 * 2 * 49152 * 7 / 8
    assert least.seconds == pytest.approx((least.weights + cache) / 1e12 + least.sent / 1e11)
    slow = dataclasses.replace(chip, flops=1e9)
    flops = 2 * 6 * least.weights / 2 + 2 * 4 * cache / 2
    assert _estimate.roofline(case("full"), half, slow).seconds == pytest.approx(flops / 1e9, rel=1e-3)


def test_a_selection_loads_what_it_visits():
    full, quest = (_shapes.layer_sizes(case(name).shallow(3))[2] for name in ("full", "quest(chunks=32)"))
    assert 6 * quest.read < full.read
    assert quest.live > full.live
    near, coded = (
        _shapes.layer_sizes(case(f"topk(0.02) + host(cache=0.03{keys})").shallow(1))[0]
        for keys in ("", ", keys=int4")
    )
    assert near.read - coded.read == near.index - coded.index > 0, "keys are ranked as they are, or as codes"


# --- collectives ----------------------------------------------------------------------------------

TEXT = """
  %all-reduce = bf16[6,1,4096]{2,0,1:T(8,128)(2,1)S(1)} all-reduce(%x), \
replica_groups=mesh['axis_0'=8,'axis_1'=1,'axis_2'=2], device_ids=([2,8]T(1,0)) {'axis_0'}, to_apply=%a
  %all-reduce.1 = bf16[6,1,4096]{2,0,1} all-reduce(%y), \
replica_groups={{0,1,2,3,4,5,6,7},{8,9,10,11,12,13,14,15}}, to_apply=%a
  ROOT %sum = (f32[6]{0}, f32[6,128]{1,0}) all-reduce(%a, %b), replica_groups=[2,8]<=[16], to_apply=%a
  %g = (bf16[6,16]{1,0}, bf16[6,128]{1,0}) all-gather-start(%c), replica_groups=[2,8]<=[16], dimensions={1}
  %done = bf16[6,128]{1,0} all-gather-done(%g)
  %alone = f32[6]{0} all-reduce(%d), replica_groups={{0},{1}}, to_apply=%a
  %p = s32[6]{0} collective-permute(%e), source_target_pairs={{0,1},{1,0}}
  %fused = f32[6]{0} fusion(%all-reduce.1), calls=%all-reduce
"""


def test_collectives_are_read_off_a_program():
    counts = collectives(TEXT, 16)
    assert counts == {
        Collective("all-reduce", 8, 6 * 4096 * 2): 2,
        Collective("all-reduce", 8, 6 * 4 + 6 * 128 * 4): 1,
        Collective("all-gather", 8, 6 * 128 * 2): 1,
        Collective("collective-permute", 2, 24): 1,
    }


@pytest.mark.parametrize(
    ("kind", "sent"),
    [("all-reduce", 1400), ("all-gather", 700), ("reduce-scatter", 5600), ("all-to-all", 700)],
)
def test_bytes_sent_by_a_ring(kind, sent):
    assert Collective(kind, 8, 800).sent == sent


# --- depths and searches --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [("a" * 32, (1, 2)), ("aa" + "b" * 30, (3, 4)), ("aaaaab" * 4 + "aa", (8, 14)), ("ab" * 13, (2, 4))],
)
def test_depths_differ_by_one_period(kinds, expected):
    assert _programs.depths(kinds) == expected


def test_a_deep_program_is_extrapolated_from_two_shallow_ones():
    one, two = Collective("all-reduce", 8, 64), Collective("all-gather", 8, 64)
    few = program(outputs=7, padding=40, temporary=100, code=10, collectives={one: 5, two: 1})
    more = program(outputs=7, padding=60, temporary=104, code=14, collectives={one: 7, two: 1}, depths=(3,))
    deep = _programs.extrapolated(few, more, 30, 12345)
    assert (deep.arguments, deep.padding) == (12345 + 640, 640)
    assert (deep.outputs, deep.temporary, deep.code) == (7, 220, 130)
    assert deep.collectives == {one: 65, two: 1}
    assert deep.depths == (2, 3)


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 7, 8, 9, 99, 100])
def test_the_largest_that_fits(limit):
    tried = []
    assert _estimate.largest(lambda n: tried.append(n) or n <= limit, 100) == limit
    assert len(tried) <= 14
    assert max(tried) <= 100


def test_searches_agree_with_the_sum():
    one, memory = case("full"), CHIPS["v5e"].memory
    known = Compiled(case=one, program=program())
    total = lambda x: _estimate.bytes_like(x, known).total  # noqa: E731
    rows = _estimate.most_rows(one, known, memory)
    assert rows == 12
    assert total(dataclasses.replace(one, rows=rows + 2)) > memory >= total(one)
    context = _estimate.longest_context(dataclasses.replace(one, rows=32), known, memory)
    at = dataclasses.replace(one, rows=32, context=context)
    assert total(dataclasses.replace(at, context=context + 1024)) > memory >= total(at)


def test_what_is_between_grows_with_rows_and_context():
    one = case("full", rows=4, context=65536)
    known = Compiled(case=one, program=program(temporary=90, outputs=10, code=7), padding=0.5)
    larger = _estimate.bytes_like(case("full"), known)
    assert (larger.temporary, larger.code) == (100 * 3 * 2, 7)
    assert larger.padding == larger.allocated // 2
    assert larger.total == larger.weights + larger.allocated + larger.padding + 607
    chunks = _estimate.bytes_like(one, dataclasses.replace(known, reading=True))
    assert chunks.temporary == 100 + 2 * 256 * 4096 * 2  # two rows of a device, a chunk each


@pytest.mark.slow
def test_what_would_fit_does():
    one = case("write_gate(0.1)", rows=96, share=0.5)
    known = Compiled(case=one, program=program())
    ways = _estimate.remedies(one, known, CHIPS["v5e"])
    assert [way.split()[0] for way in ways] == ["--rows", "--context", "--share", "64", "--policy"]
    message = {way.split()[0]: way.split()[1] for way in ways[:3]}
    changed = [
        {"rows": int(message["--rows"])},
        {"context": int(message["--context"])},
        {"share": float(message["--share"])},
    ]
    for change in changed:
        other = dataclasses.replace(one, **change)
        assert _estimate.fits(other, known, CHIPS["v5e"].memory)


def test_the_mesh_with_the_fewest_bytes():
    alone = case("full", mesh=_estimate.abstract(1, 1, 1))
    assert _estimate.best_mesh(alone, 16) == _estimate.abstract(2, 8, 1)
    one_row = dataclasses.replace(alone, rows=1)
    assert _estimate.best_mesh(one_row, 16) == _estimate.abstract(1, 8, 2)
    assert _estimate.best_mesh(dataclasses.replace(alone, rows=3), 3) == _estimate.abstract(3, 1, 1)


# --- refused --------------------------------------------------------------------------------------

GOOD = "--model llama-3.1-8b --policy full --context 4096 --rows 4 --tpu v5e:2x2"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--tpu v9:2x2", "'v9' is none of v5e, v6e, v5p, tpu7x"),
        ("--tpu v5e", "--tpu v5e has no topology"),
        ("--tpu v5e:2xtwo", "has no topology"),
        ("--gpu h100:8 --tpu", "--gpu h100:8 is not known"),
        ("--gpu h200:9 --tpu", "--gpu h200:9 is not known"),
        ("--mesh data=2,tensor=4", "has 8 devices, v5e:2x2 has 4. Make them agree"),
        ("--mesh rows=4", "'rows' is not an axis"),
        ("--rows 3 --mesh data=4", "data=4 does not divide 3 rows"),
        ("--tpu v5e:4x4 --mesh tensor=16", "tensor=16 does not divide the model's 8 KV heads"),
        ("--model qwen2.5-7b --rows 1 --tpu v5e:4x4", "Give a multiple of 4 rows"),
        ("--policy wg-kv", "--share 0.25 plans for a quarter"),
        ("--share 0.25", "'full' decides itself how much stays. Leave --share out"),
        ("--policy wg-kv --share 1.5", "--share 1.5 is out of range"),
        ("--imbalance 0.5", "--imbalance 0.5 is out of range"),
        ("--context 200000", "more than the model's 131072 positions"),
        ("--model llama-9", "is neither the name of a model nor a folder"),
        ("--policy nothing", "nothing"),
        ("--rows 1 --policy quest(512,chunk=1,dense=0)+host(cache=0.2)", "99 % of the"),
        ("--out nowhere/at/all.json", "there is no folder nowhere/at"),
    ],
)
def test_questions_that_make_no_sense_are_refused_before_any_compiling(capsys, monkeypatch, words, message):
    monkeypatch.setattr(_plan, "answer", None)
    options = dict(zip(*[iter(GOOD.split())] * 2))
    if words.endswith("--tpu"):
        del options["--tpu"]
        words = words.removesuffix(" --tpu")
    options |= dict(zip(*[iter(words.split())] * 2))
    assert command.main([word for pair in options.items() for word in pair]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error:")
    assert message in err


def test_without_the_compiler_it_is_said_how_to_get_it(capsys, monkeypatch):
    monkeypatch.setattr(aot, "_installed", lambda name: None)
    words = GOOD.replace("v5e:2x2", "v5e:1x2").split()
    assert command.main(words) == 2
    assert "pip install 'kvjax[aot]'" in capsys.readouterr().err


def test_a_topology_that_the_compiler_does_not_know(monkeypatch):
    def unknown(chip, topology):
        raise RuntimeError("INVALID_ARGUMENT: no such sides\nmore")

    monkeypatch.setattr(aot, "target", unknown)
    with pytest.raises(InputError, match="v5e:3x5: INVALID_ARGUMENT: no such sides$"):
        _plan.target("v5e:3x5")


def test_a_step_without_room_is_tried_with_fewer_rows():
    tried = []

    def compile_(one: Deployment) -> Program:
        tried.append(one.rows)
        if one.rows > 4:
            raise _programs.NoRoomError("no room")
        return program()

    known = _plan.compiled(compile_, case("full", rows=12))
    assert known is not None
    assert (known.case.rows, tried) == (2, [12, 6, 2])
    assert _plan.compiled(lambda one: compile_(case("full")), case("full", rows=4)) is None


def test_a_question_is_read(tmp_path):
    words = "--model llama-3.1-8b --policy wg-kv --share 0.25 --context 4096 --rows 16 --tpu 7x:2x2x1 --exact"
    question = _arguments.parse([*words.split(), "--out", str(tmp_path / "plan.json")])
    assert question.topology == "tpu7x:2x2x1"
    assert question.chosen
    assert question.exact
    assert question.case.mesh == _estimate.abstract(1, 8, 1)  # two devices a chip
    (tmp_path / "config.json").write_text(json.dumps(published.CONFIGS["qwen2.5-7b"]))
    folder = _arguments.parse(["--model", str(tmp_path), *GOOD.split()[2:]])
    assert folder.case.spec == published.spec("qwen2.5-7b")


def test_a_mesh_refuses_rows_it_does_not_divide():
    with pytest.raises(MeshError, match="data=2 does not divide 13 rows"):
        check(case("full", rows=13))
