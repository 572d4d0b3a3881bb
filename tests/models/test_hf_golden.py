"""The decoder against transformers: logits and greedy tokens of the committed tiny models."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import decode
from kvjax.models import decoder, hf
from kvjax.models.spec import LongRope
from kvjax.policy import Policy

TOLERANCE = 2e-4
LENGTHS = (11, 5)


def logits_of(spec, params, data):
    spec = spec.at(int(data["positions"].max()) + 1)
    x, _ = decoder.forward(
        spec, params, data["tokens"], jnp.asarray(data["positions"]), decoder.dense_attend(spec), None
    )
    return decoder.logits(spec, params, x)


def test_logits_are_those_of_transformers(name, golden_folder, golden_data):
    model, data = hf.load(golden_folder(name), dtype="float32"), golden_data(name)
    found = logits_of(model.spec, model.params, data)
    print(f"{name}: largest difference {np.abs(found - data['logits']).max():.1e}")
    np.testing.assert_allclose(found, data["logits"], atol=TOLERANCE)


def test_a_padded_batch_is_that_of_transformers(name, golden_folder, golden_data):
    """Right-padded here, left-padded there: the same logits, then the same 32 tokens through the cache."""
    model, data = hf.load(golden_folder(name), dtype="float32"), golden_data(name)
    found = decoder.dense_logits(model.spec, model.params, jnp.asarray(data["batch"]))
    for row, n in enumerate(LENGTHS):
        np.testing.assert_allclose(found[row, :n], data["batch_logits"][row, :n], atol=TOLERANCE)
    prompts = [data["batch"][row, :n].tolist() for row, n in enumerate(LENGTHS)]
    state, last = decode.prefill(model, Policy(), prompts, context=64, chunk_size=4)
    for row, n in enumerate(LENGTHS):
        np.testing.assert_allclose(last[row], data["batch_logits"][row, n - 1], atol=TOLERANCE)
    pieces = decode.stream(model, Policy(), state, last, max_new_tokens=32)
    np.testing.assert_array_equal(np.concatenate([piece for piece, _ in pieces], 1), data["batch_greedy"])


def test_tokens_through_the_cache_are_those_of_transformers(name, golden_folder, golden_data):
    model, data = hf.load(golden_folder(name), dtype="float32"), golden_data(name)
    made = decode.generate(model, Policy(), [data["prompt"].tolist()], max_new_tokens=32)
    assert made.tokens == [data["greedy"].tolist()]


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
        at = jax.tree_util.tree_flatten_with_path(model.params)[0][i][0]
        if name == "gpt2" and at[-1].key == "bk":
            continue  # unrotated, a key bias shifts all scores of a query alike
        shuffled = jnp.asarray(rng.permutation(np.ravel(leaf)).reshape(leaf.shape))
        params = jax.tree.unflatten(tree, [*leaves[:i], shuffled, *leaves[i + 1 :]])
        moved = np.abs(run(params) - data["logits"]).max()
        assert moved > 100 * TOLERANCE, jax.tree_util.tree_flatten_with_path(model.params)[0][i][0]


@pytest.mark.parametrize("name", ["phi3_long", "phi4_mini"])
def test_longrope_takes_the_factors_of_the_context(name, golden_folder, golden_data):
    """Prompts beyond the original length get the long factors, and so does any prompt in such a context."""
    model, data = hf.load(golden_folder(name)), golden_data(name)
    rope = model.spec.rope
    assert isinstance(rope.scaling, LongRope)
    assert rope.scaling.original_max_position_embeddings == 64
    assert rope.at(64) == rope
    assert rope.at(65).scaling.stretched
    made = decode.generate(model, Policy(), [data["long_prompt"].tolist()], max_new_tokens=32)
    assert made.tokens == [data["long_greedy"].tolist()]
    prompts = [data["batch"][row, :n].tolist() for row, n in enumerate(LENGTHS)]
    _, last = decode.prefill(model, Policy(), prompts, context=96)
    short = [data["batch_logits"][row, n - 1] for row, n in enumerate(LENGTHS)]
    assert np.abs(last - np.stack(short)).max() > 100 * TOLERANCE


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen3", {"qk_norm": False}),
        ("mistral", {"windows": (6, None)}),
        ("mistral", {"windows": (5, 6)}),
        ("phi3", {"windows": (None, 6)}),
        ("gemma2", {"attn_softcap": None}),
        ("gemma2", {"final_softcap": None}),
        ("gemma2", {"query_pre_attn_scalar": None}),
        ("gemma2", {"scaled_embedding": False}),
        ("gemma2", {"norm": "rms"}),
        ("gemma2", {"mlp": "swiglu"}),
        ("gemma2", {"windows": (None, 6)}),
        ("gemma3", {"local_rope": None}),
        ("gemma3", {"post_norms": False}),
        ("gemma3", {"qk_norm": False}),
        ("gpt2", {"positions": "rope"}),
        ("gpt2", {"norm": "rms"}),
    ],
)
def test_every_trait_shows_in_the_logits(name, changes, golden_folder, golden_data):
    model, data = hf.load(golden_folder(name)), golden_data(name)
    other = dataclasses.replace(model.spec, **changes)
    assert np.abs(logits_of(other, model.params, data) - data["logits"]).max() > 100 * TOLERANCE
