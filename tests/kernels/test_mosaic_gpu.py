"""The Mosaic GPU body of ragged_decode: what it refuses, and, where jax can interpret it, what it computes.

The interpreter runs warpgroups as threads that wait at barriers, fills fresh shared memory with NaN and
looks for races. jax 0.10's does not know all that the body uses: there it is only compiled.
"""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_numerics import assert_as_good_as_plain
from kernel_oracle import ragged as oracle
from test_kernel_ragged_decode import case, check, plain

from pallas_kernels import Unsupported, compat, dispatch, lowering, ragged_decode
from pallas_kernels.dispatch import interpreted
from pallas_kernels.measure import device, on_device
from pallas_kernels.measure.work import Check
from pallas_kernels.ragged_decode.work import RaggedDecodeSizes

HOPPER = ("NVIDIA H200", 132, "gpu")
SMALL = RaggedDecodeSizes(B=2, N=8, K=2, T=1, H=64, P=12, S=64, M=4)

mosaic_gpu_join = pytest.importorskip("pallas_kernels.ragged_decode.mosaic_gpu_join", exc_type=ImportError)
mosaic_gpu = pytest.importorskip("pallas_kernels.ragged_decode.mosaic_gpu", exc_type=ImportError)
needs_interpreter = pytest.mark.skipif(compat.gpu_interpreter() is None, reason="jax 0.12 interprets it")


@pytest.fixture
def short_items(monkeypatch):
    """Items of three tiles and rings that are gone round: short lists are several items."""
    monkeypatch.setattr(mosaic_gpu, "ITEM_SLOTS", (192, 192))
    monkeypatch.setattr(mosaic_gpu, "STAGES", 2)
    monkeypatch.setattr(mosaic_gpu_join, "RING", 1)
    mosaic_gpu.ragged_decode.clear_cache()
    yield
    mosaic_gpu.ragged_decode.clear_cache()


def lengths(shape):
    """None, one slot, in the middle of a page, all."""
    most = shape.M * shape.S
    return np.array([[0, 1], [most - shape.S // 2 - 1, most]])


@needs_interpreter
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("float32", {"T": 2, "softcap": 2.0}),  # several queries a head, so no mass
        pytest.param("float32", {"S": 16, "M": 20, "P": 50, "H": 128}, marks=pytest.mark.slow),
        pytest.param("int8", {"S": 32, "M": 10, "P": 24}, marks=pytest.mark.slow),
        pytest.param("int8", {"S": 128, "M": 3, "P": 8, "H": 128}, marks=pytest.mark.slow),
        pytest.param("float32", {"S": 256, "M": 2, "P": 6, "T": 20}, marks=pytest.mark.slow),
    ],
)
def test_every_length_of_every_list(kind, sizes, short_items):
    """NaN in dead slots and free pages, garbage in the tables' tails; with mass where it is given."""
    cap = sizes.pop("softcap", None)
    shape = SMALL._replace(**sizes)
    arrays, lists = case(shape, lengths(shape), kind=kind)
    mass = shape.T == 1
    with interpreted():
        actual = ragged_decode(*arrays, **lists, mass=mass, softcap=cap, impl="mosaic_gpu")
    assert len(actual) == 2 + mass
    check(actual, oracle(*arrays, **lists, softcap=cap)[: len(actual)], shape.M * shape.S)
    np.testing.assert_array_equal(actual[0][0, 0], 0)
    np.testing.assert_array_equal(actual[1][0, 0], -np.inf)


@needs_interpreter
@pytest.mark.slow
def test_bfloat16_is_as_good_as_the_plain_way(short_items):
    (q, k, v), lists = case(SMALL, np.maximum(lengths(SMALL), 3), kind="bfloat16", poison=0)
    q = q.astype(jnp.bfloat16)
    exact_out, exact_lse, _ = oracle(q, k, v, **lists)
    plain_out, plain_lse = plain(SMALL, q, k, v, **lists)
    with interpreted():
        out, lse = ragged_decode(q, k, v, **lists, impl="mosaic_gpu")
    assert_as_good_as_plain(out, plain_out, exact_out, SMALL.M * SMALL.S)
    assert_as_good_as_plain(lse, plain_lse, exact_lse, SMALL.M * SMALL.S)


@needs_interpreter
@pytest.mark.slow
def test_a_hole_hides_its_slots_and_a_nan_shows(short_items):
    """A page in the middle of a list is not there; a live key is NaN in one KV head, a value in another."""
    arrays, lists = case(SMALL, np.full((2, 2), 3 * SMALL.S - 5))
    q, k, v = arrays
    table = lists["table"]
    lists["table"] = table.at[0, 0, 1].set(-1)
    k = k.at[table[0, 1, 2], 3, 0].set(np.nan)
    v = v.at[table[1, 0, 2], 5, 7].set(np.nan)
    with interpreted():
        out, lse = ragged_decode(q, k, v, **lists, impl="mosaic_gpu")
    wanted_out, wanted_lse = ragged_decode(q, k, v, **lists, impl="ref")
    np.testing.assert_allclose(out, wanted_out, atol=1e-5)
    np.testing.assert_allclose(lse, wanted_lse, atol=1e-5)
    assert np.isnan(out).sum() == 4 * 64 + 4


@pytest.mark.skipif(compat.gpu_interpreter() is not None, reason="this jax interprets it")
def test_a_jax_that_cannot_interpret_it_says_so():
    arrays, lists = case(SMALL, lengths(SMALL))
    with interpreted(), pytest.raises(Unsupported, match=r"interpreter of jax .* 0\.12 does"):
        ragged_decode(*arrays, **lists, impl="mosaic_gpu")


def refused(shape, kind="bfloat16", where=HOPPER, **more):
    """Why it is, before anything is lowered."""
    arrays, lists = case(SMALL, lengths(SMALL), kind=kind)
    size, h = shape.S, shape.H
    pools = [jax.ShapeDtypeStruct((shape.P, size, h // (1 + (kind == "uint8"))), x.dtype) for x in arrays[1:]]
    q = jax.ShapeDtypeStruct((shape.B, shape.N, shape.T, h), jnp.bfloat16)
    if "scales" in lists:
        lists["scales"] = jax.ShapeDtypeStruct((shape.P, 2, h), jnp.float32)
    with lowering.for_device(*where), pytest.raises(Unsupported) as reason:
        jax.eval_shape(functools.partial(ragged_decode, impl="mosaic_gpu", **more), q, *pools, **lists)
    assert "Use impl=" in str(reason.value)
    return str(reason.value)


@pytest.mark.parametrize(
    ("sizes", "more", "why"),
    [
        ({"H": 80}, {}, "head dim 80"),
        ({"S": 48}, {}, "pages of 48 slots"),
        ({"S": 4}, {}, "pages of 4 slots"),
        ({"P": 1 << 19}, {}, "a pool of 2147483648 elements"),
        ({}, {"kind": "uint8"}, "pools of uint8"),
        ({}, {"pages": jnp.zeros((2, 2, 1), jnp.int32)}, "selected pages"),
        ({"T": 2}, {"mass": True}, "mass of 2 queries a head"),
        ({}, {"where": ("NVIDIA A100-SXM4-40GB", 108, "gpu")}, r"not a Hopper \(NVIDIA A100"),
    ],
)
def test_refusals(sizes, more, why):
    assert re.search(why, refused(SMALL._replace(**sizes), **more))


@pytest.mark.parametrize(
    ("kind", "there"),
    [
        ("NVIDIA H100 80GB HBM3", True),
        ("NVIDIA H200", True),
        ("NVIDIA GH200 480GB", True),
        ("NVIDIA B200", False),
        ("NVIDIA A100-SXM4-40GB", False),
        ("NVIDIA L40S", False),
    ],
)
def test_which_devices_are_hoppers(kind, there):
    assert lowering.is_hopper(kind) is there
    assert len(device._mosaic_gpu_tasks("gpu", kind, (), device.Extra())) == 6 * there
    assert device._mosaic_gpu_tasks("gpu", kind, ("phi",), device.Extra()) == []


def test_it_has_a_record_of_its_own_and_needs_one(monkeypatch):
    """It is taken where Triton's is not on record and its own is."""
    known = {"impl": "mosaic_gpu", "agrees": True}
    offered = {"xla": "xla", "triton": "triton", "mosaic_gpu": "mosaic_gpu"}

    def first(where=HOPPER):
        with lowering.for_device(*where):
            impl, why = next(dispatch._candidates("ragged_decode", offered, "gpu"))
        assert ("no record of 'triton'" in why) is (impl != "triton")
        return impl

    monkeypatch.setattr(dispatch, "record", lambda op, kind: {})
    assert first() == "xla"
    monkeypatch.setattr(dispatch, "record", lambda op, kind: known if op == "ragged_decode" else {})
    assert first() == "xla"
    monkeypatch.setattr(dispatch, "record", lambda op, kind: known if op.endswith(".mosaic_gpu") else {})
    assert first() == "mosaic_gpu"
    assert first(("NVIDIA B200", 148, "gpu")) == "xla"
    assert dispatch.filed("phi_build", "triton") == "phi"


def test_what_it_leaves_to_others_is_no_disagreement(tmp_path, monkeypatch):
    def refuses(impl):
        def run(x):
            if impl != "ref":
                raise Unsupported("not this one")
            return x

        return run

    def agrees(impl):
        return lambda x: x

    checks = [Check(name, run, (jnp.ones(3),), 1, "float32") for name, run in (("a", agrees), ("b", refuses))]
    records = device.Records(tmp_path, {"impl": "triton"}, show=False)
    monkeypatch.setattr(on_device, "work", lambda op: type("Work", (), {"checks": lambda tiny: iter(checks)}))
    say = functools.partial(records.add, "ragged_decode.mosaic_gpu")
    assert on_device.numerics("ragged_decode", "mosaic_gpu", True, say)
    record = records.of("ragged_decode.mosaic_gpu")
    record["checked"] = True
    records.write("ragged_decode.mosaic_gpu")
    assert record["agrees"]
    assert record["impl"] == "mosaic_gpu"
    assert "not this one" in record["checks"]["b"]["left_to_others"]
    checks.pop(0)
    assert not on_device.numerics("ragged_decode", "mosaic_gpu", True, say)
    assert "agrees" not in on_device.run_check(checks[0], "triton")  # a main body may leave calls to xla, too
