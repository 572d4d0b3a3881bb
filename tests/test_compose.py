"""Composition: nothing is lost between the places, and one string says what is composed.

The judge of the first half is a completion that is *exact*: it keeps what a real one would summarise.
Then window, pages and completion together must be full attention, whatever is rejected, evicted or left
unread: any token lost, counted twice or not subtracted shows in the logits.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from tiny import HashAdmit  # noqa: F401

import kvjax
from kvjax import decode
from kvjax.algebra import Completion, Picked, Policy, PolicyError, Selection
from kvjax.budgets.uniform import Uniform
from kvjax.policies.knorm import KNorm
from kvjax.policies.quest import Quest
from kvjax.policies.streaming_llm import Window
from kvjax.policies.topk import TopK
from kvjax.types import EMPTY

LENGTHS, MORE = (44, 27), 10
TEXTS = [tiny.prompt(n + MORE, seed) for seed, n in enumerate(LENGTHS)]


@dataclasses.dataclass(frozen=True, repr=False)
class Exact(Completion):
    """Every absorbed token as it is; a read leaves out the visited positions."""

    name = "exact"

    def empty(self, rows, heads, head_dim, context):
        line = (rows, heads, context)
        return {
            "k": jnp.zeros((*line, head_dim), jnp.float32),
            "v": jnp.zeros((*line, head_dim), jnp.float32),
            "pos": jnp.full(line, EMPTY),
            "n": jnp.zeros(line[:2], jnp.int32),
        }

    def absorb(self, params, summary, k, v, pos, take):
        context = summary["pos"].shape[2]
        slot = jnp.where(take, summary["n"][..., None] + jnp.cumsum(take, axis=-1) - 1, context)
        b, h = jnp.arange(k.shape[0])[:, None, None], jnp.arange(k.shape[1])[None, :, None]
        tokens = {"k": k, "v": v, "pos": pos}
        new = {name: summary[name].at[b, h, slot].set(x, mode="drop") for name, x in tokens.items()}
        return new | {"n": summary["n"] + take.sum(axis=-1)}

    def read(self, params, summary, q, visited):
        b, n, t, h = q.shape
        k, v, pos = summary["k"], summary["v"], summary["pos"]
        see = jnp.arange(pos.shape[2]) < summary["n"][..., None]
        if visited is not None:
            met = (pos[..., None] == visited.pos[:, :, None, :]) & visited.live[:, :, None, :]
            see &= ~met.any(axis=-1)
        s = jnp.einsum("bkgth,bkch->bkgtc", q.reshape(b, k.shape[1], -1, t, h), k) * h**-0.5
        s = jnp.where(see[:, :, None, None, :], s, -jnp.inf)
        top = jnp.maximum(s.max(axis=-1, keepdims=True), -1e30)
        e = jnp.exp(s - top)
        total = e.sum(axis=-1, keepdims=True)
        out = jnp.einsum("bkgtc,bkch->bkgth", e / jnp.where(total > 0, total, 1.0), v)
        return out.reshape(q.shape), (top + jnp.log(total)).reshape(b, n, t)


@dataclasses.dataclass(frozen=True, repr=False)
class Halves(Selection):
    """Two lists: anchors are always read; of the others, every second page, and two slots of three."""

    name = "halves"
    splits = True
    head: int = 3
    tail: int = 5

    def selectable(self, pos, total):
        return (pos >= self.head) & (pos < (total - self.tail)[:, None])

    def select(self, params, q, pages, list_id, total, longest):
        rows, heads, _, entries = pages.table.shape
        odd = q.reshape(rows, heads, -1).sum(axis=-1) > 0
        at = jnp.broadcast_to(jnp.arange(entries), (rows, heads, entries))
        slot = jnp.arange(pages.size) % 3 > 0
        return Picked(
            entries=jnp.where(at % 2 == odd[..., None], at, EMPTY),
            slots=jnp.broadcast_to(slot, (rows, heads, entries, pages.size)),
        )


knorm = {"eviction": KNorm(), "budget": Uniform(20, "every_step")}
once = {"eviction": KNorm(), "budget": Uniform(20)}
quest = {"selection": Quest(chunks=2, chunk=4, dense=1, recent=8)}
halves = {"selection": Halves()}
hashes = {"admission": HashAdmit()}

ON_ARRIVAL = {
    "rejects all": Policy(admission=Window(8), completion=Exact()),
    "rejects and evicts": Policy(**hashes, **knorm, sinks=2, completion=Exact()),
    "quest": Policy(**quest, completion=Exact()),
    "rejects, evicts, quest": Policy(**hashes, **knorm, **quest, sinks=2, completion=Exact()),
    "rejects, evicts, top-k": Policy(
        **hashes, **knorm, selection=TopK(3, sinks=2, tail=6), completion=Exact()
    ),
    "quest with anchors": Policy(selection=Quest(2, 4, 1, 6, sinks=2, tail=6), completion=Exact()),
    "rejects, evicts, two lists": Policy(**hashes, **knorm, **halves, sinks=2, completion=Exact()),
}
WHOLE_PROMPT = {
    "rejects and evicts once": Policy(**hashes, **once, sinks=2, completion=Exact()),
    "evicts once, two lists": Policy(**once, **halves, recent=4, completion=Exact()),
}


def is_full_attention(policy, state, first, model=None):
    """Logits of the prompt's end and of ten steps equal dense attention; φ holds what it must, once."""
    right = [tiny.dense(text, model) for text in TEXTS]
    steps = np.asarray([text[n:] for text, n in zip(TEXTS, LENGTHS)])
    state, logits = tiny.feed(policy, state, steps, tiny=model)
    for row, n in enumerate(LENGTHS):
        np.testing.assert_allclose(np.asarray(first)[row], right[row][n - 1], atol=5e-4)
        np.testing.assert_allclose(logits[row], right[row][n:], atol=5e-4)
    for room in state.layers:
        if room.pages is None:
            continue
        tiny.owned_once(room.pages)
        stored = tiny.held(room.pages)
        for (row, head), slots in stored.items():
            n = int(room.summary["n"][row, head])
            taken = np.asarray(room.summary["pos"])[row, head, :n].tolist()
            assert n > 0
            assert len(set(taken)) == n, "a token was absorbed twice"
            gone = set(range(LENGTHS[row] + MORE - room.ring.window)) - slots.keys()
            assert gone <= set(taken)
            if policy.selection.idle:
                assert gone == set(taken)
        if not policy.selection.idle:
            assert (np.asarray(room.pages.length)[..., -1] > 8).any(), "every read visits everything"


# At the second chunk size two policies, one of each mode, stand for all.
# Whole lists and selections together take half a minute each.
LONG = ("rejects, evicts, quest", "rejects, evicts, top-k", "rejects, evicts, two lists")
CHUNKED = [pytest.param(name, 5, marks=[pytest.mark.slow] * (name in LONG)) for name in ON_ARRIVAL] + [
    ("rejects and evicts", 44),
    ("rejects, evicts, two lists", 44),
]


@pytest.mark.parametrize(("name", "chunk"), CHUNKED)
def test_with_an_exact_completion_nothing_is_lost(name, chunk):
    policy = ON_ARRIVAL[name]
    is_full_attention(policy, *tiny.read(policy, [t[:n] for t, n in zip(TEXTS, LENGTHS)], chunk))


@pytest.mark.parametrize("name", ["rejects and evicts", "rejects, evicts, two lists"])
def test_the_same_token_by_token(name):
    policy, right = ON_ARRIVAL[name], [tiny.dense(text) for text in TEXTS]
    state, _ = tiny.read(policy, [text[:1] for text in TEXTS], 1)
    state = dataclasses.replace(state, total=jnp.asarray(LENGTHS, jnp.int32))
    _, logits = tiny.feed(policy, state, np.asarray([text[1 : min(LENGTHS)] for text in TEXTS]))
    for row in range(2):
        np.testing.assert_allclose(logits[row], right[row][1 : min(LENGTHS)], atol=5e-4)


@pytest.mark.parametrize("name", WHOLE_PROMPT)
def test_nothing_is_lost_after_a_whole_prompt(name):
    policy = WHOLE_PROMPT[name]
    prompts = [text[:n] for text, n in zip(TEXTS, LENGTHS)]
    state, first = kvjax.prefill(tiny.model(), policy, prompts, context=tiny.CONTEXT, page=tiny.PAGE)
    is_full_attention(policy, decode.reserve(policy, state, MORE, 1), first)


@pytest.mark.slow
def test_sliding_layers_of_the_model_keep_their_window_under_a_completion():
    slides, policy = tiny.model(windows=(6, None)), ON_ARRIVAL["rejects and evicts"]
    state, first = tiny.read(policy, [t[:n] for t, n in zip(TEXTS, LENGTHS)], 16, tiny=slides)
    is_full_attention(policy, state, first, slides)


# --- one string ----------------------------------------------------------------------------------


def test_a_string_is_its_parts():
    assert kvjax.policy("window(256) + sinks(4)") == Policy(admission=Window(256), sinks=4)
    assert kvjax.policy("knorm + uniform(64, when=every_step)") == Policy(
        eviction=KNorm(), budget=Uniform(64, "every_step")
    )
    assert kvjax.policy("full") == Policy()
    assert repr(Policy()) == "full"


def test_what_a_preset_brings_may_be_overridden():
    plain, wide = kvjax.policy("snapkv"), kvjax.policy("snapkv + ada(512)")
    assert plain.eviction == wide.eviction
    assert plain.budget != wide.budget == kvjax.policy("ada(512) + snapkv").budget


@pytest.mark.parametrize("name", kvjax.PRESETS)
def test_presets_parse_and_name_themselves(name):
    policy = kvjax.policy(name)
    assert kvjax.policy(repr(policy)) == policy


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("windw(8)", ["windw", "window"]),
        ("adakv(64)", ["adakv", "preset", "snapkv + ada(0.25)"]),
        ("window(8) + window(9)", ["window(8)", "window(9)"]),
        ("window(sise=8)", ["window", "size"]),
        ("window(0)", ["window", "0"]),
        ("uniform(1.5)", ["1.5", "ratio"]),
        ("h2o + uniform(512, when=every_step)", ["cannot serve", "Use h2o(recent=8), or when=after_prompt"]),
        ("h2o(4, average=True) + uniform(512, every_step)", ["Use h2o(recent=4), or"]),
        ("gvote + uniform(512, when=every_step)", ["gvote", "uniform", "after_prompt"]),
        ("knorm + uniform(512, prompt=keep)", ["uniform(512, prompt=keep)", "when=every(64)"]),
        ("snapkv(32) + uniform(16)", ["uniform(16)", "32"]),
        ("window(8) + recent(9)", ["window(8)", "9"]),
        ("window(8) + int8(9)", ["window(8)", "int8(9)"]),
        ("sinks(-1)", ["sinks(-1)"]),
        ("", [""]),
    ],
)
def test_refusals_name_the_parts_and_the_reason(spec, words):
    with pytest.raises(PolicyError) as refused:
        kvjax.policy(spec)
    assert all(word in str(refused.value) for word in words)


def test_a_completion_with_selection_needs_exact_storage():
    with pytest.raises(PolicyError, match="int8.*exact.*quest"):
        Policy(**quest, completion=Exact(), storage=kvjax.policy("int8(8)").storage)
    with pytest.raises(PolicyError, match="takes an Admission"):
        Policy(admission=KNorm())  # type: ignore[arg-type]
