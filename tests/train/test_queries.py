"""The calibration of queries on a tiny model: sums, directions, statistics, files that serve."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ranker_tiny import config_at, generated_text  # noqa: F401

import kvjax
from kvjax.models import decoder
from train import queries, trace_rows
from train.ranker import settings

FEW = {"sequences": 3}
STORED = "expected_attention(stored=True)"


@functools.cache
def observed(folder, skip=4) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Queries [T, N, H] after and before RoPE, by layer, of all training sequences that the config draws.

    Of those before RoPE the first ``skip`` of a sequence are left out.
    """
    config = settings.read(config_at(folder.parent / f"observed{skip}", folder, traces=FEW))
    model = kvjax.load(folder)
    drawn = trace_rows.sequences(config, model.text)
    both: tuple[list[list[np.ndarray]], ...] = ([[], []], [[], []])
    for index in range(config.recording.sequences):
        tokens = jnp.asarray(drawn.draw(index)[1])[None]

        def attend(layer, x, carry):
            skipped = (x.q[0], x.q_pre[0, skip:])
            for kept, seen in zip(both, skipped):
                kept[layer].append(np.asarray(seen, np.float64))
            return decoder.dense_attend(model.spec)(layer, x, carry)

        decoder.forward(model.spec, model.params, tokens, jnp.arange(tokens.shape[1])[None], attend, None)
    after, before = ([np.concatenate(layer) for layer in layers] for layers in both)
    return after, before


def calibrated(tmp_path, folder, part: str, policy: str) -> list[dict[str, np.ndarray]]:
    """The weights by the command line, as the policy reads them."""
    file = tmp_path / f"{part}.safetensors"
    config = str(config_at(tmp_path, folder, traces=FEW))
    assert queries.main(["--config", config, "--part", part, "--export", str(file)]) == 0
    return kvjax.weights_for(policy, kvjax.load(folder), file)["eviction"]


def test_filters_are_first_singular_vectors_turned_to_the_queries(tmp_path, tiny_folder):
    layers = calibrated(tmp_path, tiny_folder, "qfilter", "qfilter + uniform(8)")
    for layer, q in zip(layers, observed(tiny_folder)[0]):
        heads = []
        for n in range(q.shape[1]):
            vector = np.linalg.svd(q[:, n], full_matrices=False)[2][0]
            heads.append(vector * np.sign((q[:, n] @ vector).sum()))
        right = np.asarray(heads).reshape(2, 2, -1).mean(axis=1)
        np.testing.assert_allclose(layer["filter"], right, atol=1e-4)


def test_statistics_are_mean_and_covariance_behind_the_sinks(tmp_path, tiny_folder):
    layers = calibrated(tmp_path, tiny_folder, "expected_attention", f"{STORED} + uniform(8)")
    for layer, q in zip(layers, observed(tiny_folder)[1]):
        np.testing.assert_allclose(layer["mean"], q.mean(axis=0), atol=1e-4)
        for n in range(q.shape[1]):
            np.testing.assert_allclose(layer["covariance"][n], np.cov(q[:, n].T, bias=True), atol=1e-3)
    with pytest.warns(UserWarning, match="were trained with sinks=4 and are read with sinks=2"):
        kvjax.weights_for(
            "expected_attention(sinks=2, stored=True) + uniform(8)",
            kvjax.load(tiny_folder),
            tmp_path / "expected_attention.safetensors",
        )


def test_centres_are_mean_and_mean_length_of_pairs(tmp_path, tiny_folder):
    layers = calibrated(tmp_path, tiny_folder, "tri_attention", "tri_attention + uniform(8)")
    for layer, q in zip(layers, observed(tiny_folder, 0)[1]):
        half = q.shape[-1] // 2
        length = np.abs(q[..., :half] + 1j * q[..., half:]).mean(axis=0)
        np.testing.assert_allclose(layer["mean"], q.mean(axis=0), atol=1e-4)
        np.testing.assert_allclose(layer["length"], np.tile(length, (1, 2)), atol=1e-4)


@pytest.mark.parametrize("name", ["qfilter", STORED, "tri_attention"])
def test_the_embedded_model_ships_them(name):
    policy = kvjax.policy(f"{name} + uniform(0.25)")
    layers = kvjax.weights_for(policy, kvjax.load())["eviction"]
    assert len(layers) == 6
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(layers))


def test_a_config_that_is_not_there_is_one_sentence(tmp_path, capsys):
    words = ["--config", str(tmp_path / "none.yaml"), "--part", "qfilter", "--export", str(tmp_path / "f")]
    assert queries.main(words) == 2
    assert "cannot be read" in capsys.readouterr().err
    assert not (tmp_path / "f").exists()
