"""Learned weights on disk: what was saved is what is read, by the model it was saved for and by no other."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from safetensors.numpy import load_file, save_file
from tiny import by_layer  # noqa: F401

import kvjax
from kvjax.algebra import Policy
from kvjax.policies.duo import Duo
from kvjax.policies.wg_kv import WriteGate
from kvjax.serve.__main__ import main as serve
from kvjax.weights import WeightsError, fingerprint, load_weights, read_weights

GATED, DUO = kvjax.policy("write_gate(0.5, window=16) + sinks(2)"), kvjax.policy("duo(0.5, window=16)")
NOTES = {"lambda": 0.08, "tau": 0.5, "seed": 3}


@pytest.fixture(scope="module")
def home(tiny_folder, tmp_path_factory) -> Path:
    """The tiny model with two files of gates and a pattern in its folder."""
    folder = tmp_path_factory.mktemp("shipping") / "model"
    shutil.copytree(tiny_folder, folder)
    model = kvjax.load(folder)
    for name, seed in (("default", 0), ("aggressive", 1)):
        layers = GATED.admission.example_weights(jax.random.key(seed), model.network)
        kvjax.save_weights(
            folder / f"weights/write_gate/{name}.safetensors", model, GATED.admission, layers, notes=NOTES
        )
    layers = DUO.admission.example_weights(jax.random.key(2), model.network)
    kvjax.save_weights(folder / "weights/duo/default.safetensors", model, DUO.admission, layers)
    return folder


@pytest.fixture(scope="module")
def model(home):
    return kvjax.load(home)


def default(home: Path) -> Path:
    return home / "weights/write_gate/default.safetensors"


# --- what was saved is what is read --------------------------------------------------------------


def test_saved_weights_come_back_with_their_notes(home, model):
    right = GATED.admission.example_weights(jax.random.key(0), model.network)
    assert jax.tree.all(jax.tree.map(np.array_equal, load_weights(default(home), model).layers, right))
    for choice in (
        None,
        "default",
        default(home),
        {"write_gate": "default"},
        {"write_gate": str(default(home))},
    ):
        weights = kvjax.weights_for(GATED, model, choice)
        assert weights.keys() == {"admission"}
        assert jax.tree.all(jax.tree.map(np.array_equal, weights["admission"], right))
    notes = read_weights(default(home)).notes
    assert notes == {name: str(value) for name, value in NOTES.items()} | {
        "window": "16",  # what the part's weights are trained for is noted by itself
        "format": "kvjax learned weights 1",
        "method": "wg-kv",
        "place": "admission",
        "layers": "2",
        "kv_heads": "2",
        "head_dim": "8",
        "fingerprint": fingerprint(model),
        "model": "model",
        "kvjax": kvjax.__version__,
        "architecture": notes["architecture"],  # tests/test_weights_values.py
        "signs": notes["signs"],
    }
    assert not list(home.glob("weights/*/.*")), "a part of a file was left"


def test_weights_are_found_for_what_learns(home, model):
    assert kvjax.weights_for(kvjax.policy("snapkv + uniform(32)"), model) == {}
    trios = [
        (GATED, None, "write_gate/default"),
        (GATED, "aggressive", "write_gate/aggressive"),
        (DUO, None, "duo/default"),
    ]
    for policy, choice, name in trios:
        weights = kvjax.weights_for(policy, model, choice)
        theirs = load_weights(home / f"weights/{name}.safetensors", model).layers
        assert jax.tree.all(jax.tree.map(np.array_equal, weights, {"admission": theirs}))


def test_generate_takes_what_the_model_ships(model):
    prompt = [model.text.encode("The quick brown fox jumps over the lazy dog. " * 2)]
    options = {"max_new_tokens": 4, "chunk_size": 32}
    shipped = kvjax.generate(model, GATED, prompt, **options)
    said = kvjax.generate(model, GATED, prompt, **options, weights=kvjax.weights_for(GATED, model, "default"))
    other = kvjax.generate(
        model, GATED, prompt, **options, weights=kvjax.weights_for(GATED, model, "aggressive")
    )
    held = [kvjax.nbytes(done.state).total["live"] for done in (shipped, said, other)]
    assert shipped.tokens == said.tokens
    assert held[0] == held[1] != held[2]


def test_a_window_the_gates_were_not_trained_with_is_told_once(home, model, capsys):
    says = r"weights of default.safetensors were trained with window=16 and are read with window=256. Write"
    with pytest.warns(UserWarning, match=says) as told:
        weights = kvjax.weights_for(kvjax.policy("wg-kv"), model)
    assert len(told) == 1
    assert weights.keys() == {"admission"}  # a remark, no refusal
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for policy in (
            GATED,
            kvjax.policy("write_gate(0.3, window=16)"),
            kvjax.policy("duo(0.5, window=99)"),
        ):
            kvjax.weights_for(policy, model)
        words = ["--model", str(home), "--prompt", "Hello there", "--max-new-tokens", "1", "--policy"]
        assert serve([*words, "wg-kv"]) == 0
        assert re.findall(r"^note: write_gate\(0.1\): the " + says, capsys.readouterr().err, re.MULTILINE)
        assert serve([*words, "write_gate(0.5, window=16)"]) == 0
        assert "note:" not in capsys.readouterr().err


# --- whose ---------------------------------------------------------------------------------------


def test_the_fingerprint_knows_the_model_whatever_its_dtype(tiny_folder, model):
    of_model = fingerprint(model)
    for dtype in ("float32", "bfloat16", "float16"):
        assert fingerprint(kvjax.load(tiny_folder, dtype=dtype)) == of_model
    assert fingerprint(tiny.model()) != of_model


@pytest.mark.parametrize(
    ("name", "digits"),
    [("llama3", "2fff2792a0359ade"), ("gpt2", "6adcb83e98b04fdc"), ("phi3", "3843e7c83b40db69")],
)
def test_a_fingerprint_does_not_depend_on_how_weights_lie(name, digits):
    """Taken when weights lay [inputs, outputs]; files bound to them must stay valid."""
    assert fingerprint(kvjax.load(Path(__file__).parent / "golden" / name)) == digits


def test_random_weights_are_those_of_when_they_lay_otherwise():
    assert fingerprint(tiny.model()) == "911d7bfdab0f3d9e"


@dataclasses.dataclass(frozen=True)
class Trained:
    """A model whose weights have moved on."""

    network: object
    params: dict
    name: str = "moved on"


def test_a_model_that_was_trained_further_is_another_one(home, model):
    random = np.random.default_rng(0)

    def step(x: jnp.ndarray) -> jnp.ndarray:
        return x + 0.02 * float(jnp.std(x)) * random.standard_normal(x.shape).astype(np.float32)

    moved = Trained(model.network, jax.tree.map(step, model.params))
    assert fingerprint(moved) != fingerprint(model)
    with pytest.raises(WeightsError, match=r"differ from those of this model \(moved on\)"):
        load_weights(default(home), moved)


def rewritten(file: Path, to: Path, drop: str = "", add: dict | None = None, **notes: str) -> Path:
    """The file again with changes to its tensors and its header."""
    tensors = {name: x for name, x in load_file(file).items() if not drop or not name.endswith(drop)}
    save_file(tensors | (add or {}), to, metadata=read_weights(file).notes | notes)
    return to


def test_weights_of_other_sizes_are_refused_by_name(home, model, tmp_path):
    file = rewritten(default(home), tmp_path / "big.safetensors", kv_heads="8", model="Llama-3.1-8B")
    says = r"made for Llama-3.1-8B with 2 layers of 8 KV heads of 8, the model \(model\) has 2 layers of 2"
    with pytest.raises(WeightsError, match=says):
        load_weights(file, model)


def test_files_that_cannot_be_used(home, model, tmp_path):
    bare, text = tmp_path / "bare.safetensors", tmp_path / "text.safetensors"
    save_file({"x": np.zeros(3, np.float32)}, bare)
    text.write_text("no gates at all")
    strange = rewritten(
        default(home), tmp_path / "a.safetensors", add={"other.0.w1": np.zeros(2, np.float32)}
    )
    lacking = rewritten(default(home), tmp_path / "b.safetensors", drop="1.b2")
    for file, says in [
        (tmp_path / "none.safetensors", "cannot be read"),
        (tmp_path, "cannot be read|is not a safetensors file"),
        (bare, "not one of a policy's learned weights"),
        (text, "is not a safetensors file"),
        (home / "model.safetensors", "not one of a policy's learned weights"),
        (strange, "'other.0.w1' that its header does not name"),
        (lacking, "the weights of layer 1 have shapes"),
    ]:
        with pytest.raises(WeightsError, match=says):
            kvjax.weights_for(GATED, model, file)


@pytest.mark.parametrize(
    ("policy", "choice", "says"),
    [
        (GATED, "bold", "write_gate=bold: .*no 'bold' for write_gate; it has aggressive, default. Give"),
        (GATED, {"write_gate": "bold"}, "ships no 'bold' for write_gate; it has aggressive, default. Give"),
        (
            Policy(),
            "default",
            "weights 'default' are given, but nothing in the policy 'full' is learned. Leave",
        ),
        (Policy(), {"write_gate": "default"}, "weights write_gate=default are given, but nothing in"),
        (
            GATED,
            {"admission": "default"},
            r"no part of the policy 'write_gate.* is called admission.*: write_gate",
        ),
        (GATED, {"write_gate": ""}, "write_gate='' name no file. Give a file, or the name"),
        (GATED, {"write_gate": [{"w1": 0}]}, r"write_gate=\(list\) name no file"),
        (GATED, 3, "weights 3 name no file"),
        (
            GATED,
            {"write_gate": "default", "gates": "aggressive"},
            "are both given, for the same part. Keep one",
        ),
    ],
)
def test_sources_that_cannot_be_meant(model, policy, choice, says):
    with pytest.raises(WeightsError, match=says):
        kvjax.weights_for(policy, model, choice)


def test_a_file_of_another_method_is_refused_by_name(home, model):
    says = r"holds weights of 'duo', write_gate\(0.5, window=16\) reads those of 'wg-kv'"
    with pytest.raises(WeightsError, match=says):
        kvjax.weights_for(GATED, model, home / "weights/duo/default.safetensors")


@pytest.mark.parametrize(("part", "command"), [(WriteGate(), "train.gates"), (Duo(), "train.duo")])
def test_a_part_without_shipped_weights_says_what_trains_them(tiny_folder, part, command):
    name = part.name
    says = rf"none for {name}\. Give a file \(--weights {name}=FILE, .* one: python -m {command}"
    with pytest.raises(WeightsError, match=says):
        kvjax.weights_for(Policy(admission=part), kvjax.load(tiny_folder))


def test_a_file_of_the_name_does_not_hide_what_is_shipped(model, tmp_path, monkeypatch):
    (tmp_path / "default").write_text("no weights at all")
    monkeypatch.chdir(tmp_path)
    assert kvjax.weights_for(GATED, model).keys() == {"admission"}
    with pytest.raises(WeightsError, match="default is not a safetensors file"):
        kvjax.weights_for(GATED, model, Path("default"))


def test_names_are_no_weights_for_the_loops_and_what_is_shipped_is_not_called_missing(model):
    with pytest.raises(
        WeightsError, match=r"not read yet. Pass weights=kvjax.weights_for\(policy, model, {'write"
    ):
        kvjax.generate(model, GATED, [[1, 2]], weights={"write_gate": "default"})
    with pytest.raises(WeightsError, match=r"got none. Pass weights=kvjax.weights_for\(policy, model\)\."):
        kvjax.prefill(model, GATED, [[1, 2]])


def test_save_refuses_what_would_not_be_read(model, tmp_path):
    file = tmp_path / "x.safetensors"
    for part, layers, says in [
        (Duo(), [{"alpha": np.zeros(2)}], "holds 1 layers, the model .* has 2"),
        (Duo(), [{"alpha": np.zeros(3)}] * 2, "x.safetensors.*weights of layer 0 have shapes"),
        (Policy().eviction, [{}] * 2, "keep_recent learns nothing"),
    ]:
        with pytest.raises(WeightsError, match=says):
            kvjax.save_weights(file, model, part, layers)
    assert list(tmp_path.iterdir()) == []


# --- on the command line -------------------------------------------------------------------------


@pytest.mark.slow
def test_serve_takes_gates_by_default_by_name_and_by_file(home, capsys):
    prompt = "The quick brown fox jumps over the lazy dog. " * 3

    def live(*words: str) -> int:
        start = ["--model", str(home), "--prompt", prompt, "--max-new-tokens", "2", "--json"]
        assert serve([*start, "--policy", repr(GATED), *words]) == 0
        got = json.loads(capsys.readouterr().out)
        assert got["weights"] == {"write_gate": words[1].removeprefix("write_gate=") if words else "default"}
        return got["kv_bytes"]["live"]

    own, other = live(), live("--gates", "aggressive")
    assert live("--weights", "write_gate=aggressive") == other != own
    file = home / "weights/write_gate/aggressive.safetensors"
    assert live("--gates", str(file)) == live("--weights", f"write_gate={file}") == other


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--policy", "wg-kv"], "ships none for write_gate. Give a file (--weights write_gate=FILE"),
        (["--policy", "wg-kv", "--gates", "default"], "ships none for write_gate"),
        (["--policy", "wg-kv", "--gates", "/nowhere.safetensors"], "/nowhere.safetensors cannot be read"),
        (["--policy", "wg-kv", "--weights", "write_gate=/no.safetensors"], "/no.safetensors cannot be read"),
        (["--gates", "default"], "--gates default is given, but nothing in the policy 'full' is learned"),
        (
            ["--weights", "write_gate=default"],
            "write_gate=default are given, but nothing in the policy 'full'",
        ),
        (["--policy", "wg-kv", "--weights", "gate=x"], "is called gate. Parts that learn: write_gate."),
        (
            ["--policy", "wg-kv", "--weights", "default"],
            "--weights default is not a list of PART=FILE or PART=NAME",
        ),
        (
            ["--policy", "wg-kv", "--weights", "write_gate="],
            "--weights write_gate= is not a list of PART=FILE",
        ),
        (["--policy", "wg-kv", "--weights", "write_gate=a,write_gate=b"], "gives write_gate twice. Keep one"),
        (
            ["--policy", "wg-kv", "--weights", "write_gate=a", "--gates", "b"],
            "given, for the same part. Keep one",
        ),
        (["--policy", "wg-kv", "--gates", "a", "--gates", "b"], "--gates b gives gates again. Keep one"),
        (["--policy", "write_gate(1.5)"], "tau=1.5 is not a valid threshold"),
    ],
)
def test_serve_refuses_in_one_sentence(tiny_folder, capsys, words, says):
    assert serve(["--model", str(tiny_folder), "--prompt", "x", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert err.count("\n") == 1
