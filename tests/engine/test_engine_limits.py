"""What the engine does when it has no free row, no memory, no time, or a fault."""

from __future__ import annotations

import asyncio
import gc
import time

import jax
import jax.numpy as jnp
import pytest
import tiny

import kvjax
from kvjax import decode, metrics
from kvjax.decode import RequestError
from kvjax.engine import Draining, Engine, EngineDead, QueueFull, Request, TooManyStructures
from kvjax.engine.batch import RunningBatch
from kvjax.engine.pages import paged
from kvjax.engine.prefill import Prefill
from kvjax.engine.prefiller import Prefiller
from kvjax.engine.scheduler import Scheduler

SIZES = {"max_rows": 3, "context": 96, "chunk": 16, "segment": 4, "page": tiny.PAGE}
POLICY = "random + uniform(24, every(8))"


def make_request(seed: int = 1, tokens: int = 12, **more) -> Request:
    return Request(prompt=tiny.prompt(20, seed), max_new_tokens=tokens, policy=POLICY, **more)


@pytest.fixture
def engine():
    with Engine(tiny.model(), policy=POLICY, kv_memory=1 << 22, queue=2, **SIZES) as engine:
        yield engine


@pytest.mark.slow
def test_a_full_queue_says_when_to_come_again(engine):
    running = []

    def many() -> None:
        for seed in range(9):
            running.append(engine.submit(make_request(seed, 60)))

    with pytest.raises(QueueFull, match="Ask again in") as error:
        many()
    assert error.value.retry_after >= 1
    assert [len(ticket.result()) for ticket in running] == [60] * len(running)


def test_draining_ends_what_was_begun_and_takes_nothing_new(engine):
    engine.submit(make_request()).result()
    ticket = engine.submit(make_request(2, 40))
    assert engine.health == "ready"
    assert engine.drain(deadline=60) is True
    assert (ticket.finish_reason, engine.health) == ("length", "draining")
    with pytest.raises(Draining):
        engine.submit(make_request())
    engine.close()
    assert engine.health == "dead"
    with pytest.raises(EngineDead):
        engine.submit(make_request())


def test_draining_has_an_end(engine):
    tickets = [engine.submit(make_request(seed, 70)) for seed in range(2)]
    next(iter(tickets[0]))
    assert engine.drain(deadline=0.01) is False
    assert {ticket.finish_reason or list(ticket)[-1].finish_reason for ticket in tickets} == {"cancelled"}


def test_a_fault_in_one_request_ends_it_alone(engine, monkeypatch):
    unit = Prefill.unit

    def breaks(self, *words):
        if self.request.tokens[0] == tiny.prompt(20, 7)[0] and len(self.request.tokens) == 21:
            raise ArithmeticError("planted")
        return unit(self, *words)

    monkeypatch.setattr(Prefill, "unit", breaks)
    good = engine.submit(make_request(1))
    bad = engine.submit(Request(prompt=tiny.prompt(21, 7), max_new_tokens=4, policy=POLICY))
    with pytest.raises(ArithmeticError, match="planted"):
        bad.result()
    assert len(good.result()) == 12
    assert engine.health == "ready"
    assert engine.metrics().requests["error"] == 1


def test_a_fault_of_the_engine_is_raised_by_every_ticket(engine, monkeypatch):
    def breaks(self, steps, now):
        raise MemoryError("planted")

    monkeypatch.setattr(RunningBatch, "step", breaks)
    tickets = [engine.submit(make_request(seed)) for seed in range(2)]
    for ticket in tickets:
        with pytest.raises(EngineDead) as error:
            ticket.result()
        assert isinstance(error.value.__cause__, MemoryError)
    assert engine.health == "dead"
    assert isinstance(engine.fault, MemoryError)
    with pytest.raises(EngineDead):
        engine.metrics()


@pytest.mark.parametrize(
    "spec", ["full", POLICY, "quest(3, chunk=4)", "magicpig(3, 12) + recent(40)", "int8(8)"]
)
def test_the_bytes_of_a_batch_are_known_before_it_is_made(engine, spec):
    policy = paged(kvjax.policy(spec), SIZES["context"])
    sizes = {"rows": SIZES["max_rows"], "context": SIZES["context"], "page": tiny.PAGE, "chunk_size": 16}
    made = decode.empty(tiny.model().network, policy, **sizes, dtype=jnp.float32)
    assert engine._scheduler.memory.empty_bytes(policy) == metrics.allocated(made.layers)


def test_a_batch_that_never_fits_is_refused_before_anything_is_made():
    with Engine(tiny.model(), kv_memory=1 << 21, **SIZES) as engine:
        for spec in ("magicpig(16, 1024) + recent(90)", "magicpig(16, 1024, tail=1000000)"):
            with pytest.raises(
                RequestError, match=r"3 rows needs \d{7} bytes before it holds a token.*2097152"
            ):
                engine.submit(Request(prompt=tiny.prompt(20), max_new_tokens=3, policy=spec))


def test_idle_batches_make_room_for_other_policies():
    with Engine(tiny.model(), kv_memory=1 << 22, max_lanes=1, **SIZES) as engine:
        first = engine.submit(make_request(1, 30))
        other = engine.submit(Request(prompt=tiny.prompt(20, 2), max_new_tokens=5))
        tokens = first.result()
        assert (len(tokens), len(other.result())) == (30, 5)
        assert [batch.policy for batch in engine.metrics().batches] == ["full"]
        assert first.usage.total < other.usage.total  # it had to wait for the batch
        assert engine.submit(make_request(1, 30)).result() == tokens
        assert len(engine.metrics().batches) == 1


def test_an_event_loop_waits_for_tokens_without_blocking(engine):
    async def two() -> list[list[int]]:
        async def one(seed: int) -> list[int]:
            return [event.token async for event in engine.submit(make_request(seed))]

        return await asyncio.gather(one(1), one(2))

    texts = asyncio.run(two())
    assert texts == [engine.submit(make_request(seed)).result() for seed in (1, 2)]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt": []}, "nothing to continue"),
        ({"prompt": [61]}, "token id 61 at 0"),
        ({"prompt": [[1]]}, "not a list of token ids"),
        ({"prompt": tiny.prompt(90), "max_new_tokens": 7}, "Ask for at most 6"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"logprobs": 21}, "from 0 to 20"),
        ({"seed": -1}, "seed=-1"),
        ({"deadline": 0}, "deadline=0"),
        ({"stop_tokens": tuple(range(17)), "max_new_tokens": 4}, "at most 16"),
        ({"policy": "snapkw"}, "snapkw"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_begins(fields, words):
    engine = Engine(tiny.model(), **SIZES)
    with engine, pytest.raises((RequestError, kvjax.PolicyError), match=words):
        engine.submit(Request(**{"prompt": [1, 2]} | fields))


@pytest.mark.parametrize("overtaken", [False, True])
def test_rows_are_preempted_where_memory_runs_short_and_their_text_stays(monkeypatch, overtaken):
    """Counting none of the tokens to come (a share of 0) admits all; two of three rows fit to their ends.

    The oldest stays, also where its programs were ready last, so that its row came after the others'.
    """
    sizes = SIZES | {"context": 160}
    requests = [Request(prompt=tiny.prompt(70 + seed, seed), max_new_tokens=85) for seed in range(3)]
    with Engine(tiny.model(), kv_memory=1 << 22, **sizes) as roomy:
        expected = [ticket.result() for ticket in [roomy.submit(request) for request in requests]]
        assert roomy.metrics().preempted == 0
        batch = roomy._scheduler.memory.batches[0]
        pages = batch.bytes_of([1])
        held = batch.allocated - batch.bytes_of(batch.counts)
        held += 30 * pages  # of a row that is read
    read, begin = [], Prefill.begin

    def begun_with(prefill):
        read.append((len(prefill.tokens), prefill.total))
        begin(prefill)

    monkeypatch.setattr(Prefill, "begin", begun_with)
    with Engine(tiny.model(), kv_memory=held + 40 * pages, share=0.0, **sizes) as small:
        if overtaken:
            compiled = Prefiller._compiled

            def late(prefiller, prefill, seconds):
                running = small._scheduler.memory.running
                return (prefill.request.ticket.id > 1 or running) and compiled(prefiller, prefill, seconds)

            monkeypatch.setattr(Prefiller, "_compiled", late)
        begun = time.monotonic()
        tickets = [small.submit(request) for request in requests]
        texts = [ticket.result() for ticket in tickets]
        metrics = small.metrics()
    assert texts == expected
    assert any(tokens > prompt for tokens, prompt in read)  # what it wrote is read, not written again
    assert metrics.preempted == sum(ticket.usage.preempted for ticket in tickets) >= 1
    assert tickets[0].usage.preempted == 0  # the oldest stays
    assert metrics.kv_allocated <= metrics.kv_memory
    assert time.monotonic() - begun < 600


def test_a_context_that_does_not_fit_is_told_so():
    with Engine(tiny.model(), policy=POLICY, kv_memory=3000, **SIZES) as engine:
        with pytest.raises(RequestError, match="kv_memory is 3000"):
            engine.contexts.create("book", tiny.prompt(60))
        assert engine.contexts.list() == []


def test_a_row_that_can_never_fit_is_told_so():
    with Engine(tiny.model(), kv_memory=60_000, **SIZES | {"context": 160}) as engine:
        ticket = engine.submit(Request(prompt=tiny.prompt(100), max_new_tokens=50))
        with pytest.raises(RequestError, match="kv_memory"):
            ticket.result()
        assert engine.health != "dead"


# --- structures ------------------------------------------------------------------------------------


def test_a_client_brings_so_many_new_structures_a_minute(monkeypatch):
    def ask(policy: str, client: str = "a") -> int:
        request = Request(prompt=tiny.prompt(20), max_new_tokens=2, policy=policy, client=client)
        return len(engine.submit(request).result())

    with Engine(tiny.model(), new_structures=2, max_lanes=8, **SIZES) as engine:
        assert [ask("full"), ask("window(16)"), ask("window(16)")] == [2, 2, 2]
        with pytest.raises(TooManyStructures, match="Ask again in") as error:
            ask("window(24)")
        assert 1 <= error.value.retry_after <= 60
        assert ask("full") == 2  # it runs already
        assert ask("window(24)", "b") == 2
        assert ask("window(24)") == 2
        monkeypatch.setattr("kvjax.engine.engine.MINUTE", 0.0)
        assert ask("window(32)") == 2


def test_methods_of_one_batch_are_new_structures_each():
    """What reads their prompts has to be compiled, although their rows then run together."""

    def ask(policy: str) -> int:
        request = Request(prompt=tiny.prompt(20), max_new_tokens=2, policy=policy, client="a")
        return len(engine.submit(request).result())

    with Engine(tiny.model(), new_structures=2, **SIZES) as engine:
        assert ask("snapkv(8) + uniform(0.5)") == ask("keydiff + uniform(0.5) + recent(8)") == 2
        assert ask("snapkv(8) + uniform(0.4)") == 2
        assert len(engine.metrics().batches) == 1
        with pytest.raises(TooManyStructures):
            ask("snapkv(8) + ada(0.5)")


# --- memory ----------------------------------------------------------------------------------------

MIXED = ("full", "snapkv(8) + uniform(0.5)", "knorm + uniform(24, every_step)", "int8(8)", "window(64)")


def test_memory_stays_within_its_bound(monkeypatch):
    """Mixed policies that fill it: what the device has, looked at after every turn, is at most 5 % more."""
    sizes = SIZES | {"max_rows": 4, "context": 160}
    counted, turn = [], Scheduler.turn

    def device_bytes() -> int:
        return sum(x.nbytes for x in jax.live_arrays())

    def counting(scheduler):
        done = turn(scheduler)
        counted.append((device_bytes() - before, scheduler.memory.allocated()))
        return done

    tiny.model()
    gc.collect()
    before, memory = device_bytes(), 700_000
    monkeypatch.setattr(Scheduler, "turn", counting)
    with Engine(tiny.model(), kv_memory=memory, **sizes) as engine:
        requests = [
            Request(prompt=tiny.prompt(40 + 17 * at, at), max_new_tokens=30, policy=policy, ignore_eos=True)
            for at in range(4)
            for policy in MIXED
        ]
        assert [len(ticket.result()) for ticket in [engine.submit(x) for x in requests]] == [30] * len(
            requests
        )
    most, most_allocated = (max(x) for x in zip(*counted))
    assert 0.8 * memory < most_allocated <= memory
    assert most <= 1.05 * memory
