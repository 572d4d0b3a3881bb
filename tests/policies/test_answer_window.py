"""A prompt's chosen tokens stay for good, written ones leave with the window."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import kvjax
from kvjax import decode, metrics
from kvjax.algebra import PolicyError
from kvjax.policies.answer_window import AnswerWindow
from kvjax.policies.snapkv import SnapKV

W, SLOTS, PROMPT, NEW = 6, 14, 40, 20
POLICY = kvjax.policy(f"answer_window({W}) + snapkv(4) + uniform({SLOTS})")


def positions(state) -> np.ndarray:
    """[L, B, K, C]: which positions each KV head holds."""
    return np.asarray(metrics.present(state))


def test_chosen_tokens_stay_and_the_answer_slides():
    prompts = [tiny.prompt(PROMPT), tiny.prompt(PROMPT - 7, seed=1)]
    state, logits = decode.prefill(tiny.model(), POLICY, prompts, context=tiny.CONTEXT, page=tiny.PAGE)
    before = positions(state)
    pieces = decode.stream(tiny.model(), POLICY, state, logits, max_new_tokens=NEW + 1)
    *_, (_, after) = pieces
    held = positions(after)
    plain = kvjax.policy(f"snapkv(4) + uniform({SLOTS})")
    chosen, _ = decode.prefill(tiny.model(), plain, prompts, context=tiny.CONTEXT, page=tiny.PAGE)
    for row, prompt in enumerate(prompts):
        n = len(prompt)
        stays = positions(chosen)[:, row, :, : n - W]
        np.testing.assert_array_equal(before[:, row, :, : n - W], stays)
        np.testing.assert_array_equal(held[:, row, :, : n - W], stays)
        # Of the prompt's end the budget's choice outlived the ring: at least the tokens SnapKV protects.
        assert held[:, row, :, n - 4 : n].all()
        assert (held[:, row, :, :n].sum(axis=-1) == SLOTS).all()
        assert not held[:, row, :, n : n + NEW - W].any()
        assert held[:, row, :, n + NEW - W : n + NEW].all()


def test_only_given_tokens_are_admitted():
    state = decode.empty(
        tiny.model().network, POLICY, rows=1, context=tiny.CONTEXT, dtype=jnp.float32, page=tiny.PAGE
    )
    assert state.layers[0].ring.window == W
    assert POLICY.whole_prompt
    assert POLICY.eviction == SnapKV(4)


@pytest.mark.parametrize("size", [0, -1, 2.5, True])
def test_a_window_must_see_something(size):
    with pytest.raises(PolicyError, match="is not a valid window"):
        AnswerWindow(size)
