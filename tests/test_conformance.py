"""The laws every method obeys: each EXAMPLES policy lives one short life, and every law looks at it.

The life: three rows of 52, 30 and 5 tokens are prefilled, then 12 tokens are fed to all of them. Laws
that change the state replay the same compiled step from the same start.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from disturbed import dead, order, paged, poisoned, shuffled, spoil, with_pages

import kvjax
from kvjax import decode
from kvjax.algebra import Every, Frame, Policy
from kvjax.cache import pages as paging
from kvjax.cache.state import KVState

LENGTHS, STEPS = (52, 30, 5), 12
COMBINED = (
    # Pages in two pools: the newest 10 retained tokens exact, of which the ring holds 6.
    "conf_kv(recent=6) + int8(10) + confidence(14, loose=24, threshold=0.5)",
    # Two learned parts: what the gate admits, the ranker ranks, at every step and chunk by chunk.
    "write_gate(0.5, window=16) + kvp(2, recent=6) + uniform(28, every_step)",
    # How many is voted, who is learned.
    "kvp(2, recent=6) + gvote(0.5, samples=2, ahead=8)",
    "kvp(2, recent=6) + quest(chunks=3, chunk=4, dense=1, recent=8) + int8(8) + uniform(24)",
    # φ over what a read leaves out, and over what is rejected and dropped.
    "topk(5, sinks=2, tail=6) + phi(4)",
    "conf_kv(recent=6) + int8(10) + confidence(14, loose=24, threshold=0.5) + phi(4)",
    # All that is held is ranked again, and heads divide a layer's slots again.
    "snapkv(6) + int8(12) + ada(20, when=every(4)) + sinks(2)",
    "knorm + uniform(8, when=every(4), prompt=keep)",
    # Codes that tokens come to one by one, out of exact pages.
    "tova + uniform(24, every_step) + kivi(2, recent=10, group=4)",
    "tova + uniform(24, every_step) + int8(10, hadamard=True)",
    "topk(5, sinks=2, tail=6) + kivi(4, recent=6, group=4)",
)
"""Parts of several methods, where a pool exists only for the combination."""

EXAMPLES = [policy for method in kvjax.methods() for policy in method.examples]
# Laws that take a state apart and put it together know one memory; ``policies/test_host.py`` has its own.
EXAMPLES = [policy for policy in EXAMPLES if not policy.storage.hosted]
EXAMPLES += [kvjax.policy(spec) for spec in COMBINED]
SLOW = (
    "kvp(2, recent=6) + gvote(0.5, samples=2, ahead=8)",
    "random(1) + uniform(40, when=every(8)) + recent(8)",
    "int4(16)",
    "int4(16, hadamard=True)",
    "fp8(16)",
    "kivi(4, recent=2, group=4)",
    "tova + uniform(24, every_step) + kivi(2, recent=10, group=4)",
    "tova + uniform(24, every_step) + int8(10, hadamard=True)",
    "topk(5, sinks=2, tail=6) + kivi(4, recent=6, group=4)",
    "draft(topk(5, sinks=2, tail=6), most=2)",
    "window(24) + sinks(4)",
    # Places and modes that other examples show, too; methods' own tests hold them to an oracle.
    "answer_window(8) + uniform(24) + sinks(2)",
    "conf_kv(0.5, recent=6) + confidence(14, loose=24, threshold=0.5)",
    "conf_kv(0.8, gamma=0.7, recent=4) + confidence(18, loose=26, threshold=0.5, slope=2.0)",
    "conf_kv(0.5, recent=6) + int8(10) + confidence(14, loose=24, threshold=0.5) + phi(4)",
    "knorm + uniform(8, when=every(4), prompt=keep)",
    "cap(5.0, ahead=16, sinks=2) + uniform(24)",
    "compactor(0.5, chunk=16, first=2, last=3, sketch=6) + uniform(24)",
    "leverage(6) + uniform(24) + sinks(2)",
    "cur(8, sinks=2) + uniform(24)",
    "expected_attention(16, sinks=2, covariance=False, stored=True) + uniform(24)",
    "lagkv(8, sinks=2, cross=True) + ada(20)",
    "qfilter + uniform(24)",
    "qfilter + ada(20) + sinks(2)",
    "trim_kv + ada(20) + sinks(2)",
    "kvzap(-5, window=16, prefill=True) + sinks(2)",
    "kvzap_scores + ada(20) + sinks(2)",
    "fast_kvzip(2) + ada(20, floor=0)",
    "fast_kvzip_gate(0.3, window=16) + sinks(2)",
    "duo(0.25, window=8, prefill=False) + sinks(2)",
    "expected_attention(16, sinks=2, newest=8) + uniform(24, when=every(8)) + recent(4)",
    "keydiff + uniform(24, when=every(8)) + recent(4)",
    "snapkv(8) + uniform(24, when=every(4)) + sinks(2)",
    "expected_attention(16, sinks=2) + uniform(24)",
    "full",
    "gvote(0.5, samples=2, ahead=8)",
    "gvote(0.5, samples=2, ahead=8) + uniform(24) + sinks(2)",
    "gvote(0.5, samples=inf, ahead=8)",
    "h2o(None) + uniform(24)",
    "h2o(8) + uniform(21, when=every_step) + sinks(2)",
    "int8(16)",
    "keydiff + chunks(7) + uniform(24)",
    "keydiff + uniform(24)",
    "kvp(2, recent=6) + critical(0.25) + ada(20)",
    "kvzip(16, sinks=2, instruction=(5, 7, 9)) + uniform(24)",
    "kvzip(30, sinks=0, instruction=(3,)) + critical + uniform(24)",
    "kvzip(16, sinks=2, instruction=(5, 7)) + overall(20, floor=0.2)",
    "snapkv(8) + critical + uniform(24)",
    "knorm + uniform(32)",
    "knorm + uniform(40, when=every_step) + sinks(4) + recent(8)",
    "kvp(2, recent=6) + uniform(24)",
    "kvp(2, recent=6) + uniform(28, when=every_step)",
    "kvp(0, recent=4) + ada(20)",
    "kvp(4, recent=6) + pyramid(24)",
    "lagkv(8, sinks=2) + uniform(24)",
    "magicpig(3, tables=12, sinks=2, tail=6)",
    "quest(3, chunk=4, dense=1, recent=8)",
    "quest(2, chunk=4, dense=1, recent=6, sinks=2, tail=6)",
    "random(0) + uniform(0.5) + sinks(2)",
    "scissorhands(20, recent=4) + uniform(24)",
    "snapkv(8) + uniform(24)",
    "snapkv(8) + pyramid(24) + sinks(2)",
    "window(24)",
    "topk(5, sinks=2, tail=6)",
    "topk_pages(8, chunk=4, sinks=2, tail=6)",
    "tova + uniform(24)",
    "tova + uniform(22, when=every_step)",
    "write_gate(0.5, window=24) + sinks(2)",
)
"""Examples that live in the slow tests. The others cover every place and mode; new methods run by default."""


def each(policies: list[Policy]) -> pytest.MarkDecorator:
    """Parametrised over policies."""
    slow = {kvjax.policy(spec) for spec in SLOW}
    cases = [pytest.param(p, id=repr(p), marks=[pytest.mark.slow] * (p in slow)) for p in policies]
    return pytest.mark.parametrize("policy", cases)


every_policy = each(EXAMPLES)


@dataclasses.dataclass(frozen=True)
class Life:
    """What happened: states as NumPy trees after the prompt and after every step, logits of each."""

    prompts: list[list[int]]
    states: list[KVState]
    logits: np.ndarray  # [B, 1 + STEPS, V]

    def after(self, steps: int) -> KVState:
        """A fresh copy of the state after so many steps."""
        return jax.tree.map(lambda x: jnp.array(x, copy=True), self.states[steps])

    @property
    def tokens(self) -> np.ndarray:
        """What was fed after the prompt, [B, STEPS]."""
        return np.asarray([tiny.prompt(STEPS, 100 + row) for row in range(len(self.prompts))])


def kv_heads() -> int:
    """Of the model, which is another one in ``real/test_laws.py``."""
    return tiny.model().network.num_kv_heads


def prefilled(policy: Policy, prompts: list[list[int]]) -> tuple[KVState, jax.Array]:
    """The real prefill, with random weights for the parts that learn."""
    sizes = {"context": tiny.CONTEXT, "page": tiny.PAGE, "chunk_size": 16}
    return kvjax.prefill(tiny.model(), policy, prompts, **sizes, weights=tiny.weights(policy))


def begin(policy: Policy, prompts: list[list[int]]) -> tuple[KVState, np.ndarray]:
    """The real prefill, with pages for the steps that follow."""
    state, logits = prefilled(policy, prompts)
    return decode.reserve(policy, state, STEPS, 1), np.asarray(logits)


@functools.cache
def live(policy: Policy) -> Life:
    """The life of one policy, lived once."""
    prompts = [tiny.prompt(n, seed) for seed, n in enumerate(LENGTHS)]
    state, first = begin(policy, prompts)
    life = Life(prompts, [jax.device_get(state)], first)
    logits = [first[:, None]]
    for column in life.tokens.T:
        state, output = tiny.feed(policy, state, column[:, None])
        life.states.append(jax.tree.map(np.array, state))
        logits.append(output)
    return dataclasses.replace(life, logits=np.concatenate(logits, axis=1))


def same(
    policy: Policy,
    state: KVState,
    life: Life,
    *,
    rows: tuple[int, ...] = (0, 1, 2),
    at: int = 0,
    atol: float = 2e-4,
) -> None:
    """Six steps from this state read and keep what the life read and kept after ``at``, in these rows."""
    after, logits = tiny.feed(policy, state, life.tokens[:, at : at + 6])
    rows_ = list(rows)
    np.testing.assert_allclose(logits[rows_], life.logits[rows_, at + 1 : at + 7], atol=atol)
    for pages, expected in zip(paged(after), paged(life.states[at + 6])):
        left, right = tiny.held(pages), tiny.held(expected)
        for (row, head), slots in right.items():
            if row in rows:
                assert left[row, head].keys() == slots.keys()
                for pos, values in slots.items():
                    for a, b in zip(left[row, head][pos], values):
                        np.testing.assert_allclose(a, b, atol=atol)


# --- a value, and a legal loop carry -------------------------------------------------------------


@every_policy
def test_equal_policies_are_one_value_and_repr_is_their_name(policy):
    again = kvjax.policy(repr(policy))
    assert again == policy
    assert hash(again) == hash(policy)
    assert repr(again) == repr(policy)
    assert dataclasses.replace(policy, sinks=policy.sinks + 1) != policy


@every_policy
def test_state_is_a_legal_loop_carry(policy):
    state = live(policy).after(0)
    before = jax.tree.map(lambda x: (x.shape, x.dtype, x.aval.weak_type), state)
    tokens, active = np.zeros(3, np.int32), np.ones(3, bool)
    arguments = tiny.model().network, policy, tiny.model().params, tiny.weights(policy)
    step = functools.partial(decode.step, *arguments)
    after = jax.eval_shape(step, state, tokens, active)[0]
    assert jax.tree.structure(after) == jax.tree.structure(state)
    assert jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), after) == before


# --- how much, and who ---------------------------------------------------------------------------


def target(
    policy: Policy, layer: int, prompt: int, length: int, confidence: float | None = None
) -> int | None:
    """The mean target of a layer's KV heads, as the budget says it; None where only the tokens' scores know.

    That budgets say the right thing is the business of their own tests, against their papers.
    """
    network, storage = tiny.model().network, policy.storage
    slot = 2 * storage.width(network.head_dim) * storage.dtype(jnp.dtype(jnp.float32)).itemsize
    sure = None if confidence is None else jnp.asarray([confidence])
    place = (layer, network.num_layers, network.num_kv_heads, slot)
    frame = Frame(*place, sure, policy.protected, prompt=jnp.asarray([prompt]))
    seen = jnp.asarray([length])
    if policy.budget.from_scores or policy.budget.learns:
        mean = policy.budget.layer_mean(frame, seen)
        return None if mean is None else int(mean[0])
    return int(policy.budget.targets(frame, seen, None)[0, 0])


@every_policy
def test_live_slots_are_what_the_budget_says(policy):
    life, looked, learned = live(policy), 0, []
    for steps, state in enumerate(life.states):
        of_rows = dict.fromkeys(LENGTHS, 0)
        for layer, room in enumerate(state.layers):
            if room.pages is None:
                continue
            w, admit = room.ring.window, room.ring.admit
            at = tiny.places(state.length, w)
            slots = tiny.held(*room.pools)
            for row, prompt in enumerate(LENGTHS):
                seen, counts = prompt + steps, []
                for head in range(kv_heads()):
                    stored = np.asarray(sorted(slots[row, head]))
                    ring = at[row][at[row] >= 0]
                    if (
                        policy.budget.limited and policy.budget.when == "after_prompt"
                    ):  # of the prompt, what has not been refused
                        allowed = admit[row, head][at[row] >= 0]
                        counts.append((stored < prompt).sum() + ((ring < prompt) & allowed).sum())
                    else:
                        counts.append(len(stored) + len(ring))
                logits = policy.budget.needs_logits and steps > 0
                confidence = float(life.states[steps - 1].confidence[row]) if logits else None
                check_counts(policy, layer, prompt, seen, w, counts, confidence)
                of_rows[prompt] += sum(counts)
                learned += counts if row == 0 and policy.admission.learns else []
                looked += 1
        if policy.budget.over_layers:
            heads, least = len(state.layers) * kv_heads(), policy.sinks + policy.protects
            means = {prompt: max(target(policy, 0, prompt, prompt), least) for prompt in LENGTHS}
            assert of_rows == {prompt: heads * min(prompt, mean) for prompt, mean in means.items()}
    if learned:
        least, most = policy.sinks + policy.window(tiny.CONTEXT), LENGTHS[0] + STEPS
        assert min(learned) < most - STEPS, "every token was admitted"
        assert max(learned) > least, "no token was admitted"
    assert looked or policy.window(tiny.CONTEXT) == tiny.CONTEXT or not policy.paged(tiny.CONTEXT)


def check_counts(
    policy: Policy, layer: int, prompt: int, seen: int, w: int, counts: list[int], confidence: float | None
) -> None:
    if policy.admission.learns:
        assert all(min(seen, policy.sinks + w) <= n <= seen for n in counts)
    elif not policy.budget.limited:
        most = policy.sinks + w if policy.admission.rejects_all else seen
        assert counts == [min(seen, most)] * kv_heads()
    elif policy.budget.when == "after_prompt":
        mean, protected = target(policy, layer, prompt, prompt), policy.sinks + policy.protects
        if mean is None or policy.budget.over_layers or policy.budget.learns:
            assert all(min(prompt, protected) <= n <= prompt for n in counts)
        else:
            assert sum(counts) == kv_heads() * min(prompt, max(mean, protected))
        if not policy.budget.from_scores and not policy.budget.learns:
            assert len(set(counts)) == 1
    else:
        late = seen % policy.budget.when.k if isinstance(policy.budget.when, Every) else 0
        if policy.budget.from_scores:  # a head takes nothing back, so all may hold fewer
            most = max(target(policy, layer, prompt, seen), policy.sinks + w) + late
            assert sum(counts) <= kv_heads() * most
            return
        most = max(target(policy, layer, prompt, seen, confidence), policy.sinks + w)
        # After a step with a small target a larger one is filled one by one.
        least = target(policy, layer, prompt, seen, 1.0) if policy.budget.needs_logits else most
        assert all(min(seen, least) <= n <= most + late for n in counts)


@every_policy
def test_sinks_and_window_are_there_and_no_position_is_held_twice(policy):
    life = live(policy)
    for steps, state in enumerate(life.states):
        assert (state.length == np.asarray(LENGTHS) + steps).all()
        for room in state.layers:
            assert room.ring.window >= policy.protects
            at = tiny.places(state.length, room.ring.window)
            for row, seen in enumerate(state.length):
                ring = set(at[row][at[row] >= 0].tolist())
                assert ring == set(range(max(0, seen - room.ring.window), seen))
                for head in range(kv_heads()):
                    stored = tiny.held(*room.pools)[row, head].keys() if room.pools else set()
                    assert not ring & stored
                    assert all(0 <= pos < seen for pos in stored)
                    assert set(range(min(policy.sinks, seen))) <= ring | stored


# --- order, dead slots, neighbours ---------------------------------------------------------------


paged_policy = each([p for p in EXAMPLES if p.paged(tiny.CONTEXT)])


# Codes of few bits change visibly where a slot moves into another page, and the order decides which moves.
COARSE = [p for p in EXAMPLES if p.decides_later and p.storage.name in ("int4", "kivi")]


@each([p for p in EXAMPLES if p.paged(tiny.CONTEXT) and p not in COARSE])
def test_permuting_slots_changes_nothing(policy):
    life, random = live(policy), np.random.default_rng(3)
    # A chunk is chosen as a whole; keys of a group share a scale.
    group = min(getattr(policy.selection, "chunk", tiny.PAGE), getattr(policy.storage, "group", tiny.PAGE))
    state = life.after(0)
    together = policy.eviction.shared_ranking and policy.decides_later
    moved = [shuffled(p, random, group, together) for p in paged(state)]
    for old, new in zip(paged(state), moved):
        tiny.owned_once(new)
        assert order(old) != order(new), "nothing was permuted"
    # Codes are rounded once more where a slot moves into another page, and which one moves depends on order.
    rounded = not policy.storage.exact and policy.decides_later
    same(policy, with_pages(state, moved), life, atol=0.05 if rounded else 2e-4)


def telling(state: KVState) -> bool:
    """Are there dead slots in owned pages, and free pages, in every layer? Else the law says nothing."""
    return all(dead(p)[np.asarray(p.refs) > 0].any() and (p.refs == 0).any() for p in paged(state))


@every_policy
def test_contents_of_dead_slots_change_nothing(policy):
    life = live(policy)
    at = next(steps for steps in range(3) if telling(life.states[steps]))
    state = life.after(at)
    state = with_pages(state, [poisoned(p) for p in paged(state)])
    rooms, unwritten = [], 0
    for room in state.layers:
        ring = room.ring
        empty = tiny.places(state.length, ring.window) < 0
        unwritten += empty.sum()
        hole = np.broadcast_to(empty[:, None, :], ring.admit.shape)
        ring = dataclasses.replace(
            ring,
            k=spoil(ring.k, hole),
            v=spoil(ring.v, hole),
            admit=jnp.asarray(np.asarray(ring.admit) | hole),
            meta={n: spoil(x, hole) for n, x in ring.meta.items()},
        )
        rooms.append(dataclasses.replace(room, ring=ring))
    assert unwritten or state.layers[0].ring.window <= min(LENGTHS)
    same(policy, dataclasses.replace(state, layers=tuple(rooms)), life, at=at)


@every_policy
def test_one_row_never_affects_another(policy):
    life = live(policy)
    others = [list(prompt) for prompt in life.prompts]
    others[1] = tiny.prompt(LENGTHS[1], 77)
    state, first = begin(policy, others)
    assert np.abs(first[1] - life.logits[1, 0]).max() > 0.1, "the other row did not change"
    np.testing.assert_allclose(first[[0, 2]], life.logits[[0, 2], 0], atol=2e-4)
    same(policy, state, life, rows=(0, 2))


@every_policy
def test_inactive_rows_leave_no_trace(policy):
    life = live(policy)
    active = np.asarray([True, False, True])
    state, logits = tiny.feed(policy, life.after(0), life.tokens[:, :6], active=active)
    np.testing.assert_allclose(logits[[0, 2]], life.logits[[0, 2], 1:7], atol=2e-4)
    assert state.length.tolist() == [LENGTHS[0] + 6, LENGTHS[1], LENGTHS[2] + 6]
    for room, before in zip(state.layers, life.states[0].layers):
        for new, old in zip(jax.tree.leaves(room.ring), jax.tree.leaves(before.ring)):
            np.testing.assert_array_equal(np.asarray(new)[1], old[1])
        if room.pages is not None:
            now, earlier = tiny.held(*room.pools), tiny.held(*before.pools)
            for head in range(kv_heads()):
                assert jax.tree.all(jax.tree.map(np.array_equal, now[1, head], earlier[1, head]))


# --- pages ---------------------------------------------------------------------------------------

_clear = jax.jit(paging.clear)


@paged_policy
def test_every_page_has_one_owner_and_comes_back(policy):
    life = live(policy)
    for state in life.states:
        for pages in paged(state):
            tiny.owned_once(pages)
    for pages in paged(life.states[-1]):
        assert int(pages.n_free) < pages.count, "no page was ever owned: the law would say nothing"
        one = _clear(pages, np.asarray([False, True, False]))
        tiny.owned_once(one)
        left, before = tiny.held(one), tiny.held(pages)
        for (row, head), slots in left.items():
            assert slots.keys() == (set() if row == 1 else before[row, head].keys())
        none = _clear(pages, np.ones(3, bool))
        tiny.owned_once(none)
        assert int(none.n_free) == none.count


@paged_policy
def test_pools_fit_what_they_hold_after_prefill(policy):
    state, _ = prefilled(policy, live(policy).prompts)
    for p in paged(state):
        per_page = sum(x.nbytes for x in jax.tree.leaves((p.k, p.v, p.pos, p.meta))) / p.count
        extra = sum(x.nbytes for x in jax.tree.leaves((p.scales, p.summary))) / p.count
        heads = p.length.shape[0] * p.length.shape[1]
        owned = p.count - int(p.n_free)
        live_bytes = int(p.length.sum()) / p.size * per_page + owned * extra
        assert p.count * (per_page + extra) <= 1.25 * live_bytes + heads * (per_page + extra)


# --- beside generate ------------------------------------------------------------------------------

BESIDE = ("wg-kv", "topk-phi")
"""Presets of the default run: a learned admission, and a selection with φ."""


@pytest.mark.parametrize(
    "preset", [pytest.param(name, marks=[pytest.mark.slow] * (name not in BESIDE)) for name in kvjax.PRESETS]
)
def test_a_flax_module_writes_what_generate_writes(preset):
    from flax import nnx

    from kvjax.flax import CausalLM

    policy, prompts = kvjax.policy(preset), [tiny.prompt(n, seed) for seed, n in enumerate(LENGTHS)]
    if policy.eviction.replays:  # the tiny model has no tokenizer
        ids = dataclasses.replace(policy.eviction, instruction=(5, 7))
        policy = dataclasses.replace(policy, eviction=ids)
    shared = {"weights": tiny.weights(policy), "page": 16, "chunk_size": 16}  # pages hold Quest's chunks
    right = kvjax.generate(tiny.model(), policy, prompts, max_new_tokens=6, stops=(), **shared).tokens
    lm = CausalLM(tiny.model(), policy, batch=3, context=tiny.CONTEXT, **shared)
    tokens, step = [lm.prefill(prompts).argmax(-1)], nnx.jit(lambda lm, tokens: lm(tokens).argmax(-1))
    lm.reserve(5)
    for _ in range(5):
        tokens.append(step(lm, tokens[-1]))
    assert np.stack(tokens, axis=1).tolist() == right
