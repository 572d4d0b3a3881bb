"""Traces, training and export on a tiny model: what is stored, what learns, exact resume, bad input."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import yaml
from safetensors.numpy import load_file

import kvjax
from kvjax.models import decoder
from kvjax.policies import kvp
from kvjax.weights import read_weights
from train import trace_file, trace_rows, traces
from train.ranker import __main__ as ranker
from train.ranker import batches, objective, settings
from train.trace_file import Traces

ROOT = Path(__file__).resolve().parents[2]

CONFIG: dict[str, Any] = {
    "name": "tiny",
    "seed": 0,
    "traces": {
        "sequences": 10,
        "held": 3,
        "lengths": [48, 80],
        "shares": [1, 1],
        "shard": 4,
        "keys": ["post", "pre"],
        "dtype": "float32",
        "data": {"kind": "rows", "mix": {"ruler": 1, "books": 1}},
    },
    "agent": {"inputs": ["key", "value", "log"], "hidden": 16, "sinks": 2, "recent": 6},
    "method": {"permutations": 8, "rows": 4, "queries": 12, "least_future": 6},
    "optimizer": {"peak": 0.01, "warmup": 2},
    "plan": {"steps": 24, "log_every": 1, "check_every": 12, "save_every": 4},
}


def config_at(folder: Path, source: Path, **sections: Any) -> Path:
    """The tiny config with its run in ``folder``, as a file; a section given as a dict is merged."""
    tree = copy.deepcopy(CONFIG)
    tree["folder"], tree["model"] = str(folder / "run"), {"source": str(source)}
    tree["traces"]["folder"] = str(folder / "traces")
    for name, section in sections.items():
        tree[name] = tree.get(name, {}) | section if isinstance(section, dict) else section
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def records(folder: Path) -> list[dict[str, Any]]:
    """A run's log without times."""
    lines = (folder / "run" / "log.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "time"} for line in lines]


@pytest.fixture(autouse=True)
def generated_text(monkeypatch):
    monkeypatch.setenv("KVJAX_DATA", "/nowhere")


@pytest.fixture(scope="module")
def made(tmp_path_factory, tiny_folder) -> Path:
    """A folder with a config and its traces."""
    home = tmp_path_factory.mktemp("ranker")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVJAX_DATA", "/nowhere")
        assert traces.main(["--config", str(config_at(home, tiny_folder))]) == 0
    return home


def test_traces_are_what_the_models_heads_see(made, tiny_folder):
    found, model = Traces.open(made / "traces"), kvjax.load(tiny_folder)
    about = found.about
    assert (about.layers, about.heads, about.kv_heads, about.head_dim) == (2, 4, 2, 8)
    assert len(found.tasks()) == len(about.lengths) == 13
    assert {task.partition("/")[0] for task in found.tasks()} == {"ruler", "books"}
    for index in (0, 12):
        one = found.read(index, ("tokens", "at", "q", "k", "k_pre", "v"))
        tokens, seen = jnp.asarray(one["tokens"])[None], []

        def attend(layer, x, carry, seen=seen):
            seen.append((x.q[0], x.k[0], x.k_pre[0], x.v[0]))
            return decoder.dense_attend(model.spec)(layer, x, carry)

        at = jnp.arange(tokens.shape[1])[None]
        decoder.forward(model.spec, model.params, tokens, at, attend, None)
        for layer, parts in enumerate(seen):
            for name, part in zip(("q", "k", "k_pre", "v"), parts):
                np.testing.assert_allclose(one[name][layer], jnp.swapaxes(part, 0, 1), atol=2e-4)
        np.testing.assert_array_equal(one["at"], np.arange(tokens.shape[1]))


def test_the_bytes_that_are_announced_are_those_written(made):
    about = Traces.open(made / "traces").about
    for shard in range(about.shards):
        want = sum(about.bytes(about.lengths[i]) for i in about.of_shard(shard))
        assert 0 <= trace_file.file(made / "traces", shard).stat().st_size - want < 6000  # its header


def test_a_stopped_run_goes_on_with_the_same_files(tmp_path, made, tiny_folder, capsys):
    path = config_at(tmp_path, tiny_folder)
    folder = tmp_path / "traces"
    folder.mkdir()
    (folder / trace_file.MANIFEST).write_bytes((made / "traces" / trace_file.MANIFEST).read_bytes())
    first = trace_file.file(folder, 0)
    first.write_bytes(trace_file.file(made / "traces", 0).read_bytes())
    stamp = first.stat().st_mtime_ns
    assert ranker.main(["--config", str(path)]) == 2
    assert "holds 1 of 4 files: train.traces was stopped" in capsys.readouterr().err
    assert traces.main(["--config", str(path)]) == 0
    assert first.stat().st_mtime_ns == stamp, "what was there was made again"
    for file in sorted((made / "traces").iterdir()):
        assert (folder / file.name).read_bytes() == file.read_bytes()


def test_a_few_queries_are_spread_evenly_up_to_the_last(made):
    about = Traces.open(made / "traces").about
    few = trace_file.dataclasses.replace(about, queries=5)
    assert few.asked(50).tolist() == [10, 20, 29, 39, 49]
    assert few.asked(3).tolist() == [0, 1, 2]


# --- what is learned -----------------------------------------------------------------------------


def one_batch(made: Path) -> tuple[settings.Settings, Traces, dict[str, np.ndarray]]:
    chosen = settings.read(made / "config.yaml")
    found = Traces.open(made / "traces")
    return chosen, found, batches.batches(found, chosen)[3]


def test_importance_is_the_groups_largest_attention_of_what_comes_later(made):
    chosen, found, batch = one_batch(made)
    worth = np.asarray(objective.importance(batch, None))
    k, q, at = (np.asarray(batch[name], np.float64) for name in ("k", "q", "at"))
    for row in range(len(at)):
        size = int(batch["size"][row])
        mine = at[row][at[row] >= 0].astype(int)
        assert (mine >= size).all()
        assert len(mine) == min(chosen.method.queries, k.shape[2] - size)
        for agent in range(4):
            want = np.zeros(k.shape[2])
            for f, j in enumerate(mine):
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
    chosen, found, batch = one_batch(made)
    params = ranker.first(chosen, 4, found.about.head_dim)
    of = batches.statistics(found, chosen)
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
    chosen, found, batch = one_batch(made)
    task = objective.Task(agent=chosen.agent, method=chosen.method)
    params, of = ranker.first(chosen, 4, found.about.head_dim), batches.statistics(found, chosen)
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
    ("method", "metric"), [({}, "cost"), ({"kind": "soft_rank"}, "error"), ({"budget": 0.3}, "cost")]
)
def test_what_is_trained_falls(made, method, metric):
    """A gradient step at a time on one batch, without the loop."""
    chosen, found, batch = one_batch(made)
    task = objective.Task(
        agent=chosen.agent, method=settings.dataclasses.replace(chosen.method, permutations=16, **method)
    )
    params, of = ranker.first(chosen, 4, found.about.head_dim), batches.statistics(found, chosen)
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
    clocks = ("user", "seconds", "tokens_per_second")
    return [{k: v for k, v in line.items() if k not in clocks} for line in lines if "loss" in line]


def test_training_learns_goes_on_exactly_and_serves(tmp_path, made, tiny_folder, capsys):
    given = ["--traces", str(made / "traces")]
    path = config_at(tmp_path / "whole", tiny_folder)
    assert ranker.main(["--config", str(path), *given]) == 0
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

    # Stopped by its clock after the first steps, and started again: the same log to the last bit.
    parts = tmp_path / "parts"
    stopped = config_at(parts, tiny_folder, plan={"seconds": 0})
    for _ in range(2):
        assert ranker.main(["--config", str(stopped), *given]) == 0
    assert records(parts)[-1]["step"] == 2
    assert ranker.main(["--config", str(config_at(parts, tiny_folder)), *given]) == 0
    assert losses(records(parts)) == losses(log)

    file = tmp_path / "out" / "default.safetensors"
    assert ranker.main(["--config", str(path), *given, "--export", str(file)]) == 0
    notes = read_weights(file).notes
    assert (notes["method"], notes["place"], notes["step"], notes["sinks"]) == ("kvp", "eviction", "24", "2")
    assert file.with_suffix(".jsonl").exists()
    model = kvjax.load(tiny_folder)
    for spec in ("kvp(2, recent=6) + uniform(24)", "kvp(2, recent=6) + uniform(24, every_step)"):
        policy = kvjax.policy(spec)
        weights = kvjax.weights_for(policy, model, {"kvp": file})
        prompt = Traces.open(made / "traces").read(0, ("tokens",))["tokens"].tolist()
        done = kvjax.generate(model, policy, [prompt], max_new_tokens=3, weights=weights)
        assert len(done.tokens[0]) == 3

    # What serves is what was trained: the scores of a trace are those of the exported file.
    chosen, found, batch = one_batch(made)
    sides = [
        kvp.scores(layer, batch["k"][:, at], None, batch["v"][:, at], jnp.arange(batch["v"].shape[2])[None])
        for layer, at in zip(read_weights(file).layers, (slice(0, 2), slice(2, 4)))
    ]
    params = ranker.loop.latest(
        tmp_path / "whole" / "run",
        ranker.first(chosen, 4, found.about.head_dim),
        ranker.optimizer(chosen.rate, chosen.plan.steps),
        ranker.make_layout(chosen.devices, 4),
    )[1]
    want = objective.scores(params, batches.statistics(found, chosen), batch)
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
    params = ranker.first(chosen, 4, traces.about.head_dim)
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


def test_agents_on_four_devices_learn_the_same_and_exchange_only_sums(made):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    words = [sys.executable, "-c", SPREAD, str(made / "config.yaml"), str(made / "traces")]
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    subprocess.run(words, cwd=ROOT, env=environment, check=True)


# --- bad input -----------------------------------------------------------------------------------


def refused(call, words: list[str], capsys) -> str:
    assert call(words) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: ") or "\nerror: " in err
    line = err[err.index("error: ") :]
    assert line.count("\n") == 1
    return line


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"traces": {"lengths": []}}, "traces.lengths"),
        ({"traces": {"lengths": [15], "shares": [1]}}, "a sequence of 15 tokens is shorter than 16: 2 sinks"),
        ({"traces": {"lengths": [600], "shares": [1]}}, "600 tokens, the model was trained for 512"),
        ({"traces": {"keys": ["pre"]}}, "lacks post"),
        ({"traces": {"dtype": "int8"}}, "'int8' in the config is none of float16, float32"),
        ({"traces": {"sequences": 10**9, "held": 1, "shard": 10**9}}, "GB to write"),
        ({"traces": {"data": {"kind": "rows", "mix": {"web": 1}}}}, "traces.data.mix"),
        ({"traces": {"data": {"kind": "rows", "families": {"nihilism": 1}}}}, "names no task"),
        ({"traces": {"data": {"kind": "documents", "folder": "/nowhere"}}}, "'/nowhere' is no folder"),
        ({"agent": {"inputs": ["query"]}}, "'query' in the config is none of key, key_pre, value"),
        ({"agent": {"hiden": 4}}, "hiden"),
        ({"method": {"permutations": 1}}, "method.permutations"),
        ({"method": {"budget": 1.5}}, "method.budget"),
        ({"optimizer": {"peak": "fast"}}, "optimizer.peak"),
        ({"model": {"source": "/nowhere/model"}}, "/nowhere/model"),
    ],
)
def test_configs_that_cannot_be_traced(tmp_path, tiny_folder, capsys, monkeypatch, sections, says):
    # The lengths of a billion sequences take long to draw, and they are drawn one by one.
    monkeypatch.setattr(trace_rows, "length", lambda settings, index: 480)
    if sections.get("traces", {}).get("sequences"):
        sections = {"traces": {"sequences": 3, "held": 1}}
        monkeypatch.setattr(traces.shutil, "disk_usage", lambda _: type("Disk", (), {"free": 1000}))
    assert says in refused(
        traces.main, ["--config", str(config_at(tmp_path, tiny_folder, **sections))], capsys
    )
    assert not (tmp_path / "traces").exists()
    assert not (tmp_path / "run").exists()


def copied(made: Path, home: Path) -> Path:
    folder = home / "traces"
    folder.mkdir(parents=True)
    for file in (made / "traces").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def test_traces_that_cannot_be_learned_from(tmp_path, made, tiny_folder, capsys):
    def says(name: str, **sections: Any) -> str:
        path = config_at(tmp_path / name, tiny_folder, **sections)
        found = refused(ranker.main, ["--config", str(path)], capsys)
        assert not (tmp_path / name / "run").exists()
        return found

    assert "holds no traces" in says("none")
    long = says("long", agent={"sinks": 30, "recent": 20}, traces={"folder": str(made / "traces")})
    assert "a sequence of 48 tokens is shorter than 58" in long
    folder = copied(made, tmp_path / "cut")
    file = trace_file.file(folder, 1)
    file.write_bytes(file.read_bytes()[:-100])
    assert "00001.safetensors is cut short or damaged" in says("cut")
    folder = copied(made, tmp_path / "nan")
    file = trace_file.file(folder, 0)
    arrays = load_file(file)
    arrays["v.2"][1, 0, 5, 3] = np.nan
    about = Traces.open(made / "traces").about
    trace_file.write(folder, about, 0, ["books"] * 4, arrays)
    assert "00000.safetensors: v.2 holds NaN or infinity" in says("nan")
    folder = copied(made, tmp_path / "other")
    other = json.loads((folder / trace_file.MANIFEST).read_text())
    other["model"] = "another"
    (folder / trace_file.MANIFEST).write_text(json.dumps(other))
    path = config_at(tmp_path / "other", tiny_folder)
    assert "made with another model" in refused(traces.main, ["--config", str(path)], capsys)


def test_traces_and_rankers_of_another_model_are_refused(tmp_path, made, tiny_folder, capsys):
    from kvjax.models import hf

    model = kvjax.load(tiny_folder)
    turned = model.params | {"embed": -model.params["embed"]}
    hf.save(
        tmp_path / "turned", model.spec, turned, tokenizer=tiny_folder / "tokenizer.json", dtype="float32"
    )
    path = config_at(tmp_path, tmp_path / "turned", traces={"folder": str(made / "traces")})
    assert "holds traces of model" in refused(ranker.main, ["--config", str(path)], capsys)
    assert not (tmp_path / "run").exists()


def test_exporting_nothing_and_devices_that_are_not_here(tmp_path, made, tiny_folder, capsys):
    here = {"folder": str(made / "traces")}
    path = config_at(tmp_path, tiny_folder, traces=here)
    words = ["--config", str(path), "--export", str(tmp_path / "x.safetensors")]
    assert "Train first" in refused(ranker.main, words, capsys)
    assert not (tmp_path / "x.safetensors").exists()
    path = config_at(tmp_path, tiny_folder, traces=here, devices=3)
    assert "3 does not divide 4 agents" in refused(ranker.main, ["--config", str(path)], capsys)
    assert "cannot be read" in refused(ranker.main, ["--config", "no.yaml"], capsys)
    several = {"verses": {"only": ["verses"]}, "books": {"only": ["books"]}}
    path = config_at(tmp_path, tiny_folder, traces=here, variants=several)
    words = ["--config", str(path), "--variant"]
    assert "the config has books, verses" in refused(ranker.main, [*words, "prose"], capsys)
    assert "no sequences of verses to train on" in refused(ranker.main, [*words, "verses"], capsys)
    assert not (tmp_path / "tiny-verses").exists()


@pytest.mark.parametrize("name", sorted(p.name for p in (ROOT / "configs" / "ranker").glob("*.yaml")))
def test_every_config_stays_under_eight_gigabytes(name):
    chosen = settings.read(ROOT / "configs" / "ranker" / name)
    spec = chosen.spec or chosen.model().spec
    about = trace_file.About(
        model="", fingerprint="", parameters=1, layers=spec.num_layers, heads=spec.num_heads,
        kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, softcap=None, dtype=chosen.recording.dtype,
        keys=chosen.recording.keys, queries=chosen.recording.queries, shard=chosen.recording.shard,
        lengths=(), train=chosen.recording.sequences, seed=0, data={},
    )  # fmt: skip
    count = chosen.recording.sequences + chosen.recording.held
    total = sum(about.bytes(trace_rows.length(chosen, i)) for i in range(count))
    assert 1e9 < total < 8e9
    assert (spec.num_layers * spec.num_kv_heads) % chosen.devices == 0
