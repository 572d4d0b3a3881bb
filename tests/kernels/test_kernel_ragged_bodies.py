"""The Pallas bodies of ragged_decode, interpreted: against NumPy, and against races and stale memory.

The TPU interpreter fills fresh memory with NaN and copies only when a copy is waited for. A few
representative cases run by default, the whole grid with ``-m slow``.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_bodies import races_found
from kernel_numerics import assert_as_good_as_plain, assert_close
from kernel_oracle import ragged as oracle
from kernel_sizes import RAGGED_DECODE
from test_kernel_ragged_decode import KINDS, case, check, edges, plain, selection

from pallas_kernels import EMPTY, Unsupported, merge, ragged_decode, tuning
from pallas_kernels.dispatch import interpreted
from pallas_kernels.ragged_decode import mosaic_tpu, triton, triton_join, triton_pages, worklist
from pallas_kernels.ragged_decode.call import Lists, Options, Pools
from pallas_kernels.ragged_decode.work import RaggedDecodeSizes

BODIES = ("mosaic_tpu", "triton")
QUICK = [
    *(("g4_h64", "int8", True), ("g4_h96", "float32", True), ("page128", "int8", False)),
    *(("g4_h64", "uint8", True), ("page128", "uint8", False)),
]
"""Of two queries a head, whose mass takes a second read, and of one."""

GRID = [(name, kind, some) for name in RAGGED_DECODE for kind in KINDS for some in (False, True)]
CASES = [pytest.param(*x, marks=() if x in QUICK else pytest.mark.slow) for x in GRID]


@pytest.fixture(autouse=True)
def no_race(request):
    """Bodies run interpreted, and no TPU body may have raced."""
    with interpreted():
        yield
    if "mosaic_tpu" in request.node.name:
        assert not races_found()


@pytest.fixture
def short_items(monkeypatch):
    """Items of a few pages and rows of 64 queries: short lists are several items, a chunk several rows."""
    monkeypatch.setattr(mosaic_tpu, "TILE_SLOTS", 16)
    monkeypatch.setattr(mosaic_tpu, "ITEM_TILES", 2)
    monkeypatch.setattr(mosaic_tpu, "ROWS", 64)
    monkeypatch.setattr(triton, "ITEM_SLOTS", (16, 16))
    monkeypatch.setattr(triton, "PROGRAMS", 12)
    monkeypatch.setattr(triton, "ITEMS", 2)
    monkeypatch.setattr(triton, "TILE", 16)
    monkeypatch.setattr(triton_join, "JOINED", 2)
    for module in (mosaic_tpu, triton):
        module.ragged_decode.clear_cache()
    yield
    for module in (mosaic_tpu, triton):
        module.ragged_decode.clear_cache()


@pytest.mark.parametrize("impl", BODIES)
@pytest.mark.parametrize(("name", "kind", "some"), CASES)
def test_every_length_of_every_list(impl, name, kind, some, short_items):
    shape = RAGGED_DECODE[name]
    arrays, lists = case(shape, edges(shape), kind=kind)
    lists |= selection(shape, j=3) if some else {}
    actual = ragged_decode(*arrays, **lists, mass=True, softcap=2.0, impl=impl)
    check(actual, oracle(*arrays, **lists, softcap=2.0), shape.M * shape.S)
    np.testing.assert_array_equal(actual[0][0, 0], 0)
    np.testing.assert_array_equal(actual[1][0, 0], -np.inf)


@pytest.mark.parametrize("kind", ["int8", "uint8", "float32"])
def test_pages_of_an_item_go_through_one_product_on_tpu(kind):
    """Of codes several pages, each with scales of its own; of short heads with slots in the lanes."""
    shape = RAGGED_DECODE["page128"]
    arrays, lists = case(shape, edges(shape), kind=kind)
    actual = ragged_decode(*arrays, **lists, mass=True, impl="mosaic_tpu")
    check(actual, oracle(*arrays, **lists), shape.M * shape.S)


@pytest.mark.parametrize("impl", BODIES)
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) for n in RAGGED_DECODE])
def test_bfloat16_is_as_good_as_the_plain_way(impl, name):
    shape = RAGGED_DECODE[name]
    (q, k, v), lists = case(shape, np.maximum(edges(shape), 3), kind="bfloat16", poison=0)
    q = q.astype(jnp.bfloat16)
    exact_out, exact_lse, _ = oracle(q, k, v, **lists)
    plain_out, plain_lse = plain(shape, q, k, v, **lists)
    out, lse = ragged_decode(q, k, v, **lists, impl=impl)
    assert_as_good_as_plain(out, plain_out, exact_out, shape.M * shape.S)
    assert_as_good_as_plain(lse, plain_lse, exact_lse, shape.M * shape.S)


@pytest.mark.slow
@pytest.mark.parametrize("impl", BODIES)
def test_a_shared_page_is_read_by_both_and_the_same_twice(impl):
    shape = RAGGED_DECODE["g4_h64"]
    arrays, lists = case(shape, np.full((3, 2), 2 * shape.S), poison=0)
    lists["table"] = lists["table"].at[1].set(lists["table"][0])
    actual = ragged_decode(*arrays, **lists, mass=True, impl=impl)
    check(actual, oracle(*arrays, **lists), shape.M * shape.S)
    for ours, again in zip(actual, ragged_decode(*arrays, **lists, mass=True, impl=impl)):
        np.testing.assert_array_equal(ours, again)


@pytest.mark.slow
@pytest.mark.parametrize("impl", BODIES)
def test_halves_merge_to_the_whole(impl):
    shape = RAGGED_DECODE["g4_h64"]
    arrays, lists = case(shape, edges(shape))
    half = jnp.broadcast_to(jnp.arange(shape.M, dtype=jnp.int32), lists["table"].shape)
    parts = [ragged_decode(*arrays, **lists, pages=half[..., x::2], impl=impl) for x in (0, 1)]
    check(merge(parts), ragged_decode(*arrays, **lists, impl=impl), shape.M * shape.S)


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@pytest.mark.parametrize("impl", BODIES)
@given(st.integers(0, 2**31), st.booleans())
def test_any_lengths_and_tables(impl, seed, select):
    shape = RAGGED_DECODE["g4_h64"]
    rng = np.random.default_rng(seed)
    length = rng.integers(0, shape.M * shape.S + 1, size=(shape.B, shape.K))
    arrays, lists = case(shape, length * rng.integers(0, 2, size=(1, shape.K)), seed, "int8")
    lists |= selection(shape, 3, seed) if select else {}
    check(ragged_decode(*arrays, **lists, mass=True, impl=impl), oracle(*arrays, **lists), shape.M * shape.S)


@pytest.mark.parametrize(
    ("impl", "kind"),
    [("xla", "int8"), ("triton", "float32"), pytest.param("mosaic_tpu", "int8", marks=pytest.mark.slow)],
)
def test_gradients_are_those_of_the_definition(impl, kind):
    """Of out, lse and mass, with a selection, which no form of ``xla`` differentiates by itself."""
    shape = RaggedDecodeSizes(B=1, N=4, K=2, T=2, H=32, P=6, S=4, M=3)
    (q, k, v), lists = case(shape, np.array([[5, 12]]), kind=kind, poison=0)
    lists |= {"pages": jnp.array([[[1, 0], [2, 1]]])}
    names = {"float32": (q, k, v), "int8": (q, lists.get("scales"))}[kind]

    def read(impl, *x):
        more = {"scales": x[1]} if kind == "int8" else {}
        pools = (k, v) if kind == "int8" else x[1:]
        return ragged_decode(x[0], *pools, **(lists | more), mass=True, impl=impl)

    actual, back = jax.vjp(functools.partial(read, impl), *names)
    _, back_plain = jax.vjp(functools.partial(read, "ref"), *names)
    up = tuple(jnp.cos(x) for x in actual)
    for ours, theirs in zip(back(up), back_plain(up)):
        assert_close(ours, theirs, shape.M * shape.S * shape.N)
    assert float(jnp.abs(back(up)[1]).max()) > 0.01


def test_the_gradient_is_borrowed_whatever_blocks_the_body_takes():
    """What ``dispatch`` tells a body about blocks reaches the body alone."""
    shape = RAGGED_DECODE["g1_h32"]
    (q, k, v), lists = case(shape, edges(shape), poison=0)
    tuned = ((tuning.key("read", k.dtype, shape.H), tuning.Blocks(k=8, item=16)),)

    def read(q):
        return ragged_decode(q, k, v, **lists, impl="triton")[0]

    with tuning.trying("ragged_decode", tuned):
        actual, back = jax.vjp(read, q)
    wanted, back_plain = jax.vjp(lambda q: ragged_decode(q, k, v, **lists, impl="ref")[0], q)
    assert_close(actual, wanted, shape.M * shape.S)
    assert_close(back(actual)[0], back_plain(wanted)[0], shape.M * shape.S)


STREAMED = [
    pytest.param("g4_h64", "int8", True, marks=pytest.mark.slow),
    ("g1_h32", "float32", False),
]


@pytest.mark.parametrize(("name", "kind", "some"), STREAMED)
def test_lists_that_do_not_fit_are_read_two_items_ahead(name, kind, some, short_items, monkeypatch):
    """To the bit what lists in SMEM give, with mass of a second read and of one."""
    shape = RAGGED_DECODE[name]
    arrays, lists = case(shape, edges(shape), kind=kind)
    lists |= selection(shape, j=3) if some else {}
    wanted = ragged_decode(*arrays, **lists, mass=True, impl="mosaic_tpu")
    monkeypatch.setattr(mosaic_tpu, "SMEM_WORDS", 60)  # five of each of two items of six KV heads
    mosaic_tpu.ragged_decode.clear_cache()
    actual = ragged_decode(*arrays, **lists, mass=True, impl="mosaic_tpu")
    monkeypatch.setattr(mosaic_tpu, "SMEM_WORDS", 59)
    mosaic_tpu.ragged_decode.clear_cache()
    with pytest.raises(Unsupported, match="60 numbers for their items"):
        ragged_decode(*arrays, **lists, impl="mosaic_tpu")
    for ours, theirs in zip(actual, wanted):
        np.testing.assert_array_equal(ours, theirs)
    check(actual, oracle(*arrays, **lists), shape.M * shape.S)
    assert not races_found()


def test_items_cover_live_pages_once_and_no_others():
    shape, per_item = RAGGED_DECODE["g4_h64"], 2
    live = jnp.asarray([[0, 3, 16, 0, 1], [0, 0, 0, 0, 0], [16, 16, 16, 16, 0]])
    ids = jnp.arange(15).reshape(3, 5)
    packed = worklist.pack(ids, live, 20, shape.S, selected=True)
    items, count = worklist.items(packed, 2, per_item, shape.S)
    items = worklist.Items(*(np.asarray(x)[: int(count)] for x in items))
    assert list(items.row) == [0, 0, 1, 1, 2, 3, 4, 4, 5, 5]
    assert list(items.held) == [2, 1, 2, 1, 0, 0, 2, 2, 2, 2]
    bits = [(bool(e & worklist.FIRST), bool(e & worklist.LAST), bool(e & worklist.FULL)) for e in items.edge]
    assert bits[:2] == [(True, False, False), (False, True, False)]
    assert bits[4] == (True, True, False)
    assert bits[6:8] == [(True, False, True), (False, True, True)]
    entries = [np.asarray(packed.entry).reshape(-1)[p : p + n] for p, n in zip(items.place, items.held)]
    read = [(int(e) >> worklist.shift(shape.S), int(e) % 32) for e in np.concatenate(entries)]
    assert read == [(1, 3), (2, 16), (4, 1)] * 2 + [(10, 16), (11, 16), (12, 16), (13, 16)] * 2
    np.testing.assert_array_equal(worklist.unpack(packed.order, packed.order), np.arange(5) + 0 * ids)


def sizes_of(rows, live, pages, size=64, heads=8, dtype="bfloat16", tokens=1):
    """How the GPU body divides lists: its sizes, and the shares of lists of these lengths."""
    shape = jax.ShapeDtypeStruct
    q, pool = shape((rows, 4 * heads, tokens, 128), jnp.bfloat16), shape((999, size, 128), dtype)
    lists = Lists(shape((rows, heads, pages), jnp.int32), shape((rows, heads), jnp.int32), None, None)
    sizes = triton._sizes(q, Pools(pool, pool, None), lists, (), Options(False, 1.0, None), True)
    return sizes, jax.vmap(lambda x: triton_pages.shares(sizes, pages, False, x))(jnp.asarray(live))


def test_a_gpus_work_is_divided_by_what_is_live_not_by_what_could_be():
    """Of tables of 500k slots; four programs a multiprocessor of 132 where there are that many shares."""
    sizes, split = sizes_of(1, [8192, 500_000], pages=7813)
    assert sizes.items * 8 == 528
    np.testing.assert_array_equal(split.items * 8, [512, 528])
    np.testing.assert_array_equal(split.each * sizes.tile * 64, [128, 119 * 64])
    np.testing.assert_array_equal(sizes_of(1, [8192, 500_000], pages=1 << 20)[1].items, split.items)
    # Many rows: few programs of each, but one long row is not left to a few.
    sizes, split = sizes_of(32, [0, 1, 8192, 500_000], pages=7813)
    assert sizes.items == 32
    np.testing.assert_array_equal(split.items, [0, 1, 16, 32])
    # A chunk of a prompt has blocks of queries enough, and partials as large as they are.
    assert sizes_of(1, [8192], pages=7813, tokens=512)[0].items == 3


@pytest.mark.parametrize("size", [16, 64, 256])
@pytest.mark.parametrize("rows", [1, 4, 32])
def test_shares_are_even_and_cover_every_live_page_once(rows, size):
    pages = 700
    live = np.unique([0, 1, size - 1, size, size + 1, *range(0, pages * size, 997), pages * size])
    sizes, split = sizes_of(rows, live, pages, size)
    tiles, each, items = (np.asarray(x) for x in split)
    np.testing.assert_array_equal(tiles, -(-live // (size * sizes.tile)))
    assert (items <= sizes.items).all()
    assert ((items - 1) * each < np.maximum(tiles, 1)).all()  # no item without a tile,
    assert (items * each >= tiles).all()  # and no tile without an item
    # None is longer than with all items working, but for the least that an item is.
    np.testing.assert_array_equal(each, np.maximum(-(-tiles // sizes.items), sizes.least))


def test_a_row_is_the_same_to_the_bit_whatever_is_beside_it():
    shape = RAGGED_DECODE["g1_h32"]
    arrays, lists = case(shape, np.full((3, 2), shape.M * shape.S), poison=0)
    read = jax.jit(lambda length: ragged_decode(*arrays, **(lists | {"length": length}), impl="triton"))
    alone = jnp.zeros((3, 2), jnp.int32).at[1, 0].set(shape.M * shape.S - 3)
    for ours, theirs in zip(read(alone), read(jnp.maximum(alone, 17))):
        np.testing.assert_array_equal(ours[1, 0], theirs[1, 0])
        assert np.isfinite(ours[1, 0]).all()


def test_whole_lists_are_walked_as_they_lie():
    """No sort and no search: up to the last live page, with a hole where a page is missing."""
    shape = RAGGED_DECODE["g4_h64"]
    live = jnp.asarray([[16, 0, 3, 0, 0], [0, 0, 0, 0, 0], [16, 16, 16, 16, 16]])
    packed = worklist.pack(jnp.arange(15).reshape(3, 5), live, 20, shape.S, selected=False)
    np.testing.assert_array_equal(packed.held, [3, 0, 5])
    np.testing.assert_array_equal(np.asarray(packed.entry) % 32, live)
    assert worklist.unpack(live, packed.order) is live


@pytest.mark.parametrize("impl", BODIES)
def test_a_missing_page_in_a_list_is_passed_over(impl):
    shape = RAGGED_DECODE["g4_h64"]
    arrays, lists = case(shape, np.full((3, 2), shape.M * shape.S - 1))
    lists["table"] = lists["table"].at[2, 0, :2].set(jnp.array([EMPTY, shape.P])).at[0, 1, 2].set(EMPTY)
    actual = ragged_decode(*arrays, **lists, mass=True, impl=impl)
    for ours, wanted in zip(actual, ragged_decode(*arrays, **lists, mass=True, impl="ref")):
        assert_close(ours, wanted, shape.M * shape.S)


def test_refusals():
    shape = RAGGED_DECODE["g1_h32"]
    (q, k, v), lists = case(shape, edges(shape))
    with pytest.raises(Unsupported, match="powers of two"):
        ragged_decode(q, k[:, :6], v[:, :6], **lists, impl="triton")
    (_, k4, v4), coded = case(shape, edges(shape), kind="uint8")
    with pytest.raises(Unsupported, match="two codes a byte in pages of 6 slots.*multiple of 4"):
        ragged_decode(q, k4[:, :6], v4[:, :6], **coded, impl="mosaic_tpu")
    big = jax.ShapeDtypeStruct((1 << 21, 32, 32), jnp.bfloat16)
    with pytest.raises(Unsupported, match="31 bits"):
        jax.eval_shape(lambda k: ragged_decode(q, k, k, **lists, impl="triton"), big)
    wide = {"table": jnp.zeros((3, 2, 1_000_000), jnp.int32), "length": lists["length"]}
    with pytest.raises(Unsupported, match="SMEM"):
        ragged_decode(q, k, v, **wide, impl="mosaic_tpu")
    with pytest.raises(Unsupported, match="one number"):
        worklist.pack(jnp.zeros((1, 1), jnp.int32), jnp.zeros((1, 1), jnp.int32), 1 << 25, 64, selected=True)
