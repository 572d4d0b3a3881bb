"""φ against NumPy in float64: its maps, what it takes in, what a read subtracts, what is left at the ends."""

from __future__ import annotations

import functools
import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import kvjax
from kvjax import decode
from kvjax.algebra import PolicyError, Visited
from kvjax.policies.phi import Phi, log_features
from kvjax.weights import WeightsError
from pallas_kernels.merge.api import merge

F, H, K, N = 5, 8, 2, 4
G, NETWORK = N // K, tiny.model().network
PART = Phi(F)
MAPS = PART.example_weights(jax.random.key(3), NETWORK)
ALIKE = [{name: x for name, x in layer.items() if not name.endswith("_q")} for layer in MAPS]
random = np.random.default_rng(0)


def features(params: dict, side: str, head: int, x: np.ndarray) -> np.ndarray:
    """log φ [T, F] of one head's x [T, H], from the formula."""
    p = {
        name[:-2]: np.asarray(value, np.float64)[head]
        for name, value in params.items()
        if name.endswith(side)
    }
    z = x @ p["in"] + p["inner"]
    gelu = z * 0.5 * (1 + np.vectorize(math.erf)(z / math.sqrt(2)))
    return x @ p["line"] + gelu @ p["out"] + p["last"]


def estimate(params: dict, q: np.ndarray, k: np.ndarray, v: np.ndarray, n: int) -> tuple[np.ndarray, float]:
    """(out, lse) of query head n over these tokens, each with the score log φ_q · φ_k."""
    asymmetric = "line_q" in params
    log_q = features(params, "q" if asymmetric else "k", n if asymmetric else n // G, q[None])[0]
    score = np.logaddexp.reduce(log_q + features(params, "k", n // G, k), axis=-1)
    lse = np.logaddexp.reduce(score)
    return np.exp(score - lse) @ v, lse


def drawn(rows: int, tokens: int) -> tuple[np.ndarray, ...]:
    q = random.standard_normal((rows, N, 1, H)).astype(np.float32)
    k, v = random.standard_normal((2, rows, K, tokens, H)).astype(np.float32)
    return q, k, v


@functools.partial(jax.jit, static_argnames="heads")
def absorbed(params, k, v, take, heads=K):
    empty = PART.empty(k.shape[0], heads, k.shape[-1], 0)
    return PART.absorb(params, empty, k, v, jnp.zeros(take.shape, jnp.int32), take)


@jax.jit
def read(params, summary, q, visited):
    return PART.read(params, summary, q, visited)


def visiting(k: np.ndarray, v: np.ndarray, live: np.ndarray) -> Visited:
    return Visited(k=jnp.asarray(k), v=jnp.asarray(v), pos=jnp.zeros(live.shape, jnp.int32), live=live)


@pytest.mark.parametrize("params", [MAPS[0], ALIKE[0]], ids=["asymmetric", "symmetric"])
def test_the_rest_is_what_was_taken_in_less_what_was_visited(params):
    q, k, v = drawn(2, 20)
    take, live = random.random((2, 2, K, 20)) < np.array([0.7, 0.4])[:, None, None, None]
    live &= take
    summary = absorbed(params, k, v, take)
    spoiled = [np.where(live[..., None], x, np.nan) for x in (k, v)]  # what is not visited may hold anything
    out, lse = read(params, summary, q, visiting(*spoiled, live))
    whole, _ = read(params, summary, q, None)
    assert np.abs(np.asarray(whole) - np.asarray(out)).max() > 0.05, "nothing was subtracted"
    for b in range(2):
        for n in range(N):
            left = (take & ~live)[b, n // G]
            right = estimate(params, q[b, n, 0], k[b, n // G][left], v[b, n // G][left], n)
            np.testing.assert_allclose(out[b, n, 0], right[0], atol=2e-4)
            np.testing.assert_allclose(lse[b, n, 0], right[1], atol=2e-4)
    np.testing.assert_array_equal(summary.count, take.sum(-1))


def test_random_maps_of_a_query_head_have_the_directions_of_its_kv_head():
    for layer in MAPS:  # else their product is no estimate of exp(q k)
        np.testing.assert_array_equal(layer["line_q"], layer["line_k"][np.arange(N) // G])


def test_pieces_are_the_whole():
    _, k, v = drawn(1, 24)
    take = np.ones((1, K, 24), bool)
    whole, pieces = absorbed(MAPS[0], k, v, take), PART.empty(1, K, H, 0)
    for at in range(0, 24, 7):
        cut = (slice(None), slice(None), slice(at, at + 7))
        pieces = PART.absorb(MAPS[0], pieces, k[cut], v[cut], None, take[cut])
    for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(pieces)):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-5)


def test_all_visited_and_none_there_leave_exactly_nothing():
    q, k, v = drawn(1, 9)
    take = np.ones((1, K, 9), bool)
    for summary, visited in (
        (absorbed(MAPS[0], k, v, take), visiting(k, v, take)),
        (absorbed(MAPS[0], k, v, ~take), None),
        (absorbed(MAPS[0], k, v, ~take), visiting(k, v, ~take)),
    ):
        out, lse = read(MAPS[0], summary, q, visited)
        assert (np.asarray(lse) == -np.inf).all()
        assert (np.asarray(out) == 0).all()


@pytest.mark.parametrize("wide", [1.0, 1e2, 1e4])
def test_ten_thousand_random_cases_of_any_size_are_numbers(wide):
    """Scales of queries, keys, values and maps from 1e-4 to ``wide``; float32 alone."""
    rows, tokens = 3400 // K, 6
    q, k, v = drawn(rows, tokens)

    def scaled(x: np.ndarray) -> np.ndarray:
        size = np.exp(random.uniform(np.log(1e-4), np.log(wide), (len(x), 1, 1, 1)))
        return (x * size).astype(np.float32)

    q, k, v = scaled(q), scaled(k), scaled(v)
    take = random.random((rows, K, tokens)) < 0.8
    live = take & (random.random((rows, K, tokens)) < 0.5)
    summary = absorbed(MAPS[0], k, v, take)
    out, lse = read(MAPS[0], summary, q, visiting(k, v, live))
    left = np.repeat((take & ~live).any(-1), G, axis=1)
    assert np.isfinite(out).all()
    assert np.isfinite(lse)[left].all()
    assert (np.asarray(lse)[~left] == -np.inf).all()
    exact = jnp.zeros_like(out), 1e4 * jnp.asarray(random.standard_normal(lse.shape), jnp.float32)
    mixed, total = merge([exact, (out, lse)])
    assert np.isfinite(mixed).all()
    assert np.isfinite(total).all()
    assert 3 * rows * K >= 10_000


@pytest.mark.parametrize("wide", [1.0, 1e4])
def test_a_silent_head_reads_what_it_would_without_φ_and_the_others_what_they_did(wide):
    """The read of NumPy in float64 over what is visited, with the estimate of the rest in the other heads."""
    silent = np.array([True, False, False, True])
    params = MAPS[0] | {"last_q": np.where(silent[:, None], -np.inf, MAPS[0]["last_q"])}
    q, k, v = drawn(3, 20)
    q *= np.float32(wide)
    take = np.ones((3, K, 20), bool)
    live = random.random((3, K, 20)) < 0.4
    live[..., 0], live[..., 1] = True, False
    summary = absorbed(params, k, v, take)
    out, lse = read(params, summary, q, visiting(k, v, live))
    assert not np.isnan(out).any()
    assert (np.asarray(lse)[:, silent] == -np.inf).all()
    assert np.isfinite(np.asarray(lse)[:, ~silent]).all()
    exact = np.zeros((3, N, 1, H)), np.zeros((3, N, 1))
    right = np.zeros((3, N, 1, H))
    for b, n in np.ndindex(3, N):
        kv = [x[b, n // G][live[b, n // G]].astype(np.float64) for x in (k, v)]
        s = kv[0] @ q[b, n, 0] * H**-0.5
        exact[1][b, n, 0] = np.logaddexp.reduce(s)
        exact[0][b, n, 0] = right[b, n, 0] = np.exp(s - exact[1][b, n, 0]) @ kv[1]
        if not silent[n]:
            rest = [x[b, n // G][~live[b, n // G]] for x in (k, v)]
            more, mass = estimate(params, q[b, n, 0], *rest, n)
            w = np.exp([exact[1][b, n, 0], mass] - np.logaddexp(exact[1][b, n, 0], mass))
            right[b, n, 0] = w[0] * right[b, n, 0] + w[1] * more
    partial = tuple(jnp.asarray(x, jnp.float32) for x in exact)
    mixed, _ = merge([partial, (out, lse)])
    np.testing.assert_array_equal(np.asarray(mixed)[:, silent], np.asarray(partial[0])[:, silent])
    np.testing.assert_allclose(mixed[:, silent], right[:, silent], atol=1e-6)
    if wide == 1.0:  # estimates of scores of 1e4 differ by more than 1 in float32
        np.testing.assert_allclose(mixed, right, atol=2e-4)
        assert np.abs(right - exact[0])[:, ~silent].max() > 0.05, "φ stands for nothing"


# --- in a state ----------------------------------------------------------------------------------

TEXTS = [tiny.prompt(54, 0), tiny.prompt(37, 1)]
LENGTHS, MORE = (44, 27), 10


def prompts() -> list[list[int]]:
    return [text[:n] for text, n in zip(TEXTS, LENGTHS)]


def steps(policy, state) -> np.ndarray:
    return tiny.feed(policy, state, np.asarray([t[n:] for t, n in zip(TEXTS, LENGTHS)]))[1]


def test_a_read_of_the_whole_middle_is_full_attention():
    policy = kvjax.policy("topk(60, sinks=2, tail=6) + phi(5)")
    logits = steps(policy, tiny.read(policy, prompts(), 16)[0])
    for row, (text, n) in enumerate(zip(TEXTS, LENGTHS)):
        np.testing.assert_allclose(logits[row], tiny.dense(text)[n:], atol=5e-4)


@pytest.mark.slow
def test_where_all_heads_are_silent_logits_are_those_of_the_policy_without_φ(monkeypatch):
    quiet = [layer | {"last_q": jnp.full((N, F), -jnp.inf)} for layer in MAPS]
    monkeypatch.setattr(tiny, "weights", lambda policy: {"completion": quiet} if policy.learned else {})
    logits = []
    for spec in ("topk(4, sinks=2, tail=6)", "topk(4, sinks=2, tail=6) + phi(5)"):
        policy = kvjax.policy(spec)
        logits.append(steps(policy, tiny.read(policy, prompts(), 16)[0]))
    np.testing.assert_allclose(*logits, atol=1e-5)  # two programs


@functools.cache
def after(spec: str, chunk: int):
    policy = kvjax.policy(spec)
    state, _ = tiny.read(policy, prompts(), chunk)
    return jax.device_get([layer.summary for layer in state.layers])


def chunk_difference(spec: str) -> float:
    """Largest relative difference of the weights that φ holds after chunks of 5 and after the whole."""
    largest = 0.0
    for one, other in zip(after(spec, 5), after(spec, 44)):
        np.testing.assert_array_equal(one.count, other.count)
        a, b = (np.exp(x.sums.shift - one.sums.shift) * x.sums.weight for x in (one, other))
        largest = max(largest, float(np.abs(a / b - 1).max()))
    return largest


@pytest.mark.slow
def test_with_a_selection_chunks_and_the_whole_take_in_the_same():
    assert chunk_difference("topk(4, sinks=2, tail=6) + phi(5)") < 1e-4


@pytest.mark.slow
def test_without_one_what_φ_holds_depends_on_the_chunk_as_its_estimates_do():
    """In later layers alone: their inputs went through estimates, of fewer tokens with larger chunks."""
    spec = "window(8) + sinks(2) + phi(5)"
    assert chunk_difference(spec) > 1e-3
    first = [after(spec, chunk)[0].sums.weight for chunk in (5, 44)]
    np.testing.assert_allclose(*first, rtol=1e-4)


@pytest.mark.parametrize(
    "spec",
    [
        "window(8) + sinks(2) + phi(5)",
        pytest.param(
            "knorm + uniform(20, every_step) + sinks(2) + recent(8) + phi(5)", marks=pytest.mark.slow
        ),
        pytest.param("snapkv(8) + uniform(16) + phi(5)", marks=pytest.mark.slow),
        "conf_kv(recent=6) + int8(10) + confidence(14, loose=24, threshold=0.5) + phi(5)",
    ],
)
def test_without_a_selection_whatever_is_gone_was_taken_in(spec):
    policy = kvjax.policy(spec)
    sizes = {"context": tiny.CONTEXT, "page": tiny.PAGE, "chunk_size": 16}
    state, _ = kvjax.prefill(tiny.model(), policy, prompts(), **sizes, weights=tiny.weights(policy))
    state, _ = tiny.feed(
        policy,
        decode.reserve(policy, state, MORE, 1),
        np.asarray([t[n:] for t, n in zip(TEXTS, LENGTHS)]),
    )
    held = np.asarray(kvjax.metrics.present(state)).sum(-1)
    for index, room in enumerate(state.layers):
        gone = np.asarray(state.length)[:, None] - held[index]
        np.testing.assert_array_equal(room.summary.count, gone)
        assert (gone > 0).all()


# --- bad input -----------------------------------------------------------------------------------


def test_a_number_of_features_that_is_none_is_refused():
    with pytest.raises(PolicyError, match=r"features=0 is not a valid number of features"):
        Phi(0)


def test_maps_of_another_size_are_refused():
    with pytest.raises(PolicyError, match=r"have 5 features\. Write phi\(5\)"):
        Phi(64).check_weights(MAPS, NETWORK)
    wrong = [layer | {"line_q": layer["line_q"][:3]} for layer in MAPS]
    with pytest.raises(PolicyError, match="Use weights trained for this model"):
        PART.check_weights(wrong, NETWORK)
    with pytest.raises(PolicyError, match="Use weights trained for this model"):
        PART.check_weights(
            [{name: x for name, x in layer.items() if name != "inner_k"} for layer in MAPS], NETWORK
        )
    PART.check_weights(ALIKE, NETWORK)


def test_maps_of_another_model_are_refused(tmp_path):
    file = tmp_path / "phi.safetensors"
    kvjax.save_weights(file, tiny.model(), PART, MAPS)
    assert kvjax.weights_for("topk + phi(5)", tiny.model(), file)["completion"][0]["inner_k"].shape == (K, 6)
    with pytest.raises(WeightsError, match="whose weights differ"):
        kvjax.weights_for("topk + phi(5)", tiny.model(vocab=67), file)
    with pytest.raises(WeightsError, match=r"5 features\. Write phi\(5\)"):
        kvjax.weights_for("topk + phi(8)", tiny.model(), file)


def test_a_length_far_from_the_training_is_told_once_and_served():
    policy = kvjax.policy("topk(4, sinks=2, tail=6) + phi(5)")
    sizes = {"context": tiny.CONTEXT, "page": tiny.PAGE, "chunk_size": 16, "weights": None}
    for trained, count in ((100, 1), (44, 0), (0, 0)):
        maps = [layer | {"length": jnp.asarray([float(trained)])} for layer in MAPS]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            for _ in range(2):
                kvjax.prefill(tiny.model(), policy, prompts(), **sizes | {"weights": {"completion": maps}})
        assert len(caught) == count
        assert all(
            "trained for prompts of 100 tokens and read prompts of 27 to 44" in str(x.message) for x in caught
        )


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("quest + int8 + phi(8)", ["int8(128)", "phi(8)", "quest(32)", "Use native storage"]),
        ("phi(64)", ["leaves nothing out", "topk(0.01) + phi(64)"]),
    ],
)
def test_what_cannot_work_together_is_refused(spec, words):
    with pytest.raises(PolicyError) as refused:
        kvjax.policy(spec)
    assert all(word in str(refused.value) for word in words)


def test_symmetric_maps_serve_both_sides():
    x = random.standard_normal((1, N, 3, H)).astype(np.float32)
    actual = np.asarray(log_features(ALIKE[0], "q", jnp.asarray(x)))
    for n in range(N):
        np.testing.assert_allclose(actual[0, n], features(ALIKE[0], "k", n // G, x[0, n]), atol=1e-4)
