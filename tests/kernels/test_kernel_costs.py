"""Costs and records: arithmetic that can be checked by hand, and a README that says what was recorded."""

from __future__ import annotations

import types

import pytest

from pallas_kernels.measure import aot, static, table
from pallas_kernels.measure.work import cases, operations


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


def test_cases_move_what_their_shapes_say():
    found = cases()
    assert {name.split("/")[0] for name in found} <= set(operations())
    case = found["ragged_decode/bfloat16"]
    q, k, _, table_, *_ = case.args
    pages = 2 * table_.size * k.shape[1] * k.shape[2] * 2
    assert case.moves == pages + q.size * (2 + 4)
    scales = table_.size * 2 * k.shape[2] * 4
    assert found["ragged_decode/int8"].moves == pages // 2 + scales + q.size * (2 + 4)


PROGRAM = """HloModule x
%fused (p: f32[8,16]) -> f32[8] {
  %p = f32[8,16]{1,0} parameter(0)
  %t = f32[16,8]{1,0} transpose(%p)
  ROOT %r = f32[8]{0} reduce(%t)
}
ENTRY %main (a: f32[8,16]) -> f32[8,16] {
  %a = f32[8,16]{1,0:T(8,128)} parameter(0)
  %f = f32[8]{0} fusion(%a), kind=kLoop, calls=%fused
  %b = f32[8,16]{1,0:T(8,128)} copy(%a)
  %s = (bf16[4,32]{1,0}, /*index=1*/u32[]) copy-start(%b)
  %v = (f32[8,16]{1,0:T(8,128)S(1)}, f32[8,16]{1,0}, u32[]{:S(2)}) copy-start(%b)
  %w = ((f32[8,16]{1,0}), f32[4,16]{1,0:T(8,128)S(1)}, s32[]{:T(128)}) slice-start(%b)
  ROOT %k = (f32[8,16]{1,0}, f32[8]{0}) custom-call(%b), custom_call_target="x"
}
"""


def test_copies_are_found_by_size_and_only_where_memory_is_written():
    program = types.SimpleNamespace(as_text=lambda: PROGRAM)
    assert aot.copies(program, 128) == ["copy f32[8,16]", "copy-start bf16[4,32]"]
    assert aot.copies(program, 129) == []
    assert "fusion f32[8]" in aot.copies(program, 8)


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
    assert table._cell({"temp_bytes": 0}) == "compiled"
    assert table._cell({"kernels": static.registers(REPORT)}) == "255 and 20 B spilled, 168"
    assert table._cell({"bundles": {"b": 9, "a": 7}, "step_to_roofline": 1.5}) == "7, 9 (1.5x)"


def test_what_is_not_installed_is_missing_and_named(monkeypatch):
    monkeypatch.setattr(aot, "_installed", lambda name: None)
    for chip in ("v5e", "h200"):
        with pytest.raises(aot.Missing, match=f"no compiler for {chip}: .*kvjax\\[aot\\]"):
            aot.target.__wrapped__(chip)


def test_readme_has_the_table_of_what_was_recorded():
    assert table.current(), "run python -m pallas_kernels.bench --table"
