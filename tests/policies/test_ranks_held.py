"""Evictions that rank all that a KV head holds, against float64 NumPy: who goes, and what a step mixes."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from policy_oracle import room

from kvjax import layer
from kvjax.algebra import Every, Eviction, Frame, Observation, Policy, PolicyError
from kvjax.budgets.ada import Ada
from kvjax.budgets.pyramid import Pyramid
from kvjax.budgets.uniform import Uniform
from kvjax.cache import per_head
from kvjax.cache import ring as rings
from kvjax.cache.state import LayerCache
from kvjax.policies.expected_attention import ExpectedAttention
from kvjax.policies.keydiff import KeyDiff
from kvjax.policies.knorm import KNorm
from kvjax.policies.lagkv import LagKV
from kvjax.policies.r_kv import RKV
from kvjax.policies.scissorhands import Scissorhands
from kvjax.policies.snapkv import SnapKV
from kvjax.policies.then import Then
from kvjax.policies.tova import Tova
from kvjax.policies.tri_attention import TriAttention
from kvjax.types import EMPTY, Heads

PROMPTS, T, STEPS = np.array([14, 9]), 14, 13
N, K, H, TARGET, SINKS = 4, 2, 8, 8, 1
GROUP = N // K
random = np.random.default_rng(3)
Q = 1.5 * random.standard_normal((2, T + STEPS, N, H))
KEYS, VALUES = 1.5 * random.standard_normal((2, 2, T + STEPS, K, H))

Score = Callable[[int, int, list[int], int], np.ndarray]
"""Of a row, a KV head, its held positions and the number of tokens seen: a score for each."""


def attention(b: int, n: int, i: int, kept: list[int]) -> np.ndarray:
    """Of query ``i``, over those of ``kept`` that it sees; 0 for the others."""
    s = KEYS[b, kept, n // GROUP] @ Q[b, i, n] / np.sqrt(H)
    s = np.where(np.array(kept) <= i, s, -np.inf)
    e = np.exp(s - s.max())
    return e / e.sum()


def of_group(h: int) -> range:
    return range(h * GROUP, (h + 1) * GROUP)


def snap(window: int, kernel: int) -> Score:
    def score(b: int, h: int, kept: list[int], seen: int) -> np.ndarray:
        asked = range(max(seen - window, 0), seen)
        total = np.zeros(len(kept))
        for n in of_group(h):
            votes = np.mean([attention(b, n, i, kept) for i in asked], axis=0)
            votes = np.where(np.array(kept) < seen - window, votes, 0)
            wide = np.pad(votes, kernel // 2)
            total += [wide[j : j + kernel].mean() for j in range(len(kept))]
        return total / GROUP

    return score


def keydiff(b: int, h: int, kept: list[int], seen: int) -> np.ndarray:
    k = KEYS[b, kept, h]
    unit = k / np.linalg.norm(k, axis=-1, keepdims=True)
    anchor = unit.sum(axis=0)
    return -unit @ (anchor / np.linalg.norm(anchor))


def scissorhands(window: int) -> Score:
    def score(b: int, h: int, kept: list[int], seen: int) -> np.ndarray:
        counts = np.zeros(len(kept))
        for n in of_group(h):
            for i in range(max(seen - window, 0), seen):
                sees = np.array(kept) <= i
                counts += (attention(b, n, i, kept) >= (1 - 1e-5) / sees.sum()) & sees
        return counts

    return score


def expected(newest: int, sinks: int, stored: dict[str, np.ndarray] | None = None) -> Score:
    """Without RoPE. All queries of a prompt, which is ranked when nothing is gone; later the newest.

    ``stored``: mean and covariance in their place.
    """

    def score(b: int, h: int, kept: list[int], seen: int) -> np.ndarray:
        first = 0 if len(kept) == seen else max(seen - newest, 0)
        judged = np.array(kept) >= sinks
        k, share = KEYS[b, kept, h], np.zeros(len(kept))
        for n in of_group(h):
            q = Q[b, max(first, sinks) : seen, n]
            mean, spread = q.mean(axis=0), np.cov(q.T, bias=True)
            if stored is not None:
                mean, spread = stored["mean"][n], stored["covariance"][n]
            logit = k @ mean / np.sqrt(H) + np.einsum("ti,ij,tj->t", k, spread, k) / (2 * H)
            e = np.where(judged, np.exp(logit - logit[judged].max()), 0)
            share += e / e.sum() / GROUP
        return np.where(judged, share * np.linalg.norm(VALUES[b, kept, h], axis=-1), np.inf)

    return score


def lag(size: int, sinks: int) -> Score:
    def score(b: int, h: int, kept: list[int], seen: int) -> np.ndarray:
        held = len(kept)
        parts = max((held - sinks) // size - 1, 0)
        out = np.arange(held, dtype=float) + size
        out[:sinks] = 4 * (T + STEPS) - np.arange(sinks)
        for part in range(parts):
            now, ahead = (slice(sinks + (part + a) * size, sinks + (part + 1 + a) * size) for a in (0, 1))
            share = np.zeros(size)
            for x in (KEYS[b, kept, h], VALUES[b, kept, h]):
                low, high = x[ahead].min(axis=0), x[ahead].max(axis=0)
                e = np.exp(((x[now] - low) / (high - low)).std(axis=-1, ddof=1))
                share += e / e.sum()
            out[now] = np.argsort(np.argsort(share))
        return out

    return score


def r_kv(window: int, kernel: int, share: float, similar: float) -> Score:
    def score(b: int, h: int, kept: list[int], seen: int) -> np.ndarray:
        held, old = len(kept), len(kept) - window
        if old <= 0:
            return np.zeros(held)
        k = KEYS[b, kept, h]
        s = np.stack([Q[b, seen - window : seen, n] @ k[:old].T / np.sqrt(H) for n in of_group(h)]).max(
            axis=0
        )
        e = np.exp(s - s.max(axis=-1, keepdims=True))
        votes = (e / e.sum(axis=-1, keepdims=True)).mean(axis=0)
        pooled = [votes[max(0, j - kernel // 2) : j + kernel // 2 + 1].max() for j in range(old)]
        unit = k / np.linalg.norm(k, axis=-1, keepdims=True)
        cosine = unit @ unit.T
        np.fill_diagonal(cosine, 0)
        for row in cosine:
            row[max(np.flatnonzero(row > similar), default=0)] = 0
        e = np.exp(cosine.mean(axis=0))
        return np.append(share * np.array(pooled), [0] * window) - (1 - share) * e / e.sum()

    return score


def tri(mean: np.ndarray, length: np.ndarray) -> Score:
    """Without RoPE: a channel is a pair of its own."""

    def score(b: int, h: int, kept: list[int], seen: int) -> np.ndarray:
        k, best = KEYS[b, kept, h], np.full(len(kept), -np.inf)
        for n in of_group(h):
            s = k @ mean[n] + np.abs(k) @ (length[n] - np.abs(mean[n]))
            best = np.maximum(best, (s - s.mean()) / s.std())
        return best

    return score


def norm(b: int, h: int, kept: list[int], seen: int) -> np.ndarray:
    return -np.linalg.norm(KEYS[b, kept, h], axis=-1)


def simulate(
    score: Score,
    newest: int,
    every: int,
    shares: bool = False,
    spares: bool = False,
    of_prompt: Score | None = None,
    target: int = TARGET,
) -> tuple[list, np.ndarray]:
    """[step][row][head] kept positions, and what each step mixes; ``of_prompt`` where other scores cut it."""
    out, sets = np.zeros((2, STEPS, N, H)), []

    def cut(b: int, kept: list[list[int]], seen: int, score: Score = score) -> list[list[int]]:
        first = PROMPTS[b] if spares else SINKS
        stays = [[p for p in x if p < first or p >= seen - newest] for x in kept]
        scores = [dict(zip(x, score(b, h, x, seen))) for h, x in enumerate(kept)]
        for h, x in enumerate(stays):
            scores[h] |= dict.fromkeys(x, np.inf)
        room = [target + (PROMPTS[b] if spares else 0)] * K
        if shares:  # AdaKV without a floor: the layer's best, of equals the lower head and position
            best = sorted(((-s, h, p) for h in range(K) for p, s in scores[h].items()))[: sum(room)]
            room = [sum(h == of for _, of, _ in best) for h in range(K)]
        order = [sorted(x, key=lambda p: (-scores[h][p], p)) for h, x in enumerate(kept)]
        return [sorted(x[: max(n, len(s))]) for x, n, s in zip(order, room, stays)]

    now = [cut(b, [list(range(n))] * K, int(n), of_prompt or score) for b, n in enumerate(PROMPTS)]
    for step in range(STEPS):
        for b, n in enumerate(PROMPTS):
            i = int(n) + step
            now[b] = [[*x, i] for x in now[b]]
            if (i + 1) % every == 0:
                now[b] = cut(b, now[b], i + 1)
            for q in range(N):
                kept = now[b][q // GROUP]
                out[b, step, q] = attention(b, q, i, kept) @ VALUES[b, kept, q // GROUP]
        sets.append([[list(x) for x in row] for row in now])
    return sets, out


def heads(at: np.ndarray) -> dict:
    """Tokens of each row at positions [B, T] (anything where EMPTY)."""
    index = np.maximum(at, 0)[..., None, None]
    q, k, v = (jnp.asarray(np.take_along_axis(x, index, 1), jnp.float32) for x in (Q, KEYS, VALUES))
    return vars(Heads(q=q, k=k, v=v, q_pre=q, k_pre=k, hidden=q[..., 0, :]))


CASES = {
    "snapkv": (SnapKV(window=3, kernel=3), snap(3, 3)),
    "keydiff": (KeyDiff(), keydiff),
    "scissorhands": (Scissorhands(window=5, recent=2), scissorhands(5)),
    "expected_attention": (ExpectedAttention(ahead=4, sinks=1, newest=5), expected(5, 1)),
    "r_kv": (RKV(0.5, window=3, kernel=3), r_kv(3, 3, 0.5, 0.5)),
    "lagkv": (LagKV(lag=2, sinks=1), lag(2, 1)),
}


def kept_and_mixed(policy: Policy, weights: dict | None = None) -> tuple[list, np.ndarray]:
    """What ``simulate`` gives, by the layer's own loop; ``weights`` of the eviction."""
    learned = {} if weights is None else {"eviction": jax.tree.map(jnp.float32, weights)}
    w = policy.window(99)
    queries = {name: (N, n) for name, n in policy.queries.items()}
    ring = rings.empty(2, K, w, H, jnp.dtype(jnp.float32), policy.keeps, queries=queries)
    cache = LayerCache(ring=ring, pages=room(2, K, H, entries=7, size=4, meta=policy.keeps), summary=None)
    total = jnp.asarray(PROMPTS)

    @jax.jit
    def begin(cache, x, pos):
        site = layer.LayerInfo(policy, learned, 0, 1, None, total)
        _, new = layer.prompt(site, Heads(**x), pos)
        return layer.store(site, cache, new, total)

    @jax.jit
    def step(cache, x, length):
        info = layer.LayerInfo(policy, learned, 0, 1, None, total)
        _, (cache, read) = layer.step(info, Heads(**x), cache, length, jnp.asarray([True, True]))
        return read.out, cache

    at = np.where(np.arange(T) < PROMPTS[:, None], np.arange(T), EMPTY)
    cache = begin(cache, heads(at), jnp.asarray(at))
    sets, out = [], np.zeros((2, STEPS, N, H))
    for i in range(STEPS):
        mixed, cache = step(cache, heads(PROMPTS[:, None] + i), total + i)
        out[:, i] = mixed[:, 0]
        slots = per_head.slots(cache.pools)
        pos, live = np.asarray(slots.pos), np.asarray(slots.live)
        seen = PROMPTS + i + 1
        held = [[[*pos[b, h][live[b, h]], *range(n - w, n)] for h in range(K)] for b, n in enumerate(seen)]
        sets.append([[sorted(x) for x in row] for row in held])
    return sets, out


def same(policy: Policy, right: tuple[list, np.ndarray], weights: dict | None = None) -> None:
    sets, out = kept_and_mixed(policy, weights)
    assert sets == right[0]
    np.testing.assert_allclose(out, right[1], atol=1e-5)


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("name", CASES)
def test_what_is_held_is_ranked_as_a_prompt_with_gaps(name: str, every: int) -> None:
    eviction, score = CASES[name]
    policy = Policy(eviction=eviction, budget=Uniform(TARGET, Every(every)), sinks=SINKS)
    same(policy, simulate(score, policy.ring_tokens, every))


@pytest.mark.parametrize(("every", "heads"), [(4, K), (None, 2 * K)])
def test_rows_with_turns_of_their_own_are_ranked_one_by_one(every, heads, monkeypatch) -> None:
    """So a batch of many rows does not rank all of them whenever one is due."""
    ranked, ranks = [], KeyDiff.score_prompt

    def score_prompt(self: KeyDiff, weights: None, seen: Observation) -> jax.Array:
        ranked.append(seen.pos.shape[0])
        return ranks(self, weights, seen)

    monkeypatch.setattr(KeyDiff, "score_prompt", score_prompt)
    when = "every_step" if every is None else Every(every)
    policy = Policy(eviction=KeyDiff(), budget=Uniform(TARGET, when), sinks=SINKS)
    same(policy, simulate(keydiff, policy.ring_tokens, every or 1))
    assert ranked == [2, heads], "the prompt's rows, and heads of later rows"


@pytest.mark.parametrize("eviction", [CASES["snapkv"], (KNorm(), norm)])
def test_a_prompt_that_is_kept_is_not_counted(eviction: tuple[Eviction, Score]) -> None:
    budget = Uniform(TARGET, Every(2), prompt="keep")
    policy = Policy(eviction=eviction[0], budget=budget, sinks=SINKS)
    same(policy, simulate(eviction[1], policy.ring_tokens, 2, spares=True))


@pytest.mark.parametrize("eviction", [CASES["snapkv"], (KNorm(), norm)])
def test_heads_divide_what_is_left_of_the_answer(eviction: tuple[Eviction, Score]) -> None:
    budget = Ada(6, floor=0.0, when=Every(2), prompt="keep")
    policy = Policy(eviction=eviction[0], budget=budget, sinks=SINKS)
    right = simulate(eviction[1], policy.ring_tokens, 2, shares=True, spares=True, target=6)
    assert any(len(row[0]) != len(row[1]) for step in right[0] for row in step), "no head has more"
    same(policy, right)


@pytest.mark.parametrize(("layer_of", "target"), [(0, 9), (2, 7), (4, 5)])
def test_a_pyramid_of_the_answer_leaves_the_prompt_alone(layer_of: int, target: int) -> None:
    """Mean 7 and slope 1.4 over five layers: from 9 to 5 slots, behind prompts of 14 and 9 tokens."""
    frame = Frame(layer_of, 5, K, 1.0, protected=2, prompt=jnp.asarray(PROMPTS))
    budget = Pyramid(7, slope=1.4, when=Every(2), prompt="keep")
    right = PROMPTS + target
    assert budget.targets(frame, jnp.asarray(PROMPTS + 20), None)[:, 0].tolist() == right.tolist()
    # Five tokens of an answer, of which two are protected: the line is flat, as for a prompt of five.
    assert budget.targets(frame, jnp.asarray(PROMPTS + 5), None)[:, 0].tolist() == (PROMPTS + 7).tolist()


@pytest.mark.parametrize("kind", [Uniform, Ada, Pyramid])
def test_a_kept_prompt_needs_a_budget_that_acts_later(kind: type) -> None:
    with pytest.raises(PolicyError, match="keeps all of it"):
        kind(8, prompt="keep")


@pytest.mark.parametrize("eviction", [CASES["snapkv"], (KNorm(), norm)])
def test_heads_divide_a_layers_slots_again(eviction: tuple[Eviction, Score]) -> None:
    policy = Policy(eviction=eviction[0], budget=Ada(TARGET, floor=0.0, when=Every(3)), sinks=SINKS)
    same(policy, simulate(eviction[1], policy.ring_tokens, 3, shares=True))


LEARNED = {
    "mean": random.standard_normal((N, H)),
    "covariance": np.stack([x @ x.T / H for x in random.standard_normal((N, H, H))]),
}
CENTRES = {"mean": LEARNED["mean"], "length": np.abs(LEARNED["mean"]) + random.random((N, H))}


@pytest.mark.parametrize(
    ("eviction", "score", "weights"),
    [
        (ExpectedAttention(ahead=4, sinks=1, stored=True), expected(5, 1, LEARNED), LEARNED),
        (TriAttention(ahead=4), tri(**CENTRES), CENTRES),
        (Then(TriAttention(ahead=4), of=KNorm()), tri(**CENTRES), CENTRES),
    ],
    ids=["expected_attention", "tri_attention", "then"],
)
def test_each_head_reads_its_own_learned_weights(eviction: Eviction, score: Score, weights: dict) -> None:
    policy = Policy(eviction=eviction, budget=Uniform(TARGET, Every(4)), sinks=SINKS)
    of_prompt = norm if isinstance(eviction, Then) else None
    same(policy, simulate(score, policy.ring_tokens, 4, of_prompt=of_prompt), weights)


PAIRS = {
    "snapkv + then(knorm)": (SnapKV(window=3, kernel=3), snap(3, 3), KNorm(), norm),
    "knorm + then(snapkv)": (KNorm(), norm, SnapKV(window=3, kernel=3), snap(3, 3)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_the_answer_is_ranked_by_another_eviction_than_the_prompt(name: str) -> None:
    first, of_prompt, second, score = PAIRS[name]
    policy = Policy(eviction=Then(second, of=first), budget=Uniform(TARGET, Every(4)), sinks=SINKS)
    assert policy.queries == ({"q": 3} if name.endswith("then(snapkv)") else {})
    assert policy.keeps == (("eviction.norm",) if name.endswith("then(knorm)") else ())
    same(policy, simulate(score, policy.ring_tokens, 4, of_prompt=of_prompt))


def test_attention_of_the_prompt_counts_for_the_answer() -> None:
    """Nothing of the prompt goes, so the policy is the answer's eviction alone."""
    budget = Uniform(T + 2, "every_step")
    both = Policy(eviction=Then(Tova(), of=SnapKV(window=1, kernel=1)), budget=budget)
    sets, out = kept_and_mixed(both)
    right = kept_and_mixed(Policy(eviction=Tova(), budget=budget, recent=1))
    assert sets == right[0]
    assert len(sets[-1][0][0]) == T + 2
    np.testing.assert_allclose(out, right[1], atol=1e-6)
