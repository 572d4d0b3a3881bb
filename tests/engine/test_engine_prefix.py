"""Which states may stand for the beginning of another text: the rule, held against every example."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import tiny

import kvjax
from kvjax import catalogue, decode
from kvjax.engine.prefix import HeldKeys, Prefix, Prefixes, generated_too, shareable

CHUNK, CONTEXT = 16, 96
RULE = {  # policy: (shared at chunk borders, generated tokens too)
    "full": (True, True),
    "window(24) + sinks(4)": (True, True),
    "write_gate(0.5, window=16)": (True, True),
    "duo(0.5, window=16) + sinks(4)": (True, True),
    "int8(16)": (True, False),  # a chunk sees itself exactly, a step sees codes
    "quest(3, chunk=4, recent=8)": (True, False),  # a prompt is read whole, an answer selectively
    "knorm + uniform(24, every_step)": (True, False),  # a chunk evicts once, steps one by one
    "conf_kv(recent=8) + confidence(20, loose=31)": (False, False),  # learns mass from the prompt as a whole
    "snapkv(8) + uniform(0.5)": (False, False),  # judged by the prompt's last queries
    "snapkv(8) + uniform(24, every(4))": (False, False),
    "knorm + uniform(0.5)": (False, False),  # a share of the whole prompt
    "h2o(recent=8) + uniform(24, every_step)": (False, False),  # mass is learned from the prompt as a whole
    "window(24, prefill=False)": (False, False),
}
QUICK = ("int8(16)",)
EVERY = [p for method in catalogue.methods() for p in method.examples if repr(p) not in RULE]
EVERY = [p for p in EVERY if not p.storage.hosted]  # refused there


@pytest.mark.parametrize("spec", RULE)
def test_the_rule(spec):
    policy = kvjax.policy(spec)
    assert (shareable(policy), generated_too(policy)) == RULE[spec]


def test_a_prefix_leaves_a_token_to_be_read():
    """A prefix has no logits, so the prompt's last token is read whatever is kept."""
    policy, key, tokens = kvjax.policy("full"), ("full", ""), np.arange(40, dtype=np.int32)
    state = decode.empty(tiny.model().network, policy, rows=1, context=CONTEXT, dtype=np.float32)
    prefixes = Prefixes(1 << 30)
    assert prefixes.borders(key, tokens[:32], CHUNK) == [16]
    assert prefixes.borders(key, tokens[:33], CHUNK) == [32]
    kept = Prefix(key=key, tokens=tokens[:32], state=state)
    prefixes.keep(kept)
    assert prefixes.find(key, tokens[:33]) is kept
    assert prefixes.find(key, tokens[:32]) is None


def test_keys_of_a_prompt_are_its_owners_alone():
    tokens = np.arange(90, dtype=np.int32)
    prefixes = Prefixes(1 << 30)
    assert [prefixes.worth_keys(owner, tokens) for owner in ("ann", "bob", "ann")] == [False, False, True]
    layer = np.zeros((1, 2, 90, 8), np.float32)
    for owner in ("ann", "bob"):
        prefixes.keep_keys(HeldKeys(tokens=tokens, owner=owner, keys=[(layer, layer)]))
        found = prefixes.find_keys(owner, tokens, 1)
        assert found is not None
        assert (found[0].owner, found[1]) == (owner, 89)
    assert prefixes.find_keys("eve", tokens, 1) is None


def compared(state: kvjax.KVState) -> list[np.ndarray]:
    """All that decides what comes after: rings where they hold something, lists, counts."""
    arrays = [np.asarray(state.length)]
    for layer in state.layers:
        window = min(int(state.length[0]), layer.ring.window)
        slots = np.arange(int(state.length[0]) - window, int(state.length[0])) % layer.ring.window
        arrays += [np.asarray(x)[:, :, slots] for x in (layer.ring.k, layer.ring.v, layer.ring.admit)]
        arrays += [np.asarray(leaf) for leaf in jax.tree.leaves(layer.summary)]
        for (_, _), slots in sorted(tiny.held(*layer.pools).items()):
            arrays += [np.asarray(x) for pos in sorted(slots) for x in (pos, *slots[pos])]
    return arrays


def read(policy: kvjax.Policy, tokens: list[int]) -> kvjax.KVState:
    how = {"context": CONTEXT, "chunk_size": CHUNK, "page": tiny.PAGE, "weights": tiny.weights(policy)}
    return decode.prefill(tiny.model(), policy, [tokens], **how)[0]


def marked(policies: list, quick: tuple[str, ...]) -> list:
    slow = [pytest.mark.slow]
    return [pytest.param(p, marks=[] if repr(p) in quick else slow, id=repr(p)) for p in policies]


CHUNKED = [p for p in [*map(kvjax.policy, RULE), *EVERY] if shareable(p)]


@pytest.mark.parametrize("policy", marked(CHUNKED, QUICK))
def test_at_a_border_the_state_does_not_depend_on_what_follows(policy):
    """What stands after two chunks is what stood there on the way to a longer text.

    The same slots; their values up to the order in which the pages of a KV head are added up.
    """
    prompt = tiny.prompt(3 * CHUNK, 5)
    short = read(policy, prompt[: 2 * CHUNK])
    long = read(policy, prompt)
    again, _ = decode.extend(tiny.model(), policy, short, [prompt[2 * CHUNK :]], weights=tiny.weights(policy))
    for left, right in zip(compared(again), compared(long), strict=True):
        np.testing.assert_allclose(left, right, atol=2e-5)


ANSWERS = [p for p in [*map(kvjax.policy, RULE), *EVERY] if generated_too(p)]


@pytest.mark.parametrize("policy", marked(ANSWERS, ()))
def test_generated_tokens_leave_what_they_would_as_a_prompt(policy):
    prompt, answer = tiny.prompt(40, 6), tiny.prompt(20, 7)
    state = decode.reserve(policy, read(policy, prompt), len(answer), 1)
    stepped, _ = tiny.feed(policy, state, np.asarray([answer]))
    for left, right in zip(compared(stepped), compared(read(policy, [*prompt, *answer])), strict=True):
        np.testing.assert_allclose(left, right, atol=2e-5)
