"""A layer's decode step in one kernel, interpreted: it leaves and reads what the operations do."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import layer
from kvjax.algebra import Native
from kvjax.cache import pages as paging
from kvjax.cache import pool
from kvjax.cache import ring as rings
from kvjax.cache.state import LayerCache
from kvjax.layer import _one_kernel
from kvjax.policies import wg_kv
from kvjax.types import EMPTY, Heads
from pallas_kernels import dispatch

B, N, K, H, W, S, M = 3, 4, 2, 128, 32, 16, 4
LENGTHS = np.array([60, 31, 5])
"""A row whose tokens leave from the first step on, one whose ring is full after one, one whose never is."""
STEPS = 3
GATES = {"admission": wg_kv.initial(jax.random.PRNGKey(3), K, H, 8, 1)[0]}


def site(spec: str) -> layer.LayerInfo:
    policy = kvjax.policy(spec)
    params = GATES if "write_gate" in spec else {}
    return layer.LayerInfo(policy, params, 0, 1, None, jnp.asarray(LENGTHS))


def drawn(step: int, dtype: str = "bfloat16") -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(step)
    return tuple(jnp.asarray(rng.normal(size=(B, 1, n, H)), dtype) for n in (N, K, K, K))


def heads(q, k, v, early, softcap: float | None = None) -> Heads:
    return Heads(q=q, k=k, v=v, q_pre=q, k_pre=early, hidden=q[:, :, 0], softcap=softcap)


def made(info: layer.LayerInfo, poison: float = 0.0, dtype: str = "bfloat16") -> LayerCache:
    """A layer after ``LENGTHS`` tokens, 14 and 3 of them in a row's pages; ``poison`` in what is dead."""
    rng, policy = np.random.default_rng(9), info.policy
    kept = {"meta": policy.keeps, "arrays": policy.arrays}
    ring = rings.empty(B, K, W, H, jnp.dtype(dtype), **kept)
    never = np.arange(W) >= LENGTHS[:, None]
    k, v = (np.where(never[:, None, :, None], poison, rng.normal(size=(B, K, W, H))) for _ in "kv")
    bits = jnp.zeros((B, K, W), bool).at[:, 0].set(True)
    meta = {name: jnp.asarray(rng.random(x.shape), x.dtype) for name, x in ring.meta.items()}
    ring = rings.Ring(k=jnp.asarray(k, dtype), v=jnp.asarray(v, dtype), admit=bits, meta=meta)
    shape: dict = {"rows": B, "heads": K, "lists": 1, "entries": M}
    pages = pool.empty(
        pages=20, size=S, summary={}, **Native().layout(S, H, jnp.dtype(dtype)), **shape, **kept
    )
    pages = dataclasses.replace(pages, k=jnp.full_like(pages.k, poison), v=jnp.full_like(pages.v, poison))
    old = [jnp.asarray(rng.normal(size=(B, K, 14, H)), dtype) for _ in "kv"]
    pos = jnp.broadcast_to(jnp.arange(14), (B, 14))
    more = {name: jnp.ones((B, K, 14, *x.shape[2:]), x.dtype) for name, x in pages.meta.items()}
    goes = (jnp.arange(14) < jnp.asarray([14, 3])[:, None]) & (jnp.arange(B) == 0)[:, None, None]
    entry = rings.Entry(k=old[0], v=old[1], pos=pos, admit=goes, meta=more)
    goes = jnp.where(goes, 0, EMPTY)
    append = jax.jit(lambda pages: paging.append(pages, policy.storage, policy.selection, entry, goes))
    pages = append(pages)
    return LayerCache(ring=ring, pages=pages, summary=None)


def preferring(monkeypatch, impl: str) -> None:
    """This CPU is a device on which the body of decode_step, and no other, has run and agreed."""
    known = {"impl": impl, "agrees": True}
    monkeypatch.setattr(dispatch, "PREFERRED", {"cpu": (impl, "xla")})
    monkeypatch.setattr(dispatch, "record", lambda op, kind: known if op == "decode_step" else {})


def stepper(info: layer.LayerInfo, sinks: jax.Array | None = None):
    """A step as a program, (cache, token's heads, length, active) to (read, cache after)."""

    def step(cache, x, length, active):
        x = dataclasses.replace(heads(*x), sinks=sinks)
        _, (cache, read) = layer.step(info, x, cache, length, active)
        return read, cache

    return jax.jit(step)


def live(cache: LayerCache, length: np.ndarray) -> list[np.ndarray]:
    """Keys and values that a read may see, exactly; the others may be anything."""
    held = np.arange(W) < length[:, None]
    arrays = [
        np.where(held[:, None, :, None], np.asarray(x, np.float32), 0) for x in (cache.ring.k, cache.ring.v)
    ]
    fill = np.arange(S) < np.asarray(paging.fills(cache.pages))[:, None]
    return arrays + [
        np.where(fill[..., None], np.asarray(x, np.float32), 0) for x in (cache.pages.k, cache.pages.v)
    ]


def without_kv(cache: LayerCache):
    """All the rest of it."""
    nothing = {"k": 0, "v": 0}
    return dataclasses.replace(cache.ring, **nothing), dataclasses.replace(cache.pages, **nothing)


@pytest.mark.parametrize(
    ("spec", "impl"),
    [
        ("write_gate(0.88, window=32)", "mosaic_tpu"),
        ("write_gate(0.88, window=32)", "triton"),
        pytest.param("window(32) + sinks(34)", "triton", marks=pytest.mark.slow),
        pytest.param("window(32) + sinks(34)", "mosaic_tpu", marks=pytest.mark.slow),
        pytest.param("snapkv + uniform(40)", "triton", marks=pytest.mark.slow),
        pytest.param("snapkv + uniform(40)", "mosaic_tpu", marks=pytest.mark.slow),
    ],
)
def test_steps_in_one_kernel_are_the_steps(spec, impl, monkeypatch):
    """Tokens enter pages, a list goes over a page's end, rows pause; what is dead is NaN."""
    info = site(spec)
    usual, theirs = stepper(info), made(info)
    at_once, ours = stepper(info), made(info, np.nan)
    length = LENGTHS.copy()
    entered = np.asarray(theirs.pages.length)
    for i in range(STEPS):
        active = np.array([True, i != 1, i != 0])
        inputs = drawn(i), jnp.asarray(length), jnp.asarray(active)
        wanted, theirs = usual(theirs, *inputs)
        with monkeypatch.context() as patch, dispatch.interpreted(races=False):
            preferring(patch, impl)
            assert i or "pallas_call" in str(jax.make_jaxpr(at_once)(ours, *inputs))
            step, ours = at_once(ours, *inputs)
        length += active
        assert step.out.dtype == wanted.out.dtype
        for a, b in ((step.out, wanted.out), (step.lse, wanted.lse)):
            a, b = (np.asarray(x, np.float32)[active] for x in (a, b))
            np.testing.assert_allclose(a, b, atol=0.02)
        for a, b in zip(live(ours, length), live(theirs, length)):
            np.testing.assert_array_equal(a, b)
        jax.tree.map(np.testing.assert_array_equal, without_kv(ours), without_kv(theirs))
        jax.tree.map(np.testing.assert_array_equal, step.loaded, wanted.loaded)
    assert step.mass is None
    entered = np.asarray(theirs.pages.length)[..., 0] - entered[..., 0]
    np.testing.assert_array_equal(entered, [[STEPS, 0], [1, 0], [0, 0]])


def test_a_sink_is_merged_behind_the_kernel(monkeypatch):
    info, sinks = site("write_gate(0.88, window=32)"), jnp.linspace(-1.0, 3.0, N)
    inputs = drawn(0), jnp.asarray(LENGTHS), jnp.ones(B, bool)
    wanted, _ = stepper(info, sinks)(made(info), *inputs)
    without, _ = stepper(info)(made(info), *inputs)
    assert np.abs(np.asarray(without.out - wanted.out, np.float32)).max() > 0.1
    with monkeypatch.context() as patch, dispatch.interpreted(races=False):
        preferring(patch, "triton")
        ours = stepper(info, sinks)
        assert "pallas_call" in str(jax.make_jaxpr(ours)(made(info), *inputs))
        read, _ = ours(made(info), *inputs)
    for a, b in ((read.out, wanted.out), (read.lse, wanted.lse)):
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), atol=0.02)


@pytest.mark.parametrize("impl", ["mosaic_tpu", "triton"])
def test_it_is_taken_where_admission_alone_decides(impl, monkeypatch):
    def taken(spec: str, dtype: str = "bfloat16", softcap: float | None = None, **other) -> bool:
        info = site(spec)
        answers = []

        def ask() -> None:
            cache = dataclasses.replace(made(info, dtype=dtype), **other)
            answers.append(_one_kernel.fits(info, cache, heads(*drawn(0, dtype), softcap)))

        jax.eval_shape(ask)  # shapes say it
        return answers[0]

    policies = ("write_gate(0.88, window=32)", "window(32) + sinks(4)", "snapkv + uniform(40)")
    assert not any(map(taken, policies)), "on a CPU nothing changes"
    preferring(monkeypatch, impl)
    assert all(map(taken, policies))
    for spec in ("knorm + uniform(40, every_step)", "quest(chunks=2, chunk=8)"):
        assert not taken(spec)
    assert not taken(policies[0], "float32")
    assert not taken(policies[0], softcap=30.0)
    assert not taken(policies[0], pages=None)
    monkeypatch.setattr(dispatch, "record", lambda op, kind: {})
    assert not taken(policies[0]), "not on record as having agreed on this device"
