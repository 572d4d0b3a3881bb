"""ragged_decode over pools that no Pallas body reads (grouped codes, 8-bit floats) and over turned pools."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from compiler import compiled_in_full
from kernel_numerics import assert_close
from kernel_oracle import ragged as oracle
from test_kernel_ragged_decode import case, edges, selection

from pallas_kernels import Unsupported, ragged_decode
from pallas_kernels.ragged_decode import api, xla
from pallas_kernels.ragged_decode.work import RaggedDecodeSizes

SHAPE = RaggedDecodeSizes(B=3, N=4, K=2, T=1, H=16, P=40, S=8, M=5)
KINDS = ("kivi2", "kivi4", "fp8")


def packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """Channel c and those a part of H further on share a byte, the first in its low bits."""
    parts = np.split(codes.astype(np.uint8), 8 // bits, axis=-1)
    return sum(part << (bits * at) for at, part in enumerate(parts))


def pools(shape: RaggedDecodeSizes, kind: str, owned: np.ndarray) -> tuple[list, object, list]:
    """Pools and scales as stored, and what they stand for; NaN in the scales of free pages."""
    rng, size = np.random.default_rng(5), (shape.P, shape.S, shape.H)
    if kind == "fp8":
        x = rng.normal(size=(2, *size)).astype(ml_dtypes.float8_e4m3fn)
        bits = x.view(np.uint8).astype(np.uint16)
        stored = bits[..., : shape.H // 2] + 256 * bits[..., shape.H // 2 :]
        scales = rng.uniform(0.5, 1.5, (shape.P, 2, shape.H)).astype(np.float32)
        true = [x[i].astype(np.float64) * scales[:, i, None] for i in (0, 1)]
        scales[~owned] = np.nan
        return [*stored], scales, true
    bits = int(kind[-1])
    codes = rng.integers(0, 2**bits, (2, *size))
    groups, parts = 2, 4  # of four slots, of four channels
    of_keys = rng.uniform(-1, 1, (shape.P, groups, 2, shape.H)).astype(np.float16)
    of_values = rng.uniform(-1, 1, (shape.P, shape.S, 2, parts)).astype(np.float16)
    low, step = (np.repeat(of_keys[:, :, i].astype(np.float64), shape.S // groups, axis=1) for i in (0, 1))
    low_v, step_v = (np.repeat(of_values[:, :, i].astype(np.float64), shape.H // parts, -1) for i in (0, 1))
    true = [low + step * codes[0], low_v + step_v * codes[1]]
    of_keys[~owned], of_values[~owned] = np.nan, np.nan
    return [packed(x, bits) for x in codes], api.Grouped(k=of_keys, v=of_values), true


def coded(kind: str, shape: RaggedDecodeSizes = SHAPE) -> tuple[list, dict, list, dict]:
    """Arguments of a read, and the oracle's."""
    (q, _, _), lists = case(shape, edges(shape), poison=0)
    owned = np.zeros(shape.P, bool)
    for at, length in np.ndenumerate(np.asarray(lists["length"])):
        owned[np.asarray(lists["table"])[at][: -(-length // shape.S)]] = True
    stored, scales, true = pools(shape, kind, owned)
    scales = jax.tree.map(jnp.asarray, scales)
    return [q, *map(jnp.asarray, stored)], {**lists, "scales": scales}, [q, *true], lists


def check(actual, wanted, shape=SHAPE):
    for ours, theirs in zip(actual, wanted):
        assert_close(ours, theirs, shape.M * shape.S)


@pytest.mark.parametrize("impl", ["ref", "xla"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_length_and_every_selection(impl, kind):
    arrays, lists, true, plain = coded(kind)
    check(ragged_decode(*arrays, **lists, mass=True, impl=impl), oracle(*true, **plain))
    some = selection(SHAPE, j=3)
    check(ragged_decode(*arrays, **lists, **some, mass=True, impl=impl), oracle(*true, **plain, **some))


@pytest.mark.parametrize("kind", KINDS)
def test_kv_head_by_kv_head(kind, monkeypatch):
    monkeypatch.setattr(xla, "FLAT_ROWS", 0)
    monkeypatch.setattr(xla, "AT_ONCE", 0)
    jax.clear_caches()
    arrays, lists, true, plain = coded(kind)
    check(ragged_decode(*arrays, **lists, mass=True, impl="xla"), oracle(*true, **plain))
    jax.clear_caches()


@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_scores(kind):
    (q, k, _), lists, (_, keys, _), _ = coded(kind)
    scores = np.asarray(api.largest_scores(q[:, :, 0], k, **lists))
    for row, head in np.ndindex(lists["length"].shape):
        length, group = int(lists["length"][row, head]), SHAPE.N // SHAPE.K
        pages = np.asarray(lists["table"])[row, head, : -(-length // SHAPE.S)]
        held = keys[pages].reshape(-1, SHAPE.H)[:length]
        query = np.asarray(q, np.float64)[row, head * group : (head + 1) * group, 0]
        right = (query @ held.T).max(axis=0, initial=-np.inf) / np.sqrt(SHAPE.H)
        np.testing.assert_allclose(scores[row, head].reshape(-1)[:length], right, rtol=1e-5, atol=1e-5)
        assert (scores[row, head].reshape(-1)[length:] == -np.inf).all()


@pytest.mark.parametrize("kind", ["kivi2", "fp8"])
def test_no_pallas_body_reads_them(kind):
    arrays, lists, _, _ = coded(kind)
    for impl in ("mosaic_tpu", "mosaic_gpu", "triton"):
        with pytest.raises((Unsupported, ValueError), match=impl):
            ragged_decode(*arrays, **lists, impl=impl)


@pytest.mark.parametrize("kind", ["kivi2", "fp8"])
def test_the_pool_is_never_decoded_as_a_whole(kind):
    """Temporary memory of the compiled read is a fraction of the pool in float32."""
    shape = RaggedDecodeSizes(B=2, N=8, K=2, T=1, H=64, P=512, S=64, M=128)
    grids = api.Grouped(
        k=jax.ShapeDtypeStruct((shape.P, 2, 2, shape.H), jnp.float16),
        v=jax.ShapeDtypeStruct((shape.P, shape.S, 2, 2), jnp.float16),
    )
    floats = jax.ShapeDtypeStruct((shape.P, 2, shape.H), jnp.float32)
    pool = {"kivi2": (shape.H // 4, jnp.uint8), "fp8": (shape.H // 2, jnp.uint16)}[kind]
    pages = jax.ShapeDtypeStruct((shape.P, shape.S, pool[0]), pool[1])
    run = jax.jit(functools.partial(ragged_decode, impl="xla"))
    memory = compiled_in_full(
        run.lower(
            jax.ShapeDtypeStruct((2, 8, 1, 64), jnp.float32),
            pages,
            pages,
            jax.ShapeDtypeStruct((2, 2, shape.M), jnp.int32),
            jax.ShapeDtypeStruct((2, 2), jnp.int32),
            scales=grids if kind == "kivi2" else floats,
        )
    ).memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < shape.P * shape.S * shape.H * 4 / 2


@pytest.mark.parametrize("h", [2, 16, 24])
def test_turning_twice_is_nothing_and_products_stay(h):
    x, y = np.random.default_rng(0).normal(size=(2, 5, h)).astype(np.float32)
    once = np.asarray(api.turned(x))
    np.testing.assert_allclose(api.turned(once), x, atol=1e-6)
    np.testing.assert_allclose(once @ np.asarray(api.turned(y)).T, x @ y.T, atol=1e-5)
    size = h & -h  # by the definition: (-1) to the bits that both numbers have, in blocks
    sign = [[(-1) ** bin(i & j).count("1") for i in range(size)] for j in range(size)]
    right = x.reshape(5, -1, size) @ (np.asarray(sign) / np.sqrt(size))
    np.testing.assert_allclose(once, right.reshape(5, h), atol=1e-6)


@pytest.mark.parametrize("impl", ["ref", "xla"])
def test_a_turned_pool_reads_as_one_that_is_not(impl):
    (q, k, v), lists = case(SHAPE, edges(SHAPE), poison=0)
    turned = ragged_decode(q, api.turned(k), api.turned(v), **lists, mass=True, turn=True, impl=impl)
    check(turned, oracle(q, k, v, **lists))
    scores = [
        np.asarray(api.largest_scores(q[:, :, 0], keys, **lists, turn=turn))
        for keys, turn in ((k, False), (api.turned(k), True))
    ]
    np.testing.assert_allclose(*scores, atol=1e-5)


def test_grouped_scales_that_do_not_fit_are_refused():
    (q, k, v), lists, _, _ = coded("kivi2")
    grids = lists.pop("scales")
    for wrong in (grids._replace(v=grids.v[:, :4]), grids._replace(k=grids.k[:, :, :1])):
        with pytest.raises(ValueError, match="needs uint8 pages"):
            ragged_decode(q, k, v, **lists, scales=wrong)
