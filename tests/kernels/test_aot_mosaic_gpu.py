"""The Mosaic GPU bodies at serving size, compiled for H200 by the real compilers."""

from __future__ import annotations

import pytest
from chips import chip_or_skip

from benchmarks.kernels import static
from benchmarks.kernels.operations import compiled_for, mosaic_gpu_cases

pytestmark = pytest.mark.aot

CASES = mosaic_gpu_cases()
QUICK = {
    "ragged_decode.mosaic_gpu/bfloat16",
    "blockwise.mosaic_gpu/prompt_bfloat16",
    "vertical_slash.mosaic_gpu/bfloat16_quarter",
}
KERNELS = {
    "ragged_decode": {"ragged_decode_read", "ragged_decode_join"},
    "blockwise": {"blockwise"},
    "vertical_slash": {"vertical_slash"},
}
MOST_LAUNCHES = {"ragged_decode": 4, "blockwise": 8, "vertical_slash": 13}
"""Of decode: queries, the read, the join; lse is cut where queries are not 4, 8, ... Of prefill all but one
make the plan, and of vertical_slash pack keys."""

MORE_LAUNCHES = {"mass": 2, "admitted": 2}
"""Of what a case's name says."""


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x in QUICK else pytest.mark.slow) for x in CASES]
)
def test_it_compiles_in_place_in_few_launches_and_without_spills(name):
    chip_or_skip("h200")
    ((_, report),) = static.report("h200", [name], {})
    assert "error" not in report
    assert report["impl"] == "mosaic_gpu"
    op = name.partition(".")[0]
    assert set(report["kernels"]) == KERNELS[op]
    assert all(0 < x["registers"] <= 255 and x["spilled_bytes"] == 0 for x in report["kernels"].values())
    assert report["copies"] == []
    more = sum(count for said, count in MORE_LAUNCHES.items() if said in name)
    assert report["launches"] <= MOST_LAUNCHES[op] + more
    assert report["temp_bytes"] <= CASES[name].temp


def test_they_are_compiled_for_hoppers_alone():
    assert set(CASES) >= QUICK
    assert set(CASES) <= set(compiled_for("h200"))
    assert not set(CASES) & set(compiled_for("v5e"))
