"""The Mosaic GPU body at serving size, compiled for H200 by the real compilers."""

from __future__ import annotations

import pytest
from test_aot_ops import target

from pallas_kernels.measure import static
from pallas_kernels.measure.work import beside, compiled_for

pytestmark = pytest.mark.aot

CASES = beside()
QUICK = "ragged_decode.mosaic_gpu/bfloat16"
MOST_LAUNCHES = {False: 4, True: 6}
"""Without and with mass: queries, the read, the join; lse is cut where queries are not 4, 8, ..."""


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x == QUICK else pytest.mark.slow) for x in CASES]
)
def test_it_compiles_in_place_in_few_launches_and_without_spills(name):
    target("h200")
    ((_, found),) = static.report("h200", [name], {})
    assert "error" not in found
    assert found["impl"] == "mosaic_gpu"
    assert set(found["kernels"]) == {"ragged_decode_read", "ragged_decode_join"}
    assert all(0 < x["registers"] <= 255 and x["spilled_bytes"] == 0 for x in found["kernels"].values())
    assert found["copies"] == []
    assert found["launches"] <= MOST_LAUNCHES["mass" in name]
    assert found["temp_bytes"] <= CASES[name].temp


def test_it_is_compiled_for_hoppers_alone():
    assert set(CASES) <= set(compiled_for("h200"))
    assert not set(CASES) & set(compiled_for("v5e"))
