"""The decoder against transformers: logits and greedy tokens of the committed tiny models."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.models import decoder, hf

TOLERANCE = 2e-4


def logits_of(spec, params, data):
    x, _ = decoder.forward(
        spec, params, data["tokens"], jnp.asarray(data["positions"]), decoder.dense_attend(spec), None
    )
    return decoder.logits(spec, params, x)


def test_logits_are_those_of_transformers(name, golden_folder, golden_data):
    model, data = hf.load(golden_folder(name), dtype="float32"), golden_data(name)
    found = logits_of(model.spec, model.params, data)
    print(f"{name}: largest difference {np.abs(found - data['logits']).max():.1e}")
    np.testing.assert_allclose(found, data["logits"], atol=TOLERANCE)


def test_greedy_tokens_are_those_of_transformers(name, golden_folder, golden_data):
    model, data = hf.load(golden_folder(name), dtype="float32"), golden_data(name)
    step = jax.jit(lambda tokens: jnp.argmax(decoder.dense_logits(model.spec, model.params, tokens), -1))
    start, length = len(data["prompt"]), len(data["prompt"]) + len(data["greedy"])
    tokens = np.zeros((1, length), np.int32)
    tokens[0, :start] = data["prompt"]
    for t in range(start, length):
        tokens[0, t] = step(tokens)[0, t - 1]
    np.testing.assert_array_equal(tokens[0, start:], data["greedy"])


def test_llama3_golden_exercises_all_three_bands(golden_folder, golden_data):
    model, data = hf.load(golden_folder("llama3")), golden_data("llama3")
    s = model.spec.rope.scaling
    wavelength = 2 * math.pi / dataclasses.replace(model.spec.rope, scaling=None).frequencies(16)
    short = wavelength < s.original_max_position_embeddings / s.high_freq_factor
    long = wavelength > s.original_max_position_embeddings / s.low_freq_factor
    assert short.any()
    assert long.any()
    assert (~short & ~long).any()
    plain = dataclasses.replace(model.spec, rope=dataclasses.replace(model.spec.rope, scaling=None))
    assert np.abs(logits_of(plain, model.params, data) - data["logits"]).max() > 100 * TOLERANCE


def test_window_golden_depends_on_the_window(golden_folder, golden_data):
    model, data = hf.load(golden_folder("qwen2_window")), golden_data("qwen2_window")
    assert model.spec.windows == (None, 6)
    for windows in ((None, None), (None, 5), (6, None)):
        other = dataclasses.replace(model.spec, windows=windows)
        assert np.abs(logits_of(other, model.params, data) - data["logits"]).max() > 100 * TOLERANCE


def test_every_tensor_shows_in_the_logits(name, golden_folder, golden_data):
    """A golden that some tensor does not touch could not see it loaded wrongly."""
    model, data = hf.load(golden_folder(name), dtype="float32"), golden_data(name)
    run = jax.jit(lambda params: logits_of(model.spec, params, data))
    rng = np.random.default_rng(0)
    leaves, tree = jax.tree.flatten(model.params)
    for i, leaf in enumerate(leaves):
        shuffled = jnp.asarray(rng.permutation(np.ravel(leaf)).reshape(leaf.shape))
        params = jax.tree.unflatten(tree, [*leaves[:i], shuffled, *leaves[i + 1 :]])
        moved = np.abs(run(params) - data["logits"]).max()
        assert moved > 100 * TOLERANCE, jax.tree_util.tree_flatten_with_path(model.params)[0][i][0]
