"""A request that waits for programs, memory or a batch stops no other, and is not passed for ever."""

from __future__ import annotations

import gc
import threading
import time

import jax
import pytest
import tiny

import kvjax
from kvjax.engine import Engine, Request, batch_bytes, compiler
from kvjax.engine import pages as paging
from kvjax.engine.batch import RunningBatch
from kvjax.engine.compiler import Compiler
from kvjax.engine.prefill import Prefill
from kvjax.programs import maps_taken

SIZES = {"max_rows": 3, "context": 96, "chunk": 16, "segment": 4, "page": tiny.PAGE}
WHOLE = "snapkv(8) + uniform(0.5)"


def make_request(seed: int = 1, tokens: int = 8, **more) -> Request:
    return Request(prompt=tiny.prompt(20, seed), max_new_tokens=tokens, **more)


def test_others_pass_a_request_that_waits_for_programs():
    free = threading.Event()
    with Engine(tiny.model(), **SIZES) as engine:
        expected = engine.submit(make_request()).result()
        engine._scheduler.compiler._pool.submit(free.wait, 300)
        others = [
            engine.submit(make_request(2, policy=WHOLE)),
            engine.submit(make_request(3, policy="window(16)")),
        ]
        assert engine.submit(make_request()).result() == expected  # it came last, and its programs are there
        assert [ticket.done for ticket in others] == [False, False]
        assert engine.metrics().reading == 2
        others[1].cancel()
        assert [event.finish_reason for event in others[1]] == ["cancelled"]
        free.set()
        assert len(others[0].result()) == 8


def test_the_first_whole_prompt_of_a_size_is_read_where_programs_are_compiled(monkeypatch):
    readers, unit = [], Prefill.unit

    def read(self):
        readers.append(threading.current_thread().name.split("_")[0])
        unit(self)

    monkeypatch.setattr(Prefill, "unit", read)
    with Engine(tiny.model(), policy=WHOLE, **SIZES) as engine:
        texts = [engine.submit(make_request()).result() for _ in range(2)]
        assert texts[0] == texts[1]
        half = len(readers) // 2
        assert half >= 2  # a unit a layer
        assert readers == ["kvjax-compile"] * half + ["kvjax-engine"] * half


def test_a_prompt_that_fails_beside_the_others_fails_alone(monkeypatch):
    unit = Prefill.unit

    def breaks(self):
        if self.request.tokens[0] == tiny.prompt(20, 7)[0]:
            raise ArithmeticError("planted")
        unit(self)

    monkeypatch.setattr(Prefill, "unit", breaks)
    with Engine(tiny.model(), policy=WHOLE, **SIZES) as engine:
        with pytest.raises(ArithmeticError, match="planted"):
            engine.submit(make_request(7)).result()
        assert len(engine.submit(make_request(8)).result()) == 8


@pytest.mark.slow
def test_programs_are_dropped_before_a_process_has_too_many_maps(monkeypatch):
    """The compiler crashes beyond them. Who is being written goes on, and the new policy is served."""
    notes, taken = [], [0.1]
    monkeypatch.setattr(compiler, "maps_taken", lambda: taken[0])
    with Engine(tiny.model(), on_note=notes.append, **SIZES) as engine:
        expected = [
            engine.submit(make_request(1, 60)).result(),
            engine.submit(make_request(2, policy="window(8)")).result(),
        ]
        running = engine.submit(make_request(1, 60))
        first = next(iter(running))
        taken[0] = 0.9
        new = engine.submit(make_request(2, policy="window(16)"))
        assert len(new.result()) == 8
        taken[0] = 0.1
        assert [first.token, *running.result()][-60:] == expected[0]
        assert engine.submit(make_request(2, policy="window(8)")).result() == expected[1]
    assert any("90% of the memory maps" in line for line in notes)


@pytest.mark.slow
@pytest.mark.skipif(not maps_taken(), reason="the system does not count memory maps")
def test_many_policies_do_not_exhaust_the_maps(monkeypatch):
    """With a low limit, real programs and real maps: however many policies come, few maps are taken."""
    jax.clear_caches()
    gc.collect()  # else what other tests left is freed while this one runs
    notes, limit = [], maps_taken() + 0.04
    monkeypatch.setattr(compiler, "CROWDED", limit)
    policies = [
        "window(8)",
        "int8(8)",
        "snapkv(4) + uniform(12)",
        "knorm + uniform(12, every(4))",
        "tova + uniform(12)",
    ]
    with Engine(tiny.model(), on_note=notes.append, max_lanes=2, **SIZES) as engine:
        for policy in policies + policies:
            assert len(engine.submit(make_request(policy=policy)).result()) == 8
            assert maps_taken() < limit + 0.05
    assert sum("memory maps" in line for line in notes) >= 2


def test_memory_maps_are_counted_where_the_system_has_them(tmp_path):
    assert maps_taken(tmp_path) == 0.0
    (tmp_path / "self").mkdir()
    (tmp_path / "self/maps").write_text("7f00 r-xp\n" * 30)
    (tmp_path / "sys/vm").mkdir(parents=True)
    (tmp_path / "sys/vm/max_map_count").write_text("40\n")
    assert maps_taken(tmp_path) == 0.75


def test_a_request_without_a_batch_is_not_passed_for_ever():
    """One batch, always busy: after as many requests as it has rows it runs empty for the other policy."""
    with Engine(tiny.model(), max_lanes=1, **SIZES) as engine:
        engine.submit(make_request()).result()
        begun = [engine.submit(make_request(seed, 20 + 9 * seed)) for seed in range(3)]  # never all at once
        other = engine.submit(make_request(5, 4, policy="window(16)"))
        later = [engine.submit(make_request(seed, 20 + 9 * (seed % 3))) for seed in range(8)]
        ends: dict[int, float] = {}

        def listen(ticket) -> None:
            ticket.result()
            ends[ticket.id] = time.monotonic()

        threads = [threading.Thread(target=listen, args=[x]) for x in (*begun, other, *later)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sum(ends[ticket.id] < ends[other.id] for ticket in later) == 3


def test_standing_still_is_told(monkeypatch):
    notes, made = [], RunningBatch.__init__

    def slow(self, *words) -> None:
        made(self, *words)
        time.sleep(0.7)

    with Engine(tiny.model(), on_note=notes.append, **SIZES) as engine:
        engine.submit(make_request()).result()
        monkeypatch.setattr(RunningBatch, "__init__", slow)
        running = engine.submit(make_request(2, 70))
        next(iter(running))
        assert len(engine.submit(make_request(3, 2, policy="window(16)")).result()) == 2
        assert any(line.startswith("running rows stood still for") for line in notes)
        assert max(engine.metrics().pauses.recent) >= 0.7


@pytest.mark.slow
def test_a_batch_begins_with_as_many_rows_as_memory_has_room_for():
    """Five of eight, and not the next power of two below."""
    sizes = {"context": 96, "chunk": 16}
    memory = batch_bytes(tiny.model(), kvjax.policy(WHOLE), rows=5, tokens=56, max_rows=8, **sizes)
    with Engine(tiny.model(), policy=WHOLE, kv_memory=memory, max_rows=8, **sizes) as engine:
        assert len(engine.submit(Request(prompt=tiny.prompt(80), max_new_tokens=16)).result()) == 16
        (batch,) = engine._scheduler.memory.batches
        (counts,), (one,) = batch.counts, paging.most_pages(batch.policy, batch.state, 56, 1)
        assert 5 * one <= counts < 6 * one


def test_what_running_rows_wait_for_is_compiled_first():
    begun, free, made = Compiler(), threading.Event(), []
    assert not begun.ready([("first", free.wait)])
    assert not begun.ready([("later", lambda: made.append("later"))])
    assert not begun.ready([("now", lambda: made.append("now"))], urgent=True)
    free.set()
    assert begun.ready([("later", free.wait)], 60)
    assert made == ["now", "later"]
    begun.close()


def test_a_request_with_programs_passes_one_of_its_batch_without():
    free = threading.Event()
    with Engine(tiny.model(), **SIZES) as engine:
        expected = engine.submit(make_request()).result()
        engine._scheduler.compiler._pool.submit(free.wait, 300)
        long = engine.submit(
            Request(prompt=tiny.prompt(80, 2), max_new_tokens=8)
        )  # a larger pool is read into
        assert engine.submit(make_request()).result() == expected
        assert not long.done
        free.set()
        assert len(long.result()) == 8
