"""DuoAttention against float64 NumPy: full attention where alpha is largest, a window in the other heads."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from tiny import W

import kvjax
from kvjax import decode
from kvjax.algebra import Policy, PolicyError
from kvjax.policies.duo import Duo, retrieval_heads
from kvjax.policies.streaming_llm import Window

N, MORE, SINKS = 44, 12, 2
TEXT = tiny.prompt(N + MORE, 5)


def duo(share: float, **options) -> Policy:
    return Policy(admission=Duo(share=share, window=W, **options), sinks=SINKS)


ALPHA = np.stack([layer["alpha"] for layer in tiny.weights(duo(0.5))["admission"]])


def retrieves(share: float) -> np.ndarray:
    """Bool [L, K]: the ``4 share`` largest of the four numbers."""
    return np.isin(ALPHA, np.sort(ALPHA.ravel())[4 - int(4 * share) :])


def right(share: float, from_query: int = 0) -> np.ndarray:
    """Logits where the pattern hides keys from queries at ``from_query`` and later."""

    def see(layer: int, head: int) -> np.ndarray:
        whole = tiny.causal(len(TEXT))
        windowed = tiny.causal(len(TEXT), W) | (whole & (np.arange(len(TEXT)) < SINKS))
        early = (np.arange(len(TEXT)) < from_query)[:, None]
        return whole if retrieves(share)[layer, head] else np.where(early, whole, windowed)

    return tiny.oracle(TEXT, see)


def logits_and_state(policy: Policy, chunk: int) -> tuple[np.ndarray, kvjax.KVState]:
    """Logits after the prompt and after each further token, by the real prefill and step."""
    sizes = {"context": tiny.CONTEXT, "page": tiny.PAGE, "chunk_size": chunk}
    state, first = kvjax.prefill(tiny.model(), policy, [TEXT[:N]], **sizes, weights=tiny.weights(policy))
    state, rest = tiny.feed(policy, decode.reserve(policy, state, MORE, 1), np.asarray([TEXT[N:]]))
    return np.concatenate([first, rest[0]]), state


def check_held(state: kvjax.KVState, share: float) -> None:
    """Streaming heads hold their sinks alone, retrieval heads all that left the window."""
    left = set(range(len(TEXT) - W))
    for layer, room in enumerate(state.layers):
        for head in range(2):
            kept = left if retrieves(share)[layer, head] else set(range(SINKS))
            assert set(tiny.held(room.pages)[0, head]) == kept


def test_the_pattern_is_a_dense_mask():
    logits, state = logits_and_state(duo(0.25), 20)
    np.testing.assert_allclose(logits, right(0.25)[N - 1 :], atol=2e-4)
    check_held(state, 0.25)
    assert np.abs(right(0.25) - right(0.0)).max() > 0.5


def test_a_pattern_may_spare_the_prompt():
    logits, state = logits_and_state(duo(0.25, prefill=False), 1)
    np.testing.assert_allclose(logits, right(0.25, from_query=N)[N - 1 :], atol=2e-4)
    check_held(state, 0.25)
    assert np.abs(right(0.25, from_query=N) - right(0.25))[N - 1 :].max() > 0.1


def test_a_window_may_spare_the_prompt_too():
    policy = Policy(admission=Window(W, prefill=False), sinks=SINKS)
    logits, state = logits_and_state(policy, 1)
    np.testing.assert_allclose(logits, right(0.0, from_query=N)[N - 1 :], atol=2e-4)
    check_held(state, 0.0)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_the_largest_numbers_are_the_retrieval_heads(share):
    np.testing.assert_array_equal(retrieval_heads(list(ALPHA), share), retrieves(share))


def test_the_numbers_differ():
    assert len(np.unique(ALPHA)) == 4


def test_equal_numbers_go_to_the_lower_layer_then_head():
    flat = [np.full(2, 0.5), np.full(2, 0.5)]
    assert retrieval_heads(flat, 0.75).tolist() == [[True, True], [True, False]]
    assert retrieval_heads(flat, 0.6).tolist() == [[True, True], [False, False]]  # 2.4 heads are 2
    assert retrieval_heads(flat, 0.625).tolist() == [[True, True], [True, False]]  # 2.5 are 3


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ({"share": -0.1}, "not a valid share of the heads"),
        ({"share": 1.1}, "not a valid share of the heads"),
        ({"share": "half"}, "not a valid share of the heads"),
        ({"window": 0}, "1 or more"),
        ({"prefill": 1}, "True or False"),
    ],
)
def test_values_out_of_range_are_refused(call, says):
    with pytest.raises(PolicyError, match=says):
        Duo(**call)


def test_windows_switch_is_a_switch():
    with pytest.raises(PolicyError, match="True or False"):
        Window(8, prefill="no")


@pytest.mark.parametrize("pattern", [{"alpha": jnp.zeros(3)}, {"beta": jnp.zeros(2)}])
def test_patterns_that_do_not_fit_are_refused(pattern):
    with pytest.raises(PolicyError, match=r"layer 0 .* 2 KV heads of 8 channels needs \{'alpha': \(2,\)\}"):
        kvjax.prefill(tiny.model(), duo(0.5), [TEXT], weights={"admission": [pattern] * 2})
