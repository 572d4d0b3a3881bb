"""The Mosaic GPU bodies of prefill: which tiles they read, what they refuse, and what they compute.

What they compute is in ``prefill_on_hopper``: on jax 0.12's interpreter, in a process of its own.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import Unsupported, blockwise, compat, dispatch, lowering, vertical_slash
from pallas_kernels.blockwise import api as full_api
from pallas_kernels.measure import on_device
from pallas_kernels.measure.work import TimedCall
from pallas_kernels.vertical_slash import api as slash_api
from pallas_kernels.vertical_slash.compact import Rows, admitted_upto, compact
from pallas_kernels.vertical_slash.tiles import Rule

hopper_operands = pytest.importorskip("pallas_kernels.hopper_operands", exc_type=ImportError)
slash = pytest.importorskip("pallas_kernels.vertical_slash.mosaic_gpu", exc_type=ImportError)

HOPPER = ("NVIDIA H200", 132, "gpu")
needs_interpreter = pytest.mark.skipif(compat.gpu_interpreter() is None, reason="jax 0.12 interprets it")


@needs_interpreter
@pytest.mark.parametrize(
    "which", ["admitted or none", pytest.param("not (admitted or none)", marks=pytest.mark.slow)]
)
def test_interpreted_they_agree_with_the_oracle(which):
    """dispatch.interpreted(), impl="mosaic_gpu"."""
    file = pathlib.Path(__file__).with_name("prefill_on_hopper.py")
    run = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-k", which, str(file)]
    environment = {**os.environ, "NPROC": "16", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("first", [0, 37])
@pytest.mark.parametrize("window", [0, 1, 100, 320])
def test_a_block_reads_every_visible_pair_once_and_hides_nothing_of_whole_tiles(window, first):
    """By counting pairs; rows that end at, inside and before blocks of 64 queries and 32 keys; a piece."""
    t, size, block, ends = 320, 64, 32, jnp.asarray([320, 301, 64, 0], jnp.int32)
    admit = np.random.default_rng(0).random((4, 1, t)) < np.array([0.9, 0.5, 0.9, 0.9])[:, None, None]
    nothing, upto = jnp.zeros((4, 1, t, 1)), admitted_upto(jnp.asarray(admit), ends)
    pos = compact(nothing, nothing, upto, t).pos
    rows, rule = Rows(jnp.full(4, first), ends), Rule(window, t, 1.0, None)
    refs = [slash.ranges(upto, rows, t // size, size, block, rule)]
    order = slash.Ranged()

    @jax.jit
    def everything(row, at):
        program = hopper_operands.Program(row, jnp.int32(0), at)
        return order.counts(refs, program), order.tile(refs, program, jnp.arange(2 * t // block))

    j, inside, outside = np.arange(t), 0, 0
    for row, at in np.ndindex(4, t // size):
        i, length = first + at * size + np.arange(size)[:, None], int(ends[row])
        # A program of the second query head of the group reads what that of the first does.
        (whole, count), key_tile = everything(jnp.int32(row), jnp.int32(at + t // size))
        times = np.zeros((size, t), int)
        for c in range(int(count)):
            tile, packed = int(key_tile.tile[c]), int(key_tile.part[c]) == slash.PACKED
            part = slice(tile * block, (tile + 1) * block)
            keys = np.asarray(pos)[row, 0, part] if packed else j[part]
            see = (keys <= i - window) if packed else (keys > i - window) & (keys <= i)
            see = see & (i < length)
            assert see.all() or c >= whole
            assert bool(key_tile.dirty[c]) == (not packed and keys[-1] >= length)
            assert not (key_tile.dirty[c] and c < whole)
            times[:, keys[keys < t]] += see[:, keys < t]
        inside, outside = inside + int(whole), outside + int(count) - int(whole)
        wanted = (j <= i) & ((i - j < window) | admit[row]) & (i < length)
        np.testing.assert_array_equal(times, wanted)
    assert min(inside, outside) > 0


def call(op, h=64, dtype="bfloat16", t=64, heads=1):
    shape, keys = jax.ShapeDtypeStruct, jax.ShapeDtypeStruct((1, heads, t, h), dtype)
    if op == "blockwise":
        run = lambda q, k, pos: blockwise(q, k, k, q_pos=pos, k_pos=pos, impl="mosaic_gpu")  # noqa: E731
        return run, (keys, keys, shape((1, t), jnp.int32))
    run = lambda q, k, admit: vertical_slash(q, k, k, admit, window=3, impl="mosaic_gpu")  # noqa: E731
    return run, (keys, keys, shape((1, heads, t), bool))


@pytest.mark.parametrize("op", ["blockwise", "vertical_slash"])
@pytest.mark.parametrize(
    ("sizes", "where", "why"),
    [
        ({"h": 80}, HOPPER, "head dim 80"),
        ({"dtype": "float32"}, HOPPER, "keys of float32"),
        ({"t": 1 << 20, "heads": 32}, HOPPER, "keys of 2147483648 elements"),
        ({}, ("NVIDIA A100-SXM4-40GB", 108, "gpu"), r"not a Hopper \(NVIDIA A100"),
    ],
)
def test_refusals(op, sizes, where, why):
    run, args = call(op, **sizes)
    with lowering.for_device(*where), pytest.raises(Unsupported, match=why) as reason:
        jax.eval_shape(run, *args)
    assert f"{op}(impl='mosaic_gpu')" in str(reason.value)
    assert "Use impl=" in str(reason.value)


@pytest.mark.parametrize(("op", "api"), [("blockwise", full_api), ("vertical_slash", slash_api)])
def test_they_are_taken_where_tritons_is_not_and_their_own_record_says_so(op, api, monkeypatch):
    known = {"impl": "mosaic_gpu", "agrees": True}

    def first():
        with lowering.for_device(*HOPPER):
            return next(dispatch._candidates(op, api.OFFERED, "gpu"))[0]

    monkeypatch.setattr(dispatch, "record", lambda name, kind: {})
    assert first() == "xla"
    monkeypatch.setattr(dispatch, "record", lambda name, kind: known if name == f"{op}.mosaic_gpu" else {})
    assert first() == "mosaic_gpu"


def test_a_borrowed_pass_is_not_tuned(monkeypatch):
    """Of blockwise's two passes the body has the forward one."""
    jobs = [TimedCall(what, lambda impl: lambda: 0, (), tunes=what) for what in ("forward", "backward")]
    tuned = []

    def tune(op, job, tried, *rest):
        tuned.append((job.tunes, tried))
        return ()

    monkeypatch.setattr(on_device, "work", lambda op: type("Work", (), {"searches": lambda tiny: iter(jobs)}))
    monkeypatch.setattr(on_device, "tune", tune)
    assert on_device.blocks("blockwise", "mosaic_gpu", False, 60.0, lambda *said: None) == ()
    ((what, tried),) = tuned
    assert what == "forward"
    assert tried
