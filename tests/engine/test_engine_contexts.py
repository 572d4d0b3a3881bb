"""Contexts: their bounds and owners, their files; learned weights come back, wherever they are by then."""

from __future__ import annotations

import shutil
import time
from typing import Any

import jax
import numpy as np
import pytest
import tiny

import kvjax
from kvjax import saving
from kvjax.decode import RequestError
from kvjax.engine import (
    ContextExists,
    ContextMismatch,
    ContextNotFound,
    Engine,
    MemoryFull,
    QueueFull,
    Request,
)
from kvjax.saving import StateError
from kvjax.weights import save_weights

POLICY = "duo(0.5, window=16)"
SIZES = {"max_rows": 1, "context": 96, "chunk": 16, "segment": 4, "page": tiny.PAGE}
PROMPT, QUESTION = tiny.prompt(29, 20), tiny.prompt(6, 21)


@pytest.fixture(scope="module")
def folder(tiny_folder, tmp_path_factory):
    """A model that ships two sets of weights, which keep the opposite heads."""
    home = tmp_path_factory.mktemp("two") / "model"
    shutil.copytree(tiny_folder, home)
    model = kvjax.load(home)
    (part,) = kvjax.policy(POLICY).learned
    example = jax.device_get(part.example_weights(jax.random.key(1), model.network))
    flipped = jax.tree.map(lambda x: np.ascontiguousarray(x[::-1]), example)
    for name, layers in (("default", example), ("other", flipped)):
        save_weights(home / "weights" / part.name / f"{name}.safetensors", model, part, layers)
    return home


def engine(folder, **more):
    return Engine(kvjax.load(folder), **SIZES, **more)


def make_request(weights=None):
    return Request(prompt=QUESTION, max_new_tokens=9, policy=POLICY, context="book", weights=weights)


@pytest.mark.slow
def test_a_context_goes_on_with_the_weights_it_was_read_with(folder, tmp_path):
    with engine(folder) as first:
        first.contexts.create("book", PROMPT, policy=POLICY, weights={"duo": "other"})
        want = first.submit(make_request()).result()
        assert first.submit(make_request({"duo": "other"})).result() == want
        with pytest.raises(ContextMismatch):
            first.submit(make_request({"duo": "default"}))
        first.contexts.save(tmp_path / "kept")
    with engine(folder) as second:  # nobody tells it which weights those were
        assert [x.name for x in second.contexts.load(tmp_path / "kept")] == ["book"]
        assert second.submit(make_request()).result() == want


def test_weights_that_moved_are_taken_from_where_they_are_now(folder, tmp_path):
    moved = tmp_path / "elsewhere" / "mine.safetensors"
    moved.parent.mkdir()
    shutil.copy(folder / "weights" / "duo" / "other.safetensors", tmp_path / "mine.safetensors")
    with engine(folder) as first:
        first.contexts.create("book", PROMPT, policy=POLICY, weights={"duo": tmp_path / "mine.safetensors"})
        first.contexts.save(tmp_path / "kept")
    (tmp_path / "mine.safetensors").rename(moved)
    with engine(folder) as second:
        with pytest.raises(StateError, match=r"neither where they were nor among those given"):
            second.contexts.load(tmp_path / "kept")
        others = {"duo": moved, "write_gate": "default"}  # of another policy of the server
        assert len(second.contexts.load(tmp_path / "kept", weights=others)) == 1


def test_a_state_that_is_no_context_is_refused(folder, tmp_path):
    model = kvjax.load(folder)
    state, _ = kvjax.prefill(model, "full", [PROMPT], context=96)
    kvjax.save(state, tmp_path / "stray.kv", model=model, policy="full")
    with engine(folder) as other, pytest.raises(StateError, match="no context that an engine saved"):
        other.contexts.load(tmp_path)


# --- bounds and owners ---------------------------------------------------------------------------


def small_engine(**more: Any) -> Engine:
    return Engine(tiny.model(), policy="window(16)", **SIZES | more)


def names(engine: Engine, owner: str = "") -> list[str]:
    return [info.name for info in engine.contexts.list(owner)]


def test_the_longest_unused_of_the_largest_owner_makes_room():
    with small_engine(max_contexts=3) as engine:
        for name, owner in (("a", "ann"), ("b", "ann"), ("a", "bob")):
            engine.contexts.create(name, PROMPT, owner=owner)
        question = Request(prompt=QUESTION, max_new_tokens=1, context="a", owner="ann")
        engine.submit(question).result()
        engine.contexts.create(
            "b", PROMPT, owner="bob"
        )  # in the place of Ann's, although Bob's was used later
        assert (names(engine, "ann"), names(engine, "bob")) == (["a"], ["a", "b"])
        engine.contexts.create("c", PROMPT, owner="ann")
        assert (names(engine, "ann"), names(engine, "bob")) == (["a", "c"], ["b"])


def test_contexts_take_their_share_of_the_memory_alone():
    with small_engine() as engine:
        engine.contexts.create("a", PROMPT)
        size = engine.contexts.allocated
    with small_engine(kv_memory=10 * size, contexts_share=0.25) as engine:
        for name in ("a", "b", "c"):
            engine.contexts.create(name, PROMPT)
        assert names(engine) == ["b", "c"]
        assert engine.contexts.allocated == 2 * size
    with (
        small_engine(kv_memory=10 * size, contexts_share=0.05) as engine,
        pytest.raises(RequestError, match=r"contexts_share 0.05. Raise one of them"),
    ):
        engine.contexts.create("a", PROMPT)


def test_contexts_beyond_the_share_rest_in_the_hosts_memory():
    with small_engine() as engine:
        engine.contexts.create("a", PROMPT)
        size = engine.contexts.allocated
        answer = engine.submit(Request(prompt=QUESTION, max_new_tokens=4, context="a")).result()
    more = {"kv_memory": 400 * size, "contexts_share": 2.5 / 400, "host_memory": 2 * size}
    with small_engine(**more) as engine:
        for name in ("a", "b", "c"):
            engine.contexts.create(name, PROMPT)
        assert names(engine) == ["a", "b", "c"]
        assert (engine.contexts.allocated, engine.contexts.resting) == (2 * size, size)
        again = engine.submit(Request(prompt=QUESTION, max_new_tokens=4, context="a")).result()
        assert again == answer
        now = engine.metrics()  # "a" came back, and "b" went
        assert (now.contexts_to_host, now.contexts_from_host) == (2, 1)
        assert (engine.contexts.allocated, now.contexts_resting) == (2 * size, size)
        for name in ("d", "e"):  # two rest; of three the longest unused is dropped
            engine.contexts.create(name, PROMPT)
        assert names(engine) == ["a", "c", "d", "e"]
        assert engine.contexts.resting == 2 * size


def test_a_row_is_copied_from_a_context_that_rests(monkeypatch):
    """Where the device has no room for it."""
    with small_engine(contexts_share=1.0) as engine:
        engine.contexts.create("a", PROMPT)
        question = Request(prompt=QUESTION, max_new_tokens=4, context="a")
        answer = engine.submit(question).result()
        engine.contexts.held("a").rest()
        monkeypatch.setattr(engine.contexts, "wake", lambda context, room: None)
        assert engine.submit(question).result() == answer
        assert engine.contexts.resting == engine.contexts.held("a").size


def test_host_memory_is_a_size():
    with pytest.raises(RequestError, match="host_memory=-1.* is not a size"):
        small_engine(host_memory=-1)


def test_a_context_that_nobody_uses_goes():
    with small_engine(contexts_ttl=60) as engine:
        for name in ("a", "b"):
            engine.contexts.create(name, PROMPT)
        now = time.monotonic()
        engine.contexts.held("a").used = now + 30
        engine.contexts.expire(now + 61)
        assert names(engine) == ["a"]
        engine.contexts.held("a").used = now - 61
        deadline = time.monotonic() + 10
        while names(engine) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert names(engine) == [], "the engine does not look"


def test_an_owner_sees_no_context_of_others():
    with small_engine() as engine:
        engine.contexts.create("secret", PROMPT, owner="ann")
        engine.contexts.create("secret", PROMPT[:5], owner="bob")
        assert [engine.contexts.get("secret", owner).tokens for owner in ("ann", "bob")] == [29, 5]
        with pytest.raises(ContextExists):
            engine.contexts.create("secret", PROMPT, owner="bob")
        for call in (
            lambda: engine.contexts.get("secret"),
            lambda: engine.contexts.delete("secret"),
            lambda: engine.submit(Request(prompt=QUESTION, context="secret")),
            lambda: engine.submit(Request(prompt=QUESTION, context="other", owner="ann")),
        ):
            with pytest.raises(ContextNotFound) as error:
                call()
            assert "secret" not in str(error.value) or "'secret'" in str(error.value)
        engine.contexts.delete("secret", "bob")
        assert (names(engine, "ann"), names(engine, "bob"), names(engine)) == (["secret"], [], [])


def test_few_contexts_are_read_at_a_time_and_one_of_a_name():
    with small_engine() as engine:
        engine._inbox.put(lambda: time.sleep(0.3))
        tickets = [engine.contexts.begin(name, PROMPT) for name in "abcd"]
        with pytest.raises(ContextExists):
            engine.contexts.begin("a", PROMPT)
        with pytest.raises(QueueFull, match="4 contexts are being read already"):
            engine.contexts.begin("e", PROMPT)
        tickets[0].cancel()
        for ticket in tickets:
            ticket.result()
        assert names(engine) == ["b", "c", "d"]
        assert engine.contexts.create("a", PROMPT).name == "a"


def test_a_server_that_is_full_is_not_the_requests_fault():
    with small_engine() as engine:
        engine.contexts.create("a", PROMPT)
        engine.submit(Request(prompt=QUESTION, max_new_tokens=1)).result()
        size = engine.contexts.allocated
        lane = sum(batch.allocated for batch in engine.metrics().batches)
    # Beside the batch a row of its size is read.
    with small_engine(kv_memory=2 * lane + size // 2, contexts_share=1.0) as engine:
        engine.contexts.create("a", PROMPT)
        with pytest.raises(MemoryFull, match=r"contexts and other texts hold \d+ of the \d+ bytes"):
            engine.submit(Request(prompt=QUESTION, max_new_tokens=1)).result()
        engine.contexts.delete("a")
        assert len(engine.submit(Request(prompt=QUESTION, max_new_tokens=1)).result()) == 1


# --- files ---------------------------------------------------------------------------------------


def test_only_what_changed_is_written(tmp_path, monkeypatch):
    written, save = [], saving.save
    monkeypatch.setattr(
        saving, "save", lambda state, file, **more: written.append(file.name) or save(state, file, **more)
    )
    with small_engine(max_contexts=2) as engine:
        for name, owner in (("a", ""), ("b", "ann")):
            engine.contexts.create(name, PROMPT, owner=owner)
            engine.contexts.save(tmp_path)
        assert written == ["a.kv", "ann%2Fb.kv"]
        with pytest.raises(ContextNotFound):
            engine.contexts.delete("b")
        engine.contexts.delete("a")
        assert engine.contexts.save(tmp_path) == [tmp_path / "ann%2Fb.kv"]
        assert [file.name for file in tmp_path.iterdir()] == ["ann%2Fb.kv"]
        assert len(written) == 2
        engine.contexts.create("a", PROMPT[:7])
        engine.contexts.save(tmp_path)
        assert written[2:] == ["a.kv"]
    with small_engine() as engine:
        assert [info.tokens for info in engine.contexts.load(tmp_path)] == [7, 29]
        assert (names(engine), names(engine, "ann")) == (["a"], ["b"])
        engine.contexts.save(tmp_path)
        assert len(written) == 3


def test_a_damaged_file_is_skipped_and_the_others_load(tmp_path):
    with small_engine() as engine:
        for name in "abc":
            engine.contexts.create(name, PROMPT)
        engine.contexts.save(tmp_path)
    file = tmp_path / "b.kv"
    file.write_bytes(file.read_bytes()[:-100])
    left = tmp_path / ".b.kv.abc123.part"  # of a process that was killed
    left.write_bytes(b"half")
    skipped = []
    with small_engine(max_contexts=1) as engine:
        loaded = engine.contexts.load(tmp_path, on_skipped=lambda *what: skipped.append(what))
        assert [info.name for info in loaded] == ["a"]
    assert [path.name for path, _ in skipped] == ["b.kv", "c.kv"]
    assert all(isinstance(error, StateError) for _, error in skipped)
    assert "no place beside those loaded before it" in str(skipped[1][1])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.kv", "b.kv", "c.kv"]
    with small_engine() as engine, pytest.raises(StateError):
        engine.contexts.load(tmp_path)
