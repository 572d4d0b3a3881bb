"""Learned weights on disk: what was saved is what is read, by the model it was saved for and by no other."""

from __future__ import annotations

import dataclasses
import io
import json
import pickle
import re
import shutil
import warnings
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny
from safetensors.numpy import load_file, save_file
from tiny import quick_compiles  # noqa: F401

import kvjax
from kvjax.gates import converted, main, random_gates
from kvjax.learned import WeightsError, fingerprint, read_weights
from kvjax.policies.duo import Duo
from kvjax.policies.wg_kv import WriteGate, gate_logits
from kvjax.policy import Policy
from kvjax.serve.__main__ import main as serve
from kvjax.torch_file import TorchFileError, read_tensors

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


# --- files of torch, written here by hand --------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Storage:
    """Stands for a storage while a pickle is written."""

    key: str
    kind: type
    count: int


def stand_in(module: str, name: str) -> type:
    """A class that pickles as ``module.name``; whatever it is called with becomes the call in the pickle."""
    return type(name, (), {"__module__": module, "__qualname__": name})


class Call:
    """Pickles as a call of ``function`` with ``arguments``."""

    def __init__(self, function: type, *arguments: object) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple:
        return self.function, self.arguments


class Pickler(pickle._Pickler):  # the one in Python: it lets a stand-in go under another module's name
    """Writes storages as torch does, and stand-ins by name alone."""

    def persistent_id(self, value: object) -> tuple | None:
        return ("storage", value.kind, value.key, "cpu", value.count) if isinstance(value, Storage) else None

    def save_global(self, value: type, name: str | None = None) -> None:
        self.write(b"c" + f"{value.__module__}\n{value.__qualname__}\n".encode())
        self.memoize(value)


TENSOR, PARAMETER = (
    stand_in("torch._utils", "_rebuild_tensor_v2"),
    stand_in("torch._utils", "_rebuild_parameter"),
)
FLOAT, BFLOAT = stand_in("torch", "FloatStorage"), stand_in("torch", "BFloat16Storage")


def write_torch(file: Path, arrays: dict[str, np.ndarray], lost: int = 0, **changes: object) -> Path:
    """What ``torch.save({name: Parameter})`` writes: pickle protocol 2 and one storage an array.

    ``lost`` bytes are missing at the end of every storage.
    """
    saved: dict[str, object] = {}
    for key, (name, x) in enumerate(arrays.items()):
        kind = BFLOAT if x.dtype == ml_dtypes.bfloat16 else FLOAT
        stride = tuple(s // x.itemsize for s in x.strides)
        tensor = Call(TENSOR, Storage(str(key), kind, x.size), 0, x.shape, stride, False, OrderedDict())
        saved[name] = Call(PARAMETER, tensor, True, OrderedDict())
    content = io.BytesIO()
    Pickler(content, 2).dump(saved | changes)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(f"{file.stem}/data.pkl", content.getvalue())
        archive.writestr(f"{file.stem}/byteorder", "little")
        for key, x in enumerate(arrays.values()):
            archive.writestr(f"{file.stem}/data/{key}", x.tobytes()[: x.nbytes - lost])
    return file


def published(layers: int = 2, heads: int = 2, dim: int = 8, hidden: int = 12, norms: bool = True) -> dict:
    """Random gates under the authors' names."""
    random, found = np.random.default_rng(0), {}
    shapes = {
        "conv1.weight": (heads * hidden, 2 * dim, 1),
        "conv1.bias": (heads * hidden,),
        "conv2.weight": (heads, hidden, 1),
        "conv2.bias": (heads,),
    }
    shapes |= {"pre_key_norm.weight": (dim,), "post_key_norm.weight": (dim,)} if norms else {}
    for layer in range(layers):
        for name, shape in shapes.items():
            x = random.standard_normal(shape).astype(np.float32)
            found[f"model.layers.{layer}.self_attn.g_predictors.{name}"] = x
    return found


def test_tensors_of_a_torch_file(tmp_path):
    right = published() | {"half": np.arange(4).astype(ml_dtypes.bfloat16)}
    found = read_tensors(write_torch(tmp_path / "a.pt", right))
    assert found.keys() == right.keys()
    for name, x in right.items():
        assert found[name].dtype == x.dtype
        np.testing.assert_array_equal(found[name], x)


def test_nothing_in_a_torch_file_is_run(tmp_path):
    marker = tmp_path / "run"
    bad = Call(stand_in("pathlib", "Path.touch"), marker)
    worse = Call(stand_in("os", "system"), f"touch {marker}")
    for call in (bad, worse):
        file = write_torch(tmp_path / "a.pt", {}, x=call)
        with pytest.raises(TorchFileError, match="is no part of a plain tensor, and is not run"):
            read_tensors(file)
    assert not marker.exists()


def test_torch_files_that_cannot_be_read(tmp_path):
    def tensor(offset: int, size: tuple, stride: tuple) -> Call:
        return Call(TENSOR, Storage("0", FLOAT, 4), offset, size, stride, False, OrderedDict())

    x, names = {"x": np.zeros(4, np.float32)}, iter("abcdefgh")

    def file(**changes: Any) -> Path:
        return write_torch(tmp_path / f"{next(names)}.pt", x, **changes)

    cut, other, text = file(), tmp_path / "other.zip", tmp_path / "text.pt"
    cut.write_bytes(cut.read_bytes()[:200])
    text.write_text("no zip")
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("readme.txt", "hello")
    for path, says in [
        (tmp_path / "none.pt", "cannot be read"),
        (cut, "no whole zip archive"),
        (text, "no whole zip archive"),
        (other, "without one data.pkl"),
        (file(y=tensor(1, (4,), (1,))), "reaches beyond its storage"),
        (file(y=tensor(0, (2, 3), (2, 1))), "reaches beyond its storage"),
        (file(y=tensor(3, (2,), (-1,))), "reaches beyond its storage"),
        (file(y=Call(TENSOR, 5)), "pickle is damaged"),
        (file(y=3), "no dict of tensors"),
        (file(y=Call(TENSOR, Storage("7", FLOAT, 4), 0, (4,), (1,))), "pickle is damaged"),
        (file(lost=1), "storage 0 is cut short"),
    ]:
        with pytest.raises(TorchFileError, match=says):
            read_tensors(path)


@pytest.mark.parametrize("norms", [False, True])
def test_converted_gates_compute_what_grouped_convolutions_do(norms):
    """The authors' network by hand: channel blocks of conv1 and conv2 belong to one KV head each."""
    heads, dim, hidden = 2, 8, 12
    theirs = published(norms=norms)
    ours = converted(theirs, tiny.model().network)
    k_pre, k = np.random.default_rng(1).standard_normal((2, 1, heads, 5, dim)).astype(np.float32)
    for layer in range(2):
        p = {name.rpartition("g_predictors.")[2]: x for name, x in theirs.items() if f".{layer}." in name}
        found = gate_logits(ours[layer], jnp.asarray(k_pre), jnp.asarray(k))
        for head in range(heads):
            keys = [k_pre[0, head].astype(np.float64), k[0, head].astype(np.float64)]
            if norms:
                keys = [x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) for x in keys]
                keys = [keys[0] * p["pre_key_norm.weight"], keys[1] * p["post_key_norm.weight"]]
            block = slice(head * hidden, (head + 1) * hidden)
            y = np.concatenate(keys, -1) @ p["conv1.weight"][block, :, 0].T + p["conv1.bias"][block]
            y = np.asarray(jax.nn.gelu(y, approximate=False)) @ p["conv2.weight"][head, :, 0]
            np.testing.assert_allclose(found[0, head], y + p["conv2.bias"][head], atol=1e-4)


def test_convert_writes_gates_that_serve_reads(tiny_folder, tmp_path, capsys):
    file, out = write_torch(tmp_path / "tiny-0.16.pt", published()), tmp_path / "tiny.safetensors"
    assert main(["convert", str(file), "--model", str(tiny_folder), "--out", str(out)]) == 0
    assert "--policy wg-kv --gates" in capsys.readouterr().err
    backbone = kvjax.load(tiny_folder)
    weights = kvjax.weights_for(GATED, backbone, out)
    right = converted(published(), backbone.network)
    assert jax.tree.all(jax.tree.map(np.array_equal, weights["admission"], right))
    notes = read_weights(out).notes
    assert {name: notes[name] for name in ("lambda", "tau", "window", "source")} == {
        "lambda": "0.16",
        "tau": "0.1",
        "window": "256",
        "source": "tiny-0.16.pt",
    }


def test_random_gates_admit_the_share_that_was_asked_for(model):
    policy = kvjax.policy("write_gate(window=16)")
    weights = {"admission": random_gates(model, 0.25, policy.admission, tokens=400)}
    text = np.random.default_rng(5).integers(0, 256, 300).tolist()
    state, _ = kvjax.prefill(model, policy, [text], chunk_size=300, weights=weights)
    shares = np.stack([room.pages.length[0, :, 0] for room in state.layers]) / (300 - 16)
    # A quarter, three quarters as far to either side as 0 allows; in a model this small and random a text
    # shifts all keys above the first layer together.
    np.testing.assert_allclose(shares[0], [0.0625, 0.4375], atol=0.06)
    assert abs(shares.mean() - 0.25) < 0.15
    assert (shares[:, 1] > shares[:, 0] + 0.1).all(), "the heads are not ragged"


def test_random_gates_on_the_command_line(tiny_folder, tmp_path, capsys):
    words, out = ["random", "--model", str(tiny_folder)], tmp_path / "random.safetensors"
    assert main([*words, "--out", str(out), "--share", "1.5"]) == 2
    assert "no part of a text" in capsys.readouterr().err
    assert main([*words, "--out", str(out), "--share", "0.25"]) == 0
    assert read_weights(out).notes["share"] == "0.25"
    assert kvjax.weights_for(kvjax.policy("wg-kv"), kvjax.load(tiny_folder), out)


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        (published(layers=3), "gates of layer 2, the model has 2 layers"),
        (published(layers=1), "lacks conv1.weight, conv1.bias, conv2.weight, conv2.bias of layer 1"),
        (published(heads=4), "a model of 2 KV heads of 8 needs"),
        (published(dim=4), "a model of 2 KV heads of 8 needs"),
        (published() | {"lm_head.weight": np.zeros((2, 2), np.float32)}, "holds 'lm_head.weight'"),
        (
            {n: x for n, x in published().items() if "0.self_attn.g_predictors.post" not in n},
            "lacks pre_key_norm.weight, post_key_norm.weight of layer 0",
        ),
    ],
)
def test_convert_refuses_gates_of_another_model(tiny_folder, tmp_path, capsys, arrays, says):
    file, out = write_torch(tmp_path / "other.pt", arrays), tmp_path / "out.safetensors"
    assert main(["convert", str(file), "--model", str(tiny_folder), "--out", str(out)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert says in err
    assert not out.exists()
