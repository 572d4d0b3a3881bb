"""The cache computes what it claims: attention under the policy's mask, by every route to the same state.

The judge is ``tiny.oracle``: the whole model once more in float64 NumPy, with a mask
j <= i and (i - j < W or admitted_j) in place of a cache.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import tiny
from tiny import HashAdmit, W, hashed  # noqa: F401

import kvjax
from kvjax import decode
from kvjax.algebra import Every, Policy
from kvjax.budgets.uniform import Uniform
from kvjax.models.decoder import dense_logits
from kvjax.policies.knorm import KNorm
from kvjax.policies.streaming_llm import Window
from kvjax.storage.int8 import Int8

LENGTHS, MORE = (44, 27), 12
TEXTS = [tiny.prompt(n + MORE, seed) for seed, n in enumerate(LENGTHS)]


POLICIES = {
    "full": Policy(),
    "window": Policy(admission=Window(W), sinks=2),
    "hash": Policy(admission=HashAdmit(), sinks=1),
    "int8": Policy(storage=Int8(recent=W)),
}
# INT8 rounds keys and values by at most 1/254 of a channel's largest; logits here have a spread of 2.
TOLERANCE = {"int8": 0.15}
# 13 is more than a window, and no multiple of it: the ring begins anywhere.
CHUNKS = {"full": (1, 44), "window": (1, 4, 8, 13, 44), "hash": (1, 4, 8, 13, 32, 44), "int8": (1, 8, 44)}
cases = [(name, chunk) for name, chunks in CHUNKS.items() for chunk in chunks]


def mask(name: str, length: int):
    """What the policy says is visible, per layer and head."""
    j = np.arange(length)

    def see(_: int, head: int) -> np.ndarray:
        if name in ("full", "int8"):
            return tiny.causal(length)
        kept = (j < POLICIES[name].sinks) | (hashed(j, head) if name == "hash" else False)
        return tiny.causal(length, W) | (tiny.causal(length) & kept)

    return see


def expected(name: str) -> list[np.ndarray]:
    """Logits [N + MORE, V] of each text."""
    return [tiny.oracle(text, mask(name, len(text))) for text in TEXTS]


def close(name: str, actual: np.ndarray, right: np.ndarray) -> None:
    np.testing.assert_allclose(actual, right, atol=TOLERANCE.get(name, 2e-4))


def prompts() -> list[list[int]]:
    return [text[:n] for text, n in zip(TEXTS, LENGTHS)]


def more() -> np.ndarray:
    return np.asarray([text[n:] for text, n in zip(TEXTS, LENGTHS)])


def test_the_masks_differ():
    """Otherwise equality would prove nothing."""
    full, window, admitted = (expected(name)[0] for name in ("full", "window", "hash"))
    assert min(np.abs(full - window)[20:].max(), np.abs(admitted - window)[20:].max()) > 0.5
    assert len(set(full.argmax(-1))) > 10


@pytest.mark.parametrize(("name", "chunk"), cases, ids=str)
def test_every_chunk_size_is_the_dense_mask(name, chunk):
    right = expected(name)
    state, logits = tiny.read(POLICIES[name], prompts(), chunk)
    close(name, logits, np.stack([r[n - 1] for r, n in zip(right, LENGTHS)]))
    state, logits = tiny.feed(POLICIES[name], state, more())
    for row, n in enumerate(LENGTHS):
        close(name, logits[row], right[row][n:])
    assert state.length.tolist() == [n + MORE for n in LENGTHS]


@pytest.mark.parametrize("name", POLICIES)
def test_decoding_all_along_is_prefill_and_decode(name):
    """One prompt token, then only steps; the shorter row stops being active where its text ends."""
    right, ends = expected(name), [len(text) for text in TEXTS]
    state, first = tiny.read(POLICIES[name], [text[:1] for text in TEXTS], 1)
    close(name, first, np.stack([r[0] for r in right]))
    columns = decode.padded(TEXTS, max(ends))[:, 1:]
    state, both = tiny.feed(POLICIES[name], state, columns[:, : ends[1] - 1])
    state, rest = tiny.feed(POLICIES[name], state, columns[:, ends[1] - 1 :], active=[True, False])
    close(name, np.concatenate([both[0], rest[0]]), right[0][1:])
    close(name, both[1], right[1][1:])
    assert state.length.tolist() == ends
    by_chunks, _ = tiny.feed(
        POLICIES[name], tiny.read(POLICIES[name], prompts(), CHUNKS[name][-1])[0], more()
    )
    for ours, theirs in zip(state.layers, by_chunks.layers):
        if ours.pages is not None:
            left, other = tiny.held(ours.pages), tiny.held(theirs.pages)
            assert {s: set(x) for s, x in left.items()} == {s: set(x) for s, x in other.items()}


def test_one_program_for_all_layers_is_the_dense_mask():
    """``decode.step_program``; everywhere else a layer is a program, as in prefill."""
    policy, model = POLICIES["hash"], tiny.model()
    state, logits = tiny.read(policy, prompts(), CHUNKS["hash"][-1])
    logits_read = [logits]
    for column in more().astype(np.int32).T:
        state, logits = decode.step_program(
            model.network, policy, model.params, {}, state, column, np.ones(2, bool)
        )
        logits_read.append(logits)
    for row, right in enumerate(expected("hash")):
        close("hash", np.stack(logits_read, axis=1)[row], right[LENGTHS[row] - 1 :])


def test_full_is_the_models_own_attention():
    tokens = np.asarray([TEXTS[0]])
    own = np.asarray(dense_logits(tiny.model().network.spec, tiny.model().params, tokens))[0]
    np.testing.assert_allclose(own, tiny.dense(TEXTS[0]), atol=2e-4)


@pytest.mark.parametrize("chunk", [16, 44])
def test_sliding_layers_of_the_model(chunk):
    slides = tiny.model(windows=(None, 6))
    right = [tiny.dense(text, slides) for text in TEXTS]
    assert np.abs(right[0] - tiny.dense(TEXTS[0])).max() > 0.5
    state, logits = tiny.read(Policy(), prompts(), chunk, tiny=slides)
    close("full", logits, np.stack([r[n - 1] for r, n in zip(right, LENGTHS)]))
    state, logits = tiny.feed(Policy(), state, more(), tiny=slides)
    close("full", logits[0], right[0][44:])
    close("full", logits[1], right[1][27:])


def test_a_chunk_after_a_judged_prompt_reads_what_steps_read():
    """The ring still holds prompt tokens that were rejected: beyond the window no later query sees them."""
    policy = Policy(eviction=KNorm(), budget=Uniform(16), storage=Int8(recent=W))
    sizes = {"context": tiny.CONTEXT, "page": tiny.PAGE, "chunk_size": 16}
    state, _ = kvjax.prefill(tiny.model(), policy, prompts(), **sizes)
    assert not np.asarray(state.layers[0].ring.admit).all(), "nothing in the ring was rejected"
    _, logits = tiny.feed(policy, decode.reserve(policy, tiny.copy(state), MORE, 1), more())
    _, at_once = kvjax.extend(tiny.model(), policy, state, more().tolist())
    assert MORE > W
    close("int8", np.asarray(at_once), logits[:, -1])


def test_sliding_layers_under_a_whole_prompt_policy():
    slides = tiny.model(windows=(6, None))
    policy = Policy(eviction=KNorm(), budget=Uniform(20), recent=4)
    _, logits = kvjax.prefill(slides, policy, prompts(), context=tiny.CONTEXT, page=tiny.PAGE)
    close("full", logits, np.stack([tiny.dense(p, slides)[-1] for p in prompts()]))


@pytest.mark.slow
def test_prefill_with_growing_pools_is_the_same():
    """The public prefill starts with one page a layer, grows under a learned-like admission, and fits."""
    policy, right = POLICIES["hash"], expected("hash")
    state, logits = kvjax.prefill(
        tiny.model(), policy, prompts(), context=tiny.CONTEXT, page=tiny.PAGE, chunk_size=8
    )
    close("hash", logits, np.stack([r[n - 1] for r, n in zip(right, LENGTHS)]))
    for room in state.layers:
        tiny.owned_once(room.pages)
        held = tiny.held(room.pages)
        for (row, head), slots in held.items():
            old = range(LENGTHS[row] - W)
            assert set(slots) == {j for j in old if j < policy.sinks or hashed(j, head)}
    state = decode.reserve(policy, state, MORE, 1)
    _, logits = tiny.feed(policy, state, more())
    close("hash", logits[0], right[0][44:])


def test_extend_continues_a_conversation():
    """Two turns by ``extend`` are one text; a row without new tokens is left as it is."""
    policy, right = POLICIES["hash"], expected("hash")
    state, _ = tiny.read(policy, prompts(), 8)
    state = dataclasses.replace(state, chunk=8)
    state, logits = kvjax.extend(tiny.model(), policy, state, [TEXTS[0][44:], []])
    close("hash", np.asarray(logits)[0], right[0][-1])
    assert state.length.tolist() == [44 + MORE, 27]
    state, logits = kvjax.extend(tiny.model(), policy, state, [[], TEXTS[1][27:]])
    close("hash", np.asarray(logits)[1], right[1][-1])


@pytest.mark.parametrize("policy", [POLICIES["hash"], kvjax.policy("snapkv(8) + ada(24)")], ids=repr)
def test_a_ragged_batch_is_its_single_rows(policy):
    def run(texts, ends):
        state, first = kvjax.prefill(
            tiny.model(),
            policy,
            [text[:n] for text, n in zip(texts, ends)],
            context=tiny.CONTEXT,
            page=tiny.PAGE,
            chunk_size=8,
        )
        state = decode.reserve(policy, state, MORE, 1)
        state, logits = tiny.feed(policy, state, np.asarray([t[n:] for t, n in zip(texts, ends)]))
        return np.concatenate([np.asarray(first)[:, None], logits], axis=1), state

    both, together = run(TEXTS, LENGTHS)
    alone, single = run(TEXTS[1:], LENGTHS[1:])
    np.testing.assert_allclose(both[1], alone[0], atol=2e-4)
    for ours, theirs in zip(together.layers, single.layers):
        for head in range(2):
            assert tiny.held(ours.pages)[1, head].keys() == tiny.held(theirs.pages)[0, head].keys()


def test_every_k_acts_when_it_says():
    """Live slots grow by one a token and fall to the target exactly at multiples of k."""
    policy = Policy(eviction=KNorm(), budget=Uniform(20, Every(6)), recent=4)
    state, _ = tiny.read(policy, [text[:1] for text in TEXTS], 1)
    want, fell = 1, 0
    for n in range(2, 38):
        state, _ = tiny.feed(policy, state, np.asarray([[text[n - 1]] for text in TEXTS]))
        want += 1
        if n % 6 == 0 and want > 20:
            want, fell = 20, fell + 1
        for room in state.layers:
            live = np.asarray(room.pages.length.sum(-1)) + min(n, 4)
            assert (live == want).all()
    assert fell == 3


@pytest.mark.slow
def test_every_k_with_chunks_that_straddle_its_multiples():
    """Chunks of 5 and a period of 8: up to 8 + 5 - 1 tokens arrive between two looks, and none is lost."""
    policy = Policy(eviction=KNorm(), budget=Uniform(16, Every(8)), recent=1)
    text = tiny.prompt(64, 5)
    state, _ = kvjax.prefill(tiny.model(), policy, [text], context=128, page=1, chunk_size=5)
    for room in state.layers:
        tiny.owned_once(room.pages)
