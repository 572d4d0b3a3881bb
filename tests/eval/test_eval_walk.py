"""What a walk through the cache counts, against the dense model and against hand counts."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from kvjax import decode, metrics, policy
from kvjax.algebra import Completion, Policy
from kvjax.cache import ring as rings
from kvjax.eval.measure import batch, counted, forced, protocol
from kvjax.eval.tasks.sample import Encoded, Sample
from kvjax.policies.quest import Quest
from kvjax.policies.streaming_llm import Window

PROMPT, ANSWER = 40, 6


def read(spec: str | Policy, rows: int = 2):
    model = tiny.model()
    prompts = [tiny.prompt(PROMPT - 3 * row, row) for row in range(rows)]
    state, _ = decode.prefill(
        model, policy(spec), [p[:-1] for p in prompts], context=tiny.CONTEXT, page=tiny.PAGE, chunk_size=16
    )
    return model, prompts, decode.reserve(policy(spec), state, ANSWER, 1)


def test_forced_likelihoods_are_the_dense_model_s():
    model, prompts, state = read("full")
    answers = [tiny.prompt(ANSWER + 9, 5)[:ANSWER], tiny.prompt(ANSWER - 2, 6)]
    feed = [[p[-1], *a[:-1]] for p, a in zip(prompts, answers)]
    after, steps = forced.steps(model, policy("full"), state, feed, answers, forced=True)
    assert np.asarray(after.length).tolist() == [PROMPT + ANSWER - 1, PROMPT - 3 + ANSWER - 3]
    for row, (prompt, answer) in enumerate(zip(prompts, answers)):
        logits = tiny.dense(prompt + answer)[len(prompt) - 1 : -1]
        lse = np.log(np.exp(logits).sum(-1))
        expected = lse - logits[np.arange(len(answer)), answer]
        np.testing.assert_allclose(steps.nll[row, : len(answer)], expected, atol=2e-4)
        assert steps.best[row, : len(answer)].tolist() == logits.argmax(-1).tolist()
    # The state that was given in is whole: the same walk again.
    _, again = forced.steps(model, policy("full"), state, feed, answers, forced=True)
    np.testing.assert_array_equal(again.nll, steps.nll)


def test_an_unforced_walk_is_greedy_decoding():
    model, prompts, state = read("full")
    _, steps = forced.steps(
        model, policy("full"), state, [[p[-1]] for p in prompts], [[0] * ANSWER] * 2, forced=False
    )
    whole = decode.generate(
        model, policy("full"), prompts, max_new_tokens=ANSWER, chunk_size=16, page=tiny.PAGE
    )
    assert steps.best[:, :ANSWER].tolist() == whole.tokens


@pytest.mark.slow
def test_a_walk_obeys_confidence_as_decoding_does():
    spec = "conf_kv(recent=6) + confidence(14, loose=24, threshold=0.5)"
    model, prompts, state = read(spec)
    answers = [tiny.prompt(ANSWER, 5 + row) for row in range(2)]
    feed = [[p[-1], *a[:-1]] for p, a in zip(prompts, answers)]
    after, steps = forced.steps(model, policy(spec), state, feed, answers, forced=True)
    live, sure = [], []
    for column in np.asarray(feed).T:
        state, _ = tiny.feed(policy(spec), state, column[:, None])
        live.append(np.asarray(metrics.live_slots(state)).mean(axis=(0, 2)))
        sure.append(np.asarray(state.confidence))
    np.testing.assert_allclose(after.confidence, sure[-1], atol=1e-5)
    np.testing.assert_array_equal(steps.live[:, :ANSWER], np.transpose(live))
    assert np.ptp(sure) > 0.1
    assert np.ptp(live) > 5, "the budget never changed"


@pytest.mark.parametrize(
    ("spec", "protocols", "when", "prefill"),
    [
        ("tova + uniform(0.25)", ("agnostic", "aware"), ("context", "prompt"), "full"),
        (
            "tova + uniform(64, every_step)",
            ("agnostic", "aware"),
            ("context and step", "prompt and step"),
            "full",
        ),
        ("conf-kv", ("agnostic", "aware"), ("context and step", "prompt and step"), "full"),
        ("knorm + uniform(64, every_step)", ("either",), ("step",), "policy"),
    ],
)
def test_switches_say_when_the_cache_shrinks(spec, protocols, when, prefill):
    """A policy that needs the whole prompt's mass is cut at its end, and again at every step."""
    assert protocol.protocols(policy(spec), ("agnostic", "aware"), question=True) == protocols
    for name, moment in zip(protocols, when, strict=True):
        switches = protocol.switches(policy(spec), name)
        assert (switches.compress_at, switches.prefill_attention) == (moment, prefill)


def test_live_slots_presence_and_reads_of_a_one_shot_budget():
    spec = "knorm + uniform(12) + sinks(2) + recent(4)"
    model, prompts, state = read(spec)
    seen = np.asarray([len(p) - 1 for p in prompts])
    slots = np.asarray(metrics.live_slots(state))
    mask = np.asarray(metrics.present(state))
    assert mask.shape == (2, 2, 2, tiny.CONTEXT)
    np.testing.assert_array_equal(mask.sum(-1), slots)
    assert (slots == 12).all()
    for row, n in enumerate(seen):
        assert mask[:, row, :, :2].all()
        assert mask[:, row, :, n - 4 : n].all()
        assert not mask[:, row, :, n:].any()
    _, steps = forced.steps(
        model, policy(spec), state, [[p[-1]] for p in prompts], [[0] * 3] * 2, forced=False
    )
    # Tokens of the answer are kept: one slot more a step, all of them read.
    np.testing.assert_array_equal(steps.live[:, :3], [[13, 14, 15]] * 2)
    np.testing.assert_array_equal(steps.reads[:, :3, 0], steps.live[:, :3])
    assert not np.asarray(steps.reads)[:, :3, 1:].any()  # no φ, and nobody who chooses
    needed = np.arange(tiny.CONTEXT) < 2
    assert counted.span_retention(mask[:, 0], needed) == 1
    assert counted.span_retention(mask[:, 0], np.zeros(tiny.CONTEXT, bool)) is None


def test_a_selection_reads_what_it_picks():
    spec = "quest(2, chunk=4, dense=1, recent=8)"
    model, prompts, state = read(spec)
    _, steps = forced.steps(
        model, policy(spec), state, [[p[-1]] for p in prompts], [[0] * 2] * 2, forced=False
    )
    for row, prompt in enumerate(prompts):
        for i in range(2):
            held = len(prompt) + i
            full = (held - 8) % 4 == 0
            # The first layer reads everything; the second its ring and two chunks, the last one part full.
            least = (held + 8 + 4 + (4 if full else 1)) / 2
            assert least <= steps.reads[row, i, 0] <= (held + 8 + 8) / 2
            # Choosing reads the range of every chunk, worth one token: two a page of 8, in one layer of two.
            assert steps.reads[row, i, 2] == -(-(held - 8) // 8)
            assert steps.live[row, i] == held


@dataclasses.dataclass(frozen=True, repr=False)
class Linear(Completion):
    """φ(x) = exp of x's first ``size`` channels: the smallest real completion."""

    name = "linear"
    size: int = 4

    def empty(self, rows, heads, head_dim, context):
        line = (rows, heads, self.size)
        return {"u": jnp.zeros(line), "t": jnp.zeros((*line, head_dim)), "m": jnp.zeros(line)}

    def absorb(self, params, summary, k, v, pos, take):
        phi = jnp.exp(k[..., : self.size]) * take[..., None]
        more = {"u": phi.sum(axis=2), "t": jnp.einsum("bktf,bkth->bkfh", phi, v), "m": 0.0}
        return {name: x + more[name] for name, x in summary.items()}

    def read(self, params, summary, q, visited):
        group = q.shape[1] // summary["u"].shape[1]
        u, t = (jnp.repeat(summary[name], group, axis=1) for name in "ut")
        a = q[..., : self.size] + jnp.log(u + 1e-9)[:, :, None]
        share = jax.nn.softmax(a, axis=-1)
        out = jnp.einsum("bntf,bnfh->bnth", share, t / (u[..., None] + 1e-9))
        return out, jax.nn.logsumexp(a, axis=-1)


def test_a_completion_is_read_at_the_price_of_its_summary():
    """d_φ/2 + d_φ/D tokens a read (4 features, D = 8), in every layer; float32 beside float32."""
    chosen, price = Policy(admission=Window(8), completion=Linear()), 4 / 2 + 4 / 8
    model, prompts, state = read(chosen)
    room = state.layers[0]
    assert metrics.summary_tokens(room, by_bytes=False) == price
    half = dataclasses.replace(room, ring=dataclasses.replace(room.ring, k=room.ring.k.astype(jnp.bfloat16)))
    assert metrics.summary_tokens(half, by_bytes=True) == 2 * price
    _, steps = forced.steps(model, chosen, state, [[p[-1]] for p in prompts], [[0] * 2] * 2, forced=False)
    np.testing.assert_array_equal(steps.reads[:, :2], np.broadcast_to([8.0, price, 0], (2, 2, 3)))


@pytest.mark.slow
def test_a_dense_layer_does_not_ask_for_a_completion_that_has_nothing_to_say():
    chosen = Policy(selection=Quest(2, chunk=4, dense=1, recent=8), completion=Linear())
    model, prompts, state = read(chosen)
    _, steps = forced.steps(model, chosen, state, [[p[-1]] for p in prompts], [[0] * 2] * 2, forced=False)
    np.testing.assert_array_equal(steps.reads[:, :2, 1], np.full((2, 2), 2.5 / 2))  # one layer of two


def test_roomy_pools_never_grow_and_hold_the_same():
    spec = "knorm + uniform(12) + sinks(2) + recent(4)"
    model, prompts, state = read(spec)
    wide = decode.roomy(policy(spec), state, 16)
    assert decode.reserve(policy(spec), wide, 16, 16) is wide
    for name in ("live_slots", "present"):
        np.testing.assert_array_equal(getattr(metrics, name)(wide), getattr(metrics, name)(state))
    assert metrics.nbytes(wide).total["live"] == metrics.nbytes(state).total["live"]
    feed, target = [[p[-1]] for p in prompts], [[0] * ANSWER] * 2
    one, again = (forced.steps(model, policy(spec), s, feed, target, forced=False)[1] for s in (state, wide))
    np.testing.assert_array_equal(one.best[:, :ANSWER], again.best[:, :ANSWER])
    np.testing.assert_array_equal(one.live[:, :ANSWER], again.live[:, :ANSWER])


def test_pools_for_some_tokens_are_of_few_sizes():
    """The most that a stream can own, halved while it is enough: budgets near each other share a program."""
    sizes = set()
    for budget in (10, 11, 12):
        model, prompts, state = read(spec := f"knorm + uniform({budget}) + sinks(2) + recent(4)")
        fitting = decode.roomy(policy(spec), state, 1, ANSWER)
        assert decode.reserve(policy(spec), fitting, ANSWER, 1) is fitting  # none has to grow
        most, held = (decode.roomy(policy(spec), state, 1), decode.reserve(policy(spec), state, ANSWER, 1))
        count = fitting.layers[0].pools[0].count
        assert count in [-(-most.layers[0].pools[0].count // 2**k) for k in range(8)]
        assert count // 2 < max(layer.pools[0].count for layer in held.layers)
        sizes.add(count)
        feed, target = [[p[-1]] for p in prompts], [[0] * ANSWER] * 2
        one, again = (
            forced.steps(model, policy(spec), s, feed, target, forced=False)[1] for s in (most, fitting)
        )
        np.testing.assert_array_equal(one.best[:, :ANSWER], again.best[:, :ANSWER])
    assert len(sizes) == 1
    assert sizes != {most.layers[0].pools[0].count}


def test_presence_of_a_ring_that_has_turned():
    state = decode.empty(
        tiny.model().network, policy("window(8)"), rows=1, context=tiny.CONTEXT, dtype=jnp.float32, page=8
    )
    state = dataclasses.replace(state, length=jnp.asarray([21], jnp.int32))
    mask = np.asarray(metrics.present(state))[0, 0, 0]
    assert np.flatnonzero(mask).tolist() == list(range(13, 21))
    assert sorted(np.asarray(rings.positions(state.length, 8))[0].tolist()) == list(range(13, 21))


@pytest.mark.parametrize(("steps", "size"), [(1, 512), (512, 512), (513, 4096), (4096, 4096), (4097, 8192)])
def test_walks_come_in_few_sizes(steps, size):
    assert forced.size_class(steps) == size


def test_every_sample_has_draws_of_its_own_whatever_its_batch():
    """Votes of a sample are those of its request's seed, which no other sample has."""
    texts = [tiny.prompt(PROMPT, row) for row in range(3)]
    none = {"needed": np.zeros(PROMPT, bool), "scored": np.zeros(2, int), "labels": (), "bytes": 1}
    samples = [
        (Sample(context="", answer=""), Encoded(context=t, question=[], prefix=[3], answer=[1, 2], **none))
        for t in texts
    ]
    voted, model = policy("gvote(0.5, samples=2, ahead=8)"), tiny.model()
    seeds = [batch.seed_of(encoded) for _, encoded in samples]
    assert len(set(seeds)) == 3
    for some in ([0, 1, 2], [2, 0, 1]):
        part = [samples[i] for i in some]
        result = batch.run(model, voted, part, protocol="agnostic", context=tiny.CONTEXT, rows=3)
        state, _ = decode.prefill(
            model, voted, [texts[i] for i in some], context=tiny.CONTEXT, seeds=[seeds[i] for i in some]
        )
        live = np.asarray(metrics.live_slots(state))
        for at, outcome in enumerate(result.outcomes):
            np.testing.assert_allclose(outcome.heads, live[:, at] / PROMPT)
