"""Every case of every operation, compiled by the real compilers for chips that are not here.

``JAX_PLATFORMS=cpu pytest -m aot`` (without it the CUDA plug-in looks for a driver and gives up) in an
environment with the wheels of the group ``aot``; about a second a case on an idle core. A program that
compiles may still be wrong: numbers are the business of the other tests.
"""

from __future__ import annotations

import jax
import pytest

from pallas_kernels import aot
from pallas_kernels.cases import cases

pytestmark = pytest.mark.aot

CASES = cases()


@pytest.fixture(scope="module", params=aot.CHIPS)
def chip(request):
    try:
        return aot.target(request.param)
    except aot.Missing as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("name", CASES)
def test_it_compiles_in_place_and_in_little_memory(chip, name):
    case = CASES[name]
    program = aot.compiled(chip, case.run(chip.impl), *case.args)
    if case.whole:
        assert aot.copies(program, case.whole) == []
    assert program.memory_analysis().temp_size_in_bytes <= case.temp


def test_a_copy_is_seen(chip):
    """The detector itself: a head dim that TPU pools cannot have in place, and a plain copy."""
    if chip.platform == "tpu":
        case = CASES["ragged_decode/bfloat16_h64"]
        program = aot.compiled(chip, case.run(chip.impl), *case.args)
    else:
        shape = jax.ShapeDtypeStruct((64, 16384 * 64), "float32")
        program = aot.compiled(chip, lambda x: x.T + 0, shape)
    assert aot.copies(program, 16384 * 64 * 64)
