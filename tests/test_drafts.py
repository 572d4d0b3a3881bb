"""Drafts lose nothing: text, positions and bytes are those of plain decoding, whatever is drafted."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import kvjax
from benchmarks import drafted, drafts
from benchmarks.random_model import SIZES
from kvjax import decode, layer
from kvjax.algebra import Policy, PolicyError
from kvjax.decode import RequestError, _draft, best_length, gain
from kvjax.decode._draft_length import AGAIN, PROBE, DraftLength
from kvjax.layer import LayerInfo
from kvjax.sampling import sampling
from kvjax.types import Heads

QUEST, TOPK = "quest(chunks=1, chunk=4, dense=0, recent=8)", "topk(2, sinks=2, tail=6)"
PAGES = "topk_pages(4, chunk=4, sinks=2, tail=6)"
PROMPTS = [tiny.prompt(20, 1), tiny.prompt(33, 2), tiny.prompt(27, 3)]
SHAPE = {"page": tiny.PAGE, "chunk_size": 16}


@pytest.fixture(autouse=True)
def longest(monkeypatch):
    """Drafts are as long as they may be, in pieces of 64 tokens: no clock decides what is tested."""
    monkeypatch.setattr(DraftLength, "tokens", lambda self, every: every)
    monkeypatch.setattr(DraftLength, "saw", lambda self, *seen: None)


CASES = [
    ("full", f"draft({QUEST}, most=3)"),
    ("write_gate(0.5, window=8) + phi(4)", QUEST),
    *(
        pytest.param(spec, draft, marks=pytest.mark.slow)
        for spec, draft in (
            ("write_gate(0.5, window=8) + phi(4)", TOPK),
            ("snapkv(8) + uniform(24) + sinks(2)", QUEST),
            ("window(8) + sinks(12)", QUEST),
            ("write_gate(0.5, window=8)", PAGES),
            ("knorm + uniform(16)", QUEST),
            ("full", "magicpig(3, tables=12, sinks=2, tail=6)"),
        )
    ),
]


@pytest.mark.parametrize(("spec", "draft"), CASES)
def test_text_and_state_are_those_of_plain_decoding(spec, draft):
    """Three rows that accept different counts, one of which ends at a stop token inside a draft."""
    policy = decode.with_draft(kvjax.policy(spec), draft)
    write = functools.partial(
        kvjax.generate, tiny.model(), weights=tiny.weights(policy), max_new_tokens=21, seed=5, **SHAPE
    )
    stop = write(spec, PROMPTS, stops=()).tokens[1][9]
    for temperature in (0.0, 0.9):
        how = {"temperature": temperature, "repetition_penalty": 1.1, "stops": [stop]}
        drafted = write(spec, PROMPTS, draft=draft, **how)
        assert drafted.tokens == write(spec, PROMPTS, **how).tokens
        assert 0 < drafted.accepted < drafted.drafted, "all or none was accepted: the test says little"
    with pytest.MonkeyPatch.context() as patch:  # the same pages, read plainly
        patch.setattr(_draft.Drafter, "of", staticmethod(lambda policy, state: None))
        plain = write(policy, PROMPTS, **how)
    assert plain.drafted == 0
    same_state(drafted.state, plain.state)


def same_state(one, other):
    """The same positions in the same lists; numbers up to what many tokens at once round otherwise.

    Which page a list has depends on the order in which rows asked for it, and so on how many each accepted.
    """
    close = functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-4)
    np.testing.assert_array_equal(one.length, other.length)
    for a, b in zip(one.layers, other.layers):
        np.testing.assert_array_equal(a.ring.admit, b.ring.admit)
        for x, y in zip(jax.tree.leaves((a.ring, a.summary)), jax.tree.leaves((b.ring, b.summary))):
            close(x, y)
        for pages, others in zip(a.pools, b.pools):
            np.testing.assert_array_equal(pages.length, others.length)
            tiny.owned_once(pages)
        held, others = tiny.held(*a.pools), tiny.held(*b.pools)
        assert {at: [*tokens] for at, tokens in held.items()} == {at: [*x] for at, x in others.items()}
        for at, tokens in held.items():
            for pos, values in tokens.items():
                for x, y in zip(values, others[at][pos]):
                    np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-4)


LAYERS = [
    kvjax.policy("phi(4) + write_gate(0.5, window=8)"),
    pytest.param(Policy(admission=tiny.HashAdmit()), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("policy", LAYERS, ids=repr)
def test_a_layer_verifies_and_writes_what_steps_do(policy):
    """Of the same heads: outputs of the accepted tokens to rounding, all bytes of the cache exactly."""
    policy = dataclasses.replace(policy, selection=kvjax.policy(f"draft({QUEST})").selection)
    state, _ = tiny.read(policy, PROMPTS, 16)
    cache, length = state.layers[0], state.length
    learned = {p.place: p.at_layer(tiny.weights(policy)[p.place], 0) for p in policy.learned}
    info = LayerInfo(policy, learned, 0, 2, None, state.total)
    random = np.random.default_rng(4)
    draw = lambda n: jnp.asarray(random.standard_normal((3, 5, n, 8)), jnp.float32)  # noqa: E731
    q, k, v = draw(4), draw(2), draw(2)
    pre = draw(2)

    def heads(part):
        fields = {"q": q, "k": k, "v": v, "q_pre": q, "k_pre": pre}
        return Heads(**{name: x[:, part] for name, x in fields.items()}, hidden=None)

    fed, accepted = jnp.asarray([5, 3, 4]), jnp.asarray([5, 0, 2])
    out, new = jax.jit(lambda cache: layer.verify(info, heads(slice(0, 5)), cache, length, fed))(cache)
    written = jax.jit(lambda cache, new: layer.write(info, None, (cache, new), length, accepted))(cache, new)

    for i in range(5):
        active, x = i < accepted, heads(slice(i, i + 1))
        step = jax.jit(lambda cache, length, active, x=x: layer.step(info, x, cache, length, active))
        right, (cache, _) = step(cache, length + jnp.minimum(i, accepted), active)
        for row in np.flatnonzero(active):
            np.testing.assert_allclose(out[row, i], right[row, 0], rtol=2e-5, atol=2e-5)
    for a, b in zip(jax.tree.leaves(written), jax.tree.leaves(cache)):
        np.testing.assert_array_equal(a, b)
    assert any(page.length.sum() > 0 for page in cache.pools), "nothing left the window"


@pytest.mark.parametrize(("left", "steps"), [([5, 2], 3), ([1, 3], 2), ([1, 1], 0)])
def test_the_last_token_of_a_row_costs_no_draft_step(left, steps, monkeypatch):
    """Verification draws it, so at most three are drafted, one less than the longest row may write."""
    policy = kvjax.policy(f"draft({QUEST}, most=3)")
    state, _ = tiny.read(policy, PROMPTS[:2], 16)
    one = jnp.ones(2, jnp.int32)
    left = jnp.asarray(left)
    rows = decode.DecodeRows(token=one, done=one == 0, left=left, stops=-one[:1], how=sampling(2))
    calls, draft = [], layer.draft
    monkeypatch.setattr(layer, "draft", lambda *args: calls.append(1) or draft(*args))
    with jax.disable_jit():
        drafts = _draft._drafted(tiny.model().network, policy, 3, tiny.model().params, {}, state, rows)
    assert len(calls) == steps * len(state.layers)
    assert (drafts >= 0).sum(axis=1).tolist() == [min(3, n - 1) for n in left]


@pytest.mark.slow
def test_a_draft_ends_where_its_text_and_the_context_end():
    """To the last position of the model, in pieces that are shorter than a draft."""
    prompt = [tiny.prompt(256 - 12, 4), tiny.prompt(200, 5)]
    plain = kvjax.generate(tiny.model(), "full", prompt, max_new_tokens=12, **SHAPE)
    policy = kvjax.policy(f"draft({QUEST}, most=3)")
    state, logits = kvjax.prefill(tiny.model(), policy, prompt, context=256, **SHAPE)
    pieces = kvjax.stream(tiny.model(), policy, state, logits, max_new_tokens=12, every=2)
    assert np.concatenate([p for p, _ in pieces], axis=1).tolist() == plain.tokens


def test_what_cannot_be_drafted_for_is_refused():
    with pytest.raises(PolicyError, match="one read could not verify.*after_prompt"):
        kvjax.policy(f"tova + uniform(24, every_step) + draft({QUEST})")
    with pytest.raises(PolicyError, match="shows it exact to all of them.*native storage"):
        kvjax.policy(f"int8(8) + draft({QUEST})")
    with pytest.raises(PolicyError, match="nothing drafts"):
        kvjax.policy("draft")
    for draft in ("int8", "full", "quest(2) + int8", 3):
        with pytest.raises(PolicyError, match="not a selection"):
            decode.with_draft(kvjax.policy("full"), draft)
    with pytest.raises(PolicyError, match="stands where the draft would"):
        decode.with_draft(kvjax.policy("topk"), "quest")
    state, logits = kvjax.prefill(tiny.model(), "full", PROMPTS, context=64, **SHAPE)
    with pytest.raises(RequestError, match=r"prefill under 'draft\(quest\(32\)\)'"):
        kvjax.stream(tiny.model(), "full", state, logits, draft="quest", max_new_tokens=4)


def test_a_draft_is_written_as_text():
    policy = kvjax.policy(f"draft({QUEST}, most=2)")
    assert kvjax.policy(repr(policy)) == policy
    assert decode.with_draft(kvjax.policy("full"), f"draft({QUEST}, most=2)") == policy
    assert decode.with_draft(kvjax.policy("full"), policy.selection.drafts).selection.most == 4
    assert not policy.selection.acts
    assert kvjax.policy("draft(quest(recent=64))").window(512) == 64


def test_the_gain_counts_every_outcome():
    """Against enumeration: which of k drafted tokens would stand, each with its probability."""
    a, k, d, v = 0.7, 3, 0.4, 1.2
    written = 0.0
    for outcome in itertools.product([0, 1], repeat=k):
        stands = next((i for i, one in enumerate(outcome) if not one), k)
        written += np.prod([a if one else 1 - a for one in outcome]) * (stands + 1)
    assert gain(a, k, d, v) == pytest.approx(written / (k * d + v))
    assert best_length(0.8, 0.93, 1.0, 8) == 0  # 0.5B at 8,192 tokens: nothing to gain
    assert best_length(0.8, 0.33, 1.0, 8) == 3


@pytest.mark.parametrize(
    ("accepted", "draft", "verify", "tried", "chosen"),
    [
        (0.95, 0.3, 1.0, [], 4),  # half of it: 2.16 at best, less than a tenth above 2.06
        (0.8, 0.3, 1.0, [2], 4),
        (0.5, 0.3, 1.0, [2], 2),
        (0.8, 0.3, 2.2, [2], 0),  # verification that costs the same at every length
        (0.8, 0.95, 1.0, [], 0),
    ],
)
def test_the_length_of_drafts_follows_what_is_measured(monkeypatch, accepted, draft, verify, tried, chosen):
    monkeypatch.undo()
    length, told = DraftLength(4), []
    for piece in range(4 * AGAIN):
        told.append((length.next, length.tokens(64)))
        see(length, accepted, draft, verify, timed=piece > 0)
    trials = [4, 4, 0, *tried]
    other = 0 if chosen else 4
    assert told[: len(trials)] == [(k, PROBE) for k in trials]
    again = [(i, told[i]) for i in range(len(trials), len(told)) if told[i] != (chosen, 64)]
    assert again == [(len(trials) + pieces, (other, PROBE)) for pieces in (AGAIN, 3 * AGAIN)]


def see(length, accepted, draft, verify, *, timed=True, rounds=10):
    """A piece of the length that comes next, in which a plain step takes a second."""
    k, drafts = length.next, bool(length.next)
    seconds = rounds * (k * draft + verify) if k else rounds
    judged = 10 * rounds * drafts
    length.saw(k, rounds, judged, round(accepted * judged), seconds if timed else None)


def test_a_trial_counts_by_its_rounds_and_what_changed_is_measured_sooner(monkeypatch):
    monkeypatch.undo()
    length, told = DraftLength(2), []
    for rounds, verify in ((1, 0.5), (1, 0.5), (20, 2.4)):  # drafts seem cheap in a trial of one round
        told.append(length.next)
        see(length, 0.9, 0.3, verify, rounds=rounds)
    assert [*told, length.next] == [2, 0, 2, 0]
    told = []
    for _ in range(2 * AGAIN + 3):  # now they are
        told.append(length.next)
        see(length, 0.9, 0.3, 0.5)
    assert told == [0] * AGAIN + [2] * (AGAIN + 1) + [0, 2]


def test_without_a_clock_pieces_are_whole_and_drafts_longest(monkeypatch):
    monkeypatch.undo()
    drafter = _draft.Drafter(DraftLength(4), clock=False)
    see(drafter.length, 0.0, 1.0, 3.0, timed=False)
    assert (drafter.length.next, drafter.tokens(64)) == (4, 64)


def test_the_table_counts_the_bytes_of_a_step():
    """0.5B at 8,192 tokens and one row gains nothing; at 32,768 tokens and eight rows it does."""
    spec = {"0.5b": (SIZES["0.5b"], "bfloat16")}
    small, large = drafts.rows(spec, ["quest(chunks=8, dense=0)"], [(8192, 1), (32768, 8)])
    # 24 layers of keys and values of two heads of 64 channels in bfloat16, and 494 M weights.
    weights, cache = 2 * 494.03e6, 24 * 2 * 2 * 64 * 2 * 8192
    assert small["cache_share"] == pytest.approx(cache / (weights + cache), rel=1e-3)
    # Eight chunks of 16, the window of 64, and a range of two bfloat16 a channel for every 16 tokens.
    read = 24 * 2 * (2 * 64 * 2 * (8 * 16 + 64) + 2 * 64 * 2 * (8192 - 64) / 16)
    assert small["d"] == pytest.approx((weights + read) / (weights + cache), rel=1e-3)
    assert small["gain"]["0.8"] < 1 < large["gain"]["0.8"]


@pytest.fixture(scope="module")
def planted():
    """Two rows of a random model, drafts of up to four tokens."""
    policy = decode.with_draft(kvjax.policy("full"), f"draft({TOPK}, most=4)")
    return drafted.Side.of(tiny.model(), policy, 1024, 900, 2)


def test_drafted_tokens_stand_as_often_as_planted(planted):
    """Within three deviations, independently of one another, and none or all of them exactly."""
    _, tally = planted.piece(250, 4, 0.8)
    judged, stood = int(tally.judged.sum()) / 2, int(tally.accepted.sum()) / 2
    assert stood == tally.accepted[0], "rows go on together"
    assert judged > 150
    assert abs(stood - 0.8 * judged) < 3 * (judged * 0.8 * 0.2) ** 0.5
    assert 250 / tally.rounds == pytest.approx(gain(stood / judged, 4, 0, 1), rel=0.1)
    for accepted in (0.0, 1.0):
        _, tally = planted.piece(60, 4, accepted)
        np.testing.assert_array_equal(tally.accepted, accepted * tally.judged)
        assert tally.judged.min() > 40
        assert tally.rounds == (12 if accepted else 60)


def test_prices_of_drafted_tokens_are_those_of_a_clock(planted, monkeypatch):
    """A second a plain step, half of one a draft step, and verification of five tokens two, of three one."""

    class Clocked(drafted.Side):
        def piece(self, tokens, length=0, accepted=0.0):
            _, tally = super().piece(tokens, length, accepted)
            drafts = sum(min(length, left - 1) for left in range(1, tokens + 1))  # nothing stands
            return (length / 2 * tokens + 0.5 * drafts if length else 1.0 * tokens), tally

    side = Clocked(planted.model, planted.policy, planted.state)
    *prices, verify = drafted.prices(side, side, 1)
    assert prices == pytest.approx([1.0, 1.0, 0.5])
    assert verify == pytest.approx({4: 2.0, 2: 1.0})
    planted.state = side.state
