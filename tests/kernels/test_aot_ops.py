"""Every operation at serving size, compiled by the real compilers for chips that are not here.

``JAX_PLATFORMS=cpu pytest -m aot`` in an environment with the wheels of the group ``aot``; without the
variable the CUDA plug-in looks for a driver and gives up. A few cases of each operation and chip run with
``-m 'aot and not slow'``. A program that compiles may still be wrong: numbers are the business of the
other tests.
"""

from __future__ import annotations

import jax
import pytest
from chips import chip_or_skip

from benchmarks.kernels import static
from benchmarks.kernels.operations import cases
from benchmarks.kernels.programs import SpillsError, compiled_without_spills, copies, launches
from pallas_kernels import dispatch
from pallas_kernels.measure import aot
from pallas_kernels.measure.work import size

pytestmark = pytest.mark.aot

CASES = cases()
QUICK = {
    "blockwise/prompt_bfloat16",
    "decode_step/bfloat16_8k",
    "gated/odd_h96_bfloat16_gradient",
    "phi/read_bfloat16",
    "ragged_decode/int8",
    "vertical_slash/odd_h96_bfloat16",
}
QUICK_TOO = {
    ("h200", "blockwise/prompt_bfloat16_gradient"),
    ("h200", "gated/bfloat16_gradient"),
    ("h200", "ragged_decode/int8_mass"),
    ("v5e", "ragged_decode/bfloat16"),
}
MOST_LAUNCHES = {False: 2, True: 6}
"""Of a read of pages on a GPU, without and with mass (and, of one case, selected slots)."""

MOST_STEP_LAUNCHES = {False: 12, True: 2}
"""Of a decode step in one kernel, by whether on a GPU: there it is two, and nothing else."""

RING_LAUNCHES = 7
"""Of a decode step's read of its ring: none of them makes a plan."""

SLASH_LAUNCHES = {True: 11, False: 15}
"""Of vertical_slash on a GPU, of whole tiles or of what has to be padded; nothing is sorted on any chip."""

EACH = [
    pytest.param(chip, name, marks=() if name in QUICK or (chip, name) in QUICK_TOO else pytest.mark.slow)
    for chip in aot.CHIPS
    for name in CASES
]


def test_the_quick_cases_are_cases():
    assert QUICK | {name for _, name in QUICK_TOO} <= set(CASES)
    assert set(aot.CHIPS) == set(static.CHIPS)


@pytest.mark.parametrize(("chip", "name"), EACH)
def test_it_compiles_in_place_in_little_memory_and_without_spills(chip, name):
    case, place = CASES[name], chip_or_skip(chip)
    try:
        program = compiled_without_spills(place, case.run(place.impl), *case.args, donated=case.donated)
    except dispatch.Unsupported as reason:  # a head dimension that Colab's compiler cannot copy
        assert jax.__version_info__ < (0, 8)
        pytest.skip(str(reason))
    except SpillsError:
        # One of XLA's own kernels may (a scatter of ragged_decode's parts does), ours may not.
        ((_, report),) = static.report(chip, [name], {})
        assert {x: y for x, y in report["kernels"].items() if y["spilled_bytes"]} == {}
        program = aot.compiled(place, case.run(place.impl), *case.args)
    if case.whole:
        # Triton's bodies of prefill round their output outside, where the model's layout is made too.
        rounds = place.impl == "triton" and name.startswith(("blockwise/prompt", "vertical_slash/"))
        assert len(copies(program, case.whole)) == rounds
    if name.startswith("ragged_decode/"):
        # The listed pages are read from a pool: no part of it is brought to VMEM before. (Mass may be.)
        if case.whole and "mass" not in name:
            assert copies(program, case.whole // 16, vmem=True) == []
        assert chip != "h200" or launches(program) <= MOST_LAUNCHES["mass" in name]
    if name.startswith("decode_step/"):
        assert program.memory_analysis().alias_size_in_bytes >= size(case.args[3])
        assert launches(program) <= MOST_STEP_LAUNCHES[chip == "h200"]
    if name.startswith("vertical_slash/"):
        assert " sort(" not in program.as_text()
        assert chip != "h200" or launches(program) <= SLASH_LAUNCHES[case.whole > 0]
    if (chip, name) == ("h200", "blockwise/ring_bfloat16"):
        assert launches(program) <= RING_LAUNCHES
    assert program.memory_analysis().temp_size_in_bytes <= case.temp


@pytest.mark.parametrize("chip", [pytest.param("v5e", marks=pytest.mark.slow), "h200"])
def test_a_copy_and_too_much_memory_are_seen(chip):
    """The detectors themselves: a head dim that TPU pools cannot have in place, and a plain copy."""
    chip = chip_or_skip(chip)
    if chip.platform == "tpu":
        case = CASES["ragged_decode/bfloat16_h64"]
        program = aot.compiled(chip, case.run(chip.impl), *case.args)
    else:
        shape = jax.ShapeDtypeStruct((64, 16384 * 64), "float32")
        program = aot.compiled(chip, lambda x: (x.T + 0, (x.T @ x)[0, 0]), shape)
    assert copies(program, 16384 * 64 * 64)
    assert program.memory_analysis().temp_size_in_bytes > CASES["phi/read_bfloat16"].temp


def test_static_costs_are_reported_and_not_computed_twice():
    chip_or_skip("h200")
    name = "phi/odd_h64_read_float32"
    ((_, first),) = static.report("h200", [name], {})
    assert {"phi_sums", "phi_evaluate"} == set(first["kernels"])
    assert all(0 < x["registers"] <= 255 and x["spilled_bytes"] == 0 for x in first["kernels"].values())
    ((_, again),) = static.report("h200", [name], {name: {**first, "compile_s": -1}})
    assert again == {**first, "compile_s": -1}
    ((_, anew),) = static.report("h200", [name], {name: {**first, "compile_s": -1, "program": "another"}})
    assert anew["compile_s"] >= 0
