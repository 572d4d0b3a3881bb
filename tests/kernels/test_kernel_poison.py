"""What takes part is seen, NaN above all; what takes none may hold anything. Results and gradients alike.

Poison is NaN, infinity or numbers whose products overflow, in whatever an operation says it does not read:
results and gradients are those of zeros there, to the bit. The other way about, a NaN in a query or a key
that is read reaches every row that reads it, and no other.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_sizes import RAGGED_DECODE, SELF_ATTENTION
from test_kernel_gated import case as gated_case
from test_kernel_ragged_decode import case as ragged_case
from test_kernel_ragged_decode import edges
from test_kernel_vertical_slash import case as slash_case

from pallas_kernels import blockwise, column_mass, gated, merge, ragged_decode, vertical_slash
from pallas_kernels.blockwise.work import BlockwiseSizes
from pallas_kernels.dispatch import interpreted
from pallas_kernels.phi.api import phi_build, phi_evaluate

POISON = [np.nan, np.inf, -np.inf, 3e38]
PLAIN = ("ref", "xla")
IMPLS = [*PLAIN, "triton", pytest.param("mosaic_tpu", marks=pytest.mark.slow)]


@pytest.fixture(autouse=True)
def bodies():
    with interpreted(races=False):
        yield


def same(actual, wanted):
    assert jax.tree.structure(actual) == jax.tree.structure(wanted)
    for ours, theirs in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted)):
        np.testing.assert_array_equal(ours, theirs)


def everything(run):
    """The function of results of ``run``, and gradients of all arrays through every result."""

    @jax.jit
    def both(*arrays):
        actual, back = jax.vjp(run, *arrays)
        up = [jnp.where(jnp.isfinite(x), jnp.cos(x), 1.0).astype(x.dtype) for x in jax.tree.leaves(actual)]
        return actual, back(jax.tree.unflatten(jax.tree.structure(actual), up))

    return both


def unharmed(run, arrays, dead):
    """The same with poison as with zeros in the ``dead`` places of each array; what was found."""
    assert all(bool(jnp.any(there)) for there in dead if there is not None)
    both = everything(run)

    def with_(value):
        filled = (jnp.where(d, jnp.asarray(value, x.dtype), x) for x, d in zip(arrays, dead) if d is not None)
        return both(*(x if d is None else next(filled) for x, d in zip(arrays, dead)))

    clean = with_(0)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(clean[1]))
    for poison in POISON:
        same(with_(poison), clean)
    return clean


def positions(shape, blind):
    """(q_pos, k_pos, admit): a padded query; keys that are padded, too new, too old; a query without any."""
    rng = np.random.default_rng(0)
    newest = shape.S - 4
    q_pos = np.arange(newest - shape.T, newest) + 1
    q_pos[0] = -1
    k_pos = rng.permutation(shape.S)
    if blind:
        q_pos[1], k_pos = 2, np.where(k_pos < 9, -1, k_pos)
    k_pos[k_pos == newest - 1] = -1
    admit = rng.random((shape.K, shape.S)) < 0.2
    return q_pos, k_pos, admit & (k_pos % 3 == 0)


def blockwise_call(shape, blind, window=7):
    q_pos, k_pos, admit = positions(shape, blind)
    rng = np.random.default_rng(1)
    sizes = [(1, n, t, shape.H) for n, t in ((shape.N, shape.T), (shape.K, shape.S), (shape.K, shape.S))]
    arrays = [jnp.asarray(rng.normal(size=size), jnp.float32) for size in sizes]
    oldest = q_pos[q_pos >= 0].min()
    unseen = (k_pos < 0) | (k_pos > q_pos.max()) | ((k_pos <= oldest - window) & ~admit.any(axis=0))
    blank = (q_pos < 0) | (blind & (q_pos == 2))
    assert blind or unseen.sum() > (k_pos < 0).sum() + (k_pos > q_pos.max()).sum()
    options = {"q_pos": q_pos[None], "k_pos": k_pos[None], "admit": admit[None], "window": window}
    options = {name: x if name == "window" else jnp.asarray(x) for name, x in options.items()}
    return arrays, options, jnp.asarray(blank)[None, None, :, None], jnp.asarray(unseen)[None, None, :, None]


SMALL = BlockwiseSizes(B=1, N=4, K=2, T=6, S=40, H=32)
BLOCKED = BlockwiseSizes(B=1, N=2, K=1, T=300, S=600, H=32)
BLOCKWISE = [
    *((impl, SMALL) for impl in ("ref", "xla", "triton")),
    ("xla", BLOCKED),
    pytest.param("mosaic_tpu", SMALL, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("blind", [False, True])
@pytest.mark.parametrize(("impl", "shape"), BLOCKWISE)
def test_blockwise(impl, shape, blind):
    arrays, options, blank, unseen = blockwise_call(shape, blind)
    run = functools.partial(blockwise, **options, softcap=3.0, impl=impl)
    (_, lse), _ = unharmed(run, arrays, (blank, unseen, unseen))
    np.testing.assert_array_equal(lse[0, 0] == -np.inf, blank[0, 0, :, 0])


@pytest.mark.parametrize("impl", IMPLS)
def test_column_mass(impl):
    (q, k, v), options, blank, unseen = blockwise_call(SMALL, True)
    lse = blockwise(q, k, v, **options, impl="ref")[1]
    weights = jnp.linspace(1, 2, SMALL.T)[None]
    run = lambda q, k: column_mass(q, k, lse, weights, **options, softcap=3.0, impl=impl)  # noqa: E731
    mass, _ = unharmed(run, (q, k), (blank, unseen))
    assert float(mass.max()) > 0.1


@pytest.mark.parametrize("impl", IMPLS)
def test_gated(impl):
    shape = SELF_ATTENTION["g1_h32"]
    arrays, lengths = gated_case(shape)
    past = (jnp.arange(shape.T) >= lengths[:, None])[:, None]
    dead = (*[past[..., None]] * 3, past)
    unharmed(functools.partial(gated, window=shape.window, lengths=lengths, impl=impl), arrays, dead)


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("impl", IMPLS)
def test_vertical_slash(impl, window):
    """Past the ends; and without a window, in what is not admitted."""
    shape = SELF_ATTENTION["g1_h32"]
    (q, k, v, admit), lengths = slash_case(shape, admitted=(0.3,))
    past = (jnp.arange(shape.T) >= lengths[:, None])[:, None, :, None]
    unseen = past if window else past | ~jnp.any(admit, axis=1)[:, None, :, None]
    run = lambda *x: vertical_slash(*x, admit, window=window, lengths=lengths, impl=impl)[:2]  # noqa: E731
    unharmed(run, (q, k, v), (past, unseen, unseen))


@pytest.mark.parametrize("impl", IMPLS)
def test_ragged_decode(impl):
    """Dead slots, pages of no list, and the queries of KV heads without a slot."""
    shape = RAGGED_DECODE["g1_h32"]
    lengths = edges(shape)
    clean, lists = ragged_case(shape, lengths, poison=0)
    marked, _ = ragged_case(shape, lengths, poison=np.nan)
    empty = jnp.repeat(jnp.asarray(lengths == 0), shape.N // shape.K, axis=1)[..., None, None]
    dead = (jnp.broadcast_to(empty, clean[0].shape), *(jnp.isnan(x) for x in marked[1:]))
    run = functools.partial(ragged_decode, **lists, mass=True, softcap=3.0, impl=impl)
    (_, lse, _), _ = unharmed(run, clean, dead)
    np.testing.assert_array_equal(lse == -np.inf, np.broadcast_to(empty[..., 0], lse.shape))


@pytest.mark.parametrize("impl", PLAIN)
def test_merge(impl):
    rng = np.random.default_rng(0)
    out, lse = jnp.asarray(rng.normal(size=(2, 3, 4))), jnp.asarray(rng.normal(size=(2, 3)))
    lse = lse.at[0, 0].set(-jnp.inf)
    dead = jnp.stack([lse[0] == -jnp.inf, jnp.zeros(3, bool)])[..., None]
    run = lambda out: merge([(out[0], lse[0]), (out[1], lse[1])], impl=impl)  # noqa: E731
    unharmed(run, (out,), (dead,))


@pytest.mark.parametrize("impl", IMPLS)
def test_phi(impl):
    rng = np.random.default_rng(0)
    log_k, v, log_q = (jnp.asarray(rng.normal(size=(1, 1, n, 16)), jnp.float32) for n in (9, 9, 2))
    there = jnp.asarray(rng.random((1, 1, 9)) < 0.6)

    def run(log_k, v, log_q):
        return phi_evaluate(phi_build(log_k, v, there=there, impl=impl), log_q, impl=impl)

    unharmed(run, (log_k, v, log_q), (~there[..., None], ~there[..., None], None))


def self_attention(op, impl):
    """(run, arrays) of 12 queries over 12 keys; a gate of 0 and an admission of all are causal attention."""
    rng = np.random.default_rng(2)
    arrays = tuple(jnp.asarray(rng.normal(size=(1, 2, 12, 32)), jnp.float32) for _ in range(3))
    at, whole = jnp.arange(12)[None], jnp.ones((1, 2, 12), bool)
    run = {
        "blockwise": lambda *x: blockwise(*x, q_pos=at, k_pos=at, impl=impl),
        "gated": lambda *x: gated(*x, jnp.zeros((1, 2, 12)), window=3, impl=impl),
        "vertical_slash": lambda *x: vertical_slash(*x, whole, window=3, impl=impl)[:2],
    }[op]
    return run, arrays


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("op", ["blockwise", "gated", "vertical_slash"])
def test_a_nan_is_seen_by_those_who_read_it(op, impl):
    """Forward, row by row; backward, in the gradient of what the row depends on."""
    run, (q, k, v) = self_attention(op, impl)
    both, bad, after = everything(run), (0, 1, 5, 3), np.arange(12) >= 5
    clean, _ = both(q, k, v)
    # Infinities of both signs in one score.
    opposed = q.at[..., :2].set(jnp.asarray([1.0, -1.0]))
    for broken, rows, (wanted, _) in [
        ((q.at[bad].set(jnp.nan), k, v), np.arange(12) == 5, (clean, None)),
        ((q, k.at[bad].set(jnp.nan), v), after, (clean, None)),
        ((opposed, k.at[0, 1, 5, :2].set(jnp.inf), v), after, both(opposed, k, v)),
    ]:
        actual, grads = both(*broken)
        for ours, theirs in zip(actual, wanted):
            assert np.isnan(ours[0, 1, rows]).all()
            same((ours[0, 0], ours[0, 1, ~rows]), (theirs[0, 0], theirs[0, 1, ~rows]))
        for grad in grads:
            assert np.isnan(grad[0, 1, 5]).any()
            assert np.isfinite(grad[0, 0]).all()
    actual, _ = both(q, k, v.at[bad].set(jnp.nan))
    assert np.isnan(actual[0][0, 1, 5:, 3]).all()
    same((actual[0][0, 0], actual[1]), (clean[0][0, 0], clean[1]))


@pytest.mark.parametrize("impl", IMPLS)
def test_the_mass_of_a_broken_row_is_nan_where_it_looks(impl):
    rng = np.random.default_rng(2)
    q, k = (jnp.asarray(rng.normal(size=(1, 1, 12, 32)), jnp.float32) for _ in range(2))
    at = jnp.arange(12)[None]
    lse = jnp.zeros((1, 1, 12)).at[0, 0, 5].set(jnp.nan)
    mass = column_mass(q, k, lse, jnp.ones((1, 12)), q_pos=at, k_pos=at, impl=impl)
    np.testing.assert_array_equal(np.isnan(mass[0, 0]), np.arange(12) <= 5)


@pytest.mark.parametrize("selected", [False, True])
@pytest.mark.parametrize("impl", IMPLS)
def test_pages_show_a_nan_to_their_kv_head_alone(impl, selected):
    shape = RAGGED_DECODE["g4_h64"]
    lengths = np.maximum(edges(shape), 1)
    (q, k, v), lists = ragged_case(shape, lengths, poison=np.nan)
    if selected:
        lists["pages"] = jnp.zeros((*lengths.shape, 1), jnp.int32)
    run = jax.jit(functools.partial(ragged_decode, **lists, mass=True, impl=impl))
    clean = run(q, k, v)
    readers = np.zeros((shape.B, shape.N), bool)
    readers[1, shape.N // shape.K :] = True
    actual = run(q, k.at[lists["table"][1, 1, 0], 0, 3].set(jnp.nan), v)
    for ours, theirs in zip(actual, clean):
        same(ours[~readers], theirs[~readers])
    assert np.isnan(actual[0][readers]).all()
    assert np.isnan(actual[1][readers]).all()
    live = np.arange(shape.M * shape.S).reshape(shape.M, shape.S) < lengths[1, 1]
    live[1:] &= not selected
    np.testing.assert_array_equal(
        np.isnan(actual[2][readers]), np.broadcast_to(live, actual[2][readers].shape)
    )
    value = run(q, k, v.at[lists["table"][1, 1, 0], 0, 3].set(jnp.nan))
    assert np.isnan(value[0][readers][..., 3]).all()
    same((value[0][~readers], value[1]), (clean[0][~readers], clean[1]))


@pytest.mark.parametrize("impl", PLAIN)
def test_merging_hides_no_nan(impl):
    good, both = (jnp.ones((2, 3)), jnp.zeros(2)), everything(functools.partial(merge, impl=impl))
    for broken in (
        (good[0] * jnp.nan, good[1].at[0].set(jnp.nan)),
        (good[0], good[1].at[0].set(jnp.nan)),
    ):
        broken = (broken[0].at[1].set(2.0), broken[1])
        for parts in ([broken, good], [good, broken], [broken]):
            (out, lse), _ = both(parts)
            np.testing.assert_array_equal(np.isnan(lse), [True, False])
            np.testing.assert_array_equal(np.isnan(out).any(axis=1), [True, False])
    lost = (good[0].at[0, 0].set(jnp.nan), good[1])
    out, lse = merge([lost, good], impl=impl)
    np.testing.assert_array_equal(np.isnan(out), [[True, False, False], [False] * 3])
    assert np.isfinite(lse).all()


@pytest.mark.parametrize("impl", IMPLS)
def test_an_overflow_stays_loud(impl):
    """After a merge with a good partial, and in the gradients of that KV head alone."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, n, 12, 32)), jnp.float32) for n in (4, 2, 2))
    admit = jnp.zeros((1, 2, 12), bool).at[0, 1, :6].set(True)
    run = lambda *x: vertical_slash(*x, admit, window=2, capacity=4, impl=impl)[:2]  # noqa: E731
    actual, grads = everything(run)(*(q, k, v))
    joined = merge([actual, (q, jnp.zeros(q.shape[:3]))])
    for x in (*actual, *joined, grads[0]):
        np.testing.assert_array_equal(np.isnan(x[0]).reshape(4, -1).all(axis=1), [False, False, True, True])
        assert np.isfinite(x[0, :2]).all()
    for x in grads[1:]:
        assert np.isfinite(x[0, 0]).all()
        assert np.isnan(x[0, 1]).all()


@pytest.mark.parametrize("what", ["log_k", "v", "log_q"])
@pytest.mark.parametrize("impl", IMPLS)
def test_phi_shows_a_nan(impl, what):
    rng = np.random.default_rng(0)
    arrays = {n: jnp.asarray(rng.normal(size=(1, 2, s, 16)), jnp.float32) for n, s in
              {"log_k": 9, "v": 9, "log_q": 3}.items()}  # fmt: skip
    arrays[what] = arrays[what].at[0, 1, 2, 5].set(jnp.nan)
    there = jnp.ones((1, 2, 9), bool)
    summary = phi_build(arrays["log_k"], arrays["v"], there=there, impl=impl)
    out, lse = phi_evaluate(summary, arrays["log_q"], impl=impl)
    rows = [False, False, True] if what == "log_q" else [True] * 3
    np.testing.assert_array_equal(np.isnan(out[0, 1]).any(axis=-1), rows)
    np.testing.assert_array_equal(np.isnan(lse[0, 1]), [False] * 3 if what == "v" else rows)
    assert np.isfinite(out[0, 0]).all()
