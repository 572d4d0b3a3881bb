"""WG-KV against float64 NumPy: the whole model under the mask (i - j < W) or g_j >= tau, by every route."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from tiny import W

import kvjax
from kvjax import decode, metrics
from kvjax.algebra import Policy, PolicyError
from kvjax.cache import ring as rings
from kvjax.policies.wg_kv import WriteGate, gate_logits, initial
from kvjax.weights import WeightsError

LENGTHS, MORE = (44, 27), 12
TEXTS = [tiny.prompt(n + MORE, seed) for seed, n in enumerate(LENGTHS)]
POLICY = Policy(admission=WriteGate(tau=0.5, window=W), sinks=1)


def numpy_logits(params: dict, k_pre: np.ndarray, k: np.ndarray) -> np.ndarray:
    """w2 GELU(w1 [k_pre ; k] + b1) + b2 for keys [T, K, H], head by head; [T, K]."""
    p = {name: np.asarray(x, np.float64) for name, x in params.items()}
    if "norm" in p:
        k_pre, k = (x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) for x in (k_pre, k))
    x = np.concatenate([k_pre, k], axis=-1) * p.get("norm", 1.0)
    result = np.zeros(k.shape[:2])
    for head in range(k.shape[1]):
        y = x[:, head] @ p["w1"][head] + p["b1"][head]
        y = 0.5 * y * (1 + np.vectorize(math.erf)(y / math.sqrt(2)))
        result[:, head] = y @ p["w2"][head] + p["b2"][head]
    return result


@functools.cache
def truth(row: int) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """Logits [N + MORE, V] of a text, and per layer which tokens its gates admit, [T, K]."""
    gates, bits = tiny.weights(POLICY)["admission"], []

    def judge(layer: int, k_pre: np.ndarray, k: np.ndarray) -> np.ndarray:
        z = numpy_logits(gates[layer], k_pre, k)
        assert np.abs(z).min() > 1e-4, "a gate at the threshold: rounding would decide"
        bits.append((1 / (1 + np.exp(-z)) >= 0.5) | (np.arange(len(k)) < POLICY.sinks)[:, None])
        return bits[-1]

    text = TEXTS[row]
    logits = tiny.oracle(text, lambda *_: tiny.causal(len(text), W), judge=judge)
    return logits, tuple(bits)


def prompts() -> list[list[int]]:
    return [text[:n] for text, n in zip(TEXTS, LENGTHS)]


def more() -> np.ndarray:
    return np.asarray([text[n:] for text, n in zip(TEXTS, LENGTHS)])


def check(policy: Policy, chunk: int, atol: float) -> kvjax.KVState:
    """Prefill by chunks, then decode: the oracle's logits all along; the state at the end."""
    state, first = tiny.read(policy, prompts(), chunk)
    state, rest = tiny.feed(policy, state, more())
    for row, n in enumerate(LENGTHS):
        right = truth(row)[0]
        np.testing.assert_allclose(first[row], right[n - 1], atol=atol)
        np.testing.assert_allclose(rest[row], right[n:], atol=atol)
    return state


def held(state: kvjax.KVState) -> list[dict[tuple[int, int], set[int]]]:
    """Positions in GLOBAL, per layer and KV head."""
    return [{s: set(slots) for s, slots in tiny.held(room.pages).items()} for room in state.layers]


def promoted(seen: int) -> list[dict[tuple[int, int], set[int]]]:
    """What GLOBAL must hold ``seen`` tokens after the prompt: the admitted that left the window."""
    return [
        {
            (row, head): set(np.flatnonzero(truth(row)[1][layer][: max(n + seen - W, 0), head]).tolist())
            for row, n in enumerate(LENGTHS)
            for head in range(2)
        }
        for layer in range(2)
    ]


def test_the_gates_of_the_oracle_are_ragged():
    """Otherwise equality would prove little."""
    shares = [bits[:, head].mean() for bits in truth(0)[1] for head in range(2)]
    assert all(0.1 < share < 0.9 for share in shares)
    assert len({round(share, 2) for share in shares}) > 2
    local = tiny.oracle(TEXTS[0], lambda *_: tiny.causal(len(TEXTS[0]), W))
    assert np.abs(truth(0)[0] - local)[20:].max() > 0.5


@pytest.mark.parametrize("chunk", [1, 3, W, 20, 44])
def test_every_chunk_size_is_the_dense_mask_and_holds_the_same(chunk):
    state = check(POLICY, chunk, 2e-4)
    assert held(state) == promoted(MORE)
    for room in state.layers:
        tiny.owned_once(room.pages)


def test_promotion_waits_until_a_token_leaves_the_window():
    state, _ = tiny.read(POLICY, prompts(), W)
    assert held(state) == promoted(0)
    for step in range(1, MORE + 1):
        state, _ = tiny.feed(POLICY, state, more()[:, step - 1 : step])
        assert held(state) == promoted(step)
        at = np.asarray(rings.positions(state.length, W))
        assert [sorted(row) for row in at.tolist()] == [list(range(n + step - W, n + step)) for n in LENGTHS]
    assert promoted(MORE) != promoted(0)


@pytest.mark.parametrize(
    ("words", "atol"),
    # Quest may visit every chunk there is; INT8 rounds by at most 1/254 of a channel's largest.
    [("quest(chunks=40, chunk=4, dense=0, recent=8)", 2e-4), ("int8(8)", 0.15)],
)
def test_composed_with_selection_and_storage(words, atol):
    part = kvjax.policy(words)
    policy = dataclasses.replace(POLICY, selection=part.selection, storage=part.storage)
    assert kvjax.policy(f"write_gate(0.5, window={W}) + {words} + sinks(1)") == policy
    assert held(check(policy, 20, atol)) == promoted(MORE)


@pytest.mark.slow
def test_chunked_prefill_allocates_for_what_was_admitted_whatever_the_prompts_length():
    policy, chunk, context, size = dataclasses.replace(POLICY, sinks=20), 16, 128, 32
    # Gates that look at nothing and are all closed: the sinks alone are admitted.
    shut = [g | {"w2": 0 * g["w2"], "b2": 0 * g["b2"] - 9} for g in tiny.weights(POLICY)["admission"]]

    def peak(length: int) -> float:
        sizes = {"context": context, "chunk_size": chunk, "page": size}
        state, _ = kvjax.prefill(
            tiny.model(), policy, [tiny.prompt(length)], **sizes, weights={"admission": shut}
        )
        assert [len(slots) for layer in held(state) for slots in layer.values()] == [20] * 4
        return metrics.nbytes(state).peak[1]

    short, long = peak(48), peak(112)
    assert short == long
    empty = decode.empty(tiny.model().network, policy, rows=1, context=context, dtype=jnp.float32, page=size)
    fixed = metrics.allocated(empty.layers)  # rings, page tables, and one page a layer
    page = size * (2 * 8 * 4 + 4) + 8  # keys, values and positions of the slots; the free list
    pages = 2 * 2 * (math.ceil((20 + chunk) / size) + 1)  # layers, heads; a list may end in a page of its own
    assert long <= fixed + 2 * pages * page  # a pool that grows at least doubles


# --- the gate itself -----------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [False, True])
def test_gate_logits_are_numpys(norm):
    k_pre, k = np.random.default_rng(0).normal(0, 3, (2, 2, 3, 5, 8))
    params = initial(jax.random.key(0), 3, 8, 7, 1, norm=norm)[0]
    spread = jax.random.split(jax.random.key(1), len(params))
    params = {n: x + jax.random.normal(at, x.shape) for at, (n, x) in zip(spread, sorted(params.items()))}
    actual = gate_logits(params, jnp.asarray(k_pre, jnp.float32), jnp.asarray(k, jnp.float32))
    for row in range(2):
        right = numpy_logits(params, np.moveaxis(k_pre[row], 0, 1), np.moveaxis(k[row], 0, 1))
        np.testing.assert_allclose(actual[row].T, right, rtol=1e-5, atol=1e-4)
    assert gate_logits(params, jnp.bfloat16(k_pre), jnp.bfloat16(k)).dtype == jnp.float32


def test_gates_start_nearly_open_and_four_times_as_wide_as_a_head():
    gates = initial(jax.random.key(0), 2, 16, None, 3)
    assert [{name: x.shape for name, x in layer.items()} for layer in gates] == [
        {"w1": (2, 32, 64), "b1": (2, 64), "w2": (2, 64), "b2": (2,)}
    ] * 3
    k = jax.random.normal(jax.random.key(1), (1, 2, 50, 16))
    g = jax.nn.sigmoid(gate_logits(gates[0], k, k))
    assert 0.75 < g.min() < g.max() < 0.97
    assert not np.allclose(gates[0]["w1"], gates[1]["w1"])


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize("tau", [0, 1, -0.1, 1.5, "half", float("nan")])
def test_thresholds_outside_the_gates_range_are_refused(tau):
    with pytest.raises(PolicyError, match="above 0 and below 1"):
        WriteGate(tau=tau)


@pytest.mark.parametrize("window", [0, -1, 2.5])
def test_windows_that_see_nothing_are_refused(window):
    with pytest.raises(PolicyError, match="1 or more"):
        WriteGate(window=window)


@pytest.mark.parametrize("call", ["prefill", "generate"])
def test_gates_are_asked_for_before_anything_is_computed(call):
    with pytest.raises(WeightsError, match=r"write_gate.*FILE, or weights=kvjax.weights_for"):
        getattr(kvjax, call)(tiny.model(), POLICY, prompts())


def test_a_step_without_gates_says_what_is_missing():
    state = tiny.start(POLICY, 1)
    with pytest.raises(PolicyError, match=r"weights=kvjax.weights_for"):
        decode.step(
            tiny.model().network, POLICY, tiny.model().params, {}, state, jnp.zeros(1, int), jnp.ones(1, bool)
        )


def gates(**changes) -> dict:
    """The tests' gates with something else in every layer."""
    return {"admission": [layer | changes for layer in tiny.weights(POLICY)["admission"]]}


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        (gates(b2=jnp.zeros(3)), r"layer 0 .*'b2': \(3,\).* 2 KV heads of 8 channels needs"),
        (gates(w1=jnp.zeros((2, 32, 8))), r"'w1': \(2, 32, 8\)"),
        (gates(norm=jnp.zeros(8)), r"'norm': \(8,\)"),
        (gates(extra=jnp.zeros(8)), "'extra'"),
        ({"admission": gates()["admission"][:1]}, "has 1 layers, the model has 2"),
        (gates() | {"eviction": []}, "weights for eviction are given"),
    ],
)
def test_gates_that_do_not_fit_are_refused(weights, says):
    with pytest.raises(PolicyError, match=says):
        kvjax.prefill(tiny.model(), POLICY, prompts(), weights=weights)
