"""What is tried on a GPU compiles for one, without spills: its time is for measuring."""

from __future__ import annotations

import pytest
from chips import chip_or_skip

from benchmarks.kernels import programs
from benchmarks.kernels.operations import cases
from pallas_kernels import tuning
from pallas_kernels.measure import aot
from pallas_kernels.measure.candidates import CANDIDATES
from pallas_kernels.tuning import Blocks

pytestmark = pytest.mark.aot

CASES = cases()
TUNED_BY = {
    ("ragged_decode", "read"): (("bfloat16", 128), "bfloat16"),
    ("blockwise", "forward"): (("bfloat16", 128), "prompt_bfloat16"),
    ("blockwise", "backward"): (("bfloat16", 128), "prompt_bfloat16_gradient"),
    ("decode_step", "step"): (("bfloat16", 128), "bfloat16_8k"),
    ("vertical_slash", "forward"): (("bfloat16", 128), "bfloat16_quarter"),
    ("gated", "forward"): (("bfloat16", 128), "bfloat16"),
    ("gated", "backward"): (("bfloat16", 128), "bfloat16_gradient"),
    ("phi", "sums"): (("bfloat16", 128), "build_bfloat16"),
}
"""(operation, pass) to the dtype and head dim it is tuned for, and the case that has that pass."""

CHIP_OF = {"triton": "h200", "mosaic_tpu": "v5e", "mosaic_gpu": "h200"}
EACH = [
    pytest.param(op, impl, what, blocks, id=f"{op}-{impl}-{what}-{'-'.join(map(str, blocks))}")
    for (op, impl), passes in CANDIDATES.items()
    for what, tried in passes.items()
    for blocks in tried
]


def built(chip, op, what, blocks, impl=None):
    key, name = TUNED_BY[op, what]
    case = CASES[f"{op}/{name}"]
    with tuning.trying(op, ((tuning.key(what, *key), blocks),)):
        return programs.compiled_without_spills(
            chip, case.run(impl or chip.impl), *case.args, donated=case.donated
        )


@pytest.mark.slow
@pytest.mark.parametrize(("op", "impl", "what", "blocks"), EACH)
def test_a_candidate_compiles_without_spills(op, impl, what, blocks):
    built(chip_or_skip(CHIP_OF[impl], text=False), op, what, blocks, impl)


def test_a_spill_is_seen():
    """The detector itself, and that blocks reach the compiler."""
    with pytest.raises(programs.SpillsError, match="register spilling"):
        built(
            chip_or_skip("h200", text=False), "blockwise", "backward", Blocks(q=64, k=128, warps=4, stages=2)
        )


def test_too_much_shared_memory_is_seen():
    with pytest.raises(aot.jax.errors.JaxRuntimeError, match="(?i)shared"):
        built(
            chip_or_skip("h200", text=False), "blockwise", "forward", Blocks(q=256, k=256, warps=8, stages=4)
        )
