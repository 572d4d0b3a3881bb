"""Votes on every family: its own query map (bias, q-norm, gain) and rotation, against float64 NumPy."""

from __future__ import annotations

import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import metrics
from kvjax.models import decoder, hf

sys.path.insert(0, str(Path(__file__).parents[1] / "policies"))
import vote_oracle as oracle

BALLOT = {"p": 0.6, "samples": 3, "ahead": 9}
OLMO2 = "olmo2_bf16_sharded"
FAMILIES = ("llama3", "qwen2", "qwen3", "phi3", "phi3_long", "phi4_mini", "gemma2", "gemma3", "gpt2", OLMO2)
QUICK = ("gpt2", "gemma2", "phi4_mini", "qwen3", OLMO2)
"""Learned positions; softcap and gain; a part of the head turns, by LongRoPE; q-norm, and over all heads."""


def heads_of(model, tokens, context):
    """What each layer shows at the seam, under the model's own attention."""
    spec, layers = model.spec.at(context), []
    dense = decoder.dense_attend(spec)

    def attend(index, heads, carry):
        layers.append(heads)
        return dense(index, heads, carry)

    at = jnp.arange(len(tokens))[None]
    decoder.forward(spec, model.params, jnp.asarray(tokens)[None], at, attend, None)
    return spec, layers


def projected(spec, p, hidden):
    """[S, D] to [S, N, H], in float64."""
    names = ("wq", "bq", "q_norm", "q_joint_norm")
    p = {name: np.asarray(p[name], np.float64) for name in names if name in p}
    q = np.einsum("sd,nhd->snh", hidden, p["wq"]) + p.get("bq", 0.0)
    if "q_norm" in p:
        weight = p["q_norm"] + (1.0 if spec.norm == "rms_plus_one" else 0.0)
        q = q / np.sqrt((q * q).mean(axis=-1, keepdims=True) + spec.norm_eps) * weight
    if "q_joint_norm" in p:
        q = q / np.sqrt((q * q).mean(axis=(-2, -1), keepdims=True) + spec.norm_eps) * p["q_joint_norm"]
    scalar = spec.query_pre_attn_scalar
    return q if scalar is None else q * np.sqrt(spec.head_dim / scalar)


def mean_rotation(spec, index, start, count):
    """[H, H] that turns a column by the cos and sin averaged over ``count`` positions."""
    rope, turn = spec.rope_of(index), np.eye(spec.head_dim)
    if rope is None:
        return turn
    freq = np.asarray(rope.frequencies(spec.head_dim), np.float64)
    angle = (start + np.arange(count))[:, None] * freq
    cos, sin = (rope.amplitude * f(angle).mean(axis=0) for f in (np.cos, np.sin))
    half = np.arange(len(freq))
    turn[half, half] = turn[half + len(freq), half + len(freq)] = cos
    turn[half, half + len(freq)], turn[half + len(freq), half] = -sin, sin
    return turn


@pytest.mark.parametrize("name", FAMILIES)
def test_what_heads_project_with_makes_their_own_queries(name, golden_folder, golden_data):
    model = hf.load(golden_folder(name), dtype="float32")
    _, layers = heads_of(model, golden_data(name)["tokens"][0][:30], 64)
    for heads in layers:
        np.testing.assert_allclose(heads.project(heads.hidden), heads.q_pre, atol=1e-6)
        assert np.abs(heads.project(heads.hidden[:, ::-1]) - heads.q_pre).max() > 1e-3


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in FAMILIES]
)
def test_votes_are_the_familys_own(name, golden_folder, golden_data):
    model = hf.load(golden_folder(name), dtype="float32")
    whole = golden_data(name)["tokens"][0][:30]
    texts = [whole[:n].tolist() for n in (30, 19)]
    policy = kvjax.policy("gvote(0.6, samples=3, ahead=9)")
    state, _ = kvjax.prefill(model, policy, texts, context=64, page=16, seeds=[3, 8])
    present, looked = np.asarray(metrics.present(state)), 0
    for row, (text, seed) in enumerate(zip(texts, (3, 8))):
        spec, layers = heads_of(model, whole, 64)  # of which each text is a beginning
        for index, (heads, window) in enumerate(zip(layers, spec.windows)):
            if window is not None:
                continue
            draws = oracle.noise(0, seed, index, BALLOT["samples"], spec.model_dim)
            seen = (heads.k, heads.q, heads.hidden)
            k, q, hidden = (np.asarray(x[0, : len(text)], np.float64) for x in map(np.asarray, seen))
            votes, _, margin = oracle.ballots(
                k.swapaxes(0, 1),
                q[-1],
                hidden,
                draws,
                lambda x, p=model.params["layers"][index], spec=spec: projected(spec, p, x),
                mean_rotation(spec, index, len(text), BALLOT["ahead"]),
                BALLOT["p"],
                spec.attn_softcap,
            )
            if margin < 2e-6:  # rounding decides: it proves nothing here
                continue
            stays = votes > 0
            stays[:, -1] = True  # the ring holds the newest
            np.testing.assert_array_equal(present[index, row][:, : len(text)], stays)
            assert not stays.all()
            looked += 1
    rules = any(window is None for window in model.spec.windows)
    assert bool(looked) == rules, "no layer was judged"


def test_votes_on_two_devices_are_those_on_one(on_two_devices, golden_folder):
    """Each device projects by the weights of its own query heads; qwen3 normalises them per head."""
    about = on_two_devices(golden_folder("qwen3"), "gvote(0.5, samples=2, ahead=8)")
    assert about["said"]["one"] == about["said"]["two"] == about["said"]["moved"]


@pytest.mark.parametrize(
    "policy",
    [
        "gvote(0.5, samples=inf, ahead=8)",
        pytest.param("gvote(0.5, samples=2, ahead=8)", marks=pytest.mark.slow),
        pytest.param("expected_attention(ahead=8) + ada(12)", marks=pytest.mark.slow),
    ],
)
def test_a_norm_over_all_heads_is_the_same_on_two_devices(policy, on_two_devices, golden_folder):
    """Each device has half of the heads that OLMo 2's squares are summed over.

    Drawn voters rank keys, which no norm of theirs changes; expected weights it does change.
    """
    about = on_two_devices(golden_folder(OLMO2), policy)
    assert about["said"]["one"] == about["said"]["two"] == about["said"]["moved"]
    assert about["apart"] < 1e-4
    assert about["held_apart"] == 0 < about["held"][0]
    assert about["shapes"]["['q_joint_norm']"] == [[4, 8], [2, 8]]
    assert about["shapes"]["['k_joint_norm']"] == [[2, 8], [1, 8]]
