"""The laws of ``test_conformance`` on the real model, for one policy of each of the six places."""

from __future__ import annotations

import functools

import jax
import pytest
import test_conformance as conformance
import tiny
from real_prompts import BOOK

import kvjax
from kvjax import decode
from kvjax.engine import Engine, Request
from kvjax.engine.request import LearnedWeights, WeightCache

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("in_place_of_tiny")]

POLICIES = {
    "admission": "window(24) + sinks(4)",
    "eviction": "tova + uniform(24)",
    "selection": "topk_pages(8, chunk=4, sinks=2, tail=6)",
    "storage": "int8(16)",
    "budget": "snapkv(8) + ada(24)",
    "completion": "topk(5, sinks=2, tail=6) + phi(4)",
}
LAWS = [law for name, law in vars(conformance).items() if name.startswith("test_")]
TRACES = "test_state_is_a_legal_loop_carry"
"""Traces thirty layers for seconds; one place by default."""
CASES = [
    pytest.param(
        law,
        kvjax.policy(spec),
        id=f"{place}-{law.__name__.removeprefix('test_')}",
        marks=[pytest.mark.slow] * (law.__name__ == TRACES and place != "completion"),
    )
    for place, spec in POLICIES.items()
    for law in LAWS
    if law.pytestmark != [conformance.paged_policy.mark] or kvjax.policy(spec).paged(tiny.CONTEXT)
]


def in_each_place(slow_but: tuple[str, ...]) -> pytest.MarkDecorator:
    """Parametrised over the places; slow in all others than these."""
    cases = [
        pytest.param(kvjax.policy(spec), id=place, marks=[pytest.mark.slow] * (place not in slow_but))
        for place, spec in POLICIES.items()
    ]
    return pytest.mark.parametrize("policy", cases)


@pytest.fixture(scope="module")
def in_place_of_tiny(smollm2):
    """The laws' model is the real one, and its prompts are passages of the book."""
    book = smollm2.text.encode(BOOK, bos=False)

    def weights(policy):
        network = smollm2.network
        return {part.place: part.example_weights(jax.random.key(1), network) for part in policy.learned}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "model", lambda: smollm2)
        patch.setattr(tiny, "weights", functools.cache(weights))
        patch.setattr(tiny, "prompt", lambda length, seed=0: book[7 * seed : 7 * seed + length])
        patch.setattr(conformance, "live", functools.cache(conformance.live.__wrapped__))
        yield


@pytest.mark.parametrize(("law", "policy"), CASES)
def test_a_law(law, policy):
    law(policy)


@in_each_place(slow_but=tuple(POLICIES))
def test_chunks_read_what_a_whole_prompt_reads(policy):
    life = conformance.live(policy)  # in chunks of 16
    sizes = {"context": tiny.CONTEXT, "page": tiny.PAGE, "chunk_size": 64}
    state, _ = kvjax.prefill(tiny.model(), policy, life.prompts, **sizes, weights=tiny.weights(policy))
    atol = 2e-4
    if not policy.completion.idle:
        # A read subtracts what it visits. In places one part in 65,000 of a feature's sum is left, and a
        # rounding of the sum weighs as much more there: 2.8e-4 was seen, where others differ by 6e-5.
        atol = 2e-3
    elif not policy.storage.exact:
        # A page's codes are rounded anew when a chunk brings a larger key: by up to a step, of keys of up
        # to 30.
        atol = 30 / 127
    conformance.same(policy, decode.reserve(policy, state, conformance.STEPS, 1), life, atol=atol)


@in_each_place(slow_but=("budget",))
def test_the_engine_writes_what_generate_writes(policy, monkeypatch):
    """Three requests in two rows, so that one waits; together, and in ``generate`` alone."""
    random = LearnedWeights(tiny.weights(policy), "random")
    monkeypatch.setattr(WeightCache, "get", lambda self, policy, named: random)
    sizes = ((37, 8), (12, 6), (28, 5))
    prompts = [tiny.prompt(length, length) for length, _ in sizes]
    requests = [Request(prompt=prompt, max_new_tokens=n) for prompt, (_, n) in zip(prompts, sizes)]
    rows = {"max_rows": 2, "context": 96, "chunk": 16, "segment": 4, "page": tiny.PAGE}
    with Engine(tiny.model(), policy=policy, **rows) as engine:
        tickets = [engine.submit(request) for request in requests]
        together = [ticket.result() for ticket in tickets]
    for tokens, prompt, (_, count) in zip(together, prompts, sizes):
        alone = kvjax.generate(
            tiny.model(),
            policy,
            [prompt],
            max_new_tokens=count,
            stops=(),
            chunk_size=16,
            page=tiny.PAGE,
            weights=random.weights,
        )
        assert tokens == alone.tokens[0]
