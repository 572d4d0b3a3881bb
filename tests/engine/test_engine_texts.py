"""A row's text is that of the same request alone, whatever runs beside it and whenever it came.

One engine for the whole file: two batches, whose programs every test shares.
"""

from __future__ import annotations

import time

import jax
import numpy as np
import pytest
import tiny

import kvjax
from kvjax import metrics
from kvjax.engine import Engine, Event, Request
from kvjax.engine.batch import RunningBatch
from kvjax.engine.prefill import Prefill
from kvjax.engine.ticket import EngineRequest

FULL, EVICTS = "full", "random({0}) + uniform({1}, every(8)) + sinks({2})"
CONTEXT = 96
SIZES = {"max_rows": 3, "context": CONTEXT, "chunk": 16, "segment": 4, "page": tiny.PAGE}

COMPILED: list[float] = []


def _heard(event: str, duration: float, **_: object) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        COMPILED.append(duration)


jax.monitoring.register_event_duration_secs_listener(_heard)


@pytest.fixture(scope="module")
def engine():
    with Engine(tiny.model(), kv_memory=1 << 24, queue=64, **SIZES) as engine:
        yield engine
        assert engine.fault is None


def requests() -> list[Request]:
    """Different lengths, policies, hyperparameters, draws, ends."""
    draws = {"temperature": 0.9, "top_p": 0.9, "seed": 3}
    return [
        Request(prompt=tiny.prompt(30, 1), max_new_tokens=21, logprobs=2),
        Request(prompt=tiny.prompt(41, 2), max_new_tokens=9, logprobs=1, **draws),
        Request(prompt=tiny.prompt(17, 3), max_new_tokens=30, policy=EVICTS.format(0, 24, 0), logprobs=1),
        Request(prompt=tiny.prompt(33, 4), max_new_tokens=26, policy=EVICTS.format(7, 20, 2), logprobs=1),
        Request(prompt=tiny.prompt(5, 5), max_new_tokens=33, policy=EVICTS.format(1, 16, 4), logprobs=1),
        Request(prompt=tiny.prompt(22, 6), max_new_tokens=40, logprobs=0, **draws),
        Request(prompt=tiny.prompt(48, 7), max_new_tokens=12, policy=EVICTS.format(7, 24, 0), logprobs=1),
    ]


def texts(engine: Engine, requests: list[Request], pause: float = 0.0) -> list[list[Event]]:
    """All events, of requests that come together, or one after another."""
    tickets = []
    for request in requests:
        tickets.append(engine.submit(request))
        time.sleep(pause)
    return [list(ticket) for ticket in tickets]


@pytest.fixture(scope="module")
def alone(engine) -> list[list[Event]]:
    """Each request with the engine to itself; nothing is taken from a prefix."""
    texts(engine, requests())  # batches as large as they will be
    events = []
    for request in requests():
        engine._scheduler.memory.prefixes.__init__(0)  # remembers nothing from here on
        events.append(list(engine.submit(request)))
    return events


def assert_same(texts: list[list[Event]], expected: list[list[Event]]) -> None:
    """Token for token; log-probabilities up to the order in which the pages of a KV head are added up."""
    for events, others in zip(texts, expected, strict=True):
        assert [event.token for event in events] == [event.token for event in others]
        assert [event.finish_reason for event in events] == [event.finish_reason for event in others]
        left, right = ([event.logprob or 0.0 for event in x] for x in (events, others))
        np.testing.assert_allclose(left, right, atol=2e-5)


@pytest.mark.slow
def test_company_changes_nothing(engine, alone):
    assert_same(texts(engine, requests()), alone)
    assert_same(texts(engine, requests()[::-1], pause=0.05)[::-1], alone)


@pytest.mark.slow
def test_rows_come_and_go_without_compiling(engine, alone):
    texts(engine, requests())  # its programs may have been dropped since ``alone``
    before = len(COMPILED)
    assert_same(texts(engine, requests()[::2]), alone[::2])
    assert len(COMPILED) == before


def test_each_row_has_its_own_hyperparameters(alone):
    model = tiny.model()
    for request, events in list(zip(requests(), alone))[1:4]:
        want = kvjax.generate(
            model,
            request.policy or FULL,
            [request.prompt],
            max_new_tokens=request.max_new_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            seed=request.seed,
            chunk_size=16,
            page=tiny.PAGE,
        )
        assert [event.token for event in events] == want.tokens[0]


def test_pages_return(engine, alone):
    snapshot = engine.metrics()
    assert [batch.rows for batch in snapshot.batches] == [0, 0]
    assert [batch.pages_used for batch in snapshot.batches] == [0, 0]
    assert [batch.live for batch in snapshot.batches] == [0, 0]
    assert snapshot.running == snapshot.queued == 0
    assert snapshot.between_tokens.count > 0
    assert snapshot.requests["length"] >= len(alone)


def test_log_probabilities_are_the_models(alone):
    request, events = requests()[0], alone[0]
    tokens = [*request.prompt, *(event.token for event in events)]
    logits = tiny.dense(tokens[:-1])[len(request.prompt) - 1 :]
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    for event, row in zip(events, expected):
        assert event.logprob == pytest.approx(row[event.token], abs=1e-4)
        best = np.argsort(-row)[:2]
        assert [token for token, _ in event.top_logprobs] == best.tolist()
        assert [x for _, x in event.top_logprobs] == pytest.approx(row[best].tolist(), abs=1e-4)


def test_a_prompt_is_echoed_with_its_log_probabilities(engine):
    prompt = tiny.prompt(37, 8)
    events = list(engine.submit(Request(prompt=prompt, max_new_tokens=1, echo=True, logprobs=1)))
    echoed = [event for event in events if event.prompt]
    assert [event.token for event in echoed] == prompt
    assert [event.prompt for event in events] == [True] * 37 + [False]
    logits = tiny.dense(prompt)
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert echoed[0].logprob is None
    for at, event in enumerate(echoed[1:]):
        assert event.logprob == pytest.approx(expected[at][event.token], abs=1e-4)
        assert event.top_logprobs[0][0] == expected[at].argmax()
    only = list(engine.submit(Request(prompt=prompt, max_new_tokens=0, echo=True)))
    assert [event.token for event in only] == [*prompt, None]
    assert only[-1].finish_reason == "length"


def test_an_end_token_ends_a_text_and_is_part_of_it(engine, alone):
    tokens = [event.token for event in alone[0]]
    stop = next(token for at, token in enumerate(tokens) if at >= 3 and token not in tokens[:at])
    request = Request(prompt=requests()[0].prompt, max_new_tokens=21, stop_tokens=(stop,))
    events = list(engine.submit(request))
    assert [event.token for event in events] == tokens[: tokens.index(stop) + 1]
    assert events[-1].finish_reason == "stop"
    assert alone[0][-1].finish_reason == "length"


def test_usage_and_inspection_are_the_state(engine):
    policy = kvjax.policy(EVICTS.format(7, 20, 2))
    prompt = tiny.prompt(33, 4)
    ticket = engine.submit(Request(prompt=prompt, max_new_tokens=26, policy=policy, inspect=True))
    tokens = ticket.result()
    usage, seen = ticket.usage, len(prompt) + 25
    assert (usage.prompt_tokens, usage.completion_tokens) == (33, 26)
    state, _ = kvjax.prefill(tiny.model(), policy, [prompt], context=CONTEXT, chunk_size=16, page=tiny.PAGE)
    state, _ = tiny.feed(policy, kvjax.decode.reserve(policy, state, 64, 1), np.asarray([tokens[:-1]]))
    held = np.asarray(metrics.present(state))[:, 0, :, :seen]
    inspection = engine.inspect(ticket)
    assert inspection.seen == usage.kv.seen == seen
    assert inspection.tokens.tolist() == [*prompt, *tokens[:-1]]
    for layer, heads in enumerate(inspection.heads):
        for head, held_positions in enumerate(heads):
            expected = np.flatnonzero(held[layer, head])
            assert np.concatenate([held_positions.pages, held_positions.ring]).tolist() == expected.tolist()
            assert usage.kv.layers[layer, head] == len(expected)
    assert usage.kv.live == inspection.live == kvjax.nbytes(state).total["live"]
    assert usage.kv.full == metrics.full_bytes(tiny.model().network, seen, "float32")


def test_a_prefix_is_read_once(engine, alone):
    request = requests()[0]
    engine._scheduler.memory.prefixes.__init__(1 << 22)
    first = engine.submit(request)
    events = list(first)
    again = engine.submit(request)
    assert_same([events, list(again)], [alone[0], alone[0]])
    assert (first.usage.cached_tokens, again.usage.cached_tokens) == (0, 29)  # all but the last
    # Two other texts with the same beginning, which ends within a chunk.
    other = [[*request.prompt[:20], *tiny.prompt(20, seed)] for seed in (11, 12)]
    cached = []
    for prompt in other:
        ticket = engine.submit(Request(prompt=prompt, max_new_tokens=2))
        ticket.result()
        cached.append(ticket.usage.cached_tokens)
    assert cached == [20, 20]
    # What was written counts where it is the same when read.
    turn = [*request.prompt, *(event.token for event in alone[0])]
    ticket = engine.submit(Request(prompt=[*turn, 5, 6], max_new_tokens=4))
    expected = kvjax.generate(tiny.model(), FULL, [[*turn, 5, 6]], max_new_tokens=4, page=tiny.PAGE).tokens[0]
    assert ticket.result() == expected
    assert ticket.usage.cached_tokens == len(turn) - 1


def test_a_context_is_continued_as_often_as_one_likes(engine, tmp_path):
    prompt, question = tiny.prompt(29, 20), tiny.prompt(6, 21)
    policy = EVICTS.format(3, 20, 1)
    info = engine.contexts.create("book", prompt, policy=policy)
    assert (info.name, info.tokens, info.policy) == ("book", 29, repr(kvjax.policy(policy)))
    request = Request(prompt=question, max_new_tokens=9, policy=policy, context="book", logprobs=0)
    tickets = [engine.submit(request) for _ in range(3)]
    first = [list(ticket) for ticket in tickets]
    assert_same(first[1:], [first[0], first[0]])
    assert tickets[0].usage.cached_tokens == 29
    assert tickets[0].usage.prompt_tokens == 35
    alone = list(engine.submit(Request(prompt=[], max_new_tokens=4, policy=policy, context="book")))
    whole = list(engine.submit(Request(prompt=prompt, max_new_tokens=4, policy=policy)))
    assert_same([alone], [whole])
    with pytest.raises(kvjax.engine.ContextMismatch):
        engine.submit(Request(prompt=question, context="book"))
    with pytest.raises(kvjax.engine.ContextExists):
        engine.contexts.create("book", prompt)
    files = engine.contexts.save(tmp_path / "kept")
    engine.contexts.delete("book")
    with pytest.raises(kvjax.engine.ContextNotFound):
        engine.submit(request)
    assert engine.contexts.list() == []
    (back,) = engine.contexts.load(tmp_path / "kept")
    assert (back.name, back.tokens, back.live) == (info.name, info.tokens, info.live)
    assert_same([list(engine.submit(request))], first[:1])
    assert [file.name for file in files] == ["book.kv"]
    assert engine.contexts.load(tmp_path / "kept") == []  # held already
    engine.contexts.delete("book")


def test_a_long_prompt_stops_nobody_for_more_than_a_chunk(engine, monkeypatch):
    """Between two segments of a running row there is one chunk of a prompt, whatever its length."""
    turns, step, unit = [], RunningBatch.step, Prefill.unit

    def stepped(self, *steps):
        turns.append("step")
        return step(self, *steps)

    def read(self, *words):
        turns.append("chunk")
        return unit(self, *words)

    engine.submit(Request(prompt=tiny.prompt(80, 42), max_new_tokens=2)).result()  # programs are there
    monkeypatch.setattr(RunningBatch, "step", stepped)
    monkeypatch.setattr(Prefill, "unit", read)
    running = engine.submit(Request(prompt=tiny.prompt(9, 40), max_new_tokens=60))
    next(iter(running))
    before = engine.metrics().pauses.count
    long = engine.submit(Request(prompt=tiny.prompt(80, 41), max_new_tokens=2))
    assert len(long.result()) == 2
    assert len(running.result()) >= 50
    chunks = [at for at, turn in enumerate(turns) if turn == "chunk"][1:]  # but that of the running row
    assert len(chunks) == 5
    assert min(later - at for at, later in zip(chunks, chunks[1:])) >= 2
    assert engine.metrics().pauses.count >= before + 5  # and whatever a busy machine adds


def test_the_next_segment_is_begun_before_tokens_are_handed_out(engine, alone, monkeypatch):
    """Where a batch has nothing to wait for; a row that comes, ends or is inspected finds it settled."""
    flying, deliver = [], EngineRequest.deliver

    def watched(self, events, kv, took=0.0):
        going = any(batch.flying for batch in engine._scheduler.memory.batches)
        flying.append((going, len(engine._scheduler.queue)))
        deliver(self, events, kv, took)

    engine._scheduler.memory.prefixes.__init__(0)
    monkeypatch.setattr(EngineRequest, "deliver", watched)
    events = list(engine.submit(requests()[0]))
    assert_same([events], alone[:1])
    # Of the prompt, then of 20 tokens by segments of four; at the last of them the row ends.
    assert flying == [(False, 0), *[(True, 0)] * 4, (False, 0)]
    many = [Request(prompt=tiny.prompt(9, seed), max_new_tokens=40) for seed in range(5)]
    together = texts(engine, many)
    assert (True, 2) in flying  # three rows run, and the others wait until one of them ends
    assert_same(together[-1:], texts(engine, many[-1:]))


@pytest.fixture
def slow_steps(monkeypatch) -> None:
    """A step that takes long enough for another thread to do something meanwhile."""
    step = RunningBatch.step

    def slow(self, *steps):
        step(self, *steps)
        time.sleep(0.02)

    monkeypatch.setattr(RunningBatch, "step", slow)


def test_an_inspection_of_a_running_row_is_of_what_was_handed_out(engine, slow_steps):
    seen, events, ticket = [], 0, engine.submit(Request(prompt=tiny.prompt(9, 50), max_new_tokens=60))
    for _ in ticket:
        events += 1
        inspection = engine.inspect(ticket) if events % 7 == 1 else None
        if inspection is None:
            continue
        seen.append(inspection.seen)
        assert len(inspection.tokens) == inspection.seen >= 9 + events - 1
        for heads in inspection.heads:
            for held in heads:
                assert np.concatenate([held.pages, held.ring]).tolist() == list(range(inspection.seen))
    assert seen


def test_who_leaves_is_gone_within_a_segment(engine, slow_steps):
    ticket = engine.submit(Request(prompt=tiny.prompt(9, 30), max_new_tokens=80))
    next(iter(ticket))
    ticket.cancel()
    assert [event.finish_reason for event in ticket][-1] == "cancelled"
    assert ticket.usage.completion_tokens <= 2 * SIZES["segment"] + 1
    late = engine.submit(Request(prompt=tiny.prompt(9, 30), max_new_tokens=80, deadline=0.001))
    assert [event.finish_reason for event in late][-1] == "deadline"
    assert engine.metrics().running == 0
    assert all(batch.pages_used == 0 for batch in engine.metrics().batches)
