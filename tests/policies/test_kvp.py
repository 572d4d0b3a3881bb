"""KVP's rankers against float64 NumPy: the score, and what stays after a prompt or while tokens come."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from policy_oracle import best, kept, observe, positions

import kvjax
from kvjax import decode, layer
from kvjax.algebra import Policy, PolicyError
from kvjax.budgets.ada import Ada
from kvjax.budgets.uniform import Uniform
from kvjax.cache.ring import Entry
from kvjax.policies.kvp import INPUTS, USUAL, LearnedRanker, depth, initial, scores, shapes
from kvjax.policies.random_keep import Random
from kvjax.weights import WeightsError

LENGTHS, T, K, H = (40, 25, 9), 40, 2, 8
SEEN = np.random.default_rng(3).normal(0, 2, (3, len(LENGTHS), K, T, H))
"""k, k_pre and v."""


def erf_gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def numpy_scores(
    params: dict, k: np.ndarray, k_pre: np.ndarray, v: np.ndarray, pos: np.ndarray
) -> np.ndarray:
    """One head at a time, one token at a time: [K, T] for [K, T, H]."""
    p = {name: np.asarray(x, np.float64) for name, x in params.items()}
    result = np.zeros(k.shape[:2])
    for head, t in np.ndindex(result.shape):
        at = float(pos[t])
        inputs = {
            "w_key": k[head, t],
            "w_key_pre": k_pre[head, t],
            "w_value": v[head, t],
            "w_log": np.asarray([math.log2(1 + at) / 16]),
            "w_linear": np.asarray([at / 4096]),
        }
        x = p["b1"][head] + sum(inputs[name] @ p[name][head] for name in p if name in inputs)
        for name in ("w2", "w3"):
            if name in p:
                x = erf_gelu(x) @ p[name][head] + p[name.replace("w", "b")][head]
        result[head, t] = erf_gelu(x) @ p["w_out"][head]
    return result


def agents(inputs=USUAL, layers=3, seed=0) -> dict:
    """One layer's, every leaf drawn."""
    params = initial(jax.random.key(seed), K, H, 1, inputs=inputs, hidden=7, layers=layers)[0]
    spread = jax.random.split(jax.random.key(seed + 1), len(params))
    return {n: x + 0.3 * jax.random.normal(at, x.shape) for at, (n, x) in zip(spread, sorted(params.items()))}


@pytest.mark.parametrize(
    ("inputs", "layers"),
    [(USUAL, 2), (USUAL, 4), (("w_key_pre",), 3), (("w_value", "w_linear"), 2), (INPUTS, 3)],
)
def test_scores_are_numpys(inputs, layers):
    params, pos = agents(inputs, layers), positions(LENGTHS, T)
    assert depth(params) == layers
    k, k_pre, v = (jnp.asarray(x, jnp.float32) for x in SEEN)
    actual = scores(params, k, k_pre, v, jnp.asarray(pos))
    for row, length in enumerate(LENGTHS):
        right = numpy_scores(params, *SEEN[:, row], np.maximum(pos[row], 0))
        np.testing.assert_allclose(actual[row, :, :length], right[:, :length], rtol=2e-5, atol=2e-5)
    assert (
        scores(params, *(x.astype(jnp.bfloat16) for x in (k, k_pre, v)), jnp.asarray(pos)).dtype
        == jnp.float32
    )


def test_agents_need_no_more_than_they_read():
    params = agents(("w_value",), 2)
    actual = scores(params, None, None, jnp.asarray(SEEN[2], jnp.float32), jnp.zeros((3, T), int))
    assert actual.shape == (3, K, T)


def verdict(policy: Policy, params: dict, seen) -> np.ndarray:
    """Bits [B, K, T]: what a layer keeps of these prompts."""
    k = seen.values["k"]
    info = layer.LayerInfo(policy, {"eviction": params}, 0, 1, None, seen.total)
    whole = Entry(k=k, v=k, pos=seen.pos, admit=jnp.ones(k.shape[:3], bool), meta={})
    return np.asarray(layer.retained(info, whole, seen))


@pytest.mark.parametrize(("sinks", "recent", "amount"), [(4, 16, 24), (0, 0, 7), (2, 5, 0.25)])
def test_after_a_prompt_the_best_scores_stay_beside_the_first_and_the_newest(sinks, recent, amount):
    params, real = agents(), positions(LENGTHS, T)[:, None, :, None] >= 0
    policy = Policy(eviction=LearnedRanker(sinks, recent), budget=Uniform(amount))
    for padding in (9.0, np.nan):
        values = dict(zip(("k", "k_pre", "v"), np.where(real, SEEN, padding)))
        bits = verdict(policy, params, observe(LENGTHS, T, **values))
        for row, length in enumerate(LENGTHS):
            right = numpy_scores(params, *SEEN[:, row], np.arange(T))
            target = amount if isinstance(amount, int) else int(np.floor(amount * length + 0.5))
            for head in range(K):
                safe = best(right[head], length, 0, newest=recent)
                # The first tokens count to the target and go last.
                ranks = np.where(np.arange(T) < sinks, 1e9 - np.arange(T), right[head])
                want = best(ranks, length, max(target, len(safe)), newest=recent)
                assert kept(bits[row, head]) == want


def test_heads_compete_by_log_probabilities_so_that_shifted_agents_change_nothing():
    params = agents()
    seen = observe(LENGTHS, T, **dict(zip(("k", "k_pre", "v"), SEEN)))
    policy = Policy(eviction=LearnedRanker(2, 4), budget=Ada(18, floor=0.1))
    part = policy.eviction
    actual = np.asarray(part.score_prompt(params, seen))
    for row, length in enumerate(LENGTHS):
        ranked = slice(2, length - 4)
        right = numpy_scores(params, *SEEN[:, row], np.arange(T))
        for head in range(K):
            of_head = right[head, ranked]
            want = of_head - np.log(np.exp(of_head).sum())
            np.testing.assert_allclose(actual[row, head, ranked], want, atol=1e-4)
    bits = verdict(policy, params, seen)
    shared = bits.sum(axis=-1)
    assert (shared[0] != shared[0, 0]).any(), "no head was given more than another"
    assert shared.sum(axis=-1).tolist() == [36, 36, 18]

    class Shifted(LearnedRanker):
        """The same agents, head 1 with a bias that no ranking sees."""

        def arrive(self, params, observed):
            return {"score": super().arrive(params, observed)["score"] + jnp.asarray([0.0, 3.0])[:, None]}

    again = Policy(eviction=Shifted(2, 4), budget=Ada(18, floor=0.1))
    np.testing.assert_array_equal(verdict(again, params, seen), bits)


def test_a_head_without_its_gate_is_left_to_the_draws_of_a_random_choice():
    """The file decides by head; the draws are those of ``random`` with the policy's seed."""
    params, closed = agents(), jnp.asarray([1.0, 0.0])
    values = dict(zip(("k", "k_pre", "v"), SEEN))
    seen = dataclasses.replace(observe(LENGTHS, T, **values), layer=3)
    ranked = LearnedRanker().arrive(params, seen)["score"]
    opened = LearnedRanker().arrive(params | {"gate": jnp.ones(K)}, seen)["score"]
    np.testing.assert_array_equal(opened, ranked)
    for seed in (0, 5):
        score = LearnedRanker(seed=seed).arrive(params | {"gate": closed}, seen)["score"]
        np.testing.assert_array_equal(score[:, 0], ranked[:, 0])
        np.testing.assert_array_equal(score[:, 1], Random(seed).arrive(None, seen)["draw"][:, 1])
    # Where heads compete, the tokens of a head left to chance are equal to within a factor of e.
    prompt = LearnedRanker(2, 4).score_prompt(params | {"gate": closed}, seen)
    for row, length in enumerate(LENGTHS):
        assert np.abs(np.asarray(prompt[row, 1, 2 : length - 4]) + np.log(length - 6)).max() < 1


# --- while tokens come ---------------------------------------------------------------------------

EVERY = Policy(eviction=LearnedRanker(sinks=2, recent=6), budget=Uniform(20, "every_step"))
TEXT, PROMPT = tiny.prompt(60, 5), 48


@functools.cache
def ranking() -> np.ndarray:
    """Scores [K, T] of the text at the first layer, whose keys and values no eviction changes."""
    state, _ = kvjax.prefill(tiny.model(), kvjax.policy("full"), [TEXT], context=tiny.CONTEXT)
    ring = state.layers[0].ring
    k, v = (np.asarray(x[0], np.float64)[:, : len(TEXT)] for x in (ring.k, ring.v))
    params = tiny.weights(EVERY)["eviction"][0]
    result = numpy_scores(params, k, k, v, np.arange(len(TEXT)))
    for of_head in result:
        assert np.diff(np.sort(of_head)).min() > 1e-5, "two scores so near that rounding would decide"
    return result


def stay(length: int) -> list[list[int]]:
    """Positions in pages after so many tokens: sinks, then the best of what is older than the newest 6."""
    return [
        sorted([0, 1, *(2 + np.argsort(-of_head[2 : length - 6], kind="stable")[: 20 - 6 - 2])])
        for of_head in ranking()
    ]


def paged(state: kvjax.KVState) -> list[list[int]]:
    held = tiny.held(state.layers[0].pages)
    return [sorted(held[0, head]) for head in range(K)]


@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_a_stream_holds_the_best_so_far_whatever_the_chunks(chunk):
    state, _ = tiny.read(EVERY, [TEXT[:PROMPT]], chunk)
    assert paged(state) == stay(PROMPT)
    before = paged(state)
    state = decode.reserve(EVERY, state, len(TEXT) - PROMPT, 1)
    state, _ = tiny.feed(EVERY, state, np.asarray([TEXT[PROMPT:]]))
    assert paged(state) == stay(len(TEXT)) != before


def test_a_score_is_stored_with_its_slot_and_counted_only_where_it_is_needed_later():
    once = Policy(eviction=EVERY.eviction, budget=Uniform(20))
    assert EVERY.keeps == ("eviction.score",)
    assert once.keeps == ()
    state, _ = tiny.read(EVERY, [TEXT[:PROMPT]], 16)
    for head, slots in enumerate(paged(state)):
        held = tiny.held(state.layers[0].pages)[0, head]
        for pos in slots:
            np.testing.assert_allclose(held[pos][2][0], ranking()[head][pos], atol=1e-4)


def test_the_preset_is_the_part_with_the_papers_protection():
    policy = kvjax.policy("kvp")
    assert (policy.eviction.sinks, policy.eviction.recent) == (4, 16)
    assert kvjax.policy(repr(policy)) == policy == kvjax.policy("kvp + uniform(0.25)")
    assert kvjax.policy("kvp(0, recent=8) + uniform(512, every_step)").protects == 8


# --- bad input -----------------------------------------------------------------------------------


def test_no_rankers_is_one_sentence_that_names_what_trains_them():
    with pytest.raises(WeightsError, match=r"kvp.*python -m train\.ranker"):
        kvjax.prefill(tiny.model(), kvjax.policy("kvp"), [TEXT])


def changed(**leaves) -> dict:
    return {"eviction": [layer | leaves for layer in tiny.weights(EVERY)["eviction"]]}


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        (
            changed(w_key=jnp.zeros((2, 4, 8))),
            r"layer 0 .*'w_key': \(2, 4, 8\).*2 KV heads of 8 channels needs",
        ),
        (changed(w_out=jnp.zeros((3, 8))), r"'w_out': \(3, 8\)"),
        (changed(w3=jnp.zeros((2, 8, 8))), "'b3'"),
        (changed(w_future=jnp.zeros((2, 8, 8))), "'w_future'"),
        (changed(gate=jnp.ones(3)), r"'gate': \(3,\)"),
        ({"eviction": changed()["eviction"][:1]}, "has 1 layers, the model has 2"),
    ],
)
def test_rankers_of_another_geometry_are_refused(weights, says):
    with pytest.raises(PolicyError, match=says):
        kvjax.prefill(tiny.model(), EVERY, [TEXT], weights=weights)


@pytest.mark.parametrize(("sinks", "recent"), [(-1, 0), (0, -2), (1.5, 0), (True, 0)])
def test_protections_that_are_no_numbers_are_refused(sinks, recent):
    with pytest.raises(PolicyError, match="0 or more"):
        LearnedRanker(sinks, recent)


def test_untrained_agents_are_of_the_papers_size():
    params = LearnedRanker().untrained(tiny.model(), 0)
    assert [{n: x.shape for n, x in one.items()} for one in params] == [
        shapes(2, 8, hidden=256, layers=2)
    ] * 2
