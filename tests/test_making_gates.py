"""Gates from elsewhere: the authors' files converted, and random ones that admit a given share."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from torch_writer import published, write_torch

import kvjax
from kvjax.policies.wg_kv import gate_logits
from kvjax.weights import read_weights
from kvjax.weights.__main__ import main
from kvjax.weights.gates import converted, random_gates


@pytest.mark.parametrize("norms", [False, True])
def test_converted_gates_compute_what_grouped_convolutions_do(norms):
    """The authors' network by hand: channel blocks of conv1 and conv2 belong to one KV head each."""
    heads, dim, hidden = 2, 8, 12
    theirs = published(norms=norms)
    ours = converted(theirs, tiny.model().network)
    k_pre, k = np.random.default_rng(1).standard_normal((2, 1, heads, 5, dim)).astype(np.float32)
    for layer in range(2):
        p = {name.rpartition("g_predictors.")[2]: x for name, x in theirs.items() if f".{layer}." in name}
        logits = gate_logits(ours[layer], jnp.asarray(k_pre), jnp.asarray(k))
        for head in range(heads):
            keys = [k_pre[0, head].astype(np.float64), k[0, head].astype(np.float64)]
            if norms:
                keys = [x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) for x in keys]
                keys = [keys[0] * p["pre_key_norm.weight"], keys[1] * p["post_key_norm.weight"]]
            block = slice(head * hidden, (head + 1) * hidden)
            y = np.concatenate(keys, -1) @ p["conv1.weight"][block, :, 0].T + p["conv1.bias"][block]
            y = np.asarray(jax.nn.gelu(y, approximate=False)) @ p["conv2.weight"][head, :, 0]
            np.testing.assert_allclose(logits[0, head], y + p["conv2.bias"][head], atol=1e-4)


def test_convert_writes_gates_that_serve_reads(tiny_folder, tmp_path, capsys):
    file, out = write_torch(tmp_path / "tiny-0.16.pt", published()), tmp_path / "tiny.safetensors"
    assert main(["convert", str(file), "--model", str(tiny_folder), "--out", str(out)]) == 0
    assert "--policy wg-kv --weights write_gate=" in capsys.readouterr().err
    backbone = kvjax.load(tiny_folder)
    weights = kvjax.weights_for(kvjax.policy("write_gate(0.5, window=16)"), backbone, out)
    right = converted(published(), backbone.network)
    assert jax.tree.all(jax.tree.map(np.array_equal, weights["admission"], right))
    notes = read_weights(out).notes
    assert {name: notes[name] for name in ("lambda", "tau", "window", "source")} == {
        "lambda": "0.16",
        "tau": "0.1",
        "window": "256",
        "source": "tiny-0.16.pt",
    }


@pytest.mark.slow
def test_random_gates_admit_the_share_that_was_asked_for(tiny_folder):
    model = kvjax.load(tiny_folder)
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


@pytest.mark.slow
def test_random_gates_on_the_command_line(tiny_folder, tmp_path, capsys):
    words, out = ["random", "--model", str(tiny_folder)], tmp_path / "random.safetensors"
    assert main([*words, "--out", str(out), "--share", "1.5"]) == 2
    assert "is not a share" in capsys.readouterr().err
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
