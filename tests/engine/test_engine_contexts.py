"""Contexts that were read with learned weights come back with those, wherever they are by then."""

from __future__ import annotations

import shutil

import jax
import numpy as np
import pytest
import tiny

import kvjax
from kvjax.engine import ContextMismatch, Engine, Request
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
