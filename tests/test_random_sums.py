"""Random sums of parts: hypothesis writes compositions of all six places.

Each is refused with a reason, or obeys the laws: it is its name, reads exactly what it holds, and its bytes
are counted.

Discovery says what there is to compose, so a new method takes part by being there.
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from hypothesis import HealthCheck, Phase, assume, event, given, note, settings
from hypothesis import strategies as st

import kvjax
from kvjax import catalogue, decode, layer, metrics
from kvjax.algebra import PLACES, Argument, Every, Number, Policy, PolicyError, Switch, Whole, Wrapper
from kvjax.budgets.amount import Size, Time
from kvjax.cache.state import KVState
from kvjax.decode import _by_layer

WRAPPERS = [kind for kind in catalogue.parts().values() if issubclass(kind, Wrapper)]
KINDS = {
    place: [k for k in catalogue.parts().values() if k.place == place and k not in WRAPPERS]
    for place in PLACES
}
LENGTHS, STEPS = (41, 17), 3
TEXTS = [tiny.prompt(n + STEPS, seed) for seed, n in enumerate(LENGTHS)]

AMOUNTS = st.one_of(st.integers(1, 40), st.sampled_from([0.2, 0.5, 0.9]), st.sampled_from(["2560B", "4KiB"]))
TIMES = st.sampled_from(["after_prompt", "every_step", Every(3)])


def values(argument: Argument) -> st.SearchStrategy[Any]:
    """Good values of an argument, small enough for prompts of forty tokens."""
    if isinstance(argument, Size):
        return AMOUNTS
    if isinstance(argument, Time):
        return TIMES
    if isinstance(argument, Switch):
        return st.booleans()
    if isinstance(argument, Whole):
        most = argument.least + 14 if argument.most is None else min(argument.most, argument.least + 14)
        return st.integers(argument.least, most)
    if isinstance(argument, Number):
        high = argument.low + 2 if argument.high == float("inf") else argument.high
        ends = [x for x in (argument.low, (argument.low + high) / 2, high) if argument.accepts(x)]
        return st.sampled_from(ends)
    return st.nothing()


@st.composite
def parts(draw, kind, often: bool, **arguments: Any) -> Any:
    """A part with some of its arguments, or all of them; None where its own check refuses them together."""
    for name, argument in kind.arguments.items():
        if not values(argument).is_empty and (often or draw(st.booleans())):
            arguments[name] = draw(values(argument))
    try:
        return kind(**arguments)
    except PolicyError:
        return None


@st.composite
def sums(draw, often: bool = False) -> dict[str, Any]:
    """Fields of a policy: in each place something or nothing; often something, and small."""
    fields: dict[str, Any] = {}
    for place, kinds in KINDS.items():
        odds = [True, False]
        if often:  # a selective read is not judged against all that is held
            odds = [True, False, False] if place == "selection" else [True, True, False]
        if kinds and draw(st.sampled_from(odds)):
            part = draw(parts(draw(st.sampled_from(kinds)), often))
            fields |= {} if part is None else {place: part}
    if "eviction" in fields and draw(st.sampled_from([False, False, True])):
        part = draw(parts(draw(st.sampled_from(WRAPPERS)), often, of=fields["eviction"]))
        fields |= {} if part is None else {"eviction": part}
    return fields | {"sinks": draw(st.integers(0, 4)), "recent": draw(st.sampled_from([0, 0, 3, 9]))}


def built(fields: dict[str, Any]) -> Policy | str:
    """The policy, or why there is none."""
    if "budget" in fields and fields["budget"].name == "gvote" == getattr(fields.get("eviction"), "name", ""):
        fields = fields | {"eviction": type(fields["eviction"])(**_same(fields["budget"]))}
    try:
        return Policy(**fields)
    except PolicyError as error:
        return str(error)


def _same(part: Any) -> dict[str, Any]:
    return {name: getattr(part, name) for name in part.arguments}


@settings(max_examples=300, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(sums())
def test_a_sum_is_refused_with_a_reason_or_is_its_name(fields):
    policy = built(fields)
    event("refused" if isinstance(policy, str) else "built")
    if isinstance(policy, str):
        assert re.search(r"[.:] [A-Z'\"]", policy), "a reason, or no way out"
        assert any(repr(p) in policy for n, p in fields.items() if n in PLACES), "names no part"
        return
    again = kvjax.policy(repr(policy))
    assert again == policy
    assert hash(again) == hash(policy)
    assert catalogue.policy(catalogue.describe(policy)["policy"]) == policy


# --- lived ---------------------------------------------------------------------------------------


def _look(info, x, cache, length, done):
    """``layer.step``, and beside the cache what the layer asked for and got."""
    _, (cache, read) = layer.step(info, x, cache, length, ~done)
    return read.out, (cache, x.q[:, 0], read.out[:, 0])


LOOK = _by_layer.program(_look)


def seen_step(
    policy: Policy, weights: Any, state: KVState, tokens: np.ndarray
) -> tuple[KVState, list[tuple[jax.Array, jax.Array]]]:
    """A decode step of a state that is donated, with what each layer asked for and got."""
    layers = decode.layer_calls(tiny.model().network, policy, tiny.model().params, weights)
    _, met = tiny.turn(tiny.model(), policy, layers, state, tokens, np.ones(state.rows, bool), LOOK)
    caches = tuple(cache for cache, *_ in met)
    after = dataclasses.replace(state, layers=caches, length=jnp.asarray(np.asarray(state.length) + 1))
    return after, [tuple(seen) for _, *seen in met]


def holdings(state: KVState, index: int, row: int, head: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values of a KV head, ring and pages, as they are stored."""
    room = state.layers[index]
    at = tiny.places(state.length, room.ring.window)[row]
    k, v = (np.asarray(x)[row, head][at >= 0] for x in (room.ring.k, room.ring.v))
    stored = tiny.held(*room.pools)[row, head].values() if room.pools else ()
    k = np.concatenate([k, *(x[0][None] for x in stored)])
    return k.astype(np.float64), np.concatenate([v, *(x[1][None] for x in stored)]).astype(np.float64)


def reads_exactly_what_it_holds(policy: Policy, state: KVState, met: list[Any]) -> int:
    looked = 0
    for index, (q, out) in enumerate(met):
        if policy.selection.applies(index) or not policy.completion.idle:
            continue
        for row in range(state.rows):
            for n in range(q.shape[1]):
                k, v = holdings(state, index, row, n // 2)
                s = k @ np.asarray(q[row, n], np.float64) / np.sqrt(k.shape[-1])
                e = np.exp(s - s.max())
                np.testing.assert_allclose(out[row, n], e @ v / e.sum(), atol=3e-4)
                looked += 1
    return looked


def bytes_are_counted(state: KVState) -> None:
    nbytes = metrics.nbytes(state)
    stores = [getattr(room, name) for room in state.layers for name in metrics.STORES]
    assert nbytes.total["allocated"] == sum(x.nbytes for x in jax.tree.leaves(stores))
    assert metrics.by_row(state)[0].sum() == pytest.approx(nbytes.total["live"], abs=1)
    held = sum(len(x) for room in state.layers if room.pools for x in tiny.held(*room.pools).values())
    ring = sum(2 * np.minimum(np.asarray(state.length), room.ring.window).sum() for room in state.layers)
    assert np.asarray(metrics.live_slots(state)).sum() == held + ring
    assert np.asarray(metrics.present(state)).sum() == held + ring, "a position is held twice"


def lives(policy: Policy, *, long: bool) -> None:
    """Prefill, then a few steps; ``long``: fork, and other chunk sizes, too."""
    prompts = [text[:n] for text, n in zip(TEXTS, LENGTHS)]
    how = {"context": tiny.CONTEXT, "page": 16, "weights": tiny.weights(policy)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            state, logits = kvjax.prefill(tiny.model(), policy, prompts, **how, chunk_size=16 if long else 32)
        except PolicyError as refused:  # what the model's sizes or the page's do not allow
            assume(not str(refused))
        if long:
            bytes_are_counted(state)
        if long and (policy.on_arrival or policy.whole_prompt):
            other = kvjax.prefill(tiny.model(), policy, prompts, **how, chunk_size=64)
            bits = [np.asarray(metrics.present(x)) for x in (state, other[0])]
            exact = policy.storage.exact and policy.selection.idle
            # What codes, a selection or φ change in one layer's output, a gate of the next one hears.
            same = policy.whole_prompt or not policy.needs or (exact and policy.completion.idle)
            np.testing.assert_array_equal(*(bits if same else (x[0] for x in bits)))
            if exact:
                np.testing.assert_allclose(other[1], logits, atol=5e-4)
    state = decode.reserve(policy, state, STEPS, 1)
    if long:
        twin = decode.reserve(policy, kvjax.fork(state, 1, 2), STEPS, 1)
        token = np.asarray([TEXTS[1][LENGTHS[1]]] * 2, np.int32)
        _, left_seen = seen_step(policy, how["weights"], tiny.copy(state), token)
        _, right_seen = seen_step(policy, how["weights"], twin, token)
        for (_, left), (_, right) in zip(left_seen, right_seen):
            np.testing.assert_allclose(right[0], left[1], atol=2e-4)
            np.testing.assert_allclose(right[1], left[1], atol=2e-4)
    for step in range(STEPS):
        tokens = np.asarray([text[n + step] for text, n in zip(TEXTS, LENGTHS)], np.int32)
        state, met = seen_step(policy, how["weights"], state, tokens)
        assert all(np.isfinite(np.asarray(out)).all() for _, out in met)
        reads_exactly_what_it_holds(policy, jax.device_get(state), met)
    bytes_are_counted(state)
    for room in state.layers:
        for pages in room.pools:
            tiny.owned_once(pages)


def lived(count: int, long: bool):
    """A test over so many policies of at least three parts that do something."""

    @settings(
        max_examples=count,
        derandomize=True,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate,),
    )
    @given(sums(often=True))
    def test(fields):
        policy = built(fields)
        assume(not isinstance(policy, str))
        assume(sum(not part.idle for part in policy.parts) >= 3)
        note(repr(policy))
        print(repr(policy))
        if long:
            jax.clear_caches()  # programs hold memory maps; those of ten sums are few, and share helpers
        lives(policy, long=long)

    return test


test_two_sums_read_what_they_hold = lived(2, False)
test_ten_sums_read_what_they_hold = pytest.mark.slow(lived(10, False))
test_a_hundred_and_fifty_sums_fork_and_chunk = pytest.mark.slow(lived(150, True))
