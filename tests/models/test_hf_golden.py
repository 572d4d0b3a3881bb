"""The decoder against transformers: logits and greedy tokens of the committed tiny models."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import check, decode, policy
from kvjax.algebra import Policy
from kvjax.decode import _by_layer
from kvjax.engine import Engine, Request
from kvjax.models import decoder, hf
from kvjax.models.spec import LongRope

TOLERANCE = 2e-4
LENGTHS = (11, 5)


@functools.partial(jax.jit, static_argnames="spec")
def logits_at(spec, params, tokens, positions):
    x, _ = decoder.forward(spec, params, tokens, positions, decoder.dense_attend(spec), None)
    return decoder.logits(spec, params, x)


def logits_of(spec, params, data):
    spec = spec.at(int(data["positions"].max()) + 1)
    return np.asarray(logits_at(spec, params, data["tokens"], data["positions"]))


def test_logits_are_those_of_transformers(name, golden_folder, golden_data):
    model, data = hf.load(golden_folder(name), dtype="float32"), golden_data(name)
    logits = logits_of(model.spec, model.params, data)
    print(f"{name}: largest difference {np.abs(logits - data['logits']).max():.1e}")
    np.testing.assert_allclose(logits, data["logits"], atol=TOLERANCE)


def test_rounding_in_bfloat16_is_no_worse_than_transformers(name, golden_folder, golden_data):
    """Both compute in bfloat16 what both also compute in float32: at most half as much again is lost."""
    model, data = hf.load(golden_folder(name), dtype="bfloat16"), golden_data(name)
    ours = np.abs(logits_of(model.spec, model.params, data) - data["logits"]).mean()
    theirs = np.abs(data["logits_bf16"] - data["logits"]).mean()
    print(f"{name}: {ours:.4f} and {theirs:.4f}")
    assert 0 < ours < 1.5 * theirs


def test_tokens_through_the_cache_are_those_of_transformers(name, golden_folder, golden_data):
    """Three prompts of 8, 11 and 5 tokens in one batch, each as transformers answers it.

    transformers read the first alone and the others as a left-padded batch, so rows of different lengths
    in one batch are rows alone. Read in pieces of 4, so that prompts end inside a piece and before others.
    """
    model, data = hf.load(golden_folder(name), dtype="float32"), golden_data(name)
    prompts = [data["prompt"].tolist(), *(data["batch"][row, :n].tolist() for row, n in enumerate(LENGTHS))]
    state, last = decode.prefill(model, Policy(), prompts, context=64, chunk_size=4)
    for row, n in enumerate(LENGTHS):
        np.testing.assert_allclose(last[1 + row], data["batch_logits"][row, n - 1], atol=TOLERANCE)
    pieces = decode.stream(model, Policy(), state, last, max_new_tokens=32, stops=())
    wanted = np.concatenate([data["greedy"][None], data["batch_greedy"]])
    np.testing.assert_array_equal(np.concatenate([piece for piece, _ in pieces], 1), wanted)


def test_layers_without_rope_share_no_program_with_the_others(golden_folder, golden_data, monkeypatch):
    """Read whole, whole for many policies, decoded layer by layer as deep models are, or in the engine."""
    model, data = hf.load(golden_folder("smollm3"), dtype="float32"), golden_data("smollm3")
    assert check(model)
    prompts = [data["batch"][row, :n].tolist() for row, n in enumerate(LENGTHS)]
    wanted = [data["batch_logits"][row, n - 1] for row, n in enumerate(LENGTHS)]
    keeps_all = policy("snapkv(4) + uniform(64)")
    _, last = decode.prefill(model, keeps_all, prompts, context=64)
    np.testing.assert_allclose(last, wanted, atol=TOLERANCE)
    _, last = decode.cut(model, keeps_all, decode.read_full(model, prompts, context=64))
    np.testing.assert_allclose(last, wanted, atol=TOLERANCE)
    greedy = data["batch_greedy"].tolist()
    with monkeypatch.context() as deep:
        deep.setattr(_by_layer, "DEEP", 1)
        made = decode.generate(model, keeps_all, prompts, max_new_tokens=32, stops=())
        assert made.tokens == greedy
    with Engine(model, context=64, max_rows=2, chunk=8, segment=4) as engine:
        for spec in ("full", "snapkv(4) + uniform(64)"):
            asked = [Request(prompt=x, max_new_tokens=32, policy=spec, ignore_eos=True) for x in prompts]
            tickets = engine.submit_all(asked)
            assert [[event.token for event in ticket] for ticket in tickets] == greedy, spec


def test_padding_changes_no_logits(name, golden_folder, golden_data):
    """Right-padded here, left-padded there: the same logits at every real token."""
    model, data = hf.load(golden_folder(name), dtype="float32"), golden_data(name)
    positions = np.broadcast_to(np.arange(data["batch"].shape[1]), data["batch"].shape)
    logits = logits_at(model.spec, model.params, data["batch"], positions)
    for row, n in enumerate(LENGTHS):
        np.testing.assert_allclose(logits[row, :n], data["batch_logits"][row, :n], atol=TOLERANCE)


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


def test_yarn_golden_keeps_blends_and_stretches(golden_folder, golden_data):
    model, data = hf.load(golden_folder("qwen2_yarn")), golden_data("qwen2_yarn")
    rope = model.spec.rope
    share = rope.frequencies(8) / dataclasses.replace(rope, scaling=None).frequencies(8)
    assert share[0] == 1
    assert 0.25 < share[1] < 1
    np.testing.assert_allclose(share[2:], 0.25)
    for changes in ({"attention_factor": 1.0}, {"truncate": True}, {"beta_fast": 32.0}, {"factor": 2.0}):
        other = dataclasses.replace(rope, scaling=dataclasses.replace(rope.scaling, **changes))
        moved = logits_of(dataclasses.replace(model.spec, rope=other), model.params, data) - data["logits"]
        assert np.abs(moved).max() > 100 * TOLERANCE, changes


def test_every_tensor_shows_in_the_logits(name, golden_folder, golden_data):
    """A golden that some tensor does not touch could not see it loaded wrongly."""
    model, data = hf.load(golden_folder(name), dtype="float32"), golden_data(name)
    rng = np.random.default_rng(0)
    named, tree = jax.tree_util.tree_flatten_with_path(model.params)
    leaves = [leaf for _, leaf in named]
    for i, (path, leaf) in enumerate(named):
        if name in ("gpt2", "gpt2_odd") and path[-1].key == "bk":
            continue  # unrotated, a key bias shifts all scores of a query alike
        shuffled = jnp.asarray(rng.permutation(np.ravel(leaf)).reshape(leaf.shape))
        params = jax.tree.unflatten(tree, [*leaves[:i], shuffled, *leaves[i + 1 :]])
        moved = np.abs(logits_of(model.spec, params, data) - data["logits"]).max()
        assert moved > 100 * TOLERANCE, path


@pytest.mark.parametrize("name", ["phi3_long", "phi4_mini"])
def test_longrope_takes_the_factors_of_the_context(name, golden_folder, golden_data):
    """Prompts beyond the original length get the long factors, and so does any prompt in such a context."""
    model, data = hf.load(golden_folder(name)), golden_data(name)
    rope = model.spec.rope
    assert isinstance(rope.scaling, LongRope)
    assert rope.scaling.original_max_position_embeddings == 64
    assert rope.at(64) == rope
    assert rope.at(65).scaling.stretched
    made = decode.generate(model, Policy(), [data["long_prompt"].tolist()], max_new_tokens=32, stops=())
    assert made.tokens == [data["long_greedy"].tolist()]
    prompts = [data["batch"][row, :n].tolist() for row, n in enumerate(LENGTHS)]
    _, last = decode.prefill(model, Policy(), prompts, context=96)
    short = [data["batch_logits"][row, n - 1] for row, n in enumerate(LENGTHS)]
    assert np.abs(last - np.stack(short)).max() > 100 * TOLERANCE


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen2_window", {"windows": (None, None)}),
        ("qwen2_window", {"windows": (None, 5)}),
        ("qwen2_window", {"windows": (6, None)}),
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
        ("smollm3", {"unturned": ()}),
        ("smollm3", {"unturned": (2,)}),
        ("granite", {"attention_multiplier": None}),
        ("granite", {"embedding_multiplier": 1.0}),
        ("granite", {"residual_multiplier": 1.0}),
        ("granite", {"logits_divisor": 1.0}),
        ("gpt_oss", {"windows": (None, None)}),
        ("gpt_oss", {"mlp": "swiglu"}),
        ("gpt2", {"positions": "rope"}),
        ("gpt2", {"norm": "rms"}),
        ("olmo2_bf16_sharded", {"joint_qk_norm": False}),
        ("olmo2_bf16_sharded", {"post_norms": False}),
    ],
)
def test_every_trait_shows_in_the_logits(name, changes, golden_folder, golden_data):
    model, data = hf.load(golden_folder(name)), golden_data(name)
    other = dataclasses.replace(model.spec, **changes)
    assert np.abs(logits_of(other, model.params, data) - data["logits"]).max() > 100 * TOLERANCE
