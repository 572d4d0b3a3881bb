"""KVzap and Fast KVzip on a tiny model: the targets are KVzip's, a run learns, and its file serves."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from gates_tiny import config_at, records, written

from kvjax import load, weights_for
from kvjax.policies.kvzip import KVzip
from kvjax.types import Heads
from train import zap


@pytest.fixture(autouse=True)
def generated_text(monkeypatch):
    monkeypatch.setenv("KVJAX_DATA", "/nowhere")


@pytest.mark.parametrize("output", [False, True])
def test_targets_are_the_greatest_shares_of_attention(output):
    """Query by query in float64: softmax over what a second reading sees, the largest of all queries."""
    random, length, fed, n, k, h, d = np.random.default_rng(0), 5, 13, 4, 2, 3, 6
    draw = lambda *shape: np.float32(random.standard_normal(shape))  # noqa: E731
    q, keys, v, hidden, wo = (
        draw(1, fed, n, h),
        draw(1, fed, k, h),
        draw(1, fed, k, h),
        draw(1, fed, d),
        draw(d, n, h),
    )
    x = Heads(q=q, k=keys, v=v, q_pre=q, k_pre=keys, hidden=jnp.asarray(hidden), wo=jnp.asarray(wo))
    x = dataclasses.replace(x, **{name: jnp.asarray(getattr(x, name)) for name in ("q", "k", "v")})
    right = np.zeros((k, length))
    for at in range(length, fed):
        for head in range(n):
            s = keys[0, : at + 1, head // 2].astype(np.float64) @ q[0, at, head] / np.sqrt(h)
            share = (np.exp(s) / np.exp(s).sum())[:length]
            if output:
                share = share * np.linalg.norm(v[0, :length, head // 2] @ wo[:, head].T, axis=-1)
                share = share / np.linalg.norm(hidden[0, at])
            right[head // 2] = np.maximum(right[head // 2], share)
    np.testing.assert_allclose(zap.kvzip_scores(x, length, output=output)[0], right, rtol=2e-5)


@pytest.mark.parametrize("method", ["kvzap", "fast_kvzip"])
def test_a_run_learns_and_its_file_serves(method, tmp_path, tiny_folder, capsys):
    rate = {"peak": 0.05, "weight_decay": 0.0}
    config = config_at(tmp_path, tiny_folder, optimizer=rate, plan={"steps": 6, "check_every": 6})
    path = written(tmp_path, config | {"method": method})
    assert zap.main(["--config", str(path)]) == 0
    log = [record for record in records(tmp_path, "") if "loss" in record]
    assert log[-1]["loss"] < log[0]["loss"]
    file = tmp_path / "zap.safetensors"
    assert zap.main(["--config", str(path), "--export", str(file)]) == 0
    for policy in {"kvzap": ("kvzap", "kvzap-ada"), "fast_kvzip": ("fast-kvzip", "fast_kvzip_gate")}[method]:
        assert weights_for(policy, load(tiny_folder), file)
    capsys.readouterr()


def test_the_instruction_is_kvzips(tiny_folder):
    model = load(tiny_folder)
    prompt = np.asarray(model.text.encode("some words"), np.int32)
    (piece,) = KVzip().pieces(prompt, model.text)
    np.testing.assert_array_equal(piece.tokens, np.concatenate([zap.instruction(model), prompt]))


def test_rows_that_cannot_be_read_twice_are_refused(tmp_path, tiny_folder, capsys):
    longest = load(tiny_folder).network.max_positions
    data = {"lengths": [longest], "tokens": longest}
    path = written(tmp_path, config_at(tmp_path, tiny_folder, data=data) | {"method": "kvzap"})
    assert zap.main(["--config", str(path)]) == 2
    assert "is read twice with" in capsys.readouterr().err
