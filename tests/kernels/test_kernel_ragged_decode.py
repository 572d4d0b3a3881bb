"""ragged_decode against NumPy: ragged lengths, scattered pages, garbage everywhere else."""

from __future__ import annotations

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiler import compiled_in_full
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_numerics import assert_as_good_as_plain, assert_close
from kernel_oracle import ragged as oracle
from kernel_sizes import RAGGED_DECODE

from pallas_kernels import EMPTY, Unsupported, merge, ragged_decode
from pallas_kernels.ragged_decode import api, flat, xla
from pallas_kernels.ragged_decode.call import Lists, Options, Pools
from pallas_kernels.ragged_decode.ref import page_lists
from pallas_kernels.ragged_decode.work import RaggedDecodeSizes

IMPLS = ("ref", "xla")
KINDS = ("float32", "int8", "uint8")
CODES = [
    ("g4_h64", "int8"),
    ("g1_h128", "int8"),
    ("many_queries", "int8"),
    ("g4_h64", "uint8"),
    ("many_queries", "uint8"),
]


def edges(shape):
    """Lengths 0, 1, S - 1, S, S + 1 and the whole list, one for each of the six KV heads."""
    s = shape.S
    return np.array([0, 1, s - 1, s, s + 1, shape.M * s]).reshape(3, 2)


def case(shape, length, seed=0, kind="float32", poison=np.nan):
    """Pages in random order; poison in dead slots and free pages, garbage in the tables' tails."""
    rng = np.random.default_rng(seed)
    b, n, kv, t, h, pool, size, m = shape
    need = -(-length // size)
    free = list(rng.permutation(pool))
    garbage = np.array([EMPTY, pool, pool + 7, 2**31 - 1, -5, free[-1]])
    table = rng.choice(garbage, size=(b, kv, m))
    live = np.zeros((pool, size), bool)
    for row, head in np.ndindex(b, kv):
        for place in range(int(length[row, head])):
            if place % size == 0:
                table[row, head, place // size] = free.pop(0)
            live[table[row, head, place // size], place % size] = True
    assert need.sum() <= pool
    table[0, 1, need[0, 1] :] = table.reshape(-1)[-1]  # the tail of one list names a live page of another
    q = rng.normal(size=(b, n, t, h)).astype(np.float32)
    k, v = rng.normal(size=(2, pool, size, h)).astype(np.float32)
    lists = {"table": jnp.asarray(table, jnp.int32), "length": jnp.asarray(length, jnp.int32)}
    if kind in ("int8", "uint8"):
        steps, most = (40, 127) if kind == "int8" else (3, 7)
        k, v = (np.clip(np.round(x * steps), -most, most).astype(np.int8) for x in (k, v))
        k, v = (k, v) if kind == "int8" else (paired(k), paired(v))
        scales = rng.uniform(0.5, 1.5, size=(pool, 2, h)) / steps
        scales[~live.any(axis=1)] = poison
        return [jnp.asarray(x) for x in (q, k, v)], lists | {"scales": jnp.asarray(scales, jnp.float32)}
    k, v = (np.where(live[..., None], x, poison) for x in (k, v))
    return [jnp.asarray(x, kind) if i else jnp.asarray(x) for i, x in enumerate((q, k, v))], lists


def paired(codes):
    """Channel c in the low half of a byte, channel c + H / 2 in the high half."""
    half = codes.shape[-1] // 2
    return (codes[..., :half] % 16 + 16 * (codes[..., half:] % 16)).astype(np.uint8)


def selection(shape, j, seed=1):
    """j distinct pages a KV head, some of them EMPTY, and half of their slots."""
    rng = np.random.default_rng(seed)
    pages = rng.permuted(np.broadcast_to(np.arange(shape.M), (shape.B, shape.K, shape.M)), axis=2)[..., :j]
    pages = np.where(rng.random(pages.shape) < 0.2, EMPTY, pages)
    pages[-1, -1, 0] = EMPTY  # the full list's selection starts with nothing
    slots = rng.random((*pages.shape, shape.S)) < 0.5
    return {"pages": jnp.asarray(pages, jnp.int32), "slots": jnp.asarray(slots)}


def check(actual, wanted, terms):
    assert all(x.dtype == jnp.float32 for x in actual)
    for ours, theirs in zip(actual, wanted):
        assert_close(ours, theirs, terms)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("name", "kind"), [*((name, "float32") for name in RAGGED_DECODE), *CODES])
def test_every_length_of_every_list(impl, name, kind):
    shape = RAGGED_DECODE[name]
    arrays, lists = case(shape, edges(shape), kind=kind)
    actual = ragged_decode(*arrays, **lists, mass=True, impl=impl)
    check(actual, oracle(*arrays, **lists), shape.M * shape.S)
    np.testing.assert_array_equal(actual[0][0, 0], 0)
    np.testing.assert_array_equal(actual[1][0, 0], -np.inf)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("name", "kind"), [("g4_h64", "int8"), ("g4_h64", "uint8"), ("many_queries", "float32")]
)
@pytest.mark.parametrize("narrowed", [False, True])
def test_selections(impl, name, kind, narrowed):
    shape = RAGGED_DECODE[name]
    arrays, lists = case(shape, edges(shape), kind=kind)
    lists |= selection(shape, j=3)
    if not narrowed:
        del lists["slots"]
    check(ragged_decode(*arrays, **lists, mass=True, impl=impl), oracle(*arrays, **lists), shape.M * shape.S)


@pytest.mark.parametrize(
    ("impl", "form"), [("ref", "flat"), ("xla", "flat"), ("xla", "once"), ("xla", "by_head")]
)
@pytest.mark.parametrize("kind", KINDS)
def test_capped_scores(impl, form, kind, monkeypatch):
    """A cap that bends most scores, in every form of the operation."""
    shape = RAGGED_DECODE["g4_h64"]
    arrays, lists = case(shape, edges(shape), kind=kind)
    if form != "flat":
        lists |= selection(shape, j=3)
    if form == "by_head":
        monkeypatch.setattr(xla, "AT_ONCE", 0)
        xla.ragged_decode.clear_cache()
    capped = oracle(*arrays, **lists, softcap=0.8)
    check(ragged_decode(*arrays, **lists, mass=True, softcap=0.8, impl=impl), capped, shape.M * shape.S)
    assert np.abs(capped[0] - oracle(*arrays, **lists)[0]).max() > 0.1
    xla.ragged_decode.clear_cache()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chosen", [False, True])
def test_one_kv_head_at_a_time_when_all_at_once_is_too_much(kind, chosen, monkeypatch):
    shape = RAGGED_DECODE["many_queries"]
    arrays, lists = case(shape, edges(shape), kind=kind)
    lists = {"scales": None, "pages": None, "slots": None} | lists | (selection(shape, j=3) if chosen else {})
    monkeypatch.setattr(xla, "AT_ONCE", 0)
    monkeypatch.setattr(xla.listed, "BLOCK", shape.S if chosen else 5 * shape.S)
    q, k, v = arrays
    untraced = inspect.unwrap(xla.ragged_decode)
    run = jax.jit(functools.partial(untraced, options=Options(mass=True, scale=0.1, softcap=None)))
    actual = run(q, Pools(k, v, lists["scales"]), Lists(*map(lists.get, Lists._fields)))
    check(actual, oracle(*arrays, **lists, scale=0.1), shape.M * shape.S)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from(KINDS), st.booleans())
def test_any_lengths_and_tables(seed, kind, select):
    shape = RAGGED_DECODE["g4_h64"]
    rng = np.random.default_rng(seed)
    length = rng.integers(0, shape.M * shape.S + 1, size=(shape.B, shape.K)) * rng.integers(
        0, 2, size=(1, shape.K)
    )
    arrays, lists = case(shape, length, seed, kind)
    lists |= selection(shape, 3, seed) if select else {}
    check(ragged_decode(*arrays, **lists, mass=True, impl="xla"), oracle(*arrays, **lists), shape.M * shape.S)


@pytest.mark.parametrize("name", ["g1_h32", "many_queries"])
@pytest.mark.parametrize("impl", IMPLS)
def test_bfloat16_is_as_good_as_the_plain_way(impl, name):
    shape = RAGGED_DECODE[name]
    length = np.maximum(edges(shape), 3)
    (q, k, v), lists = case(shape, length, kind="bfloat16", poison=0)
    q = q.astype(jnp.bfloat16)
    exact_out, exact_lse, _ = oracle(q, k, v, **lists)
    plain_out, plain_lse = plain(shape, q, k, v, **lists)
    out, lse = ragged_decode(q, k, v, **lists, impl=impl)
    assert_as_good_as_plain(out, plain_out, exact_out, shape.M * shape.S)
    assert_as_good_as_plain(lse, plain_lse, exact_lse, shape.M * shape.S)


@functools.partial(jax.jit, static_argnums=0)
def plain(shape, q, k, v, table, length):
    """What anyone would write: gather, einsum, mask, softmax, everything in the arrays' own dtype."""
    ids = jnp.where((table >= 0) & (table < shape.P), table, 0)
    rows = (shape.B, shape.K, -1, shape.H)
    kk, vv = (jnp.repeat(x[ids].reshape(rows), shape.N // shape.K, axis=1) for x in (k, v))
    see = (
        jnp.arange(shape.M * shape.S)[None, None] < jnp.repeat(length, shape.N // shape.K, axis=1)[..., None]
    )
    s = jnp.einsum("bnth,bnsh->bnts", q, kk).astype(jnp.float32) * shape.H**-0.5
    s = jnp.where(see[:, :, None], s, -jnp.inf)
    out = jnp.einsum("bnts,bnsh->bnth", jax.nn.softmax(s, axis=-1).astype(jnp.bfloat16), vv)
    return out, jax.nn.logsumexp(s, axis=-1)


@pytest.mark.parametrize(("poison", "kind"), [(np.nan, "float32"), (np.inf, "float32"), (np.nan, "bfloat16")])
@pytest.mark.parametrize("impl", IMPLS)
def test_poison_changes_nothing(impl, poison, kind):
    """The same as from a pool with zeros in its unused slots; NaN makes ``xla`` take its slow way."""
    shape = RAGGED_DECODE["g4_h64"]
    clean, lists = case(shape, edges(shape), kind=kind, poison=0)
    dirty, _ = case(shape, edges(shape), kind=kind, poison=poison)
    assert not jnp.isfinite(dirty[1]).all()
    actual = ragged_decode(*dirty, **lists, mass=True, impl=impl)
    check(actual, ragged_decode(*clean, **lists, mass=True, impl=impl), shape.S)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_twice_and_the_same_wherever_pages_lie(kind):
    shape = RAGGED_DECODE["g4_h64"]
    (q, k, v), lists = case(shape, edges(shape), kind=kind, poison=0)
    first = ragged_decode(q, k, v, **lists, mass=True, impl="xla")
    for ours, theirs in zip(ragged_decode(q, k, v, **lists, mass=True, impl="xla"), first):
        np.testing.assert_array_equal(ours, theirs)
    to = np.random.default_rng(5).permutation(shape.P)
    back = np.argsort(to)
    known = (lists["table"] >= 0) & (lists["table"] < shape.P)
    moved = {name: x[back] if name == "scales" else x for name, x in lists.items()}
    moved["table"] = jnp.where(known, jnp.asarray(to)[jnp.where(known, lists["table"], 0)], lists["table"])
    check(ragged_decode(q, k[back], v[back], **moved, mass=True, impl="xla"), first, shape.M * shape.S)


def far_away(kind):
    """Every live page in the last pages of a pool of several chunks."""
    shape = RAGGED_DECODE["g1_h128"]
    poison = np.nan if kind == "float32" else 0
    (q, k, v), lists = case(shape, edges(shape), kind=kind, poison=poison)
    far = 4 * (flat.CHUNK // shape.S) + 5
    k, v = (jnp.concatenate([jnp.full((far, *x.shape[1:]), 99, x.dtype), x]) for x in (k, v))
    if "scales" in lists:
        lists["scales"] = jnp.concatenate([jnp.ones((far, *lists["scales"].shape[1:])), lists["scales"]])
    lists["table"] = jnp.where(lists["table"] >= 0, jnp.minimum(lists["table"], shape.P) + far, EMPTY)
    return shape, (q, k, v), lists


@pytest.mark.parametrize("kind", ["int8", "uint8", "float32"])
def test_chunks_nobody_owns_are_skipped_and_no_others(kind):
    shape, (q, k, v), lists = far_away(kind)
    assert k.shape[0] * shape.S >= flat.LARGE
    check(ragged_decode(q, k, v, **lists, mass=True, impl="xla"), oracle(q, k, v, **lists), shape.M * shape.S)


@pytest.mark.parametrize(
    ("platform", "kind", "loops"), [("tpu", "bfloat16", 2), ("cpu", "bfloat16", 1), ("cpu", "float32", 2)]
)
def test_only_a_cpu_reads_all_of_a_large_bfloat16_pool(platform, kind, loops):
    """Small chunks are read one by one in a loop; the other is for dead slots that hold NaN."""
    _, (q, k, v), lists = far_away("float32")
    k, v = k.astype(kind), v.astype(kind)
    read = jax.jit(lambda q, k, v, lists: ragged_decode(q, k, v, **lists, impl="xla"))
    text = read.trace(q, k, v, lists).lower(lowering_platforms=(platform,)).as_text()
    assert text.count("stablehlo.while") == loops


def as_prompts_lie(swapped, poison):
    """Two KV heads' pages one after the other in a pool of five chunks, some of them swapped."""
    rng = np.random.default_rng(3)
    pages, size, length = 320, 64, np.array([[9000, 10900]])
    where = np.arange(pages)
    for page, other in zip(range(3, pages // 2, 32), range(swapped)):
        where[[page, -page - 10 * other]] = where[[-page - 10 * other, page]]
    need = -(-length // size)[0]
    table = np.full((1, 2, max(need)), EMPTY)
    live = np.zeros((pages, size), bool)
    for head, begins in enumerate((0, need[0])):
        table[0, head, : need[head]] = where[begins : begins + need[head]]
        live[table[0, head, : need[head]]] = (np.arange(need[head] * size) < length[0, head]).reshape(
            -1, size
        )
    q = rng.normal(size=(1, 4, 2, 16))
    k, v = np.where(live[..., None], rng.normal(size=(2, pages, size, 16)), poison)
    return (
        [jnp.asarray(x, jnp.float32) for x in (q, k, v)],
        jnp.asarray(table, jnp.int32),
        jnp.asarray(length),
    )


@pytest.mark.parametrize("poison", [99, np.nan])
@pytest.mark.parametrize(("swapped", "long"), [(0, True), (1, True), (5, False)])
def test_pages_that_lie_together_are_read_as_one(swapped, long, poison):
    arrays, table, length = as_prompts_lie(swapped, poison)
    pool, size = arrays[1].shape[:2]
    own, _ = flat.owners(*page_lists(Lists(table, length, None, None), pool, size), pool)
    how = flat._long_pages(own, 2, size)
    assert how.pay == long
    assert how.others.live.any()
    for softcap in (None, 2.0):
        lists = {"table": table, "length": length, "softcap": softcap}
        right = oracle(*arrays, **lists)[:2]
        check(ragged_decode(*arrays, **lists, impl="xla"), right, int(length.max()))


def test_a_long_page_is_a_chunk_or_nearly():
    assert [flat.long_page(pool, 64) for pool in (320, 224, 254, 257, 1026)] == [64, 56, 127, 0, 57]
    assert [flat.long_page(pool, size) for pool, size in ((256, 256), (80, 8192), (80, 1024))] == [16, 0, 4]


@pytest.mark.parametrize("kind", ["int8", "uint8"])
def test_the_largest_scores_of_codes_are_those_of_the_definition(kind):
    shape, (q, k, _), lists = far_away(kind)
    scores = np.asarray(api.largest_scores(q[:, :, 0], k, **lists))
    keys = np.asarray(api.floats(k) * lists["scales"][:, :1], np.float64)
    for row, head in np.ndindex(lists["length"].shape):
        length, group = int(lists["length"][row, head]), shape.N // shape.K
        pages = np.asarray(lists["table"])[row, head, : -(-length // shape.S)]
        held = keys[pages].reshape(-1, shape.H)[:length]
        query = np.asarray(q, np.float64)[row, head * group : (head + 1) * group, 0]
        right = (query @ held.T).max(axis=0, initial=-np.inf) / np.sqrt(shape.H)
        np.testing.assert_allclose(scores[row, head].reshape(-1)[:length], right, rtol=1e-5, atol=1e-5)
        assert (scores[row, head].reshape(-1)[length:] == -np.inf).all()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_may_share_a_prefix(impl, kind):
    """The first two pages of a row are those of another, whose own pages follow; one page is listed twice."""
    shape = RAGGED_DECODE["g4_h64"]
    arrays, lists = case(shape, np.full((3, 2), 3 * shape.S + 1), kind=kind)
    table = lists["table"].at[1, :, :2].set(lists["table"][0, :, :2])
    lists["table"] = table.at[2, 0, 1].set(table[2, 0, 0])
    actual = ragged_decode(*arrays, **lists, mass=True, shared=True, impl=impl)
    check(actual, oracle(*arrays, **lists), shape.M * shape.S)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_page_of_two_lists_is_never_silently_lost(impl, kind):
    """Untold that pages are shared, an answer is right or NaN."""
    shape = RAGGED_DECODE["g4_h64"]
    arrays, lists = case(shape, np.full((3, 2), 3 * shape.S + 1), kind=kind)
    table = lists["table"].at[1, 1, :2].set(lists["table"][0, 0, :2])
    lists["table"] = table.at[2, 0, 1].set(table[2, 0, 0])
    actual, wanted = ragged_decode(*arrays, **lists, mass=True, impl=impl), oracle(*arrays, **lists)
    lost = np.isnan(actual[1]).reshape(3, 2, -1).all(axis=-1)
    if impl == "xla":
        assert lost[2, 0]
        assert lost[0, 0] != lost[1, 1]
        assert lost.sum() == 2
    right = np.repeat(~lost, shape.N // shape.K, axis=1)
    for ours, theirs in zip(actual, wanted):
        assert_close(ours[right], theirs[right], shape.M * shape.S)
        assert all(np.isnan(x).any() for x in np.asarray(ours)[~right])


@pytest.mark.parametrize("impl", IMPLS)
def test_a_page_that_is_not_there_is_not_read(impl):
    shape = RAGGED_DECODE["g1_h32"]
    arrays, lists = case(shape, edges(shape))
    wanted = oracle(*arrays, **lists)
    lists["table"] = lists["table"].at[2, 0, :2].set(jnp.array([EMPTY, shape.P]))
    out, lse, mass = ragged_decode(*arrays, **lists, mass=True, impl=impl)
    check((out[:2], lse[:2], mass[:2]), [x[:2] for x in wanted], shape.M * shape.S)
    for x, nothing in ((out, 0), (lse, -np.inf), (mass, 0)):
        np.testing.assert_array_equal(x[2, 0], nothing)


@pytest.mark.parametrize("impl", IMPLS)
def test_halves_merge_to_the_whole(impl):
    shape = RAGGED_DECODE["g4_h64"]
    arrays, lists = case(shape, edges(shape))
    half = jnp.broadcast_to(jnp.arange(shape.M, dtype=jnp.int32), lists["table"].shape)
    parts = [
        ragged_decode(*arrays, **lists, pages=half[..., cut], impl=impl)
        for cut in (slice(0, 1), slice(1, None))
    ]
    whole = ragged_decode(*arrays, **lists, impl=impl)
    check(merge(parts), whole, shape.M * shape.S)


@pytest.mark.parametrize("impl", IMPLS)
def test_gradients_are_those_of_dense_attention(impl):
    shape = RaggedDecodeSizes(B=1, N=4, K=2, T=2, H=32, P=6, S=4, M=3)
    arrays, lists = case(shape, np.array([[5, 12]]), poison=0)

    @jax.jit
    def dense(q, k, v):
        ids = jnp.where((lists["table"] >= 0) & (lists["table"] < shape.P), lists["table"], 0)
        k, v = (jnp.repeat(x[ids].reshape(1, shape.K, -1, shape.H), 2, axis=1) for x in (k, v))
        see = jnp.arange(shape.M * shape.S)[None, None] < jnp.repeat(lists["length"], 2, axis=1)[..., None]
        s = jnp.einsum("bnth,bnsh->bnts", q, k) * shape.H**-0.5
        s = jnp.where(see[:, :, None], s, -1e30)
        return jnp.einsum("bnts,bnsh->bnth", jax.nn.softmax(s, axis=-1), v), jax.nn.logsumexp(s, axis=-1)

    actual, back = jax.vjp(lambda *x: ragged_decode(*x, **lists, impl=impl), *arrays)
    _, back_dense = jax.vjp(dense, *arrays)
    up = jnp.cos(actual[0]), jnp.sin(actual[1])
    for ours, theirs in zip(back(up), back_dense(up)):
        assert_close(ours, theirs, shape.M * shape.S * shape.N)
    assert float(jnp.abs(back(up)[1]).max()) > 0.01


@pytest.mark.parametrize("kind", [*KINDS, "bfloat16"])
def test_the_pool_is_read_in_place(kind):
    """Temporary memory of the compiled read: a fraction of the pool, which no float copy would be."""
    if jax.default_backend() != "cpu":
        pytest.skip("the flat form is laid out for XLA on CPU")
    if kind == "bfloat16" and jax.__version_info__ < (0, 10):
        pytest.skip("XLA of jax 0.7.2 converts a bfloat16 operand to float32 before any product on CPU")
    shape = RaggedDecodeSizes(B=2, N=8, K=2, T=1, H=64, P=512, S=64, M=128)
    length = np.full((2, 2), shape.M * shape.S)
    arrays, lists = case(shape, length, kind=kind, poison=0)
    assert arrays[1].dtype == kind
    run = jax.jit(lambda q, k, v, lists: ragged_decode(q, k, v, **lists, impl="xla"))
    memory = compiled_in_full(run.lower(*arrays, lists)).memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < shape.P * shape.S * shape.H * (2 if kind == "bfloat16" else 4) / 2


def test_two_codes_of_a_byte_are_those_put_in():
    """Every pair of codes of 4 bits, and the bytes of the oracle."""
    pairs = np.stack(np.meshgrid(np.arange(-8, 8), np.arange(-8, 8)), axis=-1).reshape(-1, 2).astype(np.int8)
    codes = api.paired(jnp.asarray(pairs))
    assert codes.dtype == api.PAIRED == jnp.uint8
    assert codes.shape == (256, 1)
    np.testing.assert_array_equal(codes, paired(pairs))
    np.testing.assert_array_equal(api.floats(codes), pairs)
    np.testing.assert_array_equal(api.floats(jnp.zeros((3, 4), jnp.uint8)), np.zeros((3, 8)))


def test_refusals():
    shape = RAGGED_DECODE["g1_h32"]
    (q, k, v), lists = case(shape, edges(shape))
    for impl in ("mosaic_tpu", "triton"):
        with pytest.raises(Unsupported, match="its body is for"):
            ragged_decode(q, k, v, **lists, impl=impl)
    with pytest.raises(ValueError, match="int8, uint8 or uint16 pools"):
        ragged_decode(q, k.astype(jnp.int8), v.astype(jnp.int8), **lists)
    with pytest.raises(ValueError, match="two codes a byte"):
        ragged_decode(q, k.astype(jnp.uint8), v.astype(jnp.uint8), **lists)
    with pytest.raises(ValueError, match="one shape and dtype"):
        ragged_decode(q, k, v.astype(jnp.bfloat16), **lists)
    with pytest.raises(ValueError, match="Pass `pages`"):
        ragged_decode(q, k, v, **lists, slots=jnp.ones((3, 2, 1, shape.S), bool))
    with pytest.raises(ValueError, match="table"):
        ragged_decode(q, k, v, lists["table"], lists["length"][:1])
