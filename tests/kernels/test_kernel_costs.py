"""Costs and records: arithmetic that can be checked by hand, and a README that says what was recorded."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from pallas_kernels import aot, device, static, table
from pallas_kernels.cases import cases, operations


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


def test_copies_are_found_by_size():
    class Program:
        def as_text(self):
            return "%a = f32[8,16]{1,0} copy(%b)\n%c = bf16[4]{0} copy(%d)\n%e = f32[8,16]{1,0} add(%f, %g)"

    assert aot.copies(Program(), 128) == ["copy f32[8,16]"]
    assert aot.copies(Program(), 129) == []


@pytest.mark.parametrize(("off", "agrees"), [(0.0, True), (1e-3, False), (np.nan, False)])
def test_agreement_is_refused_beyond_tolerance(off, agrees):
    x = np.linspace(-1, 1, 9)
    assert device.agreement([x + off], [x], 9, "float32")["agrees"] is agrees


def test_a_cpu_is_not_measured():
    if jax.default_backend() != "cpu":
        pytest.skip("this is not a CPU")
    with pytest.raises(ValueError, match="needs a GPU or TPU"):
        device.measure(1)


def test_readme_has_the_table_of_what_was_recorded():
    assert table.current(), "run python -m pallas_kernels.bench --table"
