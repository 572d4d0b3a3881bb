"""Traces on a tiny model: what is stored, what goes on, and what cannot be traced or learned from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ranker_tiny import config_at, generated_text, traced  # noqa: F401
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import kvjax
from kvjax.models import decoder
from train import trace_file, trace_rows, traces
from train.ranker import __main__ as ranker
from train.ranker import settings
from train.trace_file import Traces

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def made(tmp_path_factory, tiny_folder) -> Path:
    """A folder with a config and its traces."""
    return traced(tmp_path_factory.mktemp("ranker"), tiny_folder)


def heads_of(model, tokens: jax.Array) -> list[tuple[jax.Array, ...]]:
    """Queries, keys after and before RoPE and values of a text's tokens, of every layer."""

    def look(tokens: jax.Array) -> list[tuple[jax.Array, ...]]:
        seen = []

        def attend(layer, x, carry):
            seen.append((x.q[0], x.k[0], x.k_pre[0], x.v[0]))
            return decoder.dense_attend(model.spec)(layer, x, carry)

        decoder.forward(model.spec, model.params, tokens, jnp.arange(tokens.shape[1])[None], attend, None)
        return seen

    return jax.jit(look)(tokens)


def test_traces_are_what_the_models_heads_see(made, tiny_folder):
    traces, model = Traces.open(made / "traces"), kvjax.load(tiny_folder)
    about = traces.manifest
    assert (about.layers, about.heads, about.kv_heads, about.head_dim) == (2, 4, 2, 8)
    assert len(traces.tasks()) == len(about.lengths) == 13
    assert {task.partition("/")[0] for task in traces.tasks()} == {"ruler", "books"}
    for index in (0, 12):
        one = traces.read(index, ("tokens", "at", "q", "k", "k_pre", "v"))
        seen = heads_of(model, jnp.asarray(one["tokens"])[None])
        for layer, parts in enumerate(seen):
            for name, part in zip(("q", "k", "k_pre", "v"), parts):
                np.testing.assert_allclose(one[name][layer], jnp.swapaxes(part, 0, 1), atol=2e-4)
        np.testing.assert_array_equal(one["at"], np.arange(len(one["tokens"])))


def test_a_few_queries_are_stored_with_their_positions(tmp_path, made, tiny_folder):
    """Arrays that are read backwards, as these positions were, must not be written as they lie in memory."""
    path = config_at(tmp_path, tiny_folder, traces={"queries": 11, "sequences": 1, "held": 1, "shard": 2})
    assert traces.main(["--config", str(path)]) == 0
    few, all_of = Traces.open(tmp_path / "traces"), Traces.open(made / "traces")
    one, whole = (t.read(0, ("tokens", "at", "q")) for t in (few, all_of))
    np.testing.assert_array_equal(one["tokens"], whole["tokens"])
    np.testing.assert_array_equal(one["at"], few.manifest.query_positions(len(one["tokens"])))
    np.testing.assert_array_equal(one["q"], whole["q"][:, :, one["at"]])


def test_positions_other_than_the_manifests_are_refused(tmp_path, made):
    folder = tmp_path / "traces"
    shutil.copytree(made / "traces", folder)
    file = trace_file.shard_path(folder, 0)
    with safe_open(file, "np") as opened:
        notes = opened.metadata()
    held = load_file(file)
    save_file(held | {"at.0": held["at.0"][::-1].copy()}, file, metadata=notes)
    with pytest.raises(trace_file.TraceError, match="at.0 holds other positions"):
        Traces.open(folder).read(0, ("q", "at"))


def test_the_bytes_that_are_announced_are_those_written(made):
    about = Traces.open(made / "traces").manifest
    for shard in range(about.shards):
        want = sum(about.bytes(about.lengths[i]) for i in about.of_shard(shard))
        assert 0 <= trace_file.shard_path(made / "traces", shard).stat().st_size - want < 6000  # its header


def test_a_stopped_run_goes_on_with_the_same_files(tmp_path, made, tiny_folder, capsys):
    path = config_at(tmp_path, tiny_folder)
    folder = tmp_path / "traces"
    folder.mkdir()
    (folder / trace_file.MANIFEST).write_bytes((made / "traces" / trace_file.MANIFEST).read_bytes())
    first = trace_file.shard_path(folder, 0)
    first.write_bytes(trace_file.shard_path(made / "traces", 0).read_bytes())
    stamp = first.stat().st_mtime_ns
    assert ranker.main(["--config", str(path)]) == 2
    assert "holds 1 of 4 files: train.traces was stopped" in capsys.readouterr().err
    assert traces.main(["--config", str(path)]) == 0
    assert first.stat().st_mtime_ns == stamp, "what was there was made again"
    for file in sorted((made / "traces").iterdir()):
        assert (folder / file.name).read_bytes() == file.read_bytes()


def test_a_few_queries_are_spread_evenly_up_to_the_last(made):
    about = Traces.open(made / "traces").manifest
    few = trace_file.dataclasses.replace(about, queries=5)
    assert few.query_positions(50).tolist() == [10, 20, 29, 39, 49]
    assert few.query_positions(3).tolist() == [0, 1, 2]


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
        ({"traces": {"data": {"kind": "documents", "folder": "/nowhere"}}}, "'/nowhere' is not a folder"),
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
        message = refused(ranker.main, ["--config", str(path)], capsys)
        assert not (tmp_path / name / "run").exists()
        return message

    assert "has no traces" in says("none")
    long = says("long", agent={"sinks": 30, "recent": 20}, traces={"folder": str(made / "traces")})
    assert "a sequence of 48 tokens is shorter than 58" in long
    folder = copied(made, tmp_path / "cut")
    file = trace_file.shard_path(folder, 1)
    file.write_bytes(file.read_bytes()[:-100])
    assert "00001.safetensors is cut short or damaged" in says("cut")
    folder = copied(made, tmp_path / "nan")
    file = trace_file.shard_path(folder, 0)
    arrays = load_file(file)
    arrays["v.2"][1, 0, 5, 3] = np.nan
    about = Traces.open(made / "traces").manifest
    trace_file.write_shard(folder, about, 0, ["books"] * 4, arrays)
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
    source = {"folder": str(made / "traces")}
    path = config_at(tmp_path, tiny_folder, traces=source)
    words = ["--config", str(path), "--export", str(tmp_path / "x.safetensors")]
    assert "Train first" in refused(ranker.main, words, capsys)
    assert not (tmp_path / "x.safetensors").exists()
    path = config_at(tmp_path, tiny_folder, traces=source, devices=3)
    assert "3 does not divide 4 agents" in refused(ranker.main, ["--config", str(path)], capsys)
    assert "cannot be read" in refused(ranker.main, ["--config", "no.yaml"], capsys)
    several = {"verses": {"only": ["verses"]}, "books": {"only": ["books"]}}
    path = config_at(tmp_path, tiny_folder, traces=source, variants=several)
    words = ["--config", str(path), "--variant"]
    assert "the config has books, verses" in refused(ranker.main, [*words, "prose"], capsys)
    assert "no sequences of verses to train on" in refused(ranker.main, [*words, "verses"], capsys)
    assert not (tmp_path / "tiny-verses").exists()


@pytest.mark.parametrize("name", sorted(p.name for p in (ROOT / "configs" / "ranker").glob("*.yaml")))
def test_every_config_stays_under_eight_gigabytes(name):
    chosen = settings.read(ROOT / "configs" / "ranker" / name)
    spec = chosen.spec or chosen.model().spec
    about = trace_file.Manifest(
        model="", fingerprint="", parameters=1, layers=spec.num_layers, heads=spec.num_heads,
        kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, softcap=None, dtype=chosen.recording.dtype,
        keys=chosen.recording.keys, queries=chosen.recording.queries, shard=chosen.recording.shard,
        lengths=(), train=chosen.recording.sequences, seed=0, data={},
    )  # fmt: skip
    count = chosen.recording.sequences + chosen.recording.held
    total = sum(about.bytes(trace_rows.length(chosen, i)) for i in range(count))
    assert 1e9 < total < 8e9
    assert (spec.num_layers * spec.num_kv_heads) % chosen.devices == 0
