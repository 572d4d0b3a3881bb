"""Policies on models with sliding layers: those layers are the model's own, the others follow the policy."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax import decode
from kvjax.algebra import Policy
from kvjax.models import decoder, hf
from kvjax.models.module import Decoder, leaves

WINDOWS = {"mistral": (6, 6), "gemma2": (6, None), "gemma3": (6, 6, None, 6), "gpt_oss": (6, None)}


@pytest.fixture(params=WINDOWS)
def name(request):
    """All layers slide, every second one, all but one."""
    return request.param


def test_sliding_layers_are_rings_and_take_no_policy(name, golden_folder, golden_data):
    """Full layers follow the policy; a sliding layer holds min(W_model, context) tokens under any policy."""
    model = hf.load(golden_folder(name))
    assert model.spec.windows == WINDOWS[name]
    prompt = golden_data(name)["tokens"][0].tolist()
    for policy in (Policy(), kvjax.policy("window(4) + sinks(2)"), kvjax.policy("snapkv(4) + uniform(12)")):
        state, _ = decode.prefill(model, policy, [prompt], context=64)
        for room, window in zip(state.layers, model.spec.windows):
            if window is not None:
                assert (room.ring.window, room.pages) == (6, None)
            elif policy == Policy():
                assert (room.ring.window, room.pages) == (64, None)
            else:
                held = room.ring.window + np.asarray(room.pages.length).sum(axis=-1)
                assert (held < len(prompt)).all()
    short = decode.empty(model.network, Policy(), rows=1, context=4, dtype=jnp.dtype("float32"))
    assert {room.ring.window for room in short.layers} == {4}


def test_the_user_is_told(golden_folder):
    model = hf.load(golden_folder("gemma3"))
    layers = r"sliding window of the model's own \(3 of 4; layer: tokens = 0: 6, 1: 6, 3: 6"
    with pytest.warns(UserWarning, match=layers), pytest.raises(decode.RequestError, match="row 0 is empty"):
        decode.generate(model, kvjax.policy("window(4) + sinks(2)"), [[]], max_new_tokens=1)


def visible(windows, length, full):
    """Per layer which keys a query sees: the model's window where there is one, else ``full``."""
    age = np.arange(length)[:, None] - np.arange(length)[None, :]
    return [(age >= 0) & (full if window is None else age < window) for window in windows]


def dense_logits(spec, params, tokens, masks):
    """Logits [T, V] of one text with a mask of its own at each layer; no cache anywhere."""

    def attend(index, x, carry):
        q = x.q.reshape(1, len(tokens), spec.num_kv_heads, spec.groups, spec.head_dim)
        s = jnp.einsum("btkgh,bskh->bkgts", q, x.k) * spec.head_dim**-0.5
        s = jnp.where(masks[index], decoder.softcap(s, spec.attn_softcap), -jnp.inf)
        e = jnp.exp(s)
        total = e.sum(axis=-1, keepdims=True)
        if x.sinks is not None:
            total = total + jnp.exp(x.sinks).reshape(spec.num_kv_heads, spec.groups, 1, 1)
        return jnp.einsum("bkgts,bskh->btkgh", e / total, x.v).reshape(x.q.shape), carry

    at = jnp.arange(len(tokens))[None]
    x, _ = decoder.forward(spec, params, jnp.asarray(tokens)[None], at, attend, None)
    return decoder.logits(spec, params, x[0])


def test_policies_act_on_full_layers_alone(name, golden_folder, golden_data):
    """Reading and writing under two sinks and a window of 4 is dense attention under one mask a layer."""
    model, policy = hf.load(golden_folder(name)), kvjax.policy("window(4) + sinks(2)")
    prompt = golden_data(name)["tokens"][0][:30]
    state, logits = decode.prefill(model, policy, [prompt.tolist()], context=64, chunk_size=8)
    pieces = decode.stream(model, policy, state, logits, max_new_tokens=16, stops=())
    made = np.concatenate([piece for piece, _ in pieces], 1)[0]
    tokens = np.concatenate([prompt, made])
    n = len(tokens)
    kept = (np.arange(n) < 2) | (np.arange(n)[:, None] - np.arange(n) < 4)
    run = jax.jit(lambda masks: dense_logits(model.spec, model.params, tokens, masks))
    dense = run(visible(model.spec.windows, n, kept))
    np.testing.assert_allclose(logits[0], dense[len(prompt) - 1], atol=2e-4)
    np.testing.assert_array_equal(made, dense[len(prompt) - 1 : -1].argmax(-1))
    everywhere = run(visible((None,) * len(model.spec.windows), n, kept))
    nowhere = run(visible(model.spec.windows, n, True))
    assert np.abs(everywhere - dense).max() > 0.02
    assert (np.abs(nowhere - dense).max() > 0.02) == (None in model.spec.windows)


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        *((name, "snapkv(4) + uniform(4096)") for name in ("gemma2", "gemma3", "phi4_mini", "gpt2")),
        ("gpt_oss", "snapkv(4) + uniform(4096)"),
        ("gpt_oss", "h2o(3) + uniform(4096)"),
        ("gpt_oss", "gvote(p=1)"),
        ("gpt_oss", "int8(512)"),
        ("gpt_oss", "quest(chunks=512)"),
        ("gpt_oss", "topk(4096)"),
        ("qwen3_moe", "snapkv(4) + uniform(4096)"),
        ("mixtral", "snapkv(4) + uniform(4096)"),
        ("gemma2", "int8(512)"),
        ("gemma2", "quest(chunks=512)"),
    ],
)
def test_a_policy_that_drops_nothing_changes_no_text(name, policy, golden_folder, golden_data):
    """Whole prompts layer by layer and pages read the way the family attends: caps, gains, two ropes."""
    model, data = hf.load(golden_folder(name)), golden_data(name)
    made = decode.generate(
        model, kvjax.policy(policy), [data["prompt"].tolist()], max_new_tokens=32, stops=(), page=16
    )
    assert made.tokens == [data["greedy"].tolist()]


def test_scores_behind_the_seam_are_the_model_s(golden_folder):
    """q k / sqrt(H) is the model's score also where it divides by another number."""
    spec = dataclasses.replace(hf.load(golden_folder("gemma2")).spec, norm="rms", windows=(None, None))
    seen = {}
    for scalar in (None, 24.0):
        module = Decoder(dataclasses.replace(spec, query_pre_attn_scalar=scalar), rngs=nnx.Rngs(0))

        def look(index, heads, carry, scalar=scalar):
            seen[scalar] = heads
            return jnp.zeros_like(heads.q), carry

        tokens = jnp.arange(5)[None]
        decoder.forward(module.spec, leaves(module), tokens, tokens, look, None)
    # Turned channels are differences of products, so nearness is to the size of the whole head.
    np.testing.assert_allclose(seen[24.0].q, seen[None].q * (16 / 24) ** 0.5, atol=1e-6)
    np.testing.assert_allclose(seen[24.0].q_pre, seen[None].q_pre * (16 / 24) ** 0.5, rtol=1e-6)
    np.testing.assert_array_equal(seen[24.0].k, seen[None].k)
