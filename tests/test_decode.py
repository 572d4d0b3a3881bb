"""The decode loop: greedy text, stop tokens, limits, sampling, forks, errors, and how often it compiles."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
import tiny

import kvjax
from kvjax import decode
from kvjax.cache.state import PoolOverflowError, counts
from kvjax.decode import RequestError, _by_layer, _prefill, _whole_prompt
from kvjax.models.decoder import Decoder
from kvjax.sampling import sampling
from kvjax.types import EMPTY

FULL, STREAMING = kvjax.policy("full"), kvjax.policy("window(8) + sinks(2)")
SNAPKV, INT8 = kvjax.policy("snapkv(8) + ada(24)"), kvjax.policy("int8(8)")
PROMPTS = [tiny.prompt(20, 1), tiny.prompt(33, 2)]
SHAPE = {"page": tiny.PAGE, "chunk_size": 16}


def test_generate_is_the_argmax_of_dense_attention_on_the_growing_text():
    generated = kvjax.generate(tiny.model(), FULL, PROMPTS, max_new_tokens=14, **SHAPE)
    for prompt, tokens in zip(PROMPTS, generated.tokens):
        assert len(tokens) == 14
        assert len(set(tokens)) > 3, "the text does not vary: the test says little"
        # Teacher forcing: position by position, each token is the best one after the text before it.
        logits = tiny.dense([*prompt, *tokens])
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == tokens
    assert generated.state.length.tolist() == [len(p) + 13 for p in PROMPTS]


def test_stop_tokens_and_limits_end_single_rows():
    free = kvjax.generate(tiny.model(), FULL, PROMPTS, max_new_tokens=14, **SHAPE).tokens
    stop = free[0][6]
    first = free[0].index(stop)
    other = free[1].index(stop) if stop in free[1] else 13
    stopped = kvjax.generate(tiny.model(), FULL, PROMPTS, max_new_tokens=14, stops=[stop, 60], **SHAPE).tokens
    assert stopped == [free[0][: first + 1], free[1][: other + 1]]
    assert first != other

    state, logits = kvjax.prefill(tiny.model(), FULL, PROMPTS, context=64, **SHAPE)
    pieces = list(
        kvjax.stream(tiny.model(), FULL, state, logits, max_new_tokens=[1, 14], every=decode.MAX_STEPS)
    )
    tokens = np.concatenate([piece for piece, _ in pieces], axis=1)
    assert tokens[0].tolist() == [free[0][0]] + [EMPTY] * 13
    assert tokens[1].tolist() == free[1]
    assert pieces[-1][1].length.tolist() == [20, 33 + 13]


def test_texts_end_where_the_model_says_unless_they_are_to_run_on():
    """The model's own end tokens are the default; a network without a spec has none."""
    free = kvjax.generate(tiny.model(), FULL, PROMPTS, max_new_tokens=14, **SHAPE).tokens
    ends = (free[0][6], free[1][4])
    network = Decoder(dataclasses.replace(tiny.model().network.spec, eos=ends))
    model = tiny.Tiny(network=network, params=tiny.model().params)
    cut = [row[: 1 + min(row.index(end) for end in ends if end in row)] for row in free]
    assert max(map(len, cut)) < 14
    assert kvjax.generate(model, FULL, PROMPTS, max_new_tokens=14, **SHAPE).tokens == cut
    assert kvjax.generate(model, FULL, PROMPTS, max_new_tokens=14, stops=(), **SHAPE).tokens == free
    state, logits = kvjax.prefill(model, FULL, PROMPTS, context=64, **SHAPE)
    pieces = np.concatenate(
        [p for p, _ in kvjax.stream(model, FULL, state, logits, max_new_tokens=14)], axis=1
    )
    assert [[int(token) for token in row if token != EMPTY] for row in pieces] == cut


def test_a_segment_is_its_pieces():
    """The same text whether the host looks after every 3 tokens or after 64."""
    right = kvjax.generate(tiny.model(), STREAMING, PROMPTS, max_new_tokens=11, **SHAPE).tokens
    state, logits = kvjax.prefill(tiny.model(), STREAMING, PROMPTS, context=64, **SHAPE)
    pieces = [p for p, _ in kvjax.stream(tiny.model(), STREAMING, state, logits, max_new_tokens=11, every=3)]
    assert [p.shape[1] for p in pieces] == [1, 3, 3, 3, 1]
    assert np.concatenate(pieces, axis=1).tolist() == right


def test_sampled_text_belongs_to_its_request():
    """The same request beside another neighbour, in another row, writes the same."""

    def run(prompts, requests):
        state, logits = kvjax.prefill(tiny.model(), FULL, prompts, context=64, **SHAPE)
        how = sampling(2, temperature=1.5, top_k=20, requests=requests, seed=3)
        pieces = kvjax.stream(tiny.model(), FULL, state, logits, max_new_tokens=14, how=how)
        return np.concatenate([piece for piece, _ in pieces], axis=1)

    one = run(PROMPTS, [11, 12])
    two = run([tiny.prompt(9, 8), PROMPTS[0]], [13, 11])
    assert one[0].tolist() == two[1].tolist()
    greedy = kvjax.generate(tiny.model(), FULL, PROMPTS, max_new_tokens=14, **SHAPE).tokens
    assert one[0].tolist() != greedy[0]
    assert run(PROMPTS, [14, 12])[0].tolist() != one[0].tolist()


@pytest.mark.parametrize("policy", [SNAPKV, STREAMING], ids=repr)
def test_forks_continue_like_their_row(policy):
    more = np.asarray([tiny.prompt(10, 5)] * 2)
    state, _ = kvjax.prefill(tiny.model(), policy, PROMPTS, context=tiny.CONTEXT, **SHAPE)
    twins = decode.reserve(policy, kvjax.fork(state, 1, 2), 10, 1)
    state, right = tiny.feed(policy, decode.reserve(policy, state, 10, 1), more)
    twins, logits_of_twins = tiny.feed(policy, twins, more)
    np.testing.assert_allclose(logits_of_twins, np.stack([right[1]] * 2), atol=2e-4)
    assert twins.length.tolist() == [43, 43]
    for room in twins.layers:
        tiny.owned_once(room.pages)  # copies: no page is shared


def test_fork_refuses_rows_that_are_not_there():
    state = tiny.start(FULL, 2)
    with pytest.raises(IndexError, match=r"fork\(row=2\)"):
        kvjax.fork(state, 2, 1)
    with pytest.raises(ValueError, match=r"fork\(n=0\)"):
        kvjax.fork(state, 0, 0)


PAGE_SIZES = [(1, 64), (8191, 64), (8192, 128), (16383, 128), (16384, 256), (10**6, 256)]


@pytest.mark.parametrize(("longest", "size"), PAGE_SIZES)
def test_pages_are_longer_where_lists_are(longest, size):
    assert decode.page_size(longest) == size


@pytest.mark.parametrize("policy", [FULL, STREAMING, INT8, SNAPKV], ids=repr)
def test_prompts_of_one_size_class_share_their_programs(policy):
    """The second prompt, of another length, must not compile anything."""

    def programs():
        whole = (_whole_prompt.prompt_layer, _whole_prompt.store_layer)
        layers = (_by_layer.chunk_layer, _by_layer.embed, _by_layer.after_chunk, _by_layer.last_logits)
        return [f._cache_size() for f in (*layers, decode.decode_steps, *whole)]

    def run(length):
        kvjax.generate(
            tiny.model(), policy, [tiny.prompt(length, length)], max_new_tokens=5, page=8, chunk_size=16
        )

    run(58)
    before = programs()
    run(44)
    run(51)
    assert programs() == before


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda m: kvjax.prefill(m, FULL, []), "no row"),
        (lambda m: kvjax.prefill(m, FULL, [[1, 2], []]), "row 1 is empty"),
        (lambda m: kvjax.prefill(m, FULL, [[1] * 257]), "257 tokens.*256"),
        (lambda m: kvjax.prefill(m, FULL, [[1] * 20], context=16), "context=16.*20 tokens"),
        (lambda m: kvjax.prefill(m, FULL, [[1]], chunk_size=0), "chunk_size=0"),
        (lambda m: kvjax.generate(m, FULL, [[1] * 250], max_new_tokens=7), "max_new_tokens=7.*256"),
    ],
)
def test_requests_that_cannot_be_served(call, says):
    with pytest.raises(RequestError, match=says):
        call(tiny.model())


def test_a_state_takes_no_more_than_its_context():
    state, logits = kvjax.prefill(tiny.model(), FULL, PROMPTS, context=64, **SHAPE)
    with pytest.raises(RequestError, match="context=64"):
        next(kvjax.stream(tiny.model(), FULL, state, logits, max_new_tokens=33))
    with pytest.raises(RequestError, match="max_new_tokens=0"):
        next(kvjax.stream(tiny.model(), FULL, state, logits, max_new_tokens=0))
    with pytest.raises(RequestError, match="context=64"):
        kvjax.extend(tiny.model(), FULL, state, [[1] * 45, []])
    with pytest.raises(RequestError, match="extend"):
        kvjax.extend(tiny.model(), FULL, state, [[], []])


def test_a_lost_token_is_an_error():
    """Without ``reserve`` the pool of a fitted state is too small for a page more: never silent."""
    state, _ = kvjax.prefill(tiny.model(), INT8, PROMPTS, context=tiny.CONTEXT, **SHAPE)
    state, _ = tiny.feed(INT8, state, np.zeros((2, 24), np.int32))
    with pytest.raises(PoolOverflowError, match="ran out of pages"):
        counts(state)


def test_progress_counts_what_is_done():
    for policy, last in ((STREAMING, (33, 33)), (SNAPKV, (2, 2))):
        told: list[tuple[int, int]] = []
        kvjax.prefill(
            tiny.model(),
            policy,
            PROMPTS,
            context=tiny.CONTEXT,
            progress=lambda *x, told=told: told.append(x),
            **SHAPE,
        )
        assert told[-1] == last
        assert [x[0] for x in told] == sorted({x[0] for x in told})


def test_a_chunk_program_is_compiled_once_where_everything_is_admitted():
    text = tiny.prompt(60, 3)
    before = _by_layer.chunk_layer._cache_size()
    state, _ = kvjax.prefill(tiny.model(), INT8, [text], context=200, page=4, chunk_size=12)
    assert _by_layer.chunk_layer._cache_size() == before + 1
    assert jax.tree.all(jax.tree.map(lambda x: not x.is_deleted(), state))


@pytest.mark.parametrize(
    ("spec", "known"),
    [("knorm + uniform(24, every_step)", True), ("knorm + uniform(0.9, every_step)", False)],
)
def test_a_bound_that_is_known_is_reserved_at_once(spec, known, monkeypatch):
    """One size of pools, one program; a share of the prompt is not known before it was read."""
    seen = []

    def recorded(*arguments):
        seen.append(arguments[4].layers[0].pages.count)
        return _by_layer.read_chunk(*arguments)

    monkeypatch.setattr(_prefill, "read_chunk", recorded)
    state, _ = decode.prefill(tiny.model(), kvjax.policy(spec), [tiny.prompt(120)], chunk_size=16, page=4)
    assert len(seen) == 8
    assert (len(set(seen)) == 1) == known
    assert not any(bool(layer.pages.overflow) for layer in state.layers)


@pytest.mark.parametrize(
    ("spec", "kinds"), [("quest(3, chunk=4, dense=1)", [0, 1]), ("quest(3, chunk=4, dense=0)", [0, 0])]
)
def test_layers_with_and_without_a_selection_are_different_programs(spec, kinds):
    model = tiny.model()
    calls = decode.layer_calls(model.network, kvjax.policy(spec), model.params, {})
    assert [call.kind for call in calls] == kinds


@pytest.mark.parametrize("policy", [FULL, "write_gate(window=12)"], ids=repr)
def test_a_deep_model_writes_the_same_with_one_program_for_all_its_layers(policy, monkeypatch):
    model, policy = tiny.model(), kvjax.policy(policy) if isinstance(policy, str) else policy
    weights = {part.place: part.example_weights(jax.random.key(1), model.network) for part in policy.learned}

    def written():
        options = {"context": tiny.CONTEXT, "weights": weights} | SHAPE
        state, logits = kvjax.prefill(model, policy, PROMPTS, **options)
        pieces = kvjax.stream(model, policy, state, logits, max_new_tokens=[9, 6], weights=weights, every=4)
        return [piece.tolist() for piece, _ in pieces]

    at_once = written()
    before = decode.decode_steps._cache_size(), _by_layer.step_layer._cache_size()
    monkeypatch.setattr(_by_layer, "DEEP", 1)
    assert written() == at_once
    after = decode.decode_steps._cache_size(), _by_layer.step_layer._cache_size()
    assert after[0] == before[0]
    assert after[1] == before[1] + 1  # two layers, one program
