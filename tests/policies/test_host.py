"""Host: the same answers to the bit wherever pages lie, and a cache that holds what was read last."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from tiny import by_layer  # noqa: F401, a program a layer

import kvjax
from kvjax import decode, metrics
from kvjax.algebra import PolicyError
from kvjax.cache import brought
from kvjax.cache import hosted as hosting
from kvjax.cache.state import KVState
from kvjax.sharding.mesh import ONE
from kvjax.sharding.reshard import on_host

pytestmark = pytest.mark.skipif(bool(hosting.absent()), reason=hosting.absent())

LENGTHS, NEW, CONTEXT = (90, 41, 3), 40, 144
POLICIES = (
    "quest(3, chunk=4, dense=1, recent=8)",
    "quest(2, chunk=4, dense=0, recent=6, sinks=2, tail=6)",
    "topk(5, sinks=2, tail=6)",
    "topk_pages(8, chunk=4, sinks=2, tail=6)",
    "quest(3, chunk=4, dense=0, recent=8) + int8(8)",
    "quest(3, chunk=8, dense=0, recent=8) + int4(8, hadamard=True)",
    "topk(5, sinks=2, tail=6) + phi(4)",
    "write_gate(0.5, window=16) + quest(2, chunk=4, dense=0, recent=8) + sinks(2)",
    "snapkv(8) + quest(2, chunk=4, dense=0, recent=8) + uniform(40)",
)
BY_DEFAULT = (0, 2)
"""Of these, the default run: chunks without anchors, and tokens with them."""

each = pytest.mark.parametrize(
    "spec",
    [pytest.param(s, marks=[pytest.mark.slow] * (at not in BY_DEFAULT)) for at, s in enumerate(POLICIES)],
)


def lived(spec: str, cache: float | str | None) -> tuple[list[np.ndarray], KVState]:
    """Logits after the prompts and after each of some tokens, and the state; pages move every 8 tokens."""
    policy = kvjax.policy(spec if cache is None else f"{spec} + host(cache={cache})")
    prompts = [tiny.prompt(n, seed) for seed, n in enumerate(LENGTHS)]
    sizes = {"context": CONTEXT, "page": tiny.PAGE, "chunk_size": 16}
    state, first = kvjax.prefill(tiny.model(), policy, prompts, **sizes, weights=tiny.weights(policy))
    tokens = np.asarray([tiny.prompt(NEW, 100 + row) for row in range(len(prompts))])
    logits = [np.asarray(first)[:, None]]
    for begin in range(0, NEW, 8):
        state = decode.reserve(policy, state, 8, 1)
        state, more = tiny.feed(policy, state, tokens[:, begin : begin + 8])
        logits.append(more)
    return logits, state


hosted = functools.cache(functools.partial(lived, cache=0.5))
"""``lived`` with pages in host memory; the state is not to be donated."""


@functools.cache
def plain(spec: str) -> tuple[list[np.ndarray], KVState]:
    """``lived`` with all pages on the device."""
    logits, state = lived(spec, None)
    return logits, jax.device_get(state)


def same(left: KVState, right: KVState) -> None:
    """The two hold the same tokens, to the bit."""
    for one, other in zip(left.layers, right.layers):
        one, other = (on_host(layer, ONE) for layer in (one, other))
        jax.tree.map(np.testing.assert_array_equal, one.ring, other.ring)
        jax.tree.map(np.testing.assert_array_equal, one.summary, other.summary)
        mine, theirs = (tiny.held(*layer.pools) for layer in (one, other))
        assert mine.keys() == theirs.keys()
        for stream, slots in mine.items():
            assert slots.keys() == theirs[stream].keys()
            for pos, values in slots.items():
                jax.tree.map(np.testing.assert_array_equal, values, theirs[stream][pos])


@each
def test_answers_and_caches_are_equal_to_the_bit(spec):
    right, full = plain(spec)
    logits, state = hosted(spec)
    for mine, theirs in zip(logits, right, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    same(state, full)
    there = [layer.hosted for layer in state.layers if layer.hosted is not None]
    assert there, "no layer has pages in host memory"
    assert all(hosted.k.sharding.memory_kind == "pinned_host" for hosted in there)
    assert all(int(hosted.owned.max()) > 4 for hosted in there), "hardly a page has moved"
    assert all((np.asarray(hosted.cached.asked) >= np.asarray(hosted.cached.hits)).all() for hosted in there)
    assert sum(int(hosted.cached.hits.sum()) for hosted in there) > 0


@pytest.mark.slow
def test_a_small_cache_changes_nothing_but_what_is_brought():
    spec = POLICIES[0]
    small, large = lived(spec, 0.09)[1], lived(spec, 0.9)[1]
    hits = [
        sum(int(x.hosted.cached.hits.sum()) for x in s.layers if x.hosted is not None) for s in (small, large)
    ]
    assert hits[0] < hits[1]
    same(small, large)


@pytest.mark.slow
@pytest.mark.parametrize("keys", ["int8", "int4"])
def test_tokens_ranked_by_codes_are_read_as_they_are(keys):
    """What is chosen is another set; the read of it is exact, so with few bits most answers stay near."""
    right, full = plain("topk(5, sinks=2, tail=6)")
    logits, state = lived("topk(5, sinks=2, tail=6)", f"0.5, keys={keys}")
    off = np.abs(np.concatenate(logits, axis=1) - np.concatenate(right, axis=1)).mean()
    # Prompts are read whole; what is written is chosen by codes.
    np.testing.assert_array_equal(logits[0], right[0])
    assert 0 < off < 0.5
    codes = next(layer.hosted.keys for layer in state.layers if layer.hosted is not None)
    assert codes.dtype == (jnp.int8 if keys == "int8" else jnp.uint8)


def test_the_least_recently_used_unit_goes():
    """The cache of one KV head against a list in Python, fed random choices."""
    random, places, units, most = np.random.default_rng(0), 6, 20, 4
    near = hosting.Cached(
        k=jnp.zeros((1, 1, places, 2, 3)),
        v=jnp.zeros((1, 1, places, 2, 3)),
        pos=jnp.zeros((1, 1, places, 2), jnp.int32),
        holds=jnp.full((1, 1, places), -1),
        place=jnp.full((1, 1, units), -1),
        used=jnp.zeros((1, 1, places), jnp.int32),
        clock=jnp.zeros((1, 1), jnp.int32),
        asked=jnp.zeros((1, 1), jnp.int32),
        hits=jnp.zeros((1, 1), jnp.int32),
    )
    remembered = jax.jit(brought._remembered)
    last: dict[int, int] = {}  # the read that asked for a unit last
    held: set[int] = set()
    hits = 0
    for step in range(60):
        count = int(random.integers(1, most + 1))
        chosen = random.choice(units, size=count, replace=False)
        unit = np.full((1, 1, most), 0, np.int32)
        unit[0, 0, :count] = chosen
        asked = np.arange(most)[None, None] < count
        slot = np.where(asked, np.take(np.asarray(near.place)[0, 0], unit), -1)
        missing = asked & (slot < 0)
        hits += len(held & set(chosen.tolist()))
        wide = np.broadcast_to(unit[..., None, None], (1, 1, most, 2, 3))
        got = (*(jnp.asarray(wide, jnp.float32) for _ in "kv"), jnp.asarray(wide[..., 0]))
        near = remembered(near, *map(jnp.asarray, (unit, slot, missing, asked)), got)
        last |= dict.fromkeys(chosen.tolist(), step)
        held = set(np.asarray(near.holds)[0, 0].tolist()) - {-1}
        assert set(chosen.tolist()) <= held
        # Whatever went was used no later than anything that stayed.
        assert max((last[u] for u in last.keys() - held), default=-1) <= min(last[u] for u in held)
        for place, u in enumerate(np.asarray(near.holds)[0, 0]):
            if u >= 0:
                assert int(near.place[0, 0, u]) == place
                assert (np.asarray(near.k)[0, 0, place] == u).all()
    assert int(near.hits[0, 0]) == hits > 0
    assert int(near.asked[0, 0]) > hits


@pytest.mark.parametrize("copied", [1, 2**30], ids=["one by one", "gathered"])
def test_units_are_brought_as_they_lie(copied, monkeypatch):
    monkeypatch.setattr(brought, "COPIED", copied)
    slots = np.random.default_rng(0).standard_normal((48, 3)).astype(np.float32)
    first = np.asarray([44, 0, 8, 20, 44], np.int32)
    far = jax.device_put(slots, hosting.host_memory())
    units = jax.jit(lambda x, first: brought.brought(x, first, 4))(far, jnp.asarray(first))
    assert units.sharding.memory_kind != hosting.KIND
    np.testing.assert_array_equal(units, slots[first[:, None] + np.arange(4)])


@pytest.mark.slow
def test_units_that_are_copied_one_by_one_change_nothing(monkeypatch):
    monkeypatch.setattr(brought, "COPIED", 1)
    jax.clear_caches()
    right, full = plain(POLICIES[0])
    logits, state = lived(POLICIES[0], 0.5)
    for mine, theirs in zip(logits, right, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    same(state, full)
    jax.clear_caches()


# --- what is done with such a state --------------------------------------------------------------


def continued(policy: kvjax.Policy, state: KVState, rows: int) -> np.ndarray:
    tokens = np.asarray([tiny.prompt(6, 7 + row) for row in range(rows)])
    return tiny.feed(policy, decode.reserve(policy, state, 6, 1), tokens)[1]


def test_forked_rows_go_on_as_the_row_would():
    spec = POLICIES[2]
    policy, other = kvjax.policy(spec), kvjax.policy(f"{spec} + host(cache=0.5)")
    here, there = jax.device_put(plain(spec)[1]), hosted(spec)[1]
    mine = continued(other, kvjax.fork(there, 1, 2), 2)
    np.testing.assert_array_equal(mine, continued(policy, kvjax.fork(here, 1, 2), 2))
    same(there, here)  # it is left as it was


@pytest.mark.parametrize("spec", [POLICIES[2], pytest.param(POLICIES[4], marks=pytest.mark.slow)])
def test_saved_and_opened(spec, tmp_path):
    policy, state = kvjax.policy(f"{spec} + host(cache=0.5)"), hosted(spec)[1]
    kvjax.save(state, tmp_path / "state", model=tiny.model(), policy=policy)
    opened = kvjax.open(tmp_path / "state", model=tiny.model())
    assert opened.policy == policy
    assert any(layer.hosted is not None for layer in opened.state.layers)
    same(opened.state, state)
    again = kvjax.fork(opened.state, 1, 2)
    np.testing.assert_array_equal(continued(policy, again, 2), continued(policy, kvjax.fork(state, 1, 2), 2))


@pytest.mark.slow
def test_texts_are_those_of_generate_without_it():
    prompts = [tiny.prompt(n, seed) for seed, n in enumerate(LENGTHS)]
    shared = {"max_new_tokens": 30, "stops": (), "page": 8}
    right = kvjax.generate(tiny.model(), POLICIES[0], prompts, **shared)
    made = kvjax.generate(tiny.model(), f"{POLICIES[0]} + host(cache=0.5)", prompts, **shared)
    assert made.tokens == right.tokens


# --- bytes ---------------------------------------------------------------------------------------


def test_what_lies_in_host_memory_is_no_device_memory():
    here, there = plain(POLICIES[0])[1], hosted(POLICIES[0])[1]
    mine, theirs = kvjax.nbytes(there), kvjax.nbytes(here)
    assert mine.host[0] > 0
    assert mine.host[1] >= mine.host[0]
    assert theirs.host == (0, 0)
    assert metrics.allocated(there.layers) == mine.allocated.sum()
    assert mine.live.sum() < theirs.live.sum()
    np.testing.assert_array_equal(metrics.held_by_head(there), metrics.held_by_head(here))
    np.testing.assert_array_equal(metrics.live_slots(there), metrics.live_slots(here))
    np.testing.assert_array_equal(metrics.present(there), metrics.present(jax.device_put(here)))


def test_a_step_copies_no_pool():
    policy = kvjax.policy(f"{POLICIES[1]} + host(cache=0.1)")
    state = decode.empty(tiny.model().network, policy, rows=8, context=16384, dtype=jnp.float32, page=64)
    tokens, active = jnp.zeros(8, jnp.int32), jnp.ones(8, bool)
    step = jax.jit(
        lambda s: decode.step(tiny.model().network, policy, tiny.model().params, {}, s, tokens, active),
        donate_argnums=0,
    )
    program = step.lower(state).compile()
    slots, width = state.layers[0].hosted.k.shape
    made = re.findall(rf"= f32\[{slots},{width}\]\S* ([\w-]+)\(", program.as_text())
    assert "parameter" in made, "the pool is not recognised"
    assert set(made) <= {"parameter", "get-tuple-element"}
    assert program.memory_analysis().alias_size_in_bytes > 4 * state.layers[0].hosted.k.nbytes


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("host", "every read visits everything"),
        ("int8 + host", "Add a selection"),
        ("draft(quest(chunks=8)) + host", "every read visits everything"),
        ("magicpig(3, 12) + host", "24 bytes of each token that it compares would stay"),
        ("quest + tova + uniform(64, every_step) + host", "evicts while decoding"),
        ("topk(5) + kivi(2) + host", "codes groups of tokens"),
        ("write_gate(0.5, window=16) + topk(5) + phi(4) + host", "Leave one of the three out"),
        ("quest + host(keys=int8)", "ranks by values of a page"),
        ("topk(5) + int8 + host(keys=int4)", "the keys are in codes"),
        ("topk(5) + host(keys=int2)", "Give native, int8, int4"),
        ("quest + host(0)", "a number above 0"),
        ("quest + host(of=int8)", "Write the storage before it"),
        ("quest + int8(8) + int4(8) + host", "storage twice"),
    ],
)
def test_refused(spec, says):
    with pytest.raises(PolicyError, match=says.replace("(", r"\(")):
        kvjax.policy(spec)


def test_a_cache_smaller_than_a_choice():
    policy = "quest(chunks=32, dense=0) + host(cache=0.1)"
    with pytest.raises(PolicyError, match="Give cache=0.25 or more"):
        decode.empty(tiny.model().network, policy, rows=1, context=2048, dtype=jnp.float32)


def test_where_there_is_none(monkeypatch):
    monkeypatch.setattr(hosting, "absent", lambda **_: "this is a test")
    with pytest.raises(PolicyError, match="this is a test. Leave host out"):
        decode.empty(tiny.model().network, "quest + host(0.9)", rows=1, context=2048, dtype=jnp.float32)


def test_the_engine_refuses_it():
    from kvjax.engine import Engine

    with pytest.raises(PolicyError, match="running batches hold their pages on the device"):
        Engine(tiny.model(), policy="quest + host(0.9)", kv_memory=1 << 24, context=256)


def test_repr_gives_it_back():
    policy = kvjax.policy("quest(chunks=8) + int8(32) + host(cache=0.2)")
    assert repr(policy) == "quest(8) + int8(32) + host(0.2)"
    assert kvjax.policy(repr(policy)) == policy
    assert dataclasses.replace(policy, storage=policy.storage.of) == kvjax.policy(
        "quest(chunks=8) + int8(32)"
    )
