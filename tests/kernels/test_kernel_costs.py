"""Costs and records: arithmetic that can be checked by hand, and a README that says what was recorded."""

from __future__ import annotations

import json
import types

import jax
import pytest

from benchmarks.kernels import programs, static, table
from benchmarks.kernels.operations import cases
from pallas_kernels import dispatch, lowering
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.measure import aot
from pallas_kernels.measure.work import OPERATIONS


def test_roofline_is_the_slower_of_memory_and_products():
    assert static.roofline("v5e", 820_000_000, 0) == pytest.approx(1e-3)
    assert static.roofline("v5e", 820_000_000, 394 * 10**9) == pytest.approx(2e-3)


def test_bundles_are_those_of_the_dumps(tmp_path):
    name = "123-ragged_decode_read.3-77-schedule-analysis_final_bundles.txt"
    (tmp_path / name).write_text("x\n total scheduled bundles:   1234\n")
    (tmp_path / "123-fusion.3-77-schedule-analysis_final_bundles.txt").write_text(
        "total scheduled bundles: 5"
    )
    assert static.bundles(tmp_path) == {"ragged_decode_read": 1234}


DUMP = """LB: loop body
     0   :  { %1 = setup }
   0x1 LB: > { %2 = vmatmul.mubr.bf16 } /* iteration */
   0x2   : > { %3 = vld }
  0x2a PF: > { %3 = vmatmul.bf16.gmra.mxu0 }
   0x3   : >> { %4 = vld }
   0x4   : >> { %5 = vmatmul.bf16.gmra.mxu1  ;;  %6 = vmatmul.bf16.gmra.mxu2 }
   0x5   : >> { %7 = vst }
   0x6 PF: > { %8 = vst }
   0x7   : > { %9 = vst }
"""


def test_steps_are_pieces_that_multiply_where_there_are_several(tmp_path):
    (tmp_path / "1-blockwise.1-01-final_bundles.txt").write_text(DUMP)
    (tmp_path / "1-gated.1-01-final_bundles.txt").write_text(
        DUMP.replace("3 = vmatmul", "3 = vxor").replace("2 = vmatmul", "")
    )
    (tmp_path / "1-fusion.1-01-final_bundles.txt").write_text(DUMP)
    assert static.steps(tmp_path) == {"blockwise": [2, 1, 3]}


COPIES = """   0x1 LB: > { %1 = setup }
   0x2   : >> { %2 = dma.hbm_to_vmem a  ;;  %3 = dma.hbm_to_vmem b }
   0x3 LB: >> { %4 = dma.hbm_to_vmem a }
   0x4 PF: > { %5 = vmatmul.mubr.bf16 }
   0x5 LB: >> { %6 = dma.hbm_to_vmem a }
   0x6   : >> { %7 = dma.general b }
   0x7   : >> { %8 = nop }
   0x8 LB: >> { %9 = dma.hbm_to_vmem a }
   0x9 LB: >> { %9 = dma.done.wait }
   0xa PF: > { %9 = end }
"""


def test_an_item_counts_the_loop_that_asks_for_pages_as_often_as_it_runs(tmp_path):
    (tmp_path / "1-ragged_decode_read.1-01-final_bundles.txt").write_text(COPIES)
    (tmp_path / "1-ragged_decode_mass.1-01-final_bundles.txt").write_text(DUMP)
    assert static.item(tmp_path, "ragged_decode_read", 8) == 3 + 4 * 3
    assert static.item(tmp_path, "ragged_decode_mass", 8) == 6


def test_spills_are_vector_registers_in_memory(tmp_path):
    text = "{ %1 = vst [vmem:[#allocation4_spill] sm:$0xff] %v2 ;; %3 = sst [smem:[#allocation5_spill]] %s2 }"
    text += "{ %4 = vld [vmem:[#allocation4_spill] sm:$0xff]  ;;  %5 = vld [vmem:[#allocation6] sm:$0xff] }"
    (tmp_path / "1-gated.1-01-final_bundles.txt").write_text(text)
    assert static.spills(tmp_path) == {"gated": 2}


def test_cases_move_what_their_shapes_say():
    by_name = cases()
    assert {name.split("/")[0] for name in by_name} == set(OPERATIONS)
    case = by_name["ragged_decode/bfloat16"]
    q, k, _, table_, *_ = case.args
    pages = 2 * table_.size * k.shape[1] * k.shape[2] * 2
    assert case.moves == pages + q.size * (2 + 4)
    scales = table_.size * 2 * k.shape[2] * 4
    assert by_name["ragged_decode/int8"].moves == pages // 2 + scales + q.size * (2 + 4)


def kernels(jaxpr):
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            yield eqn.params["cost_estimate"]
        for x in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "jaxpr")):
            inner = getattr(x, "jaxpr", x)
            yield from kernels(inner) if hasattr(inner, "eqns") else ()


PLACES = {"mosaic_tpu": ("TPU v5 lite", 1, "tpu"), "triton": ("NVIDIA H200", 132, "gpu")}
MASS_OUT = ("prompt_bfloat16_mass", "bfloat16_selected_mass")
"""Cases count more than these kernels write: a number a channel, not a key; zeros of what is not selected."""


@pytest.mark.parametrize("name", [x for x in cases() if not x.endswith(MASS_OUT)])
def test_xla_is_told_what_a_kernel_reads(name):
    """At least what every implementation has to move, and the products it has to do; unknown to none."""
    case = cases()[name]
    for impl, place in PLACES.items():
        with lowering.for_device(*place):
            try:
                told = list(kernels(jax.make_jaxpr(case.run(impl))(*case.args).jaxpr))
            except Unsupported as reason:
                if jax.__version_info__ < (0, 8) and "whole 128 lanes" in str(reason):
                    continue  # ``compat.check_lanes``
                raise
        assert sum(x.bytes_accessed for x in told) > 0.95 * case.moves
        assert sum(x.flops for x in told) > 0.95 * case.flops
        # A TPU's packing of keys for vertical_slash has none.
        copying = 1 if name.startswith("vertical_slash") and impl == "mosaic_tpu" else 0
        assert [x.transcendentals > 0 for x in told] == [False] * copying + [True] * (len(told) - copying)


def operations_of(jaxpr):
    for eqn in jaxpr.eqns:
        inner = [getattr(x, "jaxpr", x) for x in eqn.params.values()]
        inner = [] if eqn.primitive.name == "pallas_call" else [x for x in inner if hasattr(x, "eqns")]
        yield from () if inner else [eqn.primitive.name]
        for x in inner:
            yield from operations_of(x)


@pytest.mark.parametrize(
    ("name", "of_gpu", "of_tpu"),
    [("bfloat16", 2, 1), ("int8", 2, 1), ("int8_mass", 2, 1), ("bfloat16_chunk_mass", 3, 2)],
)
def test_kernels_of_a_read_of_pages(name, of_gpu, of_tpu):
    """Mass of one query takes no second read; a GPU's plain read has nothing but its kernels and views."""
    case, by_impl = cases()[f"ragged_decode/{name}"], {}
    for impl, place in PLACES.items():
        with lowering.for_device(*place):
            by_impl[impl] = list(operations_of(jax.make_jaxpr(case.run(impl))(*case.args).jaxpr))
    assert by_impl["triton"].count("pallas_call") == of_gpu
    assert by_impl["mosaic_tpu"].count("pallas_call") == of_tpu
    assert "mass" in name or set(by_impl["triton"]) == {"pallas_call", "reshape"}


PROGRAM = """HloModule x
%fused (p: f32[8,16]) -> f32[8] {
  %p = f32[8,16]{1,0} parameter(0)
  %t = f32[16,8]{1,0} transpose(%p)
  ROOT %r = f32[8]{0} reduce(%t)
}
%gathers (p: f32[8,16]) -> f32[4,16] {
  %p = f32[8,16]{1,0} parameter(0)
  ROOT %g = f32[4,16]{1,0} gather(%p)
}
ENTRY %main (a: f32[8,16]) -> f32[8,16] {
  %a = f32[8,16]{1,0:T(8,128)} parameter(0)
  %f = f32[8]{0} fusion(%a), kind=kLoop, calls=%fused
  %b = f32[8,16]{1,0:T(8,128)} copy(%a)
  %s = (bf16[4,32]{1,0}, /*index=1*/u32[]) copy-start(%b)
  %v = (f32[8,16]{1,0:T(8,128)S(1)}, f32[8,16]{1,0}, u32[]{:S(2)}) copy-start(%b)
  %w = ((f32[8,16]{1,0}), f32[4,16]{1,0:T(8,128)S(1)}, s32[]{:T(128)}) slice-start(%b)
  %c = ((f32[8,16]{1,0}), f32[4,16]{1,0}, u32[]) call-start(%b), to_apply=%gathers
  %d = f32[4,16]{1,0} call-done(%c)
  ROOT %k = (f32[8,16]{1,0}, f32[8]{0}) custom-call(%b), custom_call_target="x"
}
"""


def test_copies_are_found_by_size_and_only_where_memory_is_written():
    program = types.SimpleNamespace(as_text=lambda: PROGRAM)
    assert programs.copies(program, 128) == ["copy f32[8,16]", "copy-start bf16[4,32]"]
    assert programs.copies(program, 129) == []
    assert programs.copies(program, 64)[0] == "gather f32[4,16]"
    assert "fusion f32[8]" in programs.copies(program, 8)
    assert programs.copies(program, 128, vmem=True) == ["copy-start f32[8,16]"]
    assert programs.copies(program, 64, vmem=True) == ["copy-start f32[8,16]", "slice-start f32[4,16]"]


def test_launches_are_the_kernels_of_a_program_and_of_its_loops():
    loop = """%body.1 (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %g = f32[8]{0} fusion(%p), kind=kLoop, calls=%fused
}
"""
    text = PROGRAM.replace("ENTRY", loop + "ENTRY").replace(
        "  %s =", "  %l = f32[8]{0} while(%f), body=%body.1\n  %s ="
    )
    assert programs.launches(types.SimpleNamespace(as_text=lambda: PROGRAM)) == 6
    assert programs.launches(types.SimpleNamespace(as_text=lambda: text)) == 7


REPORT = """ptxas info    : Compiling entry function 'phi_sums' for 'sm_90a'
ptxas info    : Function properties for phi_sums
    16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers
ptxas info    : Compiling entry function 'wrapped_slice' for 'sm_90a'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, used 0 barriers
ptxas info    : Compiling entry function 'ragged_decode_read' for 'sm_90a'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers
"""


def test_registers_are_those_of_the_assemblers_report():
    assert static.registers(REPORT) == {
        "phi_sums": {"registers": 255, "spilled_bytes": 20},
        "ragged_decode_read": {"registers": 168, "spilled_bytes": 0},
    }


def test_costs_are_said_in_a_cell():
    assert table._cell({}) == ""
    assert table._cell({"error": "x"}) == "refused"
    assert table._cell({"kernels": static.registers(REPORT)}) == "255 and 20 B spilled, 168"
    two = {"bundles": {"b": 9, "a": 7}, "step_to_roofline": 1.5}
    assert table._cell(two) == "7, 9 (1.5x)"
    assert table._cell(two | {"steps": {"a": [2, 3]}}) == "7, 9 (2+3, 1.5x)"
    assert table._cell(two | {"item": 11}) == "7, 9 (11, 1.5x)"


TPUS = [chip for chip in static.CHIPS if chip not in static.GPUS]


@pytest.mark.parametrize("chip", TPUS)
def test_what_was_reached_on_paper_stays_reached(chip):
    """Of the records: half the bytes take less time but on 7x; pages' reads keep their registers."""
    recorded = json.loads((dispatch.TUNED / chip / "static.json").read_text())["cases"]

    def seconds(name: str) -> float:
        case, made = cases()[f"ragged_decode/{name}"], recorded[f"ragged_decode/{name}"]
        return max(made["item"] / static.CHIPS[chip].clock * 1e-9, static.roofline(chip, *case.step))

    most = {"tpu7x": 1.2}.get(chip, 0.8)
    assert seconds("int8_page128") <= most * seconds("bfloat16_page128")
    for name in ("bfloat16", "int8", "bfloat16_page128", "int8_page128", "int4"):
        assert recorded[f"ragged_decode/{name}"]["spills"] == {"ragged_decode_read": 0}
    for name in ("blockwise/prompt_bfloat16", "vertical_slash/bfloat16_quarter"):
        steps = recorded[name].get("steps", {}).get(name.split("/")[0], [0])
        # On v5p both ways of asking for a block lie in vertical_slash's step, not before it: 80 bundles.
        assert min(steps) <= (1300 if chip == "v5p" else 1200)


def test_what_is_not_installed_is_missing_and_named(monkeypatch):
    monkeypatch.setattr(aot, "_installed", lambda name: None)
    for chip in ("v5e", "h200"):
        with pytest.raises(aot.Missing, match=f"no compiler for {chip}: .*kvjax\\[aot\\]"):
            aot.target.__wrapped__(chip)


def test_readme_has_the_table_of_what_was_recorded():
    assert table.current(), "run python -m benchmarks kernels --table"
