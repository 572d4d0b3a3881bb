"""GVote against float64 NumPy: nucleus of the last real query, sampled voters, union of what they name."""

from __future__ import annotations

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import prompt_rows as rows
import pytest
import tiny
import vote_oracle as oracle
from policy_oracle import frame, judge, kept

import kvjax
from kvjax import decode, layer, metrics
from kvjax.algebra import FIRST, Observation, Policy, PolicyError
from kvjax.budgets.gvote import Voted, best
from kvjax.budgets.uniform import Uniform
from kvjax.models.rope import Rope, rotate
from kvjax.policies.gvote import Votes
from kvjax.policies.knorm import KNorm
from kvjax.types import Heads

THETA, D, LAYER = 30.0, 12, 3
SEEDS = (5, 5, 9, 2)
random = np.random.default_rng(11)
HIDDEN = random.standard_normal((len(rows.LENGTHS), rows.T, D)) + 2 * random.standard_normal(D)
WQ, BQ = random.standard_normal((D, rows.N, rows.H)), random.standard_normal((rows.N, rows.H))
TURN = functools.partial(rotate, rope=Rope(theta=THETA))
MAP = jax.tree_util.Partial(
    lambda w, hidden: jnp.einsum("bsd,dnh->bsnh", hidden, w["wq"]) + w["bq"],
    {"wq": np.float32(WQ), "bq": np.float32(BQ)},
)


def prompts(padding: float = 9.0, *, turn=TURN, softcap=None) -> Observation:
    last = np.stack([rows.Q[b, :, n - 1] for b, n in enumerate(rows.LENGTHS)])
    hidden = np.stack(
        [np.where(np.arange(rows.T)[:, None] < n, x, padding) for n, x in zip(rows.LENGTHS, HIDDEN)]
    )
    seen = rows.prompts(padding)
    seen = dataclasses.replace(seen, values=seen.values | {"hidden": jnp.asarray(hidden, jnp.float32)})
    values = seen.values | {"q_last": jnp.asarray(last, jnp.float32)}
    more = {"layer": LAYER, "seeds": jnp.asarray(SEEDS, jnp.uint32), "project": MAP}
    return dataclasses.replace(seen, values=values, rotate=turn, softcap=softcap, **more)


def rotation(position: int) -> np.ndarray:
    """[H, H] that turns a column: pair (i, i + H / 2) by position * THETA ** (-2 i / H)."""
    half = rows.H // 2
    angle = position * THETA ** (-np.arange(half) / half)
    cos, sin = np.diag(np.cos(angle)), np.diag(np.sin(angle))
    return np.block([[cos, -sin], [sin, cos]])


def votes(row: int, ballot: Votes | Voted, *, turned=True, cap=None, allowed=None) -> np.ndarray:
    """[K, length] votes of one row; the decisions must not be rounding's."""
    n = rows.LENGTHS[row]
    turn = np.mean([rotation(n + i) for i in range(ballot.ahead)], axis=0) if turned else np.eye(rows.H)
    counts, _, margin = oracle.ballots(
        rows.KEYS[row, :, :n],
        rows.Q[row, :, n - 1],
        HIDDEN[row, :n],
        oracle.noise(ballot.seed, SEEDS[row], LAYER, ballot.samples, D),
        lambda x: np.einsum("sd,dnh->snh", x, WQ) + BQ,
        turn,
        ballot.p,
        cap,
        None if allowed is None else allowed[row, :, :n],
    )
    assert margin > 1e-5
    return counts


@pytest.mark.parametrize(
    ("ballot", "turn", "cap"),
    [
        ({"p": 0.5, "samples": 3, "ahead": 7}, TURN, None),
        ({"p": 0.75, "samples": 2, "ahead": 64, "seed": 4}, TURN, 1.5),
        ({"p": 0.95, "samples": 1, "ahead": 1}, None, None),
        ({"p": 1.0, "samples": 1, "ahead": 1}, None, None),
    ],
)
def test_alone_it_keeps_exactly_the_union_of_the_votes(ballot, turn, cap):
    eviction = Votes(**ballot)
    policy = Policy(eviction=eviction, budget=Voted(**ballot))
    for padding in (9.0, np.nan):
        bits = judge(policy, prompts(padding, turn=turn, softcap=cap))
        for row in range(len(rows.LENGTHS)):
            right = votes(row, eviction, turned=turn is not None, cap=cap)
            assert [kept(x) for x in bits[row]] == [kept(x > 0) for x in right]


def test_every_group_head_and_voter_counts_in_the_score():
    eviction = Votes(0.6, samples=4, ahead=7)
    seen = prompts()
    seen = dataclasses.replace(seen, admitted=jnp.broadcast_to(seen.pos[:, None] >= 0, rows.KEYS.shape[:3]))
    actual = np.asarray(jax.jit(functools.partial(eviction.score_prompt, None))(seen))
    for row, length in enumerate(rows.LENGTHS):
        right = votes(row, eviction)
        np.testing.assert_array_equal(np.floor(actual[row, :, :length]), right)
        assert right.max() <= eviction.samples * rows.G
        assert ((right > 1) & (right < eviction.samples * rows.G)).any() or length < 10
        assert (actual[row, :, length:] == 0).all(), "padding was voted for"


def test_as_an_eviction_the_most_votes_stay_then_the_most_attention():
    eviction = Votes(0.6, samples=4, ahead=7)
    bits = judge(Policy(eviction=eviction, budget=Uniform(9)), prompts())
    for row, length in enumerate(rows.LENGTHS):
        for h, right in enumerate(votes(row, eviction)):
            stays = bits[row, h, :length]
            assert stays.sum() == min(9, length)
            assert stays.all() or right[stays].min() >= right[~stays].max()


def test_as_a_budget_it_counts_and_another_ranking_chooses():
    budget = Voted(0.6, samples=3, ahead=7)
    bits = judge(Policy(eviction=KNorm(), budget=budget), prompts())
    differs = False
    for row, length in enumerate(rows.LENGTHS):
        for h, right in enumerate(votes(row, budget)):
            norms = np.linalg.norm(rows.KEYS[row, h, :length], axis=-1)
            order = np.argsort(norms, kind="stable")[: (right > 0).sum()]
            assert kept(bits[row, h]) == sorted(order.tolist())
            differs |= kept(bits[row, h]) != kept(right > 0)
    assert differs, "the ranking changes nothing"


@pytest.mark.parametrize("ranking", [None, KNorm()])
def test_with_protected_tokens_the_target_is_their_union_with_the_votes(ranking):
    budget = Voted(0.5, samples=2, ahead=7)
    eviction = ranking or Votes(0.5, samples=2, ahead=7)
    bits = judge(Policy(eviction=eviction, budget=budget, sinks=2, recent=3), prompts())
    for row, length in enumerate(rows.LENGTHS):
        safe = (np.arange(length) < 2) | (np.arange(length) >= length - 3)
        for h, right in enumerate(votes(row, budget)):
            stays = bits[row, h, :length]
            assert stays.sum() == (safe | (right > 0)).sum()
            assert stays[safe].all()
            if ranking is None:
                assert kept(stays) == kept(safe | (right > 0))


def test_what_admission_rejected_is_neither_attended_to_nor_named():
    ballot = {"p": 0.5, "samples": 3, "ahead": 7}
    admit = np.random.default_rng(3).random(rows.KEYS.shape[:3]) < 0.5
    admit[:, :, 0] = True  # a row of one token keeps it
    bits = judge(Policy(eviction=Votes(**ballot), budget=Voted(**ballot)), prompts(), admit)
    for row in range(len(rows.LENGTHS)):
        right = votes(row, Votes(**ballot), allowed=admit)
        assert [kept(x) for x in bits[row]] == [kept(x > 0) for x in right]


def test_more_voters_and_a_wider_nucleus_never_name_fewer():
    def stays(**ballot):
        return judge(Policy(eviction=Votes(ahead=7, **ballot), budget=Voted(ahead=7, **ballot)), prompts())

    base = stays(p=0.5, samples=2)
    for wider in (stays(p=0.5, samples=5), stays(p=0.9, samples=2)):
        assert (wider | ~base).all()
        assert wider.sum() > base.sum()


# --- infinitely many voters, and other counts ----------------------------------------------------


def endless(row: int, ballot: Voted | Votes, *, turned=True) -> tuple[np.ndarray, np.ndarray]:
    """Votes and expected attention [K, length] of one row; the decisions must not be rounding's."""
    n = rows.LENGTHS[row]
    keys = rows.KEYS[row, :, :n]
    turn = np.mean([rotation(n + i) for i in range(ballot.ahead)], axis=0) if turned else np.eye(rows.H)
    affine = lambda x: np.einsum("sd,dnh->snh", x, WQ) + BQ  # noqa: E731
    weight = oracle.log_expectations(keys, HIDDEN[row, :n], affine, turn, rows.G)
    counts, near = None, np.inf
    if ballot.nucleus == "last":
        counts, near = oracle.mean_count(keys, rows.Q[row, :, :n], ballot.p, ballot.queries)
    named, attention, margin = oracle.expected(weight, counts, ballot.p, rows.K, ballot.sinks)
    assert min(margin, near) > 1e-5
    return named, attention


@pytest.mark.parametrize("turn", [TURN, None])
def test_the_expected_attention_is_the_closed_form_of_the_draws(turn):
    eviction = Votes(samples="inf", ahead=7, sinks=3)
    for padding in (9.0, np.nan):
        seen = prompts(padding, turn=turn)
        admitted = jnp.broadcast_to(seen.pos[:, None] >= 0, rows.KEYS.shape[:3])
        seen = dataclasses.replace(seen, admitted=admitted, seeds=None)
        actual = np.asarray(jax.jit(functools.partial(eviction.score_prompt, None))(seen))
        for row, length in enumerate(rows.LENGTHS):
            _, right = endless(row, eviction, turned=turn is not None)
            assert (actual[row, :, : min(3, length)] == FIRST).all()
            np.testing.assert_allclose(actual[row, :, 3:length], np.log(right[:, 3:]), rtol=2e-4, atol=2e-4)
            assert (actual[row, :, length:] == -np.inf).all()


def test_the_closed_form_is_where_the_draws_exponentials_tend():
    """Of one prompt with a narrow Gaussian, whose exponentials have a mean that draws can estimate."""
    narrow = 0.15 * HIDDEN[0]
    exact = oracle.log_expectations(
        rows.KEYS[0], narrow, lambda x: np.einsum("sd,dnh->snh", x, WQ), np.eye(rows.H), rows.G
    )
    draws = np.random.default_rng(0).standard_normal((20_000, D))
    q = np.einsum("sd,dnh->nsh", narrow.mean(axis=0) + narrow.std(axis=0) * draws, WQ)
    keys = np.repeat(rows.KEYS[0], rows.G, axis=0)
    mean = np.exp(np.einsum("nsh,nth->nst", q, keys) / np.sqrt(rows.H)).mean(axis=1)
    assert np.median(np.abs(np.log(mean) - exact)) < 0.01


@pytest.mark.parametrize(
    "ballot",
    [
        {"p": 0.6, "samples": "inf", "ahead": 7},
        {"p": 0.9, "samples": "inf", "ahead": 1, "queries": 5},
        {"p": 0.7, "samples": "inf", "ahead": 7, "nucleus": "expected"},
        {"p": 0.7, "samples": "inf", "ahead": 7, "nucleus": "expected", "sinks": 0},
        {"p": 1.0, "samples": "inf", "ahead": 7, "nucleus": "expected"},
    ],
)
def test_infinitely_many_voters_keep_as_many_as_they_name_of_the_most_expected(ballot):
    policy = Policy(eviction=Votes(**ballot), budget=Voted(**ballot))
    bits = judge(policy, prompts())
    for row in range(len(rows.LENGTHS)):
        named, attention = endless(row, policy.budget)
        for h, bit in enumerate(bits[row]):
            first = np.arange(len(named[h])) < policy.budget.sinks
            stay = np.where(first, np.inf, attention[h])
            order = np.argsort(-stay, kind="stable")[: ((named[h] > 0) | first).sum()]
            assert kept(bit) == sorted(order.tolist())


@pytest.mark.parametrize(("queries", "cap"), [(3, None), (16, 1.5)])
def test_several_queries_name_their_mean_number(queries, cap):
    ballot = {"p": 0.7, "samples": 2, "ahead": 7, "queries": queries}
    bits = judge(Policy(eviction=Votes(**ballot), budget=Voted(**ballot)), prompts(softcap=cap))
    for row, n in enumerate(rows.LENGTHS):
        keys = rows.KEYS[row, :, :n]
        counts, margin = oracle.mean_count(keys, rows.Q[row, :, :n], 0.7, queries, cap)
        assert margin > 1e-5
        turn = np.mean([rotation(n + i) for i in range(7)], axis=0)
        mean, spread = HIDDEN[row, :n].mean(axis=0), HIDDEN[row, :n].std(axis=0)
        draws = oracle.noise(0, SEEDS[row], LAYER, 2, D)
        voters = (np.einsum("sd,dnh->snh", mean + spread * draws, WQ) + BQ) @ turn.T
        named = np.zeros(keys.shape[:2], bool)
        for head in range(rows.N):
            for voter in voters:
                order = np.argsort(-(keys[head // rows.G] @ voter[head]), kind="stable")
                named[head // rows.G, order[: counts[head]]] = True
        assert [kept(x) for x in bits[row]] == [kept(x) for x in named]


def test_the_count_includes_the_rankings_own_first_tokens():
    """KVP's sinks are no votes' and no policy's; ``kvp + gvote`` keeps them and as many as have votes."""

    @dataclasses.dataclass(frozen=True, repr=False)
    class Ranked(KNorm):
        name = "ranked"

        def score_prompt(self, params, observed):
            return jnp.where(observed.pos[:, None] < 4, FIRST, super().score_prompt(params, observed))

    budget = Voted(0.5, samples=2, ahead=7)
    bits = judge(Policy(eviction=Ranked(), budget=budget), prompts())
    for row, length in enumerate(rows.LENGTHS):
        for h, right in enumerate(votes(row, budget)):
            first = np.arange(length) < 4
            assert bits[row, h, :length].sum() == (first | (right > 0)).sum()
            assert bits[row, h, : min(4, length)].all()


def test_an_expected_nucleus_needs_the_closed_form():
    with pytest.raises(PolicyError, match="Write samples=inf, or leave nucleus out"):
        Voted(nucleus="expected")
    with pytest.raises(PolicyError, match="Leave one of them out"):
        kvjax.policy("gvote(0.9, samples=inf, nucleus=expected, queries=2)")


@pytest.mark.parametrize("count", [0, 1, 3, 6, 7])
def test_the_best_are_the_highest_then_the_lowest_positions(count):
    s = np.array([2.0, -np.inf, 0.0, -0.0, 2.0, -3.0, 0.0, 1.0, -np.inf], np.float32)
    order = sorted((i for i in range(9) if s[i] > -np.inf), key=lambda i: (-s[i], i))
    assert kept(np.asarray(best(jnp.asarray(s), jnp.asarray(count)))) == sorted(order[:count])


# --- whole models --------------------------------------------------------------------------------

SIZES = {"context": tiny.CONTEXT, "page": tiny.PAGE}
POLICY = kvjax.policy("gvote(0.7, samples=3, ahead=8)")
LENGTHS = (52, 30, 17)


def held(policy, prompts, **more) -> np.ndarray:
    state, _ = kvjax.prefill(tiny.model(), policy, prompts, **SIZES | more)
    return np.asarray(metrics.present(state))


@pytest.mark.slow
def test_the_same_request_gives_the_same_cache_whatever_its_neighbours():
    texts = [tiny.prompt(n, seed) for seed, n in enumerate(LENGTHS)]
    together = held(POLICY, texts, seeds=[7, 8, 9])
    turned = held(POLICY, [texts[2], tiny.prompt(40, 9), texts[0]], seeds=[9, 1, 7])
    np.testing.assert_array_equal(turned[:, 2], together[:, 0])
    np.testing.assert_array_equal(turned[:, 0], together[:, 2])
    np.testing.assert_array_equal(held(POLICY, [texts[1]], seeds=8)[:, 0], together[:, 1])
    other = held(POLICY, texts, seeds=[7, 3, 9])
    assert (other[:, 1] != together[:, 1]).any(), "the request's seed does nothing"
    np.testing.assert_array_equal(other[:, [0, 2]], together[:, [0, 2]])
    reseeded = held(kvjax.policy("gvote(0.7, samples=3, ahead=8, seed=1)"), texts, seeds=[7, 8, 9])
    assert (reseeded != together).any(), "the policy's seed does nothing"


def test_chunked_is_whole():
    texts = [tiny.prompt(n, seed) for seed, n in enumerate(LENGTHS)]
    for chunk in (7, 64):
        np.testing.assert_array_equal(held(POLICY, texts, chunk_size=chunk), held(POLICY, texts))


def test_equal_prompts_of_one_request_seed_are_one_verdict_in_every_layer_its_own():
    text = tiny.prompt(52, 3)
    bits = held(POLICY, [text, text, text], seeds=[4, 4, 5])
    np.testing.assert_array_equal(bits[:, 0], bits[:, 1])
    assert (bits[:, 0] != bits[:, 2]).any()


def test_live_and_owned_bytes_of_each_request_follow_its_votes():
    texts = [tiny.prompt(n, seed) for seed, n in enumerate(LENGTHS)]
    state, _ = kvjax.prefill(tiny.model(), POLICY, texts, **SIZES)
    live, owned = metrics.by_row(state)
    total = metrics.nbytes(state).total
    assert live.sum() == pytest.approx(total["live"])
    assert (live < owned).all()
    assert owned.sum() <= total["allocated"]
    slots = np.asarray(metrics.live_slots(state)).sum(axis=(0, 2))
    slot = 2 * 8 * 4
    assert (np.abs(live / slots - slot) < 8).all()  # beside K and V a position, or an admission bit
    full = kvjax.prefill(tiny.model(), "full", texts, **SIZES)[0]
    assert total["allocated"] < metrics.nbytes(full).total["allocated"]


@pytest.mark.slow
def test_prompts_of_another_text_share_their_programs():
    from kvjax.cache import pool

    pool._FAMILIAR.clear()
    before = decode.decode_steps._cache_size()
    news = []
    for at in range(50):
        prompt = tiny.prompt(40 + at % 12, 100 + at)
        kvjax.generate(tiny.model(), POLICY, [prompt], max_new_tokens=2, page=tiny.PAGE)
        news.append(decode.decode_steps._cache_size() - before)
    assert news[-1] <= 4
    assert news[-1] == news[20], "a late prompt was a new program"


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize("call", [{"p": 0}, {"p": 1.01}, {"samples": 0}, {"samples": "many"}, {"ahead": 0},
                                  {"seed": -1}, {"queries": 0}, {"nucleus": "first"}])  # fmt: skip
@pytest.mark.parametrize("kind", [Votes, Voted])
def test_numbers_out_of_range_are_refused(kind, call):
    with pytest.raises(PolicyError, match=r"gvote\(.*Give "):
        kind(**call)


@pytest.mark.slow
def test_one_token_and_a_prompt_that_is_kept_whole_are_told():
    with pytest.warns(decode.Remark, match="one token in row 1"):
        held(POLICY, [tiny.prompt(20), tiny.prompt(1)])
    every = kvjax.policy("gvote(1.0, samples=1)")
    with pytest.warns(decode.Remark, match="keeps all 20 tokens of row 0 in every layer"):
        bits = held(every, [tiny.prompt(20)])
    assert bits[..., :20].all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        held(POLICY, [tiny.prompt(20)])


def test_a_model_without_a_query_projection_is_refused():
    with pytest.raises(PolicyError, match="this model has no query projection"):
        judge(Policy(eviction=Votes(), budget=Uniform(4)), dataclasses.replace(prompts(), project=None))


@pytest.mark.parametrize("seeds", [[1, 2, 3], 0.5, "1"])
def test_seeds_that_are_none_are_refused(seeds):
    with pytest.raises(decode.RequestError, match=r"prefill\(seeds="):
        held(POLICY, [tiny.prompt(20)], seeds=seeds)


# --- one word, two places ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "ranks", "counts"),
    [
        ("gvote", "gvote(0.95)", "gvote(0.95)"),
        ("gvote(0.9, samples=4) + int8(8)", "gvote(0.9, samples=4)", "gvote(0.9, samples=4)"),
        ("kvp + gvote", "kvp(4)", "gvote(0.95)"),
        ("gvote + snapkv", "snapkv(32)", "gvote(0.95)"),
        ("gvote + uniform(0.25)", "gvote(0.95)", "uniform(0.25)"),
        ("adakv + gvote(0.5)", "snapkv(32)", "gvote(0.5)"),
        ("gvote + ada(0.25)", "gvote(0.95)", "ada(0.25)"),
        ("gvote(samples=inf) + uniform(0.3)", "gvote(0.95, samples=inf)", "uniform(0.3)"),
        ("snapkv + gvote(0.9, queries=16)", "snapkv(32)", "gvote(0.9, queries=16)"),
        *[
            ("gvote(0.8, samples=inf, nucleus=expected)",)
            + ("gvote(0.8, samples=inf, nucleus=expected)",) * 2
        ],
    ],
)
def test_the_word_fills_the_places_that_nothing_else_does(spec, ranks, counts):
    policy = kvjax.policy(spec)
    assert (repr(policy.eviction), repr(policy.budget)) == (ranks, counts)
    assert kvjax.policy(repr(policy)) == policy


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("gvote + snapkv + uniform(64)", ["gvote(0.95) has no place left", "snapkv(32)", "uniform(64)"]),
        ("gvote(0.9) + gvote(0.8)", ["gvote(0.8) has no place left"]),
        ("gvote(p=2)", ["p=2", "above 0 and at most 1"]),
    ],
)
def test_refusals_name_the_word(spec, words):
    with pytest.raises(PolicyError) as refused:
        kvjax.policy(spec)
    assert all(word in str(refused.value) for word in words)


def test_a_vote_that_counts_needs_somebody_who_ranks():
    with pytest.raises(PolicyError, match="no part decides which"):
        Policy(budget=Voted())
    with pytest.raises(PolicyError, match="one set of arguments"):
        Policy(eviction=Votes(0.9), budget=Voted(0.8))


def test_the_budget_is_shown_what_it_declared():
    model, positions = tiny.model(), jnp.asarray([[0, 1, 2, -1]])
    x = np.float32(np.random.default_rng(0).standard_normal((1, 4, model.network.spec.model_dim)))

    def attend(_: int, heads: Heads, carry: None) -> tuple[jax.Array, Heads]:
        return heads.q, heads

    _, heads = model.network.layer(model.params["layers"][0], 0, x, positions, attend, None)
    info = layer.LayerInfo(POLICY, {}, 0, 2, None, jnp.asarray([3]))
    seen = layer.observe(info, heads, positions)
    np.testing.assert_array_equal(seen.q_last[0], heads.q[0, 2])
    assert info.frame(seen.k, seen).observed is seen
    plain = layer.LayerInfo(kvjax.policy("snapkv"), {}, 0, 2, None, jnp.asarray([3]))
    assert plain.frame(seen.k, seen).observed is None
    assert frame().observed is None
