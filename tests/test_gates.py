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
from tiny import quick_compiles  # noqa: F401

import kvjax
from kvjax.algebra import Policy
from kvjax.policies.duo import Duo
from kvjax.policies.wg_kv import WriteGate
from kvjax.serve.__main__ import main as serve
from kvjax.weights import WeightsError, fingerprint, read_weights

GATED, DUO = kvjax.policy("write_gate(0.5, window=16) + sinks(2)"), kvjax.policy("duo(0.5, window=16)")
NOTES = {"lambda": 0.08, "tau": 0.5, "window": 16, "seed": 3}


@pytest.fixture(scope="module")
def home(tiny_folder, tmp_path_factory) -> Path:
    """The tiny model with two files of gates and a pattern in its folder."""
    folder = tmp_path_factory.mktemp("shipping") / "model"
    shutil.copytree(tiny_folder, folder)
    model = kvjax.load(folder)
    for name, seed in (("default", 0), ("aggressive", 1)):
        layers = GATED.admission.example_weights(jax.random.key(seed), model.network)
        kvjax.save_weights(folder / f"gates/{name}.safetensors", model, "wg-kv", layers, notes=NOTES)
    layers = DUO.admission.example_weights(jax.random.key(2), model.network)
    kvjax.save_weights(folder / "gates/duo.safetensors", model, "duo", layers)
    return folder


@pytest.fixture(scope="module")
def model(home):
    return kvjax.load(home)


def default(home: Path) -> Path:
    return home / "gates/default.safetensors"


# --- what was saved is what is read --------------------------------------------------------------


def test_saved_weights_come_back_with_their_notes(home, model):
    right = GATED.admission.example_weights(jax.random.key(0), model.network)
    for found in (kvjax.load_gates(default(home), model), kvjax.load_gates("default", model)):
        assert found.keys() == {"admission"}
        assert jax.tree.all(jax.tree.map(np.array_equal, found["admission"], right))
    notes = read_weights(default(home)).notes
    assert notes == {name: str(value) for name, value in NOTES.items()} | {
        "format": "kvjax learned weights 1",
        "method": "wg-kv",
        "place": "admission",
        "layers": "2",
        "kv_heads": "2",
        "head_dim": "8",
        "fingerprint": fingerprint(model),
        "model": "model",
        "kvjax": kvjax.__version__,
    }
    assert not list(home.glob("gates/.*")), "a part of a file was left"


def test_weights_are_found_for_what_learns(home, model):
    assert kvjax.weights_for(kvjax.policy("snapkv + uniform(32)"), model) == {}
    pairs = [(GATED, None, "default"), (GATED, "aggressive", "aggressive"), (DUO, None, "duo")]
    for policy, gates, name in pairs:
        mine = kvjax.weights_for(policy, model, gates)
        theirs = kvjax.load_gates(home / f"gates/{name}.safetensors", model)
        assert jax.tree.all(jax.tree.map(np.array_equal, mine, theirs))


def test_generate_takes_what_the_model_ships(model):
    prompt = [model.text.encode("The quick brown fox jumps over the lazy dog. " * 2)]
    options = {"max_new_tokens": 4, "chunk_size": 32}
    shipped = kvjax.generate(model, GATED, prompt, **options)
    said = kvjax.generate(model, GATED, prompt, **options, weights=kvjax.load_gates("default", model))
    other = kvjax.generate(model, GATED, prompt, **options, weights=kvjax.load_gates("aggressive", model))
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
    mine = fingerprint(model)
    for dtype in ("float32", "bfloat16", "float16"):
        assert fingerprint(kvjax.load(tiny_folder, dtype=dtype)) == mine
    assert fingerprint(tiny.model()) != mine


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
        kvjax.load_gates(default(home), moved)


def rewritten(file: Path, to: Path, drop: str = "", add: dict | None = None, **notes: str) -> Path:
    """The file again with changes to its tensors and its header."""
    tensors = {name: x for name, x in load_file(file).items() if not drop or not name.endswith(drop)}
    save_file(tensors | (add or {}), to, metadata=read_weights(file).notes | notes)
    return to


def test_weights_of_other_sizes_are_refused_by_name(home, model, tmp_path):
    file = rewritten(default(home), tmp_path / "big.safetensors", kv_heads="8", model="Llama-3.1-8B")
    says = r"made for Llama-3.1-8B with 2 layers of 8 KV heads of 8, the model \(model\) has 2 layers of 2"
    with pytest.raises(WeightsError, match=says):
        kvjax.load_gates(file, model)


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
        (tmp_path, "cannot be read|is no safetensors file"),
        (bare, "holds no learned weights"),
        (text, "is no safetensors file"),
        (home / "model.safetensors", "holds no learned weights"),
        (strange, "'other.0.w1' that its header does not announce"),
        (lacking, "the gates of layer 1 have shapes"),
    ]:
        with pytest.raises(WeightsError, match=says):
            kvjax.weights_for(GATED, model, file)


@pytest.mark.parametrize(
    ("policy", "gates", "says"),
    [
        (GATED, "bold", "'bold' are not there.*ships aggressive, default, duo"),
        (GATED, "duo", r"holds weights of 'duo', write_gate\(0.5, window=16\) reads those of 'wg-kv'"),
        (Policy(), "default", "nothing in the policy full is learned"),
    ],
)
def test_gates_given_in_vain(model, policy, gates, says):
    with pytest.raises(WeightsError, match=says):
        kvjax.weights_for(policy, model, gates)


@pytest.mark.parametrize("part", [WriteGate(), Duo()])
def test_a_model_that_ships_none_says_where_gates_come_from(tiny_folder, part):
    with pytest.raises(WeightsError, match=r"ships none\. Give a file \(--gates FILE.*train\.gates"):
        kvjax.weights_for(Policy(admission=part), kvjax.load(tiny_folder))


def test_save_asks_for_every_layer(model, tmp_path):
    with pytest.raises(WeightsError, match="holds 1 layers, the model .* has 2"):
        kvjax.save_weights(tmp_path / "x.safetensors", model, "duo", [{"alpha": np.zeros(2)}])
    assert list(tmp_path.iterdir()) == []


# --- on the command line -------------------------------------------------------------------------


def test_serve_takes_gates_by_default_by_name_and_by_file(home, capsys):
    prompt = "The quick brown fox jumps over the lazy dog. " * 3

    def live(*words: str) -> int:
        start = ["--model", str(home), "--prompt", prompt, "--max-new-tokens", "2", "--json"]
        assert serve([*start, "--policy", repr(GATED), *words]) == 0
        got = json.loads(capsys.readouterr().out)
        assert got["gates"] == (words[1] if words else None)
        return got["kv_bytes"]["live"]

    own, other = live(), live("--gates", "aggressive")
    assert live("--gates", str(home / "gates/aggressive.safetensors")) == other != own


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--policy", "wg-kv"], "ships none. Give a file (--gates FILE"),
        (["--policy", "wg-kv", "--gates", "default"], "'default' are not there: the model"),
        (["--policy", "wg-kv", "--gates", "/nowhere.safetensors"], "/nowhere.safetensors cannot be read"),
        (["--gates", "default"], "--gates default is given, but nothing in --policy 'full' is learned"),
        (["--policy", "write_gate(1.5)"], "tau=1.5 is no threshold"),
    ],
)
def test_serve_refuses_in_one_sentence(tiny_folder, capsys, words, says):
    assert serve(["--model", str(tiny_folder), "--prompt", "x", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert err.count("\n") == 1
