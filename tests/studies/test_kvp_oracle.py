"""The oracle of KVP's cost on the tiny model: it ranks by what the future attends to, by NumPy."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from kvjax import decode, metrics
from kvjax.eval.measure import batch
from kvjax.eval.tasks.sample import Encoded, Sample
from studies.kvp import oracle

LENGTHS, ANSWER = (52, 45), 9
SAMPLES = [
    (
        Sample(context="", answer=""),
        Encoded(
            context=tiny.prompt(n, seed),
            question=[3, 4],
            prefix=[5],
            answer=tiny.prompt(ANSWER, 9 + seed),
            needed=np.zeros(n, bool),
            scored=np.zeros(ANSWER, int),
            labels=(),
            bytes=1,
        ),
    )
    for seed, n in enumerate(LENGTHS)
]


def attention(ids: list[int]) -> list[np.ndarray]:
    """[N, T, T] of each layer, from the queries and keys that the model hands over."""
    model, layers = tiny.model(), []

    def attend(index, x, carry):
        q, k = np.asarray(x.q[0], np.float64), np.repeat(np.asarray(x.k[0], np.float64), 2, axis=1)
        s = np.einsum("tnh,snh->nts", q, k) / np.sqrt(q.shape[-1])
        s = np.where(np.tri(len(q), dtype=bool), s, -np.inf)
        w = np.exp(s - s.max(axis=-1, keepdims=True))
        w /= w.sum(axis=-1, keepdims=True)
        layers.append(w)
        v = np.repeat(np.asarray(x.v[0], np.float64), 2, axis=1)
        return jnp.asarray(np.einsum("nts,snh->tnh", w, v)[None], jnp.float32), carry

    at = jnp.arange(len(ids))[None]
    x = model.network.embed(model.params, jnp.asarray(ids)[None], at)
    for index, block in enumerate(model.params["layers"]):
        x, _ = model.network.layer(block, index, x, at, attend, None)
    return layers


@pytest.mark.parametrize("protocol", ["agnostic", "aware"])
def test_a_token_is_worth_what_the_question_and_the_answer_attend_to_it(protocol):
    weights = oracle.future(tiny.model(), SAMPLES, protocol, 3)["eviction"]
    for row, (_, e) in enumerate(SAMPLES):
        prompt = len(e.context) + (len(e.question) if protocol == "aware" else 0)
        whole = [*e.context, *e.question, *e.prefix, *e.answer[:-1]]
        for layer, w in enumerate(attention(whole)):
            right = w.reshape(2, 2, *w.shape[1:])[:, :, prompt:, :prompt].max(axis=1).sum(axis=1)
            worth = np.asarray(weights[layer]["future"])
            np.testing.assert_allclose(worth[row, :, :prompt], right, rtol=2e-3, atol=1e-5)
            np.testing.assert_array_equal(worth[2], worth[0])  # a copy of the first fills the batch


def test_the_most_attended_stay_beside_the_protected():
    policy, model = oracle.policy_of(28), tiny.model()
    weights = oracle.future(model, SAMPLES, "agnostic", 2)
    prompts = batch.prompts(SAMPLES, "agnostic", 2)
    state, _ = decode.prefill(model, policy, prompts, context=tiny.CONTEXT, weights=weights)
    held = np.asarray(metrics.present(state))
    for layer, parts in enumerate(weights["eviction"]):
        for row, n in enumerate(LENGTHS):
            for head in range(2):
                worth = np.asarray(parts["future"])[row, head, :n].copy()
                worth[:4] = worth[n - 16 :] = np.inf
                right = np.sort(np.argsort(-worth, kind="stable")[:28])
                np.testing.assert_array_equal(np.flatnonzero(held[layer, row, head, :n]), right)
