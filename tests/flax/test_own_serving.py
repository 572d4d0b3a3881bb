"""Somebody's own NNX model in the engine, behind OpenAI's protocol, and on two devices."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import own_model
import pytest
import tiny

import kvjax
from kvjax.cli import InputError
from kvjax.engine import Engine, Request
from kvjax.models.hf import ModelError

TESTS = Path(__file__).parents[1]
VOTED = "gvote(0.5, samples=2, ahead=8)"  # makes queries by ``Heads.project``


@functools.cache
def texts(folder: Path) -> kvjax.loading.OwnModel:
    """Of the tiny tokenizer's tokens."""
    return kvjax.load(own_model.of_bytes(), tokenizer=folder)


@pytest.mark.parametrize(
    "policy", ["full", pytest.param("snapkv(8) + ada(24) + int8(8)", marks=pytest.mark.slow)]
)
def test_an_engine_writes_what_generate_writes(policy, tiny_folder):
    model, prompts = texts(tiny_folder), [tiny.prompt(30, 1), tiny.prompt(17, 2)]
    right = kvjax.generate(model, policy, prompts, max_new_tokens=6, stops=()).tokens
    with Engine(model, max_rows=2, context=64, page=8, kv_memory=2**26) as engine:
        tickets = [
            engine.submit(Request(prompt=prompt, max_new_tokens=6, policy=policy, ignore_eos=True))
            for prompt in prompts
        ]
        assert [ticket.result(300) for ticket in tickets] == right
        model.text.eos, before = (right[0][2],), model.text.eos
        try:  # its end is the tokenizer's
            ticket = engine.submit(Request(prompt=prompts[0], max_new_tokens=6, policy=policy))
            assert len(ticket.result(300)) <= 3
            assert ticket.finish_reason == "stop"
        finally:
            model.text.eos = before


def test_a_server_serves_it(tiny_folder):
    pytest.importorskip("fastapi")
    sys.path.insert(0, str(TESTS / "serving"))
    from serving_client import running

    model = texts(tiny_folder)
    prompt = model.text.encode("Somebody's own model")
    right = kvjax.generate(model, "window(16) + sinks(2)", [prompt], max_new_tokens=8, stops=())
    with running(model, "--context", "64", "--policy", "window(16) + sinks(2)") as server:
        body = server.complete("Somebody's own model", max_tokens=8, ignore_eos=True)
    assert body["choices"][0]["text"] == model.text.decode(right.tokens[0])


def test_what_loads_a_model_is_refused_beside_one(tiny_folder):
    pytest.importorskip("fastapi")
    from kvjax.serve import http

    with pytest.raises(InputError, match=r"--weight-dtype is for a model that the server loads"):
        http.serve(texts(tiny_folder), "--weight-dtype", "int8")
    with pytest.raises(ModelError, match="tokenizer=FOLDER"):
        http.serve(kvjax.load(own_model.Own()))


def lived(*policies: str) -> list[dict]:
    path = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    command = [sys.executable, str(TESTS / "flax" / "own_mesh.py"), *policies]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("policies", [(VOTED,), ("full", "snapkv(8) + ada(24) + int8(8)")])
def test_two_devices_write_what_one_writes(policies):
    """Every device has its weights, half of the cache, and votes by the queries of its own heads."""
    found = lived(*policies)
    assert [one["policy"] for one in found] == list(policies)
    for one in found:
        assert one["said"][0] == one["said"][1] == one["served"], one
        assert one["apart"] == 0 < one["held"], one
        assert one["ring"][1] == 1  # of 2 KV heads
        assert one["kept"] == [32, 2, 8]  # an array that lay on the mesh
