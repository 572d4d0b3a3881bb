"""Wrappers against float64 NumPy: what each keeps of another eviction's scores, and their words."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import prompt_rows as rows
import pytest
from policy_oracle import judge, kept

import kvjax
from kvjax import catalogue
from kvjax.algebra import Eviction, Policy, PolicyError
from kvjax.budgets.ada import Ada
from kvjax.budgets.uniform import Uniform
from kvjax.policies.chunks import Chunks
from kvjax.policies.critical import Critical
from kvjax.policies.entropy_chunks import EntropyChunks
from kvjax.policies.h2o import H2O
from kvjax.policies.random_keep import Random
from kvjax.policies.scissorhands import Scissorhands
from kvjax.policies.snapkv import SnapKV
from kvjax.policies.then import Then

WIDTH = 12
WO = np.random.default_rng(5).lognormal(size=(1, rows.N, 1)) * np.random.default_rng(6).standard_normal(
    (WIDTH, rows.N, rows.H)
)


@dataclasses.dataclass(frozen=True, repr=False)
class Drawn(Eviction):
    """Positive scores, a few of them large, as shares of attention are."""

    name = "drawn"
    needs = frozenset({"k"})

    def score_prompt(self, params, observed):
        return jnp.asarray(SCORES, jnp.float32)


SCORES = np.random.default_rng(3).lognormal(sigma=1.5, size=(len(rows.LENGTHS), rows.K, rows.T)) / 100


def prompts(padding: float):
    return dataclasses.replace(rows.prompts(padding), wo=jnp.asarray(WO, jnp.float32))


def check(policy: Policy, right, *, sinks: int = 0) -> None:
    """What the policy keeps of every row is ``right(row, length)``, a set of positions a head."""
    for padding in (9.0, np.nan):
        bits = judge(policy, prompts(padding))
        for row, length in enumerate(rows.LENGTHS):
            for head, positions in enumerate(right(row, length)):
                assert kept(bits[row, head]) == sorted(positions), (row, head)


def best(scores: np.ndarray, count: int) -> list[int]:
    return np.argsort(-scores, kind="stable")[:count].tolist()


# --- CriticalKV -----------------------------------------------------------------------------------


def norms(row: int, head: int, length: int) -> np.ndarray:
    """||W_o v||_1 [length], mean over a group's query heads."""
    v = rows.VALUES[row, head, :length]
    of_heads = [np.abs(v @ WO[:, n].T).sum(axis=1) for n in range(head * rows.G, (head + 1) * rows.G)]
    return np.mean(of_heads, axis=0)


def critical(row: int, head: int, length: int, target: int, first: float, guaranteed: int = 0) -> list[int]:
    score = SCORES[row, head, :length]
    stage = max(int(target * first), 1 if first else 0, guaranteed)
    taken = best(score, min(stage, target))
    second = (score + 1e-4) * norms(row, head, length)
    rest = [p for p in best(second, length) if p not in taken]
    return [*taken, *rest[: target - len(taken)]]


@pytest.mark.parametrize(("first", "amount"), [(0.5, 11), (0.0, 11), (0.25, 0.5), (1.0, 7)])
def test_half_goes_by_the_scores_and_the_rest_by_the_output(first, amount):
    policy = Policy(eviction=Critical(first, of=Drawn()), budget=Uniform(amount))

    def right(row, length):
        target = min(rows.target_of(amount, length), length)
        return [critical(row, h, length, target, first) for h in range(rows.K)]

    check(policy, right)
    if first == 0.0:
        plain = judge(Policy(eviction=Drawn(), budget=Uniform(amount)), prompts(9.0))
        assert (plain != judge(policy, prompts(9.0))).any(), "the output changes nothing"


@pytest.mark.parametrize("floor", [0.0, 0.2, 0.9])
def test_heads_are_compared_by_the_scores_and_what_they_are_guaranteed_stays(floor):
    mean = 9

    def right(row, length):
        if length <= mean:
            return [range(length)] * rows.K
        score, safe = SCORES[row, :, :length], int(mean * floor)
        marked = score.copy()
        for h in range(rows.K):
            marked[h, best(score[h], safe)] = np.inf
        flat = best(marked.ravel(), mean * rows.K)
        targets = np.bincount(np.asarray(flat) // length, minlength=rows.K)
        return [critical(row, h, length, int(targets[h]), 0.5, safe) for h in range(rows.K)]

    check(Policy(eviction=Critical(of=Drawn()), budget=Ada(mean, floor=floor)), right)


def test_protected_tokens_take_the_first_places():
    policy = Policy(eviction=Critical(0.5, of=Drawn()), budget=Uniform(8), sinks=3)

    def right(row, length):
        if length <= 8:
            return [range(length)] * rows.K
        sets = []
        for h in range(rows.K):
            score = SCORES[row, h, :length].copy()
            score[:3] = np.inf
            second = (score + 1e-4) * norms(row, h, length)
            taken = best(score, 4)
            rest = [p for p in best(second, length) if p not in taken]
            sets.append([*taken, *rest[:4]])
        return sets

    check(policy, right)


def test_the_norm_of_the_output_is_of_each_query_head():
    seen = dataclasses.replace(prompts(0.0))
    for order in (1, 2):
        norm = jax.jit(lambda seen, order=order: seen.wo_norm(order))(seen)
        for n in range(rows.N):
            out = rows.padded(rows.VALUES, 0.0)[:, n // rows.G] @ WO[:, n].T
            np.testing.assert_allclose(norm[:, n], np.linalg.norm(out, ord=order, axis=-1), rtol=2e-5)


def test_never_more_than_one_head_is_projected_at_once():
    seen = jax.eval_shape(lambda: prompts(0.0))
    text = str(jax.make_jaxpr(lambda seen: seen.wo_norm())(seen))
    many = f"[{len(rows.LENGTHS)},{rows.N},{rows.T},{WIDTH}]"
    assert many not in text
    assert f"[{rows.N},{len(rows.LENGTHS)},{rows.T},{WIDTH}]" not in text
    assert f"[{rows.N},{len(rows.LENGTHS) * rows.T},{WIDTH}]" not in text
    assert f"[{len(rows.LENGTHS) * rows.T},{WIDTH}]" in text


def test_a_model_that_shows_no_output_projection_is_told_so():
    with pytest.raises(PolicyError, match=r"Heads\.wo"):
        judge(Policy(eviction=Critical(of=Drawn()), budget=Uniform(8)), rows.prompts())


# --- runs -----------------------------------------------------------------------------------------


def summed(row: int, length: int, safe: int = 0) -> np.ndarray:
    """Scores over the heads; ``safe`` first tokens one above the highest."""
    score = SCORES[row, :, :length].copy()
    score[:, :safe] = (score[:, safe:].max() if safe < length else 0.0) + 1
    return score.sum(axis=0)


def in_runs(length: int, size: int) -> list[range]:
    return [range(at, min(at + size, length)) for at in range(0, length, size)]


def chunks(score: np.ndarray, size: int) -> list[int]:
    """All positions, in the order in which they stay."""
    runs = in_runs(len(score), size)
    order = sorted(runs, key=lambda run: (-score[run.start : run.stop].mean(), run.start))
    return [p for run in order for p in sorted(run, key=lambda p: (-score[p], p))]


def spiky_chunks(score: np.ndarray, size: int, few: int) -> list[int]:
    runs = in_runs(len(score), size)
    mean, entropy = np.zeros(len(runs)), np.zeros(len(runs))
    for i, run in enumerate(runs):
        x = score[run.start : run.stop]
        mean[i] = x.mean()
        p = (x - min(x.min(), 0)) / ((x - min(x.min(), 0)).sum() + 1e-8)
        if len(run) > 1:
            entropy[i] = np.clip(-(p * np.log(p + 1e-8)).sum() / np.log(len(run)), 0, 1)
    middle, calm = (np.sort(x)[(len(runs) - 1) // 2] for x in (mean, entropy))
    first, later = [], []
    for i in sorted(range(len(runs)), key=lambda i: -mean[i]):
        inside = sorted(runs[i], key=lambda p: -score[p])
        cut = few if mean[i] >= middle and entropy[i] < calm else len(inside)
        first += inside[:cut]
        later += inside[cut:]
    return first + sorted(later, key=lambda p: -score[p])


@pytest.mark.parametrize(
    ("size", "amount", "sinks"), [(7, 15, 0), (5, 0.4, 0), (7, 12, 3), (50, 6, 0), (1, 9, 0)]
)
def test_whole_runs_stay_and_the_next_one_fills_the_rest(size, amount, sinks):
    policy = Policy(eviction=Chunks(size, of=Drawn()), budget=Uniform(amount), sinks=sinks)

    def right(row, length):
        target = rows.target_of(amount, length)
        order = chunks(summed(row, length, sinks), size)
        safe = list(range(min(sinks, length)))
        return [(safe + [p for p in order if p not in safe])[: max(target, len(safe))]] * rows.K

    check(policy, right)


@pytest.mark.parametrize(("size", "few", "amount"), [(6, 2, 15), (4, 3, 0.7), (10, 4, 20), (9, 1, 3)])
def test_spiky_runs_keep_their_best_tokens(size, few, amount):
    policy = Policy(eviction=EntropyChunks(size, few, of=Drawn()), budget=Uniform(amount))

    def right(row, length):
        return [spiky_chunks(summed(row, length), size, few)[: rows.target_of(amount, length)]] * rows.K

    check(policy, right)
    plain = judge(Policy(eviction=Chunks(size, of=Drawn()), budget=Uniform(amount)), prompts(9.0))
    assert (plain != judge(policy, prompts(9.0))).any(), "no run was spiky"


def test_negative_scores_are_cut_into_runs_likewise(monkeypatch):
    monkeypatch.setitem(globals(), "SCORES", SCORES - 0.02)
    policy = Policy(eviction=EntropyChunks(6, 2, of=Drawn()), budget=Uniform(16))
    jax.clear_caches()  # the scores are constants of a program
    check(policy, lambda row, length: [spiky_chunks(summed(row, length), 6, 2)[:16]] * rows.K)
    jax.clear_caches()


def test_runs_take_what_critical_makes_of_the_scores():
    policy = Policy(eviction=Chunks(5, of=Critical(of=Drawn())), budget=Uniform(12))

    def right(row, length):
        score = sum((SCORES[row, h, :length] + 1e-4) * norms(row, h, length) for h in range(rows.K))
        return [chunks(score, 5)[:12]] * rows.K

    check(policy, right)


# --- words ----------------------------------------------------------------------------------------


def test_a_wrapper_follows_the_eviction():
    policy = kvjax.policy("snapkv(8) + critical(0.3) + chunks(5) + ada(0.25)")
    assert policy.eviction == Chunks(5, of=Critical(0.3, of=SnapKV(8)))
    assert repr(policy.eviction) == "snapkv(8) + critical(0.3) + chunks(5)"
    assert policy.structure == "snapkv(window=8) + critical + chunks(size=5) + ada"
    assert policy.needs == {"q", "k", "v", "wo_norm"}
    names = [part["name"] for part in catalogue.describe(policy)["parts"]]
    assert names == ["snapkv", "critical", "chunks", "ada"]
    assert kvjax.policy("ada(0.25) + snapkv(8) + int8 + critical").eviction == Critical(of=SnapKV(8))
    assert kvjax.policy("kvp + gvote + critical").eviction.of.name == "kvp"
    assert kvjax.policy("criticalkv").eviction == Critical(of=SnapKV())


def test_another_eviction_ranks_the_answer():
    text = 'snapkv(8) + critical + chunks(5) + then(scissorhands(9, recent=4)) + uniform(64, when="every(8)")'
    policy = kvjax.policy(text)
    assert policy.eviction == Then(Scissorhands(9, recent=4), of=Chunks(5, of=Critical(of=SnapKV(8))))
    assert kvjax.policy(repr(policy)) == policy
    held = "snapkv(window=8) + critical + chunks(size=5)"
    assert policy.structure == f"{held} + then(scissorhands(window=9, recent=4)) + uniform(when=every(8))"
    parts = catalogue.describe(policy)["parts"]
    assert parts[3] == {"place": "eviction", "name": "then", "args": {"answer": "scissorhands(9, recent=4)"}}
    assert (policy.protects, policy.ranks_held) == (8, True)
    on_arrival = kvjax.policy("snapkv(8) + then(knorm) + uniform(64, every(8))")
    assert on_arrival.whole_prompt, "else the answer's eviction would cut the prompt in chunks"
    assert (on_arrival.keeps, on_arrival.queries) == (("eviction.norm",), {})


def test_numbers_of_both_evictions_are_leaves():
    one, two = (Then(H2O(recent=4), of=Random(seed)) for seed in (1, 2))
    assert jax.tree.structure(one) == jax.tree.structure(two)
    assert jax.tree.structure(one) != jax.tree.structure(Then(H2O(recent=5), of=Random(1)))
    assert jax.tree.leaves(Then(Random(3), of=Random(2))) == [3, 2]


def test_weights_of_the_answers_eviction_are_the_policys():
    policy = kvjax.policy("snapkv + then(qfilter) + uniform(64, every(4))")
    assert [part.name for part in policy.learned] == ["qfilter"]
    assert len(kvjax.weights_for(policy, kvjax.load())["eviction"]) == 6


def test_numbers_of_what_is_held_are_leaves():
    one, two = (Critical(first, of=Random(seed)) for first, seed in ((0.5, 1), (0.25, 2)))
    assert jax.tree.structure(one) == jax.tree.structure(two)
    assert jax.tree.leaves(two) == [0.25, 1e-4, 2]
    assert jax.tree.structure(one) != jax.tree.structure(Critical(of=SnapKV()))
    assert one != two


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("critical + uniform(0.25)", r"^critical\(0.5\) has nothing to wrap\. Write an eviction before it"),
        ("critical + snapkv + uniform(0.25)", "has nothing to wrap"),
        ("snapkv + chunks(20) + critical + uniform(0.25)", r"Write chunks\(20\) last"),
        ("snapkv + critical + critical + uniform(0.25)", "wraps twice by critical"),
        ("snapkv + critical(of=knorm) + uniform(0.25)", "Write the eviction before it"),
        ("snapkv + critical(share=1) + uniform(0.25)", "Its arguments: first, floor"),
        ("knorm + chunks(9) + uniform(40, every_step)", "Use knorm, or when=after_prompt"),
        ("write_gate + knorm + chunks(9) + uniform(0.5)", "admits different tokens"),
        ("knorm + entropy_chunks(4, spiky=4) + uniform(0.5)", "spiky=4 is not below size=4"),
        ("then(knorm) + uniform(24, every(4))", "has nothing to wrap"),
        ("snapkv + then + uniform(24, every(4))", "nothing ranks the answer"),
        ("snapkv + then(int8) + uniform(24, every(4))", r"answer=int8\(128\) is not a valid eviction"),
        ("snapkv + then(critical) + uniform(24, every(4))", "has nothing to wrap"),
        ("snapkv + then(knrm) + uniform(24, every(4))", "Did you mean 'knorm'"),
        ("snapkv + then(knorm(3)) + uniform(24, every(4))", "knorm: too many positional arguments"),
        ("snapkv + then(h2o) + uniform(24, every(4))", r"Use h2o\(recent=8\), or"),
        ("snapkv + then(knorm) + critical + uniform(24, every(4))", r"Write then\(knorm\) last"),
        ("snapkv + then(knorm) + uniform(0.25)", r"or leave then\(knorm\) out"),
        ("snapkv + then(knorm) + uniform(9, every(4), keep)", r"Write 'knorm \+ uniform\(9"),
        ("kvp + then(qfilter) + uniform(24, every(4))", "both evictions read learned weights"),
        ("kvzip + then(snapkv) + uniform(40, every(4))", "feeds a prompt twice"),
    ],
)
def test_what_has_no_order_is_refused(spec, message):
    with pytest.raises(PolicyError, match=message):
        kvjax.policy(spec)


def test_a_wrapper_holds_an_eviction():
    for wrong in ({}, {"of": Policy().eviction}):
        with pytest.raises(PolicyError, match="has nothing to wrap"):
            Critical(**wrong)
    with pytest.raises(PolicyError, match="of=True is not a valid eviction"):
        Critical(of=True)
