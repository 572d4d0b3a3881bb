"""CONF-KV against float64 NumPy: confidence, targets, ranking; a prompt, a chunk and many steps of it all."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from policy_oracle import frame, judge, kept, observe, room

import kvjax
from kvjax import decode, layer, metrics
from kvjax.algebra import Frame, Policy, PolicyError
from kvjax.budgets.confidence import Confidence
from kvjax.budgets.uniform import Uniform
from kvjax.cache import ring as rings
from kvjax.cache.pages import Slots
from kvjax.cache.state import LayerCache, fork
from kvjax.decode import _by_layer, _whole_prompt
from kvjax.policies.conf_kv import ConfKV
from kvjax.types import EMPTY, Heads

# --- how sure ------------------------------------------------------------------------------------


def sure(z: np.ndarray, wh: float, wm: float, wp: float) -> float:
    """The formula, float64."""
    z = z.astype(np.float64)
    p = np.exp(z - z.max()) / np.exp(z - z.max()).sum()
    some = p[p > 0]
    first, second = np.sort(p)[::-1][:2]
    flat = -(some * np.log(some)).sum() / np.log(len(z))
    margin = 1.0 if second == 0 else 1 / (1 + second / first)
    return wh * (1 - flat) + wm * margin + wp * first


def test_confidence_is_the_formula():
    random = np.random.default_rng(0)
    z = random.standard_normal((6, 97)) * np.array([0.01, 1, 3, 9, 1, 1])[:, None]
    z[4] = 0.0  # flat: no entropy to gain, no margin
    z[5, 3:] = -np.inf
    z[5, 7] = 60.0
    for weights in ((0.4, 0.3, 0.3), (1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)):
        budget = Confidence(wh=weights[0], wm=weights[1], wp=weights[2])
        actual = jax.jit(budget.confidence)(jnp.asarray(z, jnp.float32))
        right = [sure(row, *weights) for row in z]
        np.testing.assert_allclose(actual, right, atol=2e-6)
    np.testing.assert_allclose(sure(z[4], 0.4, 0.3, 0.3), 0.15 + 0.3 / 97)  # the oracle, by hand


def test_a_sure_step_is_tight_and_given_tokens_are_loose():
    budget, seen = Confidence(100, 300, threshold=0.5), jnp.asarray([900, 900, 900])
    at = Frame(0, 1, 2, 64.0, jnp.asarray([0.49, 0.5, 0.9]))
    assert budget.targets(at, seen, None)[:, 0].tolist() == [300, 100, 100]
    assert budget.targets(frame(), seen, None)[:, 0].tolist() == [300] * 3


@pytest.mark.parametrize("layers", [1, 2, 5, 12])
@pytest.mark.parametrize("slope", [1.0, 1.5, 4.0])
def test_the_pyramid_falls_linearly_around_its_mean(layers, slope):
    budget, seen = Confidence(97, 211, slope=slope), jnp.asarray([500, 500])
    sure = jnp.asarray([0.0, 1.0])

    @jax.jit
    def at(index):
        return budget.targets(Frame(index, layers, 2, 64.0, sure), seen, None)[:, 0]

    targets = np.asarray([at(index) for index in range(layers)])
    assert targets.mean(axis=0).tolist() == [211, 97]
    line = np.linspace(2 - 1 / slope, 1 / slope, layers) if layers > 1 else np.ones(1)
    assert np.abs(targets - line[:, None] * [211, 97]).max() <= 0.5 + 1e-4
    assert (np.diff(targets, axis=0) < 0).all() == (slope > 1 or layers == 1)
    if layers > 1:
        assert (budget.least, budget.most) == (targets.min(), targets.max())


# --- who goes ------------------------------------------------------------------------------------


def mixed(mass: list[float], pos: list[int], live: list[bool], alpha: float) -> list[float]:
    slots = Slots(
        pos=jnp.asarray([[pos]]),
        live=jnp.asarray([[live]]),
        meta={"mass": jnp.asarray([[mass]], jnp.float32)},
    )
    return np.asarray(ConfKV(alpha).score(None, slots))[0, 0].tolist()


def test_candidates_alone_set_the_scale():
    every = [0.25 * 1.0 + 0, 0.25 * 0.5 + 0.75 * 0.25, 0.75]
    actual = mixed([3, 2, 1, 99], [10, 11, 14, 90], [True, True, True, False], 0.25)
    np.testing.assert_allclose(actual[:3], every)


@pytest.mark.parametrize(
    ("mass", "live", "right"),
    [
        ([5, 1, 1], [True, False, False], [0, 0, 0]),  # one candidate
        ([2, 2, 2], [True, True, True], [0, 0.25, 0.5]),  # equal mass: recency alone
        ([2, 1, 3], [False, False, False], [0, 0, 0]),
    ],
)
def test_what_cannot_be_spread_counts_nothing(mass, live, right):
    np.testing.assert_allclose(mixed(mass, [4, 6, 8], live, 0.5), right)


def test_a_budget_that_acts_once_ranks_the_prompt():
    ones = np.ones((1, 4, 12, 3))
    seen = observe((12,), 12, q=ones, k=ones[:, :2], v=ones[:, :2])
    for alpha, right in (
        (0.0, [7, 8, 9, 10, 11]),
        (1.0, [0, 1, 2, 10, 11]),
    ):  # equal keys: old tokens gather more
        policy = Policy(eviction=ConfKV(alpha, recent=2), budget=Uniform(5))
        assert [kept(x) for x in judge(policy, seen)[0]] == [right] * 2


# --- all of it, step by step ---------------------------------------------------------------------

PROMPTS, T, MORE, STEPS = np.array([14, 9]), 14, np.array([9, 4]), 16
N, K, H, TIGHT, LOOSE, SINKS, P = 4, 2, 8, 7, 12, 1, 3
ALPHA, GAMMA = 0.6, 0.8
random = np.random.default_rng(3)
Q = 1.5 * random.standard_normal((2, T + 9 + STEPS, N, H))
KEYS, VALUES = 1.5 * random.standard_normal((2, 2, T + 9 + STEPS, K, H))
SURE = random.random((STEPS, 2))


class Row:
    """One layer of one row: the tokens it keeps, and the moving average of what they received."""

    def __init__(self, b: int):
        self.b, self.kept, self.mass = b, [], np.zeros(Q.shape[1])

    def read(self, i: int, kept: list[int]) -> np.ndarray:
        """What query i mixes, [N, H]."""
        out, received = np.zeros((N, H)), np.zeros((N, len(self.mass)))
        for n in range(N):
            s = KEYS[self.b, kept, n // (N // K)] @ Q[self.b, i, n] / np.sqrt(H)
            received[n, kept] = np.exp(s - s.max()) / np.exp(s - s.max()).sum()
            out[n] = received[n] @ VALUES[self.b, :, n // (N // K)]
        self.mass = GAMMA * self.mass + (1 - GAMMA) * received.mean(axis=0)
        return out

    def together(self, first: int, count: int) -> None:
        for i in range(first, first + count):
            self.read(i, [*self.kept, *range(first, i + 1)])
        self.kept += range(first, first + count)
        self.cut(first + count, LOOSE)

    def cut(self, seen: int, target: int) -> None:
        free = [p for p in self.kept if SINKS <= p < seen - P]
        a, r = (spread(np.asarray(x, float)) for x in (self.mass[free], free))
        order = sorted(zip(ALPHA * a + (1 - ALPHA) * r, free), key=lambda x: (x[0], -x[1]))
        gone = {p for _, p in order[: max(len(self.kept) - target, 0)]}
        self.kept = [p for p in self.kept if p not in gone]


def spread(x: np.ndarray) -> np.ndarray:
    return (x - x.min()) / (x.max() - x.min()) if len(x) and x.max() > x.min() else np.zeros(len(x))


def heads(at: np.ndarray) -> dict:
    index = np.maximum(at, 0)[..., None, None]
    q, k, v = (jnp.asarray(np.take_along_axis(x, index, 1), jnp.float32) for x in (Q, KEYS, VALUES))
    return {"q": q, "k": k, "v": v, "q_pre": q, "k_pre": k, "hidden": q[..., 0, :]}


def held(cache: LayerCache, b: int, h: int, seen: int) -> dict[int, float]:
    """Position -> mass of what a KV head holds in either room."""
    pages, masses = cache.pages, {}
    for i in range(int(pages.length[b, h, 0])):
        where = int(pages.table[b, h, 0, i // 4]), i % 4
        masses[int(pages.pos[where])] = float(pages.meta["eviction.mass"][where])
    for p in range(seen - P, seen):
        masses[p] = float(cache.ring.meta["eviction.mass"][b, h, p % P])
    return masses


def test_a_prompt_a_chunk_and_steps_are_the_papers_loop():
    budget = Confidence(TIGHT, LOOSE, threshold=0.5)
    policy = Policy(eviction=ConfKV(ALPHA, GAMMA, P), budget=budget, sinks=SINKS)
    ring = rings.empty(2, K, policy.window(99), H, jnp.dtype(jnp.float32), policy.keeps)
    pages = room(2, K, H, entries=5, size=4, meta=policy.keeps)
    assert decode.most_slots(policy, 99, 9) <= 5 * 4
    cache, total = LayerCache(ring=ring, pages=pages, summary=None), jnp.asarray(PROMPTS)

    @jax.jit
    def begin(cache, x, pos, more):
        site = layer.LayerInfo(policy, {}, 0, 1, None, total)
        _, new = layer.prompt(site, Heads(**x), pos)
        cache = layer.store(site, cache, new, total)
        return layer.chunk(site, Heads(**more), cache, total, jnp.asarray(MORE))[1]

    @jax.jit
    def step(cache, x, length, sure):
        site = layer.LayerInfo(policy, {}, 0, 1, None, total, sure)
        _, (cache, read) = layer.step(site, Heads(**x), cache, length, jnp.asarray([True, True]))
        return read.out, cache

    at = np.where(np.arange(T) < PROMPTS[:, None], np.arange(T), EMPTY)
    cache = begin(cache, heads(at), jnp.asarray(at), heads(PROMPTS[:, None] + np.arange(9)))
    rows, sizes = [Row(0), Row(1)], []
    for row, n, more in zip(rows, PROMPTS, MORE):
        row.together(0, n)
        row.together(n, more)
    for i in range(STEPS):
        length = PROMPTS + MORE + i
        mixed, cache = step(cache, heads(length[:, None]), jnp.asarray(length), jnp.asarray(SURE[i]))
        for b, row in enumerate(rows):
            n = int(length[b])
            row.kept.append(n)
            row.cut(n + 1, TIGHT if SURE[i, b] >= 0.5 else LOOSE)
            np.testing.assert_allclose(mixed[b, 0], row.read(n, row.kept), atol=1e-5)
            for h in range(K):
                masses = held(cache, b, h, n + 1)
                assert masses.keys() == set(row.kept)
                np.testing.assert_allclose([masses[p] for p in row.kept], row.mass[row.kept], atol=1e-6)
            sizes.append(len(row.kept))
        # What shared_ranking promises: heads hold the same tokens in the same slots.
        tables, length_ = np.asarray(cache.pages.table), np.asarray(cache.pages.length)
        for b in range(2):
            slots = [
                np.asarray(cache.pages.pos)[tables[b, h, 0]].reshape(-1)[: length_[b, h, 0]] for h in range(K)
            ]
            np.testing.assert_array_equal(*slots)
    falls = -np.diff(np.reshape(sizes, (STEPS, 2)), axis=0)
    assert falls.max() > 2, "no step let several tokens go"
    assert falls.min() < 0, "the cache never grew again"


POLICY = Policy(eviction=ConfKV(recent=6), budget=Confidence(14, 24, threshold=0.5))


@pytest.mark.slow
def test_a_step_obeys_the_logits_that_produced_its_token():
    lengths, text = (40, 30), np.asarray([tiny.prompt(10, 100), tiny.prompt(10, 101)])
    prompts = [tiny.prompt(n, seed) for seed, n in enumerate(lengths)]
    sizes = {"context": tiny.CONTEXT, "page": tiny.PAGE, "chunk_size": 16}
    state, logits = kvjax.prefill(tiny.model(), POLICY, prompts, **sizes)
    assert (np.asarray(metrics.live_slots(state)) == 24).all()
    state = decode.reserve(POLICY, state, 10, 1)
    live, met = np.full(2, 24), set()
    for i, column in enumerate(text.T):
        right = [sure(row, 0.4, 0.3, 0.3) for row in np.asarray(logits)]
        np.testing.assert_allclose(state.confidence, right, atol=1e-5)
        active = np.asarray([True, i != 4])
        arguments = (
            tiny.model().network,
            POLICY,
            tiny.model().params,
            {},
            state,
            column.astype(np.int32),
            active,
        )
        state, new_logits = decode.step_program(*arguments)
        logits = np.where(active[:, None], new_logits, logits)
        live = np.where(active, np.minimum(live + 1, np.where(np.asarray(right) >= 0.5, 14, 24)), live)
        assert (np.asarray(metrics.live_slots(state)) == live[None, :, None]).all()
        met |= set(live.tolist())
    assert {14, 24} < met
    assert fork(state, 1, 3).confidence.tolist() == [float(state.confidence[1])] * 3


def test_chunks_after_the_prompt_read_what_was_kept():
    """Each chunk sees what was held before it, and itself; after it the cache is loose; then logits count."""
    texts = [tiny.prompt(44, 0), tiny.prompt(39, 1)]
    sizes = {"context": tiny.CONTEXT, "page": tiny.PAGE, "chunk_size": 5}
    state, _ = kvjax.prefill(tiny.model(), POLICY, [t[:32] for t in texts], **sizes)
    see = [np.repeat(tiny.causal(len(t))[None], 4, 0).reshape(2, 2, len(t), len(t)) for t in texts]
    ends = [0.0, 0.0]
    for begin in range(32, 44, 5):
        present = np.asarray(metrics.present(state))
        pieces = [t[begin : begin + 5] for t in texts]
        for b, piece in enumerate(pieces):
            rows = slice(begin, begin + len(piece))
            if piece:
                see[b][:, :, rows, :begin] = present[:, b, :, None, :begin]
        state, logits = kvjax.extend(tiny.model(), POLICY, state, pieces)
        assert (np.asarray(metrics.live_slots(state)) == 24).all()
        for b, piece in enumerate(pieces):
            if piece:
                right = tiny.oracle(texts[b], lambda index, head, b=b: see[b][index, head])
                np.testing.assert_allclose(logits[b], right[begin + len(piece) - 1], atol=2e-4)
                ends[b] = sure(right[begin + len(piece) - 1], 0.4, 0.3, 0.3)
        np.testing.assert_allclose(state.confidence, ends, atol=1e-4)
    assert not see[0][0, 0, 40, :32].all(), "nothing was evicted"


# --- the whole of it -----------------------------------------------------------------------------


@pytest.mark.parametrize("more", ["", pytest.param(" + int8(12)", marks=pytest.mark.slow)])
def test_the_embedded_model_writes_and_nothing_is_compiled_for_another_prompt(more, monkeypatch):
    """A program a layer, as deeper models write; ``test_traced`` has that for all layers, on a tiny model."""
    monkeypatch.setattr(_by_layer, "DEEP", 1)
    model = kvjax.load()
    policy = kvjax.policy("conf_kv(recent=8) + confidence(24, loose=48)" + more)
    counts = []
    for text in ("The pass key is 48213. " * 4, "Once upon a time there was a river; nobody knew its name. "):
        ids = (model.text.encode(text) * 4)[: 66 + len(counts)]
        out = kvjax.generate(model, policy, [ids], max_new_tokens=20, stops=())
        assert 1 <= len(out.tokens[0]) <= 20
        assert (np.asarray(metrics.live_slots(out.state)) <= 48).all()
        counts.append((_by_layer.step_layer._cache_size(), _whole_prompt.prompt_layer._cache_size()))
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("conf_kv + confidence(600)", ["tight=600", "loose=512"]),
        ("conf_kv + confidence(0)", ["tight=0"]),
        ("conf_kv + confidence(64)", ["64", "protected", "conf_kv"]),
        ("conf_kv + confidence(128, slope=2.0)", ["64", "protected"]),
        ("conf_kv(recent=60) + confidence(64) + sinks(4)", ["sinks=4", "60"]),
        ("conf_kv + confidence(threshold=1.5)", ["threshold=1.5"]),
        ("conf_kv + confidence(slope=0.5)", ["slope=0.5"]),
        ("conf_kv + confidence(wh=0.5)", ["sum to 1.1"]),
        ("conf_kv + confidence(wh=1.4, wm=-0.4, wp=0.0)", ["wh=1.4"]),
        ("conf_kv(1.5) + confidence", ["alpha=1.5"]),
        ("conf_kv(gamma=1.0) + confidence", ["gamma=1.0"]),
        ("conf_kv(recent=-1) + confidence", ["recent=-1"]),
        ("conf_kv + confidence + write_gate(window=100)", ["conf_kv", "write_gate", "KV heads"]),
        ("tova + uniform(600, every_step) + duo(0.5)", ["tova", "duo", "KV heads"]),
        ("h2o(8, average=True) + uniform(64, every_step)", ["h2o", "after_prompt"]),
    ],
)
def test_refusals_say_what_and_why(spec, words):
    with pytest.raises(PolicyError) as refused:
        kvjax.policy(spec)
    assert all(word in str(refused.value) for word in words)


def test_presets_are_the_method():
    assert kvjax.policy("conf-kv") == Policy(eviction=ConfKV(), budget=Confidence())
    assert kvjax.policy("conf-kv-l").budget.slope > 1
    both = kvjax.policy("conf-kv + int8(64)")
    assert both.storage.name == "int8"
    assert both.window(4096) == 64
    assert decode.most_slots(both, 4096, 1) == 512 - 64 + 1
