"""Calls a person gets wrong: each is taken as it was meant, or refused with a sentence that says how."""

from __future__ import annotations

import functools
import warnings
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import kvjax
from kvjax import decode
from kvjax.algebra import PolicyError
from kvjax.decode import Remark, RequestError

PROMPT = tiny.prompt(20, 1)
SHAPE = {"page": tiny.PAGE, "chunk_size": 16, "context": 64}


def begun(spec: str, prompt: list[int] = PROMPT):
    policy = kvjax.policy(spec)
    return kvjax.prefill(tiny.model(), policy, [prompt], **SHAPE, weights=tiny.weights(policy))


def go_on(spec: str, state, logits, call: str = "stream"):
    policy = kvjax.policy(spec)
    weights = tiny.weights(policy)
    if call == "extend":
        return kvjax.extend(tiny.model(), policy, state, [[1, 2]], weights=weights)
    return list(kvjax.stream(tiny.model(), policy, state, logits, max_new_tokens=3, weights=weights))


# --- a state knows its policy's structure --------------------------------------------------------


@pytest.mark.parametrize("call", ["stream", "extend"])
@pytest.mark.parametrize(
    ("made", "other"),
    [
        ("int8(8)", "int4(8)"),  # wrong logits without a word
        ("window(8) + sinks(2)", "full"),  # stays a window
        ("full", "window(8) + sinks(2)"),
        ("full", "knorm + uniform(12, every_step)"),  # KeyError
        ("knorm + uniform(12, every_step)", "uniform(12, every_step)"),
        ("int8(8)", "int8(16)"),  # another ring
        ("recent(4) + knorm + uniform(12)", "recent(6) + knorm + uniform(12)"),
    ],
)
def test_a_state_is_continued_under_its_own_policy(made, other, call):
    state, logits = begun(made)
    with pytest.raises(RequestError) as refused:
        go_on(other, state, logits, call)
    says = str(refused.value)
    for part in (call, kvjax.policy(made).structure, repr(kvjax.policy(other)), "or prefill under"):
        assert part in says
    go_on(made, state, logits, call)  # and is still there


@pytest.mark.parametrize(
    ("made", "other"),
    [
        ("knorm + uniform(0.5)", "knorm + uniform(12)"),
        ("knorm + uniform(12, every_step)", "knorm + uniform(10, every_step)"),
        ("window(8) + sinks(2)", "window(8) + sinks(3)"),
        ("snapkv(8) + pyramid(0.5)", "snapkv(8) + pyramid(0.5, slope=20)"),
    ],
)
def test_dials_may_differ(made, other):
    assert len(go_on(other, *begun(made))[-1][0]) == 1


@pytest.mark.parametrize(
    ("made", "other"),
    [
        ("knorm + uniform(12, every_step)", "knorm + uniform(40, every_step)"),  # PoolOverflowError
        ("window(8)", "window(8) + sinks(2)"),  # nothing outlived the window
    ],
)
def test_a_dial_may_not_ask_for_slots_the_state_has_no_pages_for(made, other):
    state, logits = begun(made)
    with pytest.raises(RequestError, match=r"has pages for \d+ slots.*prefill under"):
        go_on(other, state, logits)


def test_every_part_shows_what_is_no_dial():
    assert kvjax.policy("full").structure == "full"
    spec = "snapkv(6) + ada(0.3, floor=0.1) + int8(9) + sinks(3) + recent(2)"
    assert kvjax.policy(spec).structure == "snapkv(window=6) + int8(recent=9) + ada + recent(2)"
    assert kvjax.policy("knorm + uniform(3, every(4))").structure == "knorm + uniform(when=every(4))"


def test_the_checks_of_a_call_cost_less_than_a_third_of_a_millisecond():
    policy = kvjax.policy("conf_kv(recent=8) + int8(16) + confidence(20, loose=31)")
    state = decode.empty(tiny.model().network, policy, rows=1, context=64, dtype=jnp.float32, page=8)
    from kvjax.decode import _checks

    run = functools.partial(_checks.check_continues, "stream", tiny.model().network, policy, state, 1)
    assert min(_seconds(run) for _ in range(20)) < 3e-4


def _seconds(run) -> float:
    import time

    start = time.perf_counter()
    run()
    return time.perf_counter() - start


# --- a state that was used -----------------------------------------------------------------------


@pytest.mark.parametrize("call", ["stream", "extend"])
def test_a_state_is_used_once(call):
    state, logits = begun("full")
    kept = jax.tree.map(jnp.copy, state)
    go_on("full", state, logits)
    with pytest.raises(RequestError, match=rf"{call}: the state was donated.*kvjax\.fork.*jax\.tree\.map"):
        go_on("full", state, logits, call)
    go_on("full", kept, logits, call)


def test_a_donated_state_is_not_forked():
    state, logits = begun("full")
    go_on("full", state, logits)
    with pytest.raises(ValueError, match=r"fork\(row=0\): the state was donated"):
        kvjax.fork(state, 0, 2)


def test_a_piece_whose_state_went_elsewhere_ends_the_stream():
    state, logits = begun("full")
    pieces = kvjax.stream(tiny.model(), "full", state, logits, max_new_tokens=8, every=2)
    next(pieces)
    _, state = next(pieces)
    kvjax.extend(tiny.model(), "full", state, [[1]])
    with pytest.raises(RequestError, match="stream: the state was donated"):
        next(pieces)


# --- positions -----------------------------------------------------------------------------------


def test_a_context_beyond_the_models_positions_is_refused():
    most = tiny.model().network.max_positions
    with pytest.raises(RequestError, match=rf"context={most + 1}\).*{most} positions"):
        kvjax.prefill(tiny.model(), "full", [PROMPT], context=most + 1)
    with pytest.raises(RequestError, match=rf"row 0 has {most + 1} tokens"):
        kvjax.prefill(tiny.model(), "full", [[1] * (most + 1)], context=most + 1)


@functools.cache
def short() -> tiny.Tiny:
    """Trained for 70 positions, which is no size class."""
    import dataclasses

    model = tiny.model()
    spec = dataclasses.replace(model.network.spec, max_positions=70)
    return tiny.Tiny(type(model.network)(spec), model.params)


def test_contexts_end_with_the_models_positions():
    state, _ = kvjax.prefill(short(), "full", [tiny.prompt(66)])
    assert state.context == 70
    generated = kvjax.generate(short(), "full", [tiny.prompt(66)], max_new_tokens=4)
    assert (
        generated.tokens == kvjax.generate(tiny.model(), "full", [tiny.prompt(66)], max_new_tokens=4).tokens
    )
    assert (decode.bucket(66), decode.bucket(66, 70), decode.bucket(66, 4096)) == (96, 70, 96)


def test_extend_and_stream_end_with_the_models_positions():
    """A state that was not made by ``prefill`` may have a larger context than the model has positions."""
    state = decode.empty(short().network, "full", rows=1, context=96, dtype=jnp.float32)
    with pytest.raises(
        RequestError, match="extend: row 0 would reach 71 tokens, the model was trained for 70"
    ):
        kvjax.extend(short(), "full", state, [[1] * 71])
    state, logits = kvjax.extend(short(), "full", state, [[1] * 68])
    with pytest.raises(
        RequestError, match="stream: row 0 would reach 71 tokens, the model was trained for 70"
    ):
        kvjax.stream(short(), "full", state, logits, max_new_tokens=4)
    *_, (_, state) = kvjax.stream(short(), "full", state, logits, max_new_tokens=3)
    assert state.length.tolist() == [70]


# --- policies and prompts as people write them ---------------------------------------------------


def test_a_policy_may_be_a_string_everywhere():
    model, spec = tiny.model(), "window(8) + sinks(2)"
    right = kvjax.generate(model, kvjax.policy(spec), [PROMPT], max_new_tokens=4).tokens
    assert kvjax.generate(model, spec, [PROMPT], max_new_tokens=4).tokens == right
    state, _ = kvjax.prefill(model, spec, [PROMPT[:15]], **SHAPE)
    state, logits = kvjax.extend(model, spec, state, [PROMPT[15:]])
    pieces = kvjax.stream(model, spec, state, logits, max_new_tokens=4)
    assert np.concatenate([piece for piece, _ in pieces], axis=1).tolist() == right
    assert kvjax.weights_for(spec, model) == {}
    empty = decode.empty(model.network, spec, rows=1, context=64, dtype=jnp.float32)
    assert empty.structure == kvjax.policy(spec).structure


@pytest.mark.parametrize("policy", ["nonsense", None, 3])
@pytest.mark.parametrize("call", [kvjax.prefill, kvjax.generate])
def test_what_is_no_policy_is_refused(call, policy):
    with pytest.raises(PolicyError, match=rf"policy\({policy!r}\)"):
        call(tiny.model(), policy, [PROMPT])


@pytest.mark.parametrize("prompt", [PROMPT, np.asarray(PROMPT), np.asarray([PROMPT]), tuple(PROMPT)])
def test_one_flat_list_is_one_row(prompt):
    _, right = begun("full")
    state, logits = kvjax.prefill(tiny.model(), "full", prompt, **SHAPE)
    np.testing.assert_array_equal(logits, right)
    extended, _ = kvjax.extend(tiny.model(), "full", state, [7, 8])
    assert extended.length.tolist() == [22]
    assert len(kvjax.generate(tiny.model(), "full", prompt, max_new_tokens=2).tokens) == 1


class Letters:
    """A tokenizer of letters; 1 begins a text."""

    def encode(self, text: str, *, bos: bool = True) -> list[int]:
        return [1] * bos + [ord(letter) - 60 for letter in text]


def test_texts_are_read_where_there_is_a_tokenizer():
    model = SimpleNamespace(network=tiny.model().network, params=tiny.model().params, text=Letters())
    ids = Letters().encode("KVJAX")
    _, right = kvjax.prefill(model, "full", [ids], **SHAPE)
    for prompts in ("KVJAX", ["KVJAX"], [ids]):
        state, logits = kvjax.prefill(model, "full", prompts, **SHAPE)
        np.testing.assert_array_equal(logits, right)
    _, first = kvjax.extend(model, "full", jax.tree.map(jnp.copy, state), "CACHE")
    _, second = kvjax.extend(model, "full", state, [Letters().encode("CACHE", bos=False)])
    np.testing.assert_array_equal(first, second)
    assert len(kvjax.generate(model, "full", ["KV", "JAX"], max_new_tokens=2).tokens) == 2


@pytest.mark.parametrize(
    ("prompts", "says"),
    [
        ("a text", "row 0 is a text, and this model has no tokenizer.*kvjax.load"),
        ([[1], "a text"], "row 1 is a text"),
        ([[1.0, 2.0]], "row 0 is not a list of token ids"),
        ([[True]], "row 0 is not a list of token ids"),
        ([[[1], [2, 3]]], "row 0 is not a list of token ids"),
        ([None], "row 0 is not a list of token ids"),
        (7, r"prompts=7\) is not a prompt"),
        ([[3], [3, -1]], "row 1 has the token id -1 at 1, the model knows 0 to 60"),
        ([[61]], "row 0 has the token id 61 at 0.*tokenizer"),
        ([[10**30]], "row 0 is not a list of token ids"),
    ],
)
def test_what_is_no_prompt_is_refused(prompts, says):
    model = tiny.model()
    state = decode.empty(model.network, "full", rows=1, context=64, dtype=jnp.float32)
    calls = {
        "prefill": lambda: kvjax.prefill(model, "full", prompts, **SHAPE),
        "extend": lambda: kvjax.extend(model, "full", state, prompts),
        "generate": lambda: kvjax.generate(model, "full", prompts, max_new_tokens=2),
    }
    for call, run in calls.items():
        with pytest.raises(RequestError, match=f"^{call}.*{says}"):
            run()


def test_reading_prompts_asks_nothing_of_the_device():
    from kvjax.decode import _checks

    with jax.transfer_guard("disallow"):
        rows = _checks.read_prompts("prefill", tiny.model(), [PROMPT, [3]])
    assert [row.tolist() for row in rows] == [PROMPT, [3]]


# --- what is served otherwise than it reads ------------------------------------------------------


def remarks(run) -> list[str]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default", Remark)
        run()
    return [str(one.message) for one in told if issubclass(one.category, Remark)]


@pytest.mark.slow
def test_every_call_says_that_the_models_own_window_rules_and_says_it_once():
    slides, spec = tiny.model(windows=(6, None)), "knorm + uniform(12) + recent(4)"
    says = "the policy has no effect in layers with a sliding window of the model's own "
    says += "(1 of 2; layer: tokens = 0: 6)."

    def apart():
        state, logits = kvjax.prefill(slides, spec, [PROMPT], **SHAPE)
        state = jax.tree.map(jnp.copy, state)
        list(kvjax.stream(slides, spec, state, logits, max_new_tokens=2))

    assert remarks(apart) == [says]
    assert remarks(lambda: kvjax.prefill(slides, spec, [PROMPT], **SHAPE)) == [says]
    assert remarks(lambda: kvjax.generate(slides, spec, [PROMPT], max_new_tokens=2)) == [says]
    state, logits = kvjax.prefill(slides, spec, [PROMPT], **SHAPE)
    stream = functools.partial(kvjax.stream, slides, spec, state, logits, max_new_tokens=2)
    assert remarks(stream) == [says]
    assert remarks(lambda: kvjax.prefill(slides, "full", [PROMPT], **SHAPE)) == []
    assert remarks(lambda: begun("knorm + uniform(12) + recent(4)")) == []


@pytest.mark.parametrize(
    ("spec", "which"),
    [
        ("snapkv(16) + uniform(0.26) + sinks(2)", "a prompt of fewer than 68 tokens"),
        ("snapkv(16) + ada(0.26)", "a prompt of fewer than 60 tokens"),
        ("snapkv(16) + pyramid(0.26, slope=20)", "a prompt of fewer than 60 tokens"),
        ("knorm + recent(16) + uniform(0.26, every_step)", "a prompt of fewer than 60 tokens"),
        ("snapkv(16) + uniform('2KiB')", "a prompt"),
    ],
)
def test_a_budget_below_what_is_protected_is_told(spec, which):
    policy = kvjax.policy(spec)
    says = f"{policy!r} leaves a KV head of {which} fewer slots than the {policy.protected} protected tokens"
    (told,) = remarks(lambda: begun(spec))
    assert told.startswith(says)
    assert "Raise the budget, or protect fewer." in told
    roomy = spec.replace("0.26", "1.0").replace("2KiB", "8MiB")
    assert remarks(lambda: begun(roomy)) == []
