"""A request that waits for programs, memory or a batch stops no other, and is not passed for ever."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from pathlib import Path

import jax
import pytest
import tiny

import kvjax
from kvjax.engine import Engine, Progress, Request, batch_bytes, compiler
from kvjax.engine import pages as paging
from kvjax.engine.batch import RunningBatch
from kvjax.engine.compiler import WORKERS, Compiler, Program
from kvjax.engine.prefill import Prefill
from kvjax.engine.together import Together
from kvjax.programs import maps_taken

SIZES = {"max_rows": 3, "context": 96, "chunk": 16, "segment": 4, "page": tiny.PAGE}
WHOLE = "snapkv(8) + uniform(0.5)"


def make_request(seed: int = 1, tokens: int = 8, **more) -> Request:
    return Request(prompt=tiny.prompt(20, seed), max_new_tokens=tokens, **more)


def held(engine: Engine) -> threading.Event:
    """Nothing is compiled until it is set."""
    free = threading.Event()
    for _ in range(WORKERS):
        engine._scheduler.compiler._pool.submit(free.wait, 300)
    return free


def test_others_pass_a_request_that_waits_for_programs():
    with Engine(tiny.model(), **SIZES) as engine:
        expected = engine.submit(make_request()).result()
        free = held(engine)
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


def test_a_client_waits_for_its_own_structure_only(monkeypatch):
    """One structure's first program never ends: another new one is served, and one that runs already."""
    free, empty = threading.Event(), paging.empty

    def slow(model, policy, **sizes):
        if policy.admission.window == 17 and threading.current_thread().name.startswith("kvjax-compile"):
            free.wait(300)
        return empty(model, policy, **sizes)

    monkeypatch.setattr(paging, "empty", slow)
    with Engine(tiny.model(), **SIZES) as engine:
        expected = engine.submit(make_request()).result()
        blocked = [engine.submit(make_request(seed, policy="window(17)")) for seed in range(2)]
        assert len(engine.submit(make_request(policy="window(16)")).result()) == 8
        assert engine.submit(make_request()).result() == expected
        assert [ticket.done for ticket in blocked] == [False, False]
        free.set()
        assert [len(ticket.result()) for ticket in blocked] == [8, 8]


def test_lines_are_fair():
    """A client with many programs never has all threads, and the one that was served less comes first."""
    compiler, free, made = Compiler(workers=2), threading.Event(), {}
    slow = [Program(made, f"slow {at}", lambda: free.wait(300)) for at in range(3)]
    assert not compiler.ready(slow, client="a")
    assert compiler.ready([Program(made, "b", lambda: True)], 60, client="b")
    order: list[str] = []

    def note(name: str) -> Program:
        return Program(made, name, lambda: order.append(name) or True)

    (blocked,) = [Program(made, "blocked", lambda: free.wait(300))]
    assert not compiler.ready([blocked], client="b")  # both threads are at work
    assert not compiler.ready([note("a1"), note("a2")], client="a")
    assert not compiler.ready([note("c1")], client="c")
    free.set()
    assert compiler.ready([*slow, blocked, note("a1"), note("a2"), note("c1")], 60)
    assert order[0] == "c1"
    compiler.close()


def test_who_was_served_less_comes_first():
    """One thread, so that nothing else can decide: the older program is of the client that was served."""
    compiler, free, made, order = Compiler(workers=1), threading.Event(), {}, []
    first, older, newer = (
        Program(made, "first", lambda: free.wait(300)),
        Program(made, "older", lambda: order.append("older") or True),
        Program(made, "newer", lambda: order.append("newer") or True),
    )
    assert not compiler.ready([first, older], client="a")
    assert not compiler.ready([newer], client="b")
    free.set()
    assert compiler.ready([first, older, newer], 60)
    assert order == ["newer", "older"]
    compiler.close()


@pytest.mark.parametrize("reason", ["cancelled", "deadline"])
def test_what_nobody_waits_for_leaves_the_line(reason):
    with Engine(tiny.model(), **SIZES) as engine:
        engine.submit(make_request()).result()
        free, compiler = held(engine), engine._scheduler.compiler
        stays = engine.submit(make_request(2, policy="window(16)"))
        more = {"deadline": 600.0} if reason == "deadline" else {}
        leaves = engine.submit(make_request(3, policy=WHOLE, **more))
        while engine.metrics().reading < 2:
            time.sleep(0.01)
        both = compiler.waiting
        if reason == "cancelled":
            leaves.cancel()
        else:
            leaves.submitted -= 600
        assert list(leaves)[-1].finish_reason == reason
        assert 0 < compiler.waiting < both
        free.set()
        assert len(stays.result()) == 8
        made = {
            repr(x.first): bool(x.chunk.made or x.prompt.made) for x in engine._scheduler.memory.structures
        }
        assert made["window(16)"]
        assert not made[repr(kvjax.policy(WHOLE))]


class Listener:
    """Programs that were compiled meanwhile, by name."""

    def __init__(self, thread: str = "kvjax-engine") -> None:
        """In threads whose names begin so."""
        self.thread = thread

    def __enter__(self) -> list[str]:
        self.on, self.names = True, []
        jax.monitoring.register_event_duration_secs_listener(self)
        return self.names

    def __call__(self, event: str, seconds: float, **facts) -> None:
        here = threading.current_thread().name.startswith(self.thread)
        if self.on and here and "backend_compile" in event:
            self.names.append(str(facts.get("fun_name")))

    def __exit__(self, *error) -> None:
        self.on = False


def test_the_engines_thread_compiles_nothing():
    """Not for a new structure, a longer prompt, a larger pool, a context, log-probabilities or a last row."""
    with Listener() as compiled, Engine(tiny.model(), **SIZES) as engine:
        for policy in ("full", WHOLE):
            echo = make_request(policy=policy, logprobs=2, echo=True, inspect=True)
            ticket = engine.submit(echo)
            assert len(ticket.result()) == 8
            engine.metrics()  # after the turn in which it ended
            assert engine.inspect(ticket).seen == 27
            longer = [Request(prompt=tiny.prompt(40, 4), max_new_tokens=50, policy=policy) for _ in range(2)]
            assert [len(engine.submit(x).result()) for x in longer] == [50, 50]
            engine.contexts.create(policy, tiny.prompt(30, 6), policy=policy)
            more = Request(prompt=[1, 2], max_new_tokens=4, policy=policy, context=policy)
            assert len(engine.submit(more).result()) == 4
    assert compiled == []


@pytest.mark.skipif(not maps_taken(), reason="the system does not count memory maps")
def test_programs_leave_with_their_batch():
    """One batch at a time: however often structures come back, there are the maps of one of them."""

    def maps() -> int:
        gc.collect()
        return len(Path("/proc/self/maps").read_text().splitlines())

    with Engine(tiny.model(), max_lanes=1, **SIZES) as engine:
        texts, counts, structures = [], [], []
        for policy in ("window(16)", "window(16) + sinks(4)") * 2:
            texts.append(engine.submit(make_request(policy=policy)).result())
            structures.append(weakref.ref(engine._scheduler.memory.batches[0].structure))
            counts.append(maps())
        assert texts[:2] * 2 == texts
        assert sum(structure() is not None for structure in structures) == 1
    assert max(counts[2:]) < counts[1] + 0.3 * (counts[1] - counts[0]) + 50


def test_programs_of_smaller_pools_leave():
    with Engine(tiny.model(), **SIZES) as engine:
        engine.submit(make_request()).result()
        (batch,) = engine._scheduler.memory.batches
        before = tuple(batch.counts)
        assert list(batch._sized) == [before]
        engine._call(lambda: batch.resize([2 * n for n in before]))
        assert list(batch._sized) == []


def test_a_prompt_that_fails_beside_the_others_fails_alone(monkeypatch):
    unit = Prefill.unit

    def breaks(self, *words):
        if self.request.tokens[0] == tiny.prompt(20, 7)[0]:
            raise ArithmeticError("planted")
        return unit(self, *words)

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


def test_idle_batches_go_before_a_process_has_too_many_maps(monkeypatch):
    """Only as many as must: the least recently used one."""
    taken = [0.1]
    monkeypatch.setattr(compiler, "maps_taken", lambda: taken[0])
    with Engine(tiny.model(), **SIZES) as engine:
        for policy in ("full", "window(16)"):
            engine.submit(make_request(policy=policy)).result()
        drop = engine._scheduler.memory._drop_batch

        def dropped(*words):
            taken[0] = 0.7
            return drop(*words)

        monkeypatch.setattr(engine._scheduler.memory, "_drop_batch", dropped)
        taken[0] = 0.8
        assert len(engine.submit(make_request(policy="window(16) + sinks(4)")).result()) == 8
        assert [batch.policy for batch in engine.metrics().batches] == ["window(16)", "window(16) + sinks(4)"]


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
    """Five of eight, and not the next power of two below: of the six that there is memory for once they are
    read, a prompt that is being read takes one with a layer that is not cut yet."""
    sizes = {"context": 96, "chunk": 16}
    memory = batch_bytes(tiny.model(), kvjax.policy(WHOLE), rows=6, tokens=56, max_rows=8, **sizes)
    with Engine(tiny.model(), policy=WHOLE, kv_memory=memory, max_rows=8, **sizes) as engine:
        assert len(engine.submit(Request(prompt=tiny.prompt(80), max_new_tokens=16)).result()) == 16
        (batch,) = engine._scheduler.memory.batches
        (counts,), (one,) = batch.counts, paging.most_pages(batch.policy, batch.state, 56, 1)
        assert 5 * one <= counts < 6 * one


def test_what_running_rows_wait_for_is_compiled_first():
    begun, free, made, order = Compiler(workers=1), threading.Event(), {}, []
    later = Program(made, "later", lambda: order.append("later"))
    assert not begun.ready([Program(made, "first", lambda: free.wait(300))])
    assert not begun.ready([later])
    assert not begun.ready([Program(made, "now", lambda: order.append("now"))], urgent=True)
    free.set()
    assert begun.ready([later], 60)
    assert order == ["now", "later"]
    begun.close()


def test_a_request_with_programs_passes_one_of_its_batch_without():
    with Engine(tiny.model(), **SIZES) as engine:
        expected = engine.submit(make_request()).result()
        free = held(engine)
        long = engine.submit(
            Request(prompt=tiny.prompt(80, 2), max_new_tokens=8)
        )  # a larger pool is read into
        assert engine.submit(make_request()).result() == expected
        assert not long.done
        free.set()
        assert len(long.result()) == 8


# --- warm, and how far a request is ------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["window(16)", "int8", WHOLE])
def test_two_at_once_compile_nothing_after_a_warm_up(policy, monkeypatch):
    """Neither what reads both in one program nor pools for two rows, in any thread."""
    groups, read = [], Together.read
    monkeypatch.setattr(
        Together, "read", lambda self, afford: groups.append(len(self.prefills)) or read(self, afford)
    )
    with Engine(tiny.model(), **SIZES | {"prefill_tokens": 64}) as engine:
        assert engine.usual_rows() == (1, 2)  # as many as there are places
        engine.warm_up(policy, prompts=engine.usual_prompts(), rows=engine.usual_rows(), answer=30)
        warmed, groups[:] = len(groups), []
        with Listener("") as compiled:
            for length in engine.usual_prompts():
                prompts = [tiny.prompt(length, seed) for seed in (5, 6)]
                both = [Request(prompt=prompt, max_new_tokens=30, policy=policy) for prompt in prompts]
                assert [len(ticket.result()) for ticket in engine.submit_all(both)] == [30, 30]
        assert compiled == []
    alone = kvjax.policy(policy).whole_prompt  # is read layer by layer, each by itself
    assert (bool(warmed), 2 in groups) == (not alone, not alone)


def test_progress_says_what_a_request_waits_for():
    with Engine(tiny.model(), **SIZES | {"max_rows": 1}) as engine:
        free = held(engine)
        first, second = (engine.submit(make_request(seed, tokens=60)) for seed in (1, 2))
        try:
            while (now := engine.progress(first)).stage == "waiting":
                time.sleep(0.01)
            assert now == Progress("compiling", 0)
            assert engine.progress(second) == Progress("waiting", 0)
        finally:
            free.set()
        assert Progress("writing", 20) in [engine.progress(first) for _ in first]
        assert engine.progress(first) == Progress("done", 20)
        second.cancel()
        assert [event for event in second][-1].finish_reason == "cancelled"
        assert engine.progress(second).stage == "done"
