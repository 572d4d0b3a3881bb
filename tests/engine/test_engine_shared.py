"""Rows of a batch that begin alike share full pages: fewer pages, the same texts, nothing left behind."""

from __future__ import annotations

import numpy as np
import pytest
import tiny

import kvjax
from kvjax.engine import Engine, Request
from kvjax.engine.batch import RunningBatch
from kvjax.engine.pages import can_lend, shapes_with

SIZES = {"max_rows": 4, "context": 128, "chunk": 16, "segment": 4, "page": tiny.PAGE, "kv_memory": 1 << 24}
BEGINNING, MANY = tiny.prompt(96, 3), 4


def make_request(seed: int, **more) -> Request:
    end = tiny.prompt(5, 50 + seed)
    prompt = end if "context" in more else [*BEGINNING, *end]
    return Request(prompt=prompt, max_new_tokens=20, ignore_eos=True, logprobs=0, **more)


def shared_pages(engine: Engine) -> np.ndarray:
    """Owners beyond the first, by layer."""
    (batch,) = engine._scheduler.memory.batches
    return engine._call(
        lambda: np.asarray([np.maximum(np.asarray(x.pages.refs) - 1, 0).sum() for x in batch.state.layers])
    )


def texts(share: bool, policy: str = "full", **more) -> tuple[list[list[int]], list[np.ndarray]]:
    """Of rows that run together; what they shared after each token of the last one."""
    with Engine(tiny.model(), policy=policy, share_pages=share, **SIZES) as engine:
        if more:
            engine.contexts.create("book", BEGINNING, policy=policy)
        if (
            share
        ):  # the programs that read such pages are there, or the first would have ended before they are
            sources, insert = [], RunningBatch.insert
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(
                    RunningBatch, "insert", lambda *x: (sources.append(shapes_with(x[2])), insert(*x))[1]
                )
                for _ in range(2):  # from its beginning, and from the prefix that the first one leaves
                    engine.submit(make_request(MANY, **more)).result()
            (batch,), compiler = engine._scheduler.memory.batches, engine._scheduler.compiler
            programs = [x for y in sources for x in batch.programs(SIZES["segment"], y, shared=True)]
            assert engine._call(lambda: compiler.ready(programs, 600))
        first = engine.submit(make_request(0, **more))
        events = iter(first)
        head = next(events)
        tickets = [engine.submit(make_request(seed, **more)) for seed in range(1, MANY)]
        seen = [shared_pages(engine) for _ in tickets[-1]]
        tokens = [[head.token, *(event.token for event in events)]]
        tokens += [ticket.result() for ticket in tickets[:-1]]
        tokens.append(list(engine.submit(make_request(MANY - 1, **more)).result()))
        assert engine.metrics().batches[0].pages_used == 0
        (batch,) = engine._scheduler.memory.batches
        assert not batch.shared
        assert engine.fault is None
    return tokens, seen


@pytest.mark.parametrize("policy", ["full", pytest.param("int8(16)", marks=pytest.mark.slow)])
def test_rows_with_one_beginning_hold_it_once(policy):
    plain, none = texts(False, policy)
    shared, seen = texts(True, policy)
    assert shared == plain
    assert not np.any(none)
    network = tiny.model().network
    window = 64 if policy == "full" else 16
    full = (len(BEGINNING) - window) // tiny.PAGE * network.num_kv_heads
    most = np.max(seen, axis=0)
    assert most.shape == (network.num_layers,)
    assert np.all(most == (MANY - 1) * full)


@pytest.mark.slow
def test_rows_that_continue_a_context_share_it():
    policy = "snapkv(8) + uniform(0.5)"
    assert can_lend(kvjax.policy(policy))
    plain, none = texts(False, policy, context="book")
    shared, seen = texts(True, policy, context="book")
    assert shared == plain
    assert not np.any(none)
    assert np.any(seen)


def test_what_evicts_while_it_writes_lends_nothing():
    assert not can_lend(kvjax.policy("knorm + uniform(24, every_step)"))
    assert all(can_lend(kvjax.policy(x)) for x in ("full", "int8(16)", "write_gate(0.5)", "gvote"))


def test_the_texts_of_one_prompt_hold_it_once():
    """It is read once, and each further text borrows the pages of the first."""
    requests = [Request(prompt=BEGINNING, max_new_tokens=28, temperature=1.0, draw=at) for at in range(MANY)]
    with Engine(tiny.model(), share_pages=False, **SIZES) as engine:
        plain = [ticket.result() for ticket in engine.submit_all(requests)]
    with Engine(tiny.model(), share_pages=True, **SIZES) as engine:
        for _ in range(2):  # the second time programs are there
            engine._scheduler.memory.prefixes.__init__(0)
            tickets = engine.submit_all(requests)
            seen = [shared_pages(engine) for _ in tickets[-1]]
        assert [ticket.result() for ticket in engine.submit_all(requests)] == plain
        assert engine.metrics().batches[0].pages_used == 0
    full = (len(BEGINNING) - 64) // tiny.PAGE * tiny.model().network.num_kv_heads
    assert np.all(np.max(seen, axis=0) == (MANY - 1) * full)
