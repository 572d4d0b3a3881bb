"""vertical_slash against NumPy and against the other reads of the same mask."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiler import compiled_in_full
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_bodies import BODIES, body, check_no_race, check_refusals, small_blocks
from kernel_numerics import assert_as_good_as_plain, assert_close
from kernel_oracle import blockwise as oracle
from kernel_sizes import SELF_ATTENTION, SLASH_BLOCKS

from pallas_kernels import blockwise, compat
from pallas_kernels.dispatch import interpreted
from pallas_kernels.gated.api import gated
from pallas_kernels.vertical_slash import ref, xla
from pallas_kernels.vertical_slash.api import vertical_slash
from pallas_kernels.vertical_slash.compact import FAR, Inputs, admitted_upto, compact
from pallas_kernels.vertical_slash.mosaic_tpu_pack import compact as packed_on_tpu
from pallas_kernels.vertical_slash.tiles import Rule

IMPLS = ("ref", "xla")


def case(shape, seed=0, dtype=jnp.float32, lengths=None, admitted=(0.3, 0.02)):
    """q, k, v, admit of rows of differing length, NaN past the end; each KV head its own share."""
    rng = np.random.default_rng(seed)
    b, n, heads, t, h, _ = shape
    q, k, v = rng.normal(size=(b, n, t, h)), *rng.normal(size=(2, b, heads, t, h))
    lengths = np.array([t - 2, 1][:b]) if lengths is None else lengths
    past = (np.arange(t) >= lengths[:, None])[:, None, :, None]
    q, k, v = (np.where(past, np.nan, x) for x in (q, k, v))
    admit = rng.random((b, heads, t)) < np.resize(admitted, heads)[:, None]
    arrays = [jnp.asarray(x, dtype) for x in (q, k, v)]
    return [*arrays, jnp.asarray(admit)], jnp.asarray(lengths, jnp.int32)


def exact(q, k, v, admit, lengths, window, softcap=None):
    """(out, lse, admitted) by the oracle of dense reads."""
    at = np.arange(q.shape[2])
    pos = np.where(at < np.asarray(lengths)[:, None], at, -1)
    out, lse, _ = oracle(q, k, v, q_pos=pos, k_pos=pos, window=window, admit=admit, softcap=softcap)
    return out, lse, (np.asarray(admit) & (pos >= 0)[:, None]).sum(-1)


def check(actual, wanted, terms):
    assert_close(actual[0], wanted[0], terms)
    assert_close(actual[1], wanted[1], terms)
    np.testing.assert_array_equal(actual[2], wanted[2])
    assert actual[0].dtype == actual[1].dtype == jnp.float32


@pytest.mark.parametrize(
    ("impl", "name"),
    [
        ("ref", "g1_h32"),
        ("xla", "g8_h96"),
        *(pytest.param(i, n, marks=pytest.mark.slow) for i in IMPLS for n in SELF_ATTENTION),
    ],
)
def test_small_shapes(impl, name):
    shape = SELF_ATTENTION[name]
    arrays, lengths = case(shape)
    actual = vertical_slash(*arrays, window=shape.window, lengths=lengths, impl=impl)
    check(actual, exact(*arrays, lengths, shape.window), shape.T)


@pytest.mark.parametrize(
    ("softcap", "admitted"), [(None, (0.3, 0.02)), pytest.param(0.8, (0.0, 1.0), marks=pytest.mark.slow)]
)
def test_blocks_of_queries_and_keys(softcap, admitted):
    arrays, lengths = case(SLASH_BLOCKS, admitted=admitted, lengths=np.array([SLASH_BLOCKS.T, 700]))
    call = functools.partial(
        vertical_slash, *arrays, window=SLASH_BLOCKS.window, lengths=lengths, softcap=softcap
    )
    actual = call(impl="xla")
    check(actual, exact(*arrays, lengths, SLASH_BLOCKS.window, softcap), SLASH_BLOCKS.T)
    for first, second in zip(actual, call(impl="xla")):
        np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("impl", ["xla", *BODIES])
def test_every_length_of_a_row(impl):
    """0, 1, block - 1, block, block + 1 and all; NaN past the ends; the same to the bit when asked again."""
    block = 256 if impl == "xla" else small_blocks(impl)[1]
    t, run = block + 3, xla.vertical_slash if impl == "xla" else tiled(impl)
    shape = SELF_ATTENTION["g1_h32"]._replace(B=6, N=2, K=1, T=t, window=block // 3)
    ends = np.array([0, 1, block - 1, block, block + 1, t])
    arrays, lengths = case(shape, lengths=ends, admitted=(0.3,))
    rule = Rule(shape.window, t, shape.H**-0.5, None)
    actual = run(Inputs(*arrays, lengths), rule=rule)
    check(actual, exact(*arrays, lengths, shape.window), t)
    for first, second in zip(actual, run(Inputs(*arrays, lengths), rule=rule)):
        np.testing.assert_array_equal(first, second)
    check_no_race(impl)


@pytest.mark.parametrize("impl", ["ref", "xla", *BODIES])
def test_a_piece_of_a_prompt_is_those_rows_of_the_whole(impl):
    """Queries of some tokens over all keys so far: at the start, inside, past the end; bfloat16 out."""
    bq, bk = (256, 256) if impl in IMPLS else small_blocks(impl)
    t, s, end = bq + 5, 2 * bk + 9, 2 * bk - 3
    shape = SELF_ATTENTION["g4_h64"]._replace(B=3, N=2, K=1, T=s, window=bk // 2)
    (q, k, v, admit), lengths = case(shape, lengths=np.array([s, end, end]), admitted=(0.3,))
    start = np.array([0, end - bq // 2, bk // 3])
    at = start[:, None] + np.arange(t)
    piece = jnp.take_along_axis(q, jnp.minimum(at, s - 1)[:, None, :, None], axis=2)
    run = {"ref": ref.vertical_slash, "xla": xla.vertical_slash}[impl] if impl in IMPLS else tiled(impl)
    rule = Rule(shape.window, s, shape.H**-0.5, None, jnp.dtype("bfloat16"))
    out, lse, admitted = run(Inputs(piece, k, v, admit, lengths, jnp.asarray(start, jnp.int32)), rule=rule)
    whole = exact(q, k, v, admit, lengths, shape.window)
    np.testing.assert_array_equal(admitted, whole[2])
    assert out.dtype == jnp.bfloat16
    wanted = [
        np.take_along_axis(x, np.minimum(at, s - 1).reshape(3, 1, t, *[1] * (x.ndim - 3)), 2)
        for x in whole[:2]
    ]
    past = at[:, None] >= np.asarray(lengths)[:, None, None]
    wanted = [
        np.where(past.reshape(3, 1, t, *[1] * (x.ndim - 3)), z, x) for x, z in zip(wanted, (0, -np.inf))
    ]
    assert_as_good_as_plain(out, jnp.asarray(wanted[0], jnp.bfloat16), wanted[0], s)
    assert_close(lse, wanted[1], s)
    check_no_race(impl)


@pytest.mark.parametrize("impl", ["xla", pytest.param("triton", marks=pytest.mark.slow)])
def test_gradients_are_those_of_dense_attention(impl):
    """Through out and lse, of full rows."""
    shape = SELF_ATTENTION["g4_h64"]._replace(window=6)
    (q, k, v, admit), _ = case(shape, lengths=np.array([shape.T]))
    read = functools.partial(vertical_slash, window=6, impl=impl)
    dense = functools.partial(plain, window=6)
    with interpreted():
        actual, back = jax.vjp(lambda *x: read(*x, admit)[:2], q, k, v)
        wanted, back_dense = jax.vjp(lambda *x: dense(*x, admit), q, k, v)
        up = tuple(jnp.cos(x) for x in wanted)
        for ours, theirs in zip(back(up), back_dense(up)):
            assert_close(ours, theirs, shape.T * shape.N)
    assert float(jnp.abs(back(up)[1]).max()) > 0.01


def test_long_gradients_hold_no_square():
    t = 8192
    arrays = [jax.ShapeDtypeStruct((1, n, t, 32), jnp.bfloat16) for n in (2, 1, 1)]
    admit = jax.ShapeDtypeStruct((1, 1, t), jnp.bool_)

    def loss(*x):
        return vertical_slash(*x, window=256, capacity=t // 4, impl="xla")[0].sum()

    program = compiled_in_full(jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*arrays, admit))
    assert program.memory_analysis().temp_size_in_bytes < t * t / 2


@settings(max_examples=6, deadline=None)
@given(st.integers(0, 2**31), st.integers(0, 600), st.sampled_from([0.0, 0.01, 0.5]))
def test_any_lengths_any_share(seed, first_length, share):
    """One compiled program, any lengths, any admission: 700 queries, a window of 300."""
    shape = SLASH_BLOCKS._replace(T=700)
    lengths = np.array([first_length, 700])
    arrays, lengths = case(shape, seed, lengths=lengths, admitted=(share, 0.1))
    actual = vertical_slash(*arrays, window=shape.window, lengths=lengths, capacity=650, impl="xla")
    check(actual, exact(*arrays, lengths, shape.window), shape.T)


def test_keys_are_packed_in_order():
    (_, k, v, admit), lengths = case(SELF_ATTENTION["g1_h32"])
    t = k.shape[2]
    upto = admitted_upto(admit, lengths)
    packed = compact(k, v, upto, t)
    for row, head in np.ndindex(admit.shape[:2]):
        at = np.flatnonzero(np.asarray(admit)[row, head] & (np.arange(t) < int(lengths[row])))
        n = len(at)
        assert int(upto[row, head, -1]) == n
        np.testing.assert_array_equal(packed.pos[row, head], [*at, *[FAR] * (t - n)])
        np.testing.assert_array_equal(packed.k[row, head, :n], k[row, head, at])
        np.testing.assert_array_equal(packed.v[row, head], np.r_[v[row, head, at], np.zeros((t - n, 32))])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_packing_by_products_copies_bits(dtype):
    """Streams that admit nothing, some, nearly all, more than fits; any bits, NaN and infinity too."""
    block, capacity, share = 128, 384, np.array([[0.0, 0.3], [0.99, 0.5]])
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 32, (2, 2, 2, 512, 32), dtype=np.uint32)
    k, v = (jnp.asarray(x.view(np.float32)).astype(dtype) for x in bits)
    admit = jnp.asarray(rng.random((2, 2, 512)) < share[..., None])
    upto = admitted_upto(admit, jnp.array([512, 500]))
    interpret = compat.tpu_interpreter(detect_races=True)
    packed = packed_on_tpu(k, v, upto, capacity=capacity, block=block, interpret=interpret)
    check_no_race("mosaic_tpu")
    wanted, word = compact(k, v, upto, capacity), {2: np.uint16, 4: np.uint32}[k.dtype.itemsize]
    assert int(upto[1, 0, -1]) > capacity
    for row, head in np.ndindex(2, 2):
        n = min(int(upto[row, head, -1]), capacity)
        written = -(-n // block) * block
        np.testing.assert_array_equal(packed.pos[row, head, 0, :written], wanted.pos[row, head, :written])
        np.testing.assert_array_equal(packed.v[row, head, n:written], 0)
        for ours, theirs in ((packed.k, wanted.k), (packed.v, wanted.v)):
            ours, theirs = (np.asarray(x[row, head, :n]).view(word) for x in (ours, theirs))
            nan = np.isnan(theirs.view(k.dtype))  # of which the payload may change
            np.testing.assert_array_equal(np.isnan(ours.view(k.dtype)), nan)
            np.testing.assert_array_equal(ours[~nan], theirs[~nan])


@pytest.mark.parametrize("impl", ["xla", pytest.param("ref", marks=pytest.mark.slow)])
def test_overflow_is_told_and_nobody_gets_a_wrong_answer(impl):
    """Streams at and over the capacity: the first are exact, the others all NaN and counted."""
    shape = SELF_ATTENTION["g4_h64"]
    arrays, _ = case(shape, lengths=np.array([shape.T]))
    admit = np.zeros(arrays[3].shape, bool)
    admit[0, 0, [2, 5, 6, 30]] = True
    admit[0, 1, [1, 3, 4, 5, 32]] = True
    arrays[3] = jnp.asarray(admit)
    out, lse, admitted = vertical_slash(*arrays, window=1, capacity=4, impl=impl)
    np.testing.assert_array_equal(admitted, [[4, 5]])
    wanted = exact(*arrays, [shape.T], 1)
    assert_close(out[:, :4], wanted[0][:, :4], shape.T)
    assert_close(lse[:, :4], wanted[1][:, :4], shape.T)
    assert np.isnan(out[:, 4:]).all()
    assert np.isnan(lse[:, 4:]).all()
    enough = vertical_slash(*arrays, window=1, capacity=5, impl=impl)
    check(enough, wanted, shape.T)


@pytest.mark.parametrize("name", ["blocked", pytest.param("g1_h32", marks=pytest.mark.slow)])
def test_gates_of_0_and_1_are_this_mask(name):
    shape = SLASH_BLOCKS if name == "blocked" else SELF_ATTENTION[name]
    (q, k, v, admit), lengths = case(shape)
    gate = jnp.where(admit, 0.0, -jnp.inf)
    ours = vertical_slash(q, k, v, admit, window=shape.window, lengths=lengths, impl="xla")
    theirs = gated(q, k, v, gate, window=shape.window, lengths=lengths, impl="xla")
    assert_close(ours[0], theirs[0], shape.T)
    assert_close(ours[1], theirs[1], shape.T)


@pytest.mark.parametrize(("window", "admitted"), [(5, 1.0), pytest.param(63, 0.0, marks=pytest.mark.slow)])
def test_a_window_or_an_admission_of_everything_is_blockwise(window, admitted):
    shape = SELF_ATTENTION["g1_h128"]
    arrays, lengths = case(shape, admitted=(admitted,))
    at = jnp.where(jnp.arange(shape.T) < lengths[:, None], jnp.arange(shape.T), -1)
    ours = vertical_slash(*arrays, window=window, lengths=lengths, impl="xla")
    theirs = blockwise(*arrays[:3], q_pos=at, k_pos=at, impl="xla")
    assert_close(ours[0], theirs[0], shape.T)
    assert_close(ours[1], theirs[1], shape.T)


@pytest.mark.parametrize("impl", ["xla", pytest.param("ref", marks=pytest.mark.slow)])
def test_bfloat16_is_as_good_as_the_plain_way(impl):
    shape = SELF_ATTENTION["g4_h64"]
    arrays, lengths = case(shape, dtype=jnp.bfloat16, lengths=np.array([shape.T]))
    wanted = exact(*arrays, lengths, 1)
    actual = vertical_slash(*arrays, window=1, impl=impl)
    for ours, theirs, truth in zip(actual, plain(*arrays, window=1), wanted):
        assert_as_good_as_plain(ours, theirs, truth, shape.T)


@functools.partial(jax.jit, static_argnames="window")
def plain(q, k, v, admit, window):
    """What anyone would write: einsum, mask, softmax, products in the arrays' own dtype."""
    k, v, admit = (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v, admit))
    age = jnp.arange(q.shape[2])[:, None] - jnp.arange(q.shape[2])[None, :]
    s = jnp.einsum("bnth,bnsh->bnts", q, k).astype(jnp.float32) * q.shape[-1] ** -0.5
    s = jnp.where((age >= 0) & ((age < window) | admit[:, :, None, :]), s, -1e30)
    out = jnp.einsum("bnts,bnsh->bnth", jax.nn.softmax(s, axis=-1).astype(v.dtype), v)
    return out, jax.nn.logsumexp(s, axis=-1)


def test_memory_follows_the_prompt_not_its_square():
    t = 16384
    arrays = [jax.ShapeDtypeStruct((1, n, t, 32), jnp.bfloat16) for n in (2, 1, 1)]
    admit = jax.ShapeDtypeStruct((1, 1, t), jnp.bool_)
    run = functools.partial(xla.vertical_slash, rule=Rule(256, t // 4, 1.0, None))
    program = compiled_in_full(jax.jit(run).lower(Inputs(*arrays, admit, None)))
    held = program.memory_analysis().temp_size_in_bytes
    assert held < t * t / 16


def tiled(impl):
    """A Pallas body, interpreted, with small tiles."""
    return body("vertical_slash", impl, "vertical_slash", blocks=small_blocks(impl))


@pytest.mark.parametrize("impl", BODIES)
@pytest.mark.parametrize("softcap", [None, pytest.param(0.8, marks=pytest.mark.slow)])
def test_bodies(impl, softcap):
    """Several tiles of queries, of packed keys and of the band; one KV head overflows."""
    t = 300 if impl == "mosaic_tpu" else 75
    shape = SELF_ATTENTION["g1_h32"]._replace(N=4, T=t, window=t // 3)
    (q, k, v, admit), lengths = case(shape, lengths=np.array([t, 2 * t // 3]), admitted=(0.6, 0.4))
    counts = exact(q[..., :1], k[..., :1], v[..., :1], admit, lengths, 1)[2]
    capacity = int(np.sort(counts, axis=None)[-2])
    rule = Rule(shape.window, capacity, 0.2, softcap)
    actual, wanted = (
        f(Inputs(q, k, v, admit, lengths), rule=rule) for f in (tiled(impl), ref.vertical_slash)
    )
    lost = np.isnan(wanted[0]).any(axis=(0, 2, 3))
    assert 0 < lost.sum() < len(lost)
    for ours, truth in zip(actual, wanted):
        assert ours.dtype == truth.dtype
        np.testing.assert_array_equal(np.isnan(ours), np.isnan(truth))
        assert_close(np.nan_to_num(ours, neginf=-1), np.nan_to_num(truth, neginf=-1), t)
    check_no_race(impl)


@pytest.mark.slow
@pytest.mark.parametrize("impl", BODIES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", SELF_ATTENTION)
def test_bodies_on_all_small_shapes(impl, name, dtype):
    shape = SELF_ATTENTION[name]
    arrays, lengths = case(shape, dtype=dtype)
    rule = Rule(shape.window, shape.T, shape.H**-0.5, None)
    actual, plainly = (f(Inputs(*arrays, lengths), rule=rule) for f in (tiled(impl), xla.vertical_slash))
    for ours, theirs, truth in zip(actual, plainly, exact(*arrays, lengths, shape.window)):
        assert_as_good_as_plain(ours, theirs, truth, shape.T)


def test_refusals():
    (q, k, v, admit), lengths = case(SELF_ATTENTION["g1_h32"])
    check_refusals(vertical_slash, q, k, v, admit, lengths, each="one bit a key")
    with pytest.raises(ValueError, match="pass `offset`"):
        vertical_slash(q[:, :, 1:], k, v, admit, window=3)
    with pytest.raises(ValueError, match="one position a row"):
        vertical_slash(q, k, v, admit, window=3, offset=jnp.zeros(7, jnp.int32))
    with pytest.raises(ValueError, match="holds no key"):
        vertical_slash(q, k, v, admit, window=3, capacity=0)
