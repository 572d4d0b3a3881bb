"""Penalties, biases and least lengths in the engine: a text is ``kvjax.generate``'s, in any company."""

from __future__ import annotations

import jax
import pytest
import tiny
from tiny import by_layer  # noqa: F401  (a fixture)

import kvjax
from kvjax.decode import RequestError
from kvjax.engine import Engine, Request

SIZES = {"max_rows": 3, "context": 96, "chunk": 16, "segment": 4, "page": tiny.PAGE}
DRAWN = {"temperature": 0.9, "top_p": 0.9, "seed": 3}
STOPS = tuple(range(12))
SHAPED = [
    {"frequency_penalty": 1.5, "presence_penalty": 0.5},
    {"repetition_penalty": 1.4, **DRAWN},
    {"logit_bias": {5: 4.0, 7: -100.0}, "min_p": 0.05, **DRAWN},
    {"min_tokens": 12, "stop_tokens": STOPS},
]

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


def request(number: int, **fields) -> Request:
    return Request(prompt=tiny.prompt(20 + number, number), max_new_tokens=24, **fields)


def alone(request: Request) -> list[int]:
    """What ``generate`` writes."""
    names = ("temperature", "top_p", "seed", "min_p", "frequency_penalty", "presence_penalty", "min_tokens")
    generation = kvjax.generate(
        tiny.model(),
        "full",
        [request.prompt],
        max_new_tokens=request.max_new_tokens,
        repetition_penalty=request.repetition_penalty,
        logit_bias=request.logit_bias,
        stops=request.stop_tokens,
        page=tiny.PAGE,
        **{name: getattr(request, name) for name in names},
    )
    return generation.tokens[0]


def make_room(engine: Engine) -> int:
    """Puts all running rows back to wait, as where memory runs short; how many."""

    def do() -> int:
        scheduler, many = engine._scheduler, 0
        scheduler._settle()
        for batch in scheduler.memory.batches:
            for number, row in list(batch.taken.items()):
                batch.release([number])
                row.request.restart()
                scheduler.queue.append(row.request)
                many += 1
        return many

    return engine._call(do)


def test_shaped_texts_are_generates_beside_others_and_after_making_room(engine):
    plain = [request(number, **DRAWN) for number in range(4)]
    before = [engine.submit(one).result() for one in plain]
    shaped = [request(number, **fields) for number, fields in enumerate(SHAPED)]
    expected = [alone(one) for one in shaped]
    assert all(
        text != alone(request(n, **DRAWN)) for n, text in enumerate(expected)
    )  # each option does something
    assert 12 < len(expected[3]) < 24
    assert not set(expected[3][:12]) & set(STOPS)
    tickets = [engine.submit(one) for pair in zip(shaped, plain) for one in pair]
    next(iter(tickets[0]))
    assert make_room(engine) >= 1
    events = [[event.token for event in ticket] for ticket in tickets[1:]]
    assert events == [text for pair in zip(expected, before) for text in pair][1:]
    assert sum(ticket.usage.preempted for ticket in tickets) >= 1
    assert engine.submit(shaped[0]).result() == expected[0]


def test_other_numbers_compile_nothing(engine):
    engine.submit(request(1, frequency_penalty=0.5)).result()
    before = len(COMPILED)
    for fields in ({"logit_bias": {3: 1.0, 4: 2.0}}, {"min_tokens": 5}, {"repetition_penalty": 1.1, **DRAWN}):
        engine.submit(request(1, **fields)).result()
    assert len(COMPILED) == before


def test_a_batch_without_shaped_rows_runs_the_plain_program(engine):
    (batch,) = engine._scheduler.memory.batches
    for fields, shapes in (({"presence_penalty": 1.0}, True), ({}, False)):
        engine.submit(request(0, **fields)).result()
        assert batch._steps_shape is shapes
    assert engine.metrics().running == 0  # between two programs: the last row is released
    assert batch._inputs(1, False).how.shaping is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"min_p": 1.5}, "min_p=1.5"),
        ({"repetition_penalty": 0}, "above 0"),
        ({"frequency_penalty": float("inf")}, "finite"),
        ({"logit_bias": {61: 1.0}}, "token id 61"),
        ({"logit_bias": dict.fromkeys(range(301), 1.0)}, "at most 300"),
        ({"min_tokens": 25}, "min_tokens=25"),
    ],
)
def test_shaping_that_does_not_fit_is_refused(engine, fields, words):
    with pytest.raises(RequestError, match=words):
        engine.submit(request(0, **fields))
