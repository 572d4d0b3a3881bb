"""After the prompt, policies whose budget acts on it alone are one policy: what they feed shares programs."""

from __future__ import annotations

import jax
import numpy as np
import tiny
from jax.interpreters.partial_eval import dce_jaxpr
from test_conformance import EXAMPLES, each
from test_traced import compilations

import kvjax
from kvjax import decode, layer
from kvjax.algebra import Policy
from kvjax.cache.state import KVState
from kvjax.decode._step import run_layers

RESTING = [policy for policy in EXAMPLES if policy.after_prompt != policy]


def traced(policy: Policy, state: KVState, tokens: int) -> str:
    """What a step, or a chunk of so many tokens, computes under a policy, as text."""
    fed, count = np.zeros((3, tokens), np.int32), np.ones(3, bool if tokens == 1 else np.int32)
    run = layer.step if tokens == 1 else layer.chunk
    weights = tiny.weights(policy)

    def program(state: KVState) -> object:
        network, params = tiny.model().network, tiny.model().params
        return run_layers(network, policy, params, weights, state, fed, run, (state.length, count))

    jaxpr = jax.make_jaxpr(program)(state).jaxpr
    return str(dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0])  # without what nothing reads


@each(RESTING)
def test_what_rests_computes_what_it_computed(policy):
    """Nothing that a step or a chunk reads of a policy is lost when its prompt is behind it."""
    sizes = {"rows": 3, "context": tiny.CONTEXT, "page": tiny.PAGE, "chunk_size": 16, "dtype": "float32"}
    state = decode.empty(tiny.model().network, policy, **sizes)
    rest, _, begin = decode.after_prompt(policy, tiny.weights(policy), state)
    for tokens in (1, 5):
        assert traced(rest, begin, tokens) == traced(policy, state, tokens)


def test_policies_that_act_while_decoding_do_not_rest():
    for spec in ("full", "window(16)", "knorm + uniform(24, every_step)", "quest(3, chunk=4)", "int8(16)"):
        assert kvjax.policy(spec).after_prompt == kvjax.policy(spec)


def test_methods_that_cut_the_prompt_share_what_stores_writes_and_extends():
    def run(spec: str) -> int:
        """Programs compiled for what comes after the prompt."""
        policy, stores = kvjax.policy(spec), decode.store_layer._cache_size()
        sizes = {"context": 96, "chunk_size": 32, "page": tiny.PAGE, "weights": tiny.weights(policy)}
        state, logits = decode.prefill(tiny.model(), policy, [tiny.prompt(60)], **sizes)
        state = decode.roomy(policy, state, 32)

        def after() -> None:
            nonlocal state, logits
            own = {"weights": sizes["weights"]}
            state, logits = decode.extend(tiny.model(), policy, state, [tiny.prompt(9, 1)], **own)
            state = decode.roomy(policy, state, 32)
            list(decode.stream(tiny.model(), policy, state, logits, max_new_tokens=4, **own))

        return compilations(after) + decode.store_layer._cache_size() - stores

    assert run("snapkv(8) + uniform(0.5)") > 0
    for spec in (
        "keydiff + uniform(0.5) + recent(8)",
        "snapkv(8) + ada(0.5)",
        "kvp(2, recent=8) + uniform(0.5)",
    ):
        assert run(spec) == 0, spec
    assert run("snapkv(6) + uniform(0.5)") > 0  # its ring is shorter
