"""Prompts share the machine: who is read when, what is read together, and what is read only once.

Whatever the order, a text is that of ``generate``. One engine for most of the file reads four chunks a turn.
"""

from __future__ import annotations

import dataclasses
import threading

import numpy as np
import pytest
import tiny
from test_engine_prefix import compared

import kvjax
from kvjax.engine import Engine, Request
from kvjax.engine.batch import RunningBatch
from kvjax.engine.prefill import Prefill
from kvjax.engine.together import Together
from kvjax.engine.turns import PASSED, Turns

CHUNK, CONTEXT = 16, 160
SIZES = {"max_rows": 4, "context": CONTEXT, "chunk": CHUNK, "segment": 4, "page": tiny.PAGE}
EVICTS = "random({0}) + uniform({1}, every(8)) + sinks({2})"
WHOLE = "snapkv(8) + uniform(0.5)"


@pytest.fixture(scope="module")
def engine():
    with Engine(tiny.model(), kv_memory=1 << 24, prefill_tokens=4 * CHUNK, **SIZES) as engine:
        yield engine
        assert engine.fault is None


@pytest.fixture(autouse=True)
def nothing_held(engine) -> None:
    """No test finds what another read."""
    engine._scheduler.memory.prefixes.__init__(1 << 22)


def generated(request: Request) -> list[int]:
    sizes = {"chunk_size": CHUNK, "page": tiny.PAGE}
    names = ("max_new_tokens", "temperature", "top_p", "seed")
    how = {name: getattr(request, name) for name in names}
    return kvjax.generate(tiny.model(), request.policy or "full", [request.prompt], **how, **sizes).tokens[0]


def at_once(engine: Engine, requests: list[Request]) -> list:
    """Tickets of requests that the engine finds in its queue together."""
    free = threading.Event()
    engine._inbox.put(free.wait)  # its thread waits
    tickets = [engine.submit(request) for request in requests]
    free.set()
    return tickets


@pytest.fixture
def units(monkeypatch) -> list[list[int]]:
    """Numbers of the requests whose prompts are read, unit by unit."""
    seen: list[list[int]] = []
    alone, together = Prefill.unit, Together.read

    def one(self, *words):
        seen.append([self.request.ticket.id])
        return alone(self, *words)

    def several(self, *words):
        seen.append([prefill.request.ticket.id for prefill in self.prefills])
        return together(self, *words)

    monkeypatch.setattr(Prefill, "unit", one)
    monkeypatch.setattr(Together, "read", several)
    return seen


@pytest.mark.parametrize("policies", [["full"] * 4, [EVICTS.format(s, 20, s) for s in range(4)]])
def test_several_prompts_are_read_in_one_program(engine, units, monkeypatch, policies):
    """As many as the budget allows; texts stay, also where each row has its own hyperparameters."""
    ready = engine._scheduler.compiler.ready
    # The program is there when it is first asked for.
    monkeypatch.setattr(
        engine._scheduler.compiler, "ready", lambda programs, wait=0.0, **more: ready(programs, 60, **more)
    )
    lengths = (45, 33, 47, 41)
    requests = [
        Request(
            prompt=tiny.prompt(many, 60 + many), max_new_tokens=6, policy=policy, temperature=0.7, seed=many
        )
        for many, policy in zip(lengths, policies)
    ]
    tickets = at_once(engine, requests)
    assert [ticket.result() for ticket in tickets] == [generated(request) for request in requests]
    numbers = {ticket.id for ticket in tickets}
    assert max(len(unit) for unit in units) == 4
    assert {number for unit in units for number in unit} == numbers
    assert len(units) < sum(-(-many // CHUNK) for many in lengths) / 2


def test_a_fault_in_one_of_several_ends_it_alone(engine, units, monkeypatch):
    ready, fed = engine._scheduler.compiler.ready, Prefill.fed
    monkeypatch.setattr(
        engine._scheduler.compiler, "ready", lambda programs, wait=0.0, **more: ready(programs, 60, **more)
    )

    def breaks(self, *words):
        if self.tokens[0] == bad.prompt[0]:
            raise ArithmeticError("planted")
        return fed(self, *words)

    good, bad = (Request(prompt=tiny.prompt(40, seed), max_new_tokens=5) for seed in (3, 4))
    monkeypatch.setattr(Prefill, "fed", breaks)
    tickets = at_once(engine, [bad, good])
    with pytest.raises(ArithmeticError, match="planted"):
        tickets[0].result()
    assert tickets[1].result() == generated(good)
    assert [len(unit) for unit in units][0] == 2
    assert engine.health == "ready"


def test_the_shortest_is_read_first(units):
    """One that came last, behind long ones of both kinds, is read in its first turn."""
    with Engine(tiny.model(), kv_memory=1 << 24, **SIZES) as engine:
        for policy in ("full", WHOLE):  # programs are there, and batches have their size
            for many in (140, 12):
                engine.submit(
                    Request(prompt=tiny.prompt(many, many), max_new_tokens=2, policy=policy)
                ).result()
        units.clear()
        long = [Request(prompt=tiny.prompt(140, at), max_new_tokens=4) for at in range(2)]
        long += [Request(prompt=tiny.prompt(140, at), max_new_tokens=4, policy=WHOLE) for at in range(2, 4)]
        short = Request(prompt=tiny.prompt(12, 5), max_new_tokens=4)
        *others, last = at_once(engine, [*long, short])
        assert last.result() == generated(short)
        order = [unit[0] for unit in units]
        # Four requests leave the queue in a turn, in which one prompt is read; then comes the short one.
        assert order.index(last.id) <= 2 * tiny.model().network.num_layers
        assert [ticket.result() for ticket in others] == [generated(request) for request in long]


def test_a_long_prompt_is_not_passed_for_ever(units):
    with Engine(tiny.model(), kv_memory=1 << 24, queue=256, **SIZES) as engine:
        for many in (140, 12):
            engine.submit(Request(prompt=tiny.prompt(many, many), max_new_tokens=2)).result()
        units.clear()
        long = Request(prompt=tiny.prompt(140, 1), max_new_tokens=2)
        short = [Request(prompt=tiny.prompt(14, at), max_new_tokens=1) for at in range(10, 90)]
        first, *others = at_once(engine, [long, *short])
        assert first.result() == generated(long)
        for ticket in others:
            ticket.result()
        order = [unit[0] for unit in units]
        begins = order.index(first.id)
        passed = 14 * sum(number != first.id for number in order[: len(order) - order[::-1].index(first.id)])
        assert begins > 0
        assert 140 < passed <= PASSED * 140 + 14


def test_equal_prompts_are_read_once(engine):
    """The texts of one question differ in their draws alone, whenever its policy decides."""
    for policy in ("full", WHOLE):
        first = Request(
            prompt=tiny.prompt(45, 7), max_new_tokens=6, temperature=1.5, seed=5, policy=policy, logprobs=1
        )
        requests = [dataclasses.replace(first, draw=draw) for draw in range(4)]
        before = engine.metrics().prompt_tokens
        tickets = engine.submit_all(requests)
        texts = [ticket.result() for ticket in tickets]
        assert engine.metrics().prompt_tokens - before == 45
        assert [ticket.usage.cached_tokens for ticket in tickets] == [0, 45, 45, 45]
        assert len({tuple(text) for text in texts}) > 1
        engine._scheduler.memory.prefixes.__init__(0)
        assert texts == [engine.submit(request).result() for request in requests]


def test_who_leaves_takes_no_others_with_it(engine, monkeypatch):
    """Three ask for one prompt; the first leaves while it is read."""
    unit = Prefill.unit

    def leaves(self, *words):
        tickets[0].cancel()
        return unit(self, *words)

    requests = [
        Request(prompt=tiny.prompt(31, 8), max_new_tokens=5, temperature=1.0, draw=at) for at in range(3)
    ]
    expected = [engine.submit(request).result() for request in requests]
    engine._scheduler.memory.prefixes.__init__(0)
    monkeypatch.setattr(Prefill, "unit", leaves)
    tickets = at_once(engine, requests)
    assert [event.finish_reason for event in tickets[0]][-1] == "cancelled"
    assert [ticket.result() for ticket in tickets[1:]] == expected[1:]


def test_prompts_of_another_owner_are_not_shared(engine):
    request = Request(prompt=tiny.prompt(45, 17), max_new_tokens=3, owner="a")
    text = engine.submit(request).result()
    again = [engine.submit(dataclasses.replace(request, owner=owner)) for owner in ("b", "a")]
    assert [ticket.result() for ticket in again] == [text, text]
    assert [ticket.usage.cached_tokens for ticket in again] == [0, 44]


@pytest.mark.parametrize("tokens", [70, 64, 9, 120])
def test_a_beginning_of_what_is_held_is_what_reading_it_leaves(engine, tokens):
    """A cache that keeps everything, cut back to any number of tokens, is the one of so many tokens."""
    prompt = tiny.prompt(140, 19)
    engine.submit(Request(prompt=prompt, max_new_tokens=2)).result()
    memory = engine._scheduler.memory
    held = max(memory.prefixes._held, key=lambda prefix: len(prefix.tokens))
    structure = next(x for x in memory.structures if x.policy.structure == memory.batches[0].policy.structure)

    def states() -> tuple:
        short = structure.shortened(held.row, np.int32(tokens), (64,))
        engine._scheduler.memory.prefixes.__init__(1 << 22)
        return short

    short = engine._call(states)
    ticket = engine.submit(Request(prompt=[*prompt[:tokens], 3], max_new_tokens=2))
    ticket.result()
    assert ticket.usage.cached_tokens == 0
    own = structure.policy
    alone, _ = kvjax.decode.prefill(
        tiny.model(), own, [prompt[:tokens]], context=CONTEXT, chunk_size=CHUNK, page=tiny.PAGE
    )
    for left, right in zip(compared(short), compared(alone), strict=True):
        np.testing.assert_allclose(left, right, atol=2e-5)


@pytest.mark.parametrize(
    "policy",
    [
        WHOLE,
        pytest.param("snapkv(8) + ada(0.5) + sinks(2)", marks=pytest.mark.slow),
        pytest.param("keydiff + uniform(0.5)", marks=pytest.mark.slow),
    ],
)
def test_a_whole_prompt_is_read_behind_a_beginning_that_came_before(engine, policy):
    """Kept when it comes the second time, taken the third; the row holds what reading all of it leaves."""
    begin = tiny.prompt(90, 30)
    ends = [tiny.prompt(many, 31 + many) for many in (20, 11, 26, 4)]
    requests = [Request(prompt=[*begin, *end], max_new_tokens=7, policy=policy, inspect=True) for end in ends]
    tickets = []
    for request in requests:
        tickets.append(engine.submit(request))
        assert tickets[-1].result() == generated(request)
    queries = 8 if "snapkv" in policy else 1
    assert [x.usage.cached_tokens for x in tickets] == [0, 0, 90, min(90, 94 - queries)]
    for request, ticket in zip(requests, tickets):
        engine._scheduler.memory.prefixes.__init__(0)
        alone = engine.submit(request)
        alone.result()
        assert alone.usage.cached_tokens == 0
        engine.metrics()  # after the turn in which it ended
        for layer, others in zip(engine.inspect(ticket).heads, engine.inspect(alone).heads, strict=True):
            for head, other in zip(layer, others, strict=True):
                assert head.pages.tolist() == other.pages.tolist()
                assert head.ring.tolist() == other.ring.tolist()


def test_who_needs_more_than_keys_and_values_reads_all():
    """By what a policy declares; others are never read behind a beginning."""
    needs = {
        "snapkv(8) + uniform(0.5)": 8,
        "knorm + uniform(0.5)": 1,
        "h2o + uniform(0.5)": None,  # the attention of every query
        "full": None,  # is read in chunks
        "snapkv(8) + critical + uniform(0.5)": None,  # the output projection
    }
    found = {spec: kvjax.decode.queries_behind(kvjax.policy(spec)) for spec in needs}
    assert found == needs


def test_a_prompt_begins_with_part_of_another(engine):
    """The longest common beginning, wherever it ends; the text is as without it."""
    begin = tiny.prompt(75, 20)
    engine.submit(Request(prompt=[*begin, *tiny.prompt(30, 21)], max_new_tokens=2)).result()
    request = Request(prompt=[*begin, 5, 6, 7, 8], max_new_tokens=8)
    ticket = engine.submit(request)
    assert ticket.result() == generated(request)
    assert ticket.usage.cached_tokens >= 75


def test_prompts_have_a_turn_after_every_program_and_a_program_is_then_one_step(monkeypatch):
    """Two batches run; while anything is left to read neither writes twice, nor more than a token."""
    seen: list[str] = []
    step, read = RunningBatch.step, Turns.read

    def stepping(self, steps, now):
        seen.append(f"step {now}")
        step(self, steps, now)

    def reading(self):
        before = self.units
        done = read(self)
        seen.extend(["read"] * (self.units > before))
        return done

    def run(seed: int) -> None:
        runs = [
            engine.submit(Request(prompt=tiny.prompt(8, seed), max_new_tokens=60, policy=policy))
            for policy in ("full", "int8(64)")
        ]
        for ticket in runs:
            next(iter(ticket))
        seen.clear()
        prompts = [tiny.prompt(48, seed + 1), tiny.prompt(48, seed + 2)]
        new = at_once(engine, [Request(prompt=prompt, max_new_tokens=4) for prompt in prompts])
        for ticket in [*new, *runs]:
            ticket.result()

    monkeypatch.setattr(RunningBatch, "step", stepping)
    monkeypatch.setattr(Turns, "read", reading)
    with Engine(tiny.model(), **SIZES) as engine:
        run(60)  # compiles
        run(70)
    first, last = seen.index("read"), len(seen) - seen[::-1].index("read")
    while_read = seen[first:last]
    assert len(while_read) >= 11  # three chunks each
    assert set(while_read[::2]) == {"read"}
    assert set(while_read[1::2]) == {"step 1"}
    assert "step 4" in seen[last:]
