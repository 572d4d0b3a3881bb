"""One threshold for all layers and heads against plain Python; what stays of prompts against NumPy."""

from __future__ import annotations

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from policy_oracle import frame
from test_kvzip import ASK, LENGTHS, PROMPTS, kept, layers
from test_kvzip import scores as kvzip_scores

import kvjax
from kvjax import decode, metrics
from kvjax.algebra import PolicyError
from kvjax.budgets.overall import Overall

LAYERS, HEADS, T = 3, 2, 30
random = np.random.default_rng(0)
LEVEL = random.integers(0, 7, (LAYERS, 1, HEADS, 1))
# Layers and heads on different levels, whole numbers so that there are ties within and between them.
SCORES = np.round(random.standard_normal((LAYERS, 4, HEADS, T)) * 4 + LEVEL)
SEEN = np.array([30, 30, 17, 4])
for row, end in enumerate(SEEN):
    SCORES[:, row, :, end:] = -np.inf
SCORES[:, 1, :, :2] = SCORES[:, 1, :, -3:] = np.inf  # protected
SCORES[1, 0, 0, 3:] = -np.inf  # a head to which few tokens were admitted
SCORES[2, 0, 1] = np.where(SCORES[2, 0, 1] > 0, 0.0, -0.0)  # zeros of either sign are equal


def counts(scores: np.ndarray, total: int, sure: int) -> np.ndarray:
    """Slots of each layer and head of one row [L, K]; ties to the lowest layer, head and position."""
    order = []
    for at in np.ndindex(scores.shape[:2]):
        own = [p for p in sorted(range(T), key=lambda p: (-scores[at][p], p)) if scores[at][p] > -np.inf]
        worth = [0.0 if rank < sure else -scores[at][p] for rank, p in enumerate(own)]
        order += [(rank >= sure, worth[rank], *at, p) for rank, p in enumerate(own)]
    slots = np.zeros(scores.shape[:2], int)
    for _, _, layer, head, _ in sorted(order)[:total]:
        slots[layer, head] += 1
    return slots


@jax.jit
def targets(budget: Overall, scores, seen):
    return budget.targets_of_layers(frame(layers=LAYERS, kv_heads=HEADS), seen, scores)


@pytest.mark.parametrize("floor", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("amount", [1, 5, 12, 0.25, 0.5, 1.0])
def test_counts_are_those_of_the_best_of_all(amount, floor):
    every = [jnp.asarray(one, jnp.float32) for one in SCORES]
    slots = np.stack(targets(Overall(amount, floor=floor), every, jnp.asarray(SEEN)))
    for b, seen in enumerate(SEEN):
        share = Fraction(amount) * int(seen) if isinstance(amount, float) else amount
        mean = math.floor(share + Fraction(1, 2))
        right = counts(SCORES[:, b], mean * LAYERS * HEADS, math.floor(mean * Fraction(str(floor))))
        np.testing.assert_array_equal(slots[:, b], right)


def expected(score: np.ndarray, total: int) -> np.ndarray:
    """The highest of all [L, K, T], as bits."""
    flat = np.sort(score.ravel())[::-1]
    assert total >= flat.size or flat[total - 1] - flat[total] > 1e-6, "a close call"
    return score >= flat[min(total, flat.size) - 1]


def check(policy: str, scores: list[np.ndarray], mean: int) -> None:
    bits = kept(policy)
    shares = set()
    for row, (length, score) in enumerate(zip(LENGTHS, scores)):
        right = expected(score, min(mean, length) * score[..., 0].size)
        np.testing.assert_array_equal(bits[:, row, :, :length], right)
        shares |= {n for n in right.sum(axis=-1).ravel() if n < length}
    assert len(shares) > 3, "layers and heads keep different numbers"


def test_kvzips_highest_of_all_layers_stay():
    scores = [kvzip_scores(prompt, 16, 3, True) for prompt in PROMPTS]
    check(f"kvzip(16, sinks=3, output=True, instruction={ASK}) + overall(11)", scores, 11)


def test_scores_of_one_pass_are_compared_over_layers_too():
    scores = [
        np.stack([-np.linalg.norm(seen["k"], axis=-1).T for seen in layers(prompt)]) for prompt in PROMPTS
    ]
    for score in scores:
        score[:, :, :2] = np.inf
    check("knorm + overall(11) + sinks(2)", scores, 11)


@pytest.mark.parametrize(
    "policy",
    [
        f"kvzip(16, sinks=3, instruction={ASK}) + overall(11, floor=0.3)",
        "tova + critical + overall(11) + int8(4)",  # mass, a wrapper that reads W_o, codes
    ],
)
def test_what_a_reading_is_cut_to_is_what_a_prefill_keeps(policy):
    direct, first = kvjax.prefill(tiny.model(), policy, PROMPTS, context=tiny.CONTEXT, page=tiny.PAGE)
    reading = decode.read_full(tiny.model(), PROMPTS, context=tiny.CONTEXT)
    state, logits = decode.cut(tiny.model(), policy, reading, page=tiny.PAGE)
    np.testing.assert_array_equal(metrics.present(state), metrics.present(direct))
    np.testing.assert_allclose(logits, first, atol=1e-4)
    assert len(set(metrics.held_by_head(direct).ravel().tolist())) > 3


def test_a_wrapper_chooses_and_the_numbers_stay():
    plain, wrapped = (
        kvjax.prefill(tiny.model(), f"snapkv(8) {word} overall(11)", PROMPTS, context=72, page=tiny.PAGE)[0]
        for word in ("+", "+ critical(0.3) +")
    )
    assert (metrics.present(plain) != metrics.present(wrapped)).any()
    np.testing.assert_array_equal(metrics.held_by_head(plain), metrics.held_by_head(wrapped))


def test_the_peak_is_the_full_cache_and_its_scores():
    state, _ = kvjax.prefill(tiny.model(), "snapkv(8) + overall(13)", [tiny.prompt(120)], context=192, page=8)
    network, tokens = tiny.model().network, 128  # the size class of the prompt
    full = network.num_layers * network.num_kv_heads * tokens * (2 * network.head_dim * 4 + 4)
    live, allocated = np.asarray(state.peak)
    assert full <= live <= 1.5 * full
    assert live < allocated


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("kvzip + overall(0.25, every_step)", "not a valid share"),
        ("snapkv(64) + overall(32)", "fewer than the 64 protected tokens"),
        ("write_gate + snapkv + overall(0.5)", "holds a prompt and then cuts it, .* write_gate.* reads"),
        ("window(8) + snapkv + overall(0.5)", r"overall\(0\.5\).* reads a prompt into a full cache"),
        (
            "kvzap(-5) + snapkv + overall(0.5)",
            r"overall\(0\.5\) holds .* but kvzap.* reads hidden",
        ),
        ("overall(0.0)", "not a valid amount"),
    ],
)
def test_what_it_cannot_serve_is_refused(spec, message):
    with pytest.raises(PolicyError, match=message):
        kvjax.policy(spec)
