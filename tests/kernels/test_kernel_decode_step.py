"""decode_step: against NumPy in float64, token by token, with poison in all that is dead."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_bodies import BODIES, body, check_no_race

from pallas_kernels import Unsupported, decode_step, dispatch, lowering
from pallas_kernels.decode_step import api
from pallas_kernels.decode_step.call import Cache, Lists, Token, refusal
from pallas_kernels.tuning import Blocks
from pallas_kernels.tuning import key as block_key

B, K, G, H, W, S, M = 4, 2, 2, 128, 32, 16, 6
SEEN = (100, 7, -1, 64)
"""A full ring, one that fills, a row without a token, and a slot at a ring's beginning."""
LENGTHS = ((40, 0), (0, 3), (20, 16), (63, 95))
"""One ends at a page's end, one in a list's last slot; a KV head has no pages yet."""
SMALL = ((block_key("step", "bfloat16", H), Blocks(item=64, k=16)),)
"""A list is several items."""


def made(dtype: str = "bfloat16", poison: float = np.nan, seed: int = 0) -> tuple[Token, Cache, Lists]:
    """A step with ``poison`` in all that is dead: ring slots never written, free pages, ends of lists."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    pool = 2 * B * K * M
    ring_k, ring_v, k_pages, v_pages = normal(B, K, W, H), normal(B, K, W, H), *normal(2, pool, S, H)
    seen, length = np.array(SEEN, np.int32), np.array(LENGTHS, np.int32)
    enters = (np.arange(B * K).reshape(B, K) % 3 != 1) & (seen >= W)[:, None]
    table = rng.permutation(pool)[: B * K * M].reshape(B, K, M).astype(np.int32)
    dead = np.ones((pool, S), bool)
    for row, head in np.ndindex(B, K):
        never = slice(seen[row] if 0 <= seen[row] < W else W, None)
        ring_k[row, head, never], ring_v[row, head, never] = poison, poison
        for at in range(length[row, head]):
            dead[table[row, head, at // S], at % S] = False
        table[row, head, -(-(length[row, head] + 1) // S) :] = (-1, 10**6)[head]  # beyond what is owned
    k_pages[dead], v_pages[dead] = poison, poison
    bits = lambda x: jnp.asarray(x, dtype)  # noqa: E731
    cache = Cache(*map(bits, (ring_k, ring_v, k_pages, v_pages)))
    token = Token(*map(bits, (normal(B, K * G, H), normal(B, K, H), normal(B, K, H))))
    return token, cache, Lists(*map(jnp.asarray, (table, length, seen, enters)))


def wide(x) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def oracle(token: Token, cache: Cache, lists: Lists):
    """(out, lse, ring k and v, {(page, slot): (k, v)}) after the step, token by token."""
    ring_k, ring_v, k_pages, v_pages = map(wide, cache)
    q, k, v = map(wide, token)
    out, lse, stored = np.zeros(q.shape), np.full(q.shape[:2], -np.inf), {}
    for row, head in np.ndindex(B, K):
        n, count = int(lists.seen[row]), int(lists.length[row, head])
        place = [(int(lists.table[row, head, i // S]), i % S) for i in range(min(count + 1, M * S))]
        pairs = [(k_pages[at], v_pages[at]) for at in place[:count]]
        old = ring_k[row, head, n % W].copy(), ring_v[row, head, n % W].copy()
        if lists.enters[row, head]:
            pairs.append(old)
            stored[place[count]] = old
        if n >= 0:
            ring_k[row, head, n % W], ring_v[row, head, n % W] = k[row, head], v[row, head]
        pairs += [(ring_k[row, head, i], ring_v[row, head, i]) for i in range(min(n + 1, W))]
        terms = np.array([x for _, x in pairs]).reshape(-1, H)
        scores = np.array([x for x, _ in pairs]).reshape(-1, H) @ q[row, head * G : head * G + G].T * H**-0.5
        for i in range(G if len(terms) else 0):
            lse[row, head * G + i] = np.logaddexp.reduce(scores[:, i])
            out[row, head * G + i] = np.exp(scores[:, i] - lse[row, head * G + i]) @ terms
    return out, lse, ring_k, ring_v, stored


def check(actual, token: Token, cache: Cache, lists: Lists) -> None:
    """``actual`` is what a step gave for them."""
    out, lse, after = actual
    want, want_lse, *rings, stored = oracle(token, cache, lists)
    live, exact = np.asarray(lists.seen) >= 0, token.q.dtype == jnp.float32
    assert (out.dtype, lse.dtype) == (token.q.dtype, jnp.float32)
    np.testing.assert_allclose(wide(out)[live], want[live], atol=1e-5 if exact else 0.02)
    np.testing.assert_allclose(wide(lse)[live], want_lse[live], atol=1e-5 if exact else 2e-3)
    # Bit for bit: what was written, and that nothing else was.
    for ring, wanted in zip(after[:2], rings):
        for row, n in enumerate(np.asarray(lists.seen)):
            held = slice(0, min(n + 1, W) if n >= 0 else W)  # without a token all of it stays
            np.testing.assert_array_equal(wide(ring)[row, :, held], wanted[row, :, held])
    for i, (pages, before) in enumerate(zip(after[2:], cache[2:])):
        new = wide(before).copy()
        for at, old in stored.items():
            new[at] = old[i]
            np.testing.assert_array_equal(wide(pages)[at], old[i])
        held = ~np.isnan(wide(before)).any(-1)
        np.testing.assert_array_equal(wide(pages)[held], new[held])


def called(impl, token: Token, cache: Cache, lists: Lists):
    table, length, seen, enters = lists
    return decode_step(*token, cache, table, length, seen=seen, enters=enters, impl=impl)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("impl", ["ref", "xla"])
def test_it_is_the_step_by_definition(impl, dtype):
    # ``xla`` pays a second pass for a NaN in a dead value of a live page: another program.
    arguments = made(dtype, np.nan if impl == "ref" else 1e3)
    check(called(impl, *arguments), *arguments)


@pytest.mark.parametrize("impl", ["ref", "xla"])
def test_a_rows_first_token_is_written(impl):
    token, cache, lists = made("float32", 1e3)
    none = jnp.zeros_like
    lists = Lists(lists.table, none(lists.length), none(lists.seen), none(lists.enters))
    check(called(impl, token, cache, lists), token, cache, lists)


@pytest.mark.parametrize("impl", BODIES)
def test_a_body_is_the_step(impl):
    arguments = made()
    run = body("decode_step", impl, "decode_step", blocks=SMALL)
    check(run(*arguments, scale=H**-0.5), *arguments)
    check_no_race(impl)


@pytest.mark.parametrize("impl", BODIES)
def test_a_ring_may_be_shorter_than_a_page(impl, monkeypatch):
    for name, value in (("W", 16), ("S", 32), ("SEEN", (100, 7, -1, 48))):
        monkeypatch.setitem(globals(), name, value)
    arguments = made()
    run = body("decode_step", impl, "decode_step", blocks=SMALL)
    check(run(*arguments, scale=H**-0.5), *arguments)
    check_no_race(impl)


@pytest.mark.slow
@pytest.mark.parametrize("impl", BODIES)
def test_a_body_is_the_step_with_its_own_blocks_through_dispatch(impl):
    arguments = made(seed=1)
    with dispatch.interpreted():
        check(called(impl, *arguments), *arguments)


@pytest.mark.parametrize("impl", ["ref", "xla", *(pytest.param(x, marks=pytest.mark.slow) for x in BODIES)])
def test_a_token_for_which_there_is_no_page_is_not_stored(impl):
    """A table without the page, an id beyond the pool, a list that is full: read as if none had left."""
    token, cache, lists = made("bfloat16", 1e3)
    table = np.array(lists.table)
    table[0, 0, 40 // S], table[3, 0, 63 // S + 1 :] = -1, -1
    length = np.array(lists.length)
    length[3, 0], length[3, 1] = 64, M * S
    table[3, 1] = np.setdiff1d(np.arange(len(cache.k_pages)), table)[:M]
    table[0, 1, :] = 10**6
    length[0] = 32, 0
    lists = lists._replace(table=jnp.asarray(table), length=jnp.asarray(length))
    bold = lists._replace(enters=jnp.ones((B, K), bool))
    timid = lists._replace(enters=jnp.zeros((B, K), bool))
    with dispatch.interpreted():
        actual, wanted = called(impl, token, cache, bold), called("ref", token, cache, timid)
    for ours, theirs in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted)):
        ours, theirs = wide(ours), wide(theirs)
        live = [0, 1, 3] if len(ours) == B else slice(None)
        if ours.shape == cache.k_pages.shape:  # dead slots may hold anything
            held = np.zeros(ours.shape[:2], bool)
            for row, head in np.ndindex(B, K):
                for at in range(int(lists.length[row, head])):
                    held[lists.table[row, head, at // S], at % S] = True
            ours, theirs = ours[held], theirs[held]
        elif ours.shape == cache.ring_k.shape:
            ours, theirs = ours[[0, 3]], theirs[[0, 3]]
        else:
            ours, theirs = ours[live], theirs[live]
        np.testing.assert_allclose(ours, theirs, atol=0.05)


def shaped(w=256, s=64, h=128, n=8, k=2, b=2, m=8, p=64, dtype="bfloat16", pages=None):
    """(q, cache, table) as shapes, all of which every body takes."""
    of = jax.ShapeDtypeStruct
    ring, pool = of((b, k, w, h), dtype), of((p, s, h), pages or dtype)
    return of((b, n, h), dtype), Cache(ring, ring, pool, pool), of((b, k, m), "int32")


REFUSED = [
    ("mosaic_tpu", {"h": 64}, "a head dim of 64"),
    ("mosaic_tpu", {"w": 100}, "a ring of 100"),
    ("mosaic_tpu", {"w": 2048}, "1024 slots at most"),
    ("mosaic_tpu", {"s": 8}, "pages of 8 slots"),
    ("mosaic_tpu", {"b": 32, "m": 8192}, "scalar memory"),
    ("mosaic_tpu", {"b": 1024}, "VMEM"),
    ("mosaic_tpu", {"dtype": "float32"}, "arrays of float32"),
    ("triton", {"h": 96}, "a head dim of 96"),
    ("triton", {"h": 512}, "a head dim of 512"),
    ("triton", {"s": 48}, "pages of 48 slots"),
    ("triton", {"n": 64}, "64 query heads over 2"),
    ("triton", {"w": 8192}, "a ring of 8192"),
    ("triton", {"p": 1 << 18}, "31 bits"),
    ("triton", {"pages": "int8"}, "arrays of bfloat16, int8"),
]


@pytest.mark.parametrize(("impl", "odd", "why"), REFUSED)
def test_what_a_body_does_not_take_is_said_before_anything_is_compiled(impl, odd, why, monkeypatch):
    q, cache, table = shaped(**odd)
    assert why in refusal(impl, q, cache, table)
    assert refusal(impl, *shaped()) is None
    monkeypatch.setattr(dispatch, "body", lambda op, offered: impl)
    assert not api.has_body(q, cache, table)
    assert api.has_body(*shaped())
    if "pages" in odd:
        return
    (b, _, h), k = q.shape, table.shape[1]
    new, lists = jax.ShapeDtypeStruct((b, k, h), q.dtype), jax.ShapeDtypeStruct((b, k), "int32")
    rest = {"seen": jax.ShapeDtypeStruct((b,), "int32"), "enters": jax.ShapeDtypeStruct((b, k), "bool")}
    with dispatch.interpreted(), pytest.raises(Unsupported, match=rf"(?s){why}.*Use impl='xla'"):
        jax.eval_shape(
            lambda *a, **o: decode_step(*a, **o, impl=impl), q, new, new, cache, table, lists, **rest
        )


def test_a_body_is_there_where_dispatch_would_run_one(monkeypatch):
    assert not api.has_body(*shaped())
    ran = {"impl": "mosaic_tpu", "agrees": True}
    monkeypatch.setattr(dispatch, "record", lambda op, kind: ran if op == "decode_step" else {})
    assert not api.has_body(*shaped())
    with lowering.for_device("TPU v5 lite", 1, "tpu"):
        assert api.has_body(*shaped())
        assert not api.has_body(*shaped(h=64))
        assert dispatch.body("gated", api.OFFERED) is None
    with lowering.for_device("NVIDIA H200", 132, "gpu"):
        assert not api.has_body(*shaped())


@pytest.mark.parametrize(
    ("place", "shape", "why"),
    [
        ("ring_k", (B, K, W, H + 1), "needs a ring"),
        ("v_pages", (7, S, H), "of one shape and dtype"),
        ("q", (B, 3, H), "N a multiple of K"),
        ("v", (B, K, 1), "needs q"),
        ("length", (B, 1), "needs .B, K, M. and"),
        ("enters", (B,), "needs .B. and"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(place, shape, why):
    token, cache, lists = made()
    arrays = {**token._asdict(), **cache._asdict(), **lists._asdict()}
    arrays[place] = jnp.zeros(shape, arrays[place].dtype)
    cache = Cache(*(arrays.pop(name) for name in Cache._fields))
    with pytest.raises(ValueError, match=why):
        decode_step(cache=cache, **arrays)
