"""Rankers on a tiny model: what is learned, exact resume, export and serving, agents on devices."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ranker_tiny import config_at, generated_text, records, traced  # noqa: F401

import kvjax
from kvjax.policies import kvp
from kvjax.weights import read_weights
from train.ranker import __main__ as ranker
from train.ranker import batches, objective, settings
from train.trace_file import Traces

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def made(tmp_path_factory, tiny_folder) -> Path:
    """A folder with a config and its traces."""
    return traced(tmp_path_factory.mktemp("ranker"), tiny_folder)


def one_batch(made: Path) -> tuple[settings.Settings, Traces, dict[str, np.ndarray]]:
    chosen = settings.read(made / "config.yaml")
    traces = Traces.open(made / "traces")
    return chosen, traces, batches.batches(traces, chosen)[3]


def test_importance_is_the_groups_largest_attention_of_what_comes_later(made):
    chosen, traces, batch = one_batch(made)
    worth = np.asarray(objective.importance(batch, None))
    k, q, at = (np.asarray(batch[name], np.float64) for name in ("k", "q", "at"))
    for row in range(len(at)):
        size = int(batch["size"][row])
        queries = at[row][at[row] >= 0].astype(int)
        assert (queries >= size).all()
        assert len(queries) == min(chosen.method.queries, k.shape[2] - size)
        for agent in range(4):
            want = np.zeros(k.shape[2])
            for f, j in enumerate(queries):
                each = []
                for g in range(2):
                    s = k[row, agent, : j + 1] @ q[row, agent, g, f] / np.sqrt(8)
                    e = np.exp(s - s.max())
                    each.append(e / e.sum())
                want[: j + 1] += np.max(each, axis=0)
            np.testing.assert_allclose(worth[row, agent], want, atol=1e-4)
    ranked, may = objective.ranked(objective.Task(agent=chosen.agent, method=chosen.method), batch)
    for row, size in enumerate(batch["size"]):
        assert np.flatnonzero(may[row, 0]).tolist() == list(range(2, size - 6))
        assert (np.asarray(ranked[row])[:, ~np.asarray(may[row, 0])] == 0).all()


def test_standardised_inputs_are_folded_into_the_weights(made):
    chosen, traces, batch = one_batch(made)
    params = ranker.initial_agents(chosen, 4, traces.manifest.head_dim)
    of = batches.statistics(traces, chosen)
    assert {name: value["mean"].shape for name, value in of.items()} == {
        "w_key": (4, 8),
        "w_value": (4, 8),
        "w_log": (4, 1),
    }
    got = objective.scores(params, of, batch)
    turned = {}
    for short, name in (("k", "w_key"), ("v", "w_value")):
        turned[short] = (batch[short] - of[name]["mean"][:, None]) / of[name]["scale"][:, None]
    assert abs(turned["k"].mean()) < 0.3
    assert 0.7 < turned["k"].std() < 1.3
    at = np.arange(batch["v"].shape[2])
    log = (np.log2(1 + at) / 16 - of["w_log"]["mean"]) / of["w_log"]["scale"]
    x = jnp.einsum("bati,aif->batf", turned["k"], params["w_key"])
    x += jnp.einsum("bati,aif->batf", turned["v"], params["w_value"])
    x += log[None, :, :, None] * params["w_log"][:, 0, None] + params["b1"][:, None]
    want = jnp.einsum("batf,af->bat", jax.nn.gelu(x, approximate=False), params["w_out"])
    np.testing.assert_allclose(got, want, atol=1e-3)


@pytest.mark.slow
def test_one_agents_loss_has_no_part_in_anothers_gradient(made):
    chosen, traces, batch = one_batch(made)
    task = objective.Task(agent=chosen.agent, method=chosen.method)
    params, of = (
        ranker.initial_agents(chosen, 4, traces.manifest.head_dim),
        batches.statistics(traces, chosen),
    )
    grad = jax.grad(lambda p, b: objective.objective(task, of, p, b)[0])
    other = batch | {name: batch[name].copy() for name in ("k", "v", "q")}
    for name in ("k", "v", "q"):
        other[name][:, 2] *= 0.5
    one, two = grad(params, batch), grad(params, other)
    for name in one:
        others = np.asarray([0, 1, 3])
        np.testing.assert_allclose(one[name][others], two[name][others], rtol=1e-5, atol=1e-6)
    assert np.abs(one["w_key"][2] - two["w_key"][2]).max() > 1e-3


@pytest.mark.parametrize(
    ("method", "metric"),
    [
        ({}, "cost"),
        ({"kind": "soft_rank"}, "error"),
        ({"kind": "projected_rank"}, "error"),
        ({"budget": 0.3}, "cost"),
    ],
)
def test_what_is_trained_falls(made, method, metric):
    """A gradient step at a time on one batch, without the loop."""
    chosen, traces, batch = one_batch(made)
    task = objective.Task(
        agent=chosen.agent, method=settings.dataclasses.replace(chosen.method, permutations=16, **method)
    )
    params, of = (
        ranker.initial_agents(chosen, 4, traces.manifest.head_dim),
        batches.statistics(traces, chosen),
    )
    run = jax.jit(jax.value_and_grad(lambda p, b: objective.objective(task, of, p, b), has_aux=True))
    optimiser, seen = optax.adam(0.01), []
    state = optimiser.init(params)
    for seed in range(30):
        (_, told), grad = run(params, batch | {"seed": np.uint32(seed)})
        update, state = optimiser.update(grad, state)
        params = optax.apply_updates(params, update)
        seen.append(float(told[metric]))
    assert np.mean(seen[-5:]) < 0.98 * np.mean(seen[:5])


def losses(lines: list[dict]) -> list[dict]:
    """What was learned at every step, without the time it took."""
    clocks = ("seconds", "tokens_per_second")
    return [{k: v for k, v in line.items() if k not in clocks} for line in lines if "loss" in line]


def test_training_learns_goes_on_exactly_and_serves(tmp_path, made, tiny_folder, capsys):
    source = ["--traces", str(made / "traces")]
    path = config_at(tmp_path / "whole", tiny_folder)
    assert ranker.main(["--config", str(path), *source]) == 0
    told = capsys.readouterr().err
    assert "4 agents of 304 parameters: 1,216 in all" in told
    log = records(tmp_path / "whole")
    before, after = [line for line in log if "area_learned" in line]
    assert after["area_learned"] < after["area_random"]
    costs = [line["greedy"] for line in log if "greedy" in line]
    assert np.mean(costs[-6:]) < np.mean(costs[:6])
    assert {"area_learned_layer_0", "area_learned_layer_1", "area_recency", "area_knorm"} <= set(after)
    assert {"area_keydiff", "area_lagkv"} <= set(after)
    assert all(
        line["agent_grad_min"] <= line["agent_grad_mean"] <= line["agent_grad_max"] for line in losses(log)
    )
    assert any(line["agent_grad_min"] < line["agent_grad_max"] for line in losses(log))

    # Stopped by its clock after the first step, and started again: the same log to the last bit.
    parts = tmp_path / "parts"
    stopped = config_at(parts, tiny_folder, plan={"seconds": 0})
    assert ranker.main(["--config", str(stopped), *source]) == 0
    assert records(parts)[-1]["step"] == 1
    assert ranker.main(["--config", str(config_at(parts, tiny_folder)), *source]) == 0
    assert losses(records(parts)) == losses(log)

    file = tmp_path / "out" / "default.safetensors"
    assert ranker.main(["--config", str(path), *source, "--export", str(file)]) == 0
    notes = read_weights(file).notes
    assert (notes["method"], notes["place"], notes["step"], notes["sinks"]) == ("kvp", "eviction", "24", "2")
    assert file.with_suffix(".jsonl").exists()
    model = kvjax.load(tiny_folder)
    policy = kvjax.policy("kvp(2, recent=6) + uniform(24)")
    weights = kvjax.weights_for(policy, model, {"kvp": file})
    prompt = Traces.open(made / "traces").read(0, ("tokens",))["tokens"].tolist()
    done = kvjax.generate(model, policy, [prompt], max_new_tokens=3, stops=(), weights=weights)
    assert len(done.tokens[0]) == 3

    # What serves is what was trained: the scores of a trace are those of the exported file.
    chosen, traces, batch = one_batch(made)
    sides = [
        kvp.scores(layer, batch["k"][:, at], None, batch["v"][:, at], jnp.arange(batch["v"].shape[2])[None])
        for layer, at in zip(read_weights(file).layers, (slice(0, 2), slice(2, 4)))
    ]
    params = ranker.loop.latest(
        tmp_path / "whole" / "run",
        ranker.initial_agents(chosen, 4, traces.manifest.head_dim),
        ranker.optimizer(chosen.rate, chosen.plan.steps),
        ranker.make_layout(chosen.devices, 4),
    )[1]
    want = objective.scores(params, batches.statistics(traces, chosen), batch)
    np.testing.assert_allclose(jnp.concatenate(sides, axis=1), want, atol=1e-4)


SPREAD = """
import re, sys
import jax, numpy as np
from train.ranker import __main__ as ranker, batches, objective, settings
from train.trace_file import Traces
chosen, traces, found = settings.read(settings.Path(sys.argv[1])), Traces.open(settings.Path(sys.argv[2])), []
task, of = objective.Task(agent=chosen.agent, method=chosen.method), batches.statistics(traces, chosen)
for devices in (4, 1):
    layout = ranker.make_layout(devices, 4)
    params = ranker.initial_agents(chosen, 4, traces.manifest.head_dim)
    placed, mine = jax.device_put(params, layout.gates(params)), jax.device_put(of, layout.gates(of))
    run = jax.jit(jax.value_and_grad(lambda p, of, b: objective.objective(task, of, p, b), has_aux=True))
    batch = layout.batch(batches.batches(traces, chosen)[0])
    assert len(batch["k"].sharding.device_set) == devices
    program = run.lower(placed, mine, batch).compile()
    moved = re.findall(r"= (.*) (all-gather|all-to-all|collective-permute|all-reduce)\\(", program.as_text())
    assert all(re.fullmatch(r"\\(?((f32|s32|u32)\\[\\](, )?)+\\)?", shape) for shape, _ in moved), moved
    assert bool(moved) == (devices > 1)  # sums of losses and metrics
    found.append(jax.device_get(program(placed, mine, batch)))
# The loss is a difference of log-probabilities of about -100.
jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3), *found)
assert max(np.abs(x).max() for x in jax.tree.leaves(found[0][1])) > 0.1, "no gradient: nothing was compared"
"""


@pytest.mark.slow
def test_agents_on_four_devices_learn_the_same_and_exchange_only_sums(made):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    words = [sys.executable, "-c", SPREAD, str(made / "config.yaml"), str(made / "traces")]
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    subprocess.run(words, cwd=ROOT, env=environment, check=True)


def test_cache_sizes_are_spread_over_all_that_leave_a_future():
    """From sinks, recent and two to rank up to the longest, every size is drawn about as often."""
    chosen = SimpleNamespace(agent=SimpleNamespace(sinks=2, recent=6), method=SimpleNamespace(least_future=8))
    rng = np.random.default_rng(0)
    sizes = np.asarray([batches.cache_size(rng, chosen, 60) for _ in range(4300)])
    drawn, counts = np.unique(sizes, return_counts=True)
    assert drawn.tolist() == list(range(10, 53))
    assert 60 < counts.min() <= counts.max() < 150, "4,300 draws of 43 sizes"
