"""Calls timed in turn: who is called how often, in which order, and what is made of the times."""

from __future__ import annotations

import pytest

from studies import processor


def test_calls_come_in_turn_and_are_told_over_the_first(monkeypatch):
    clock, called = [0.0], []

    def of(name, *seconds):
        left = iter(seconds)

        def run():
            called.append(name)
            clock[0] += next(left)

        return run

    monkeypatch.setattr(processor.time, "process_time", lambda: clock[0])
    times = processor.beside(of("a", 9, 2, 4, 8), {"b": of("b", 9, 3, 5, 16)})
    assert called == ["a", "b"] * (processor.REPEATS + 1)  # the first of each warms up
    assert (times["first"], times["b"]) == (2, 3)
    assert times["over"] == {"b": pytest.approx(0.5)}  # of 1.5, 1.25 and 2 the middle one
