"""A whole YaRN model at the last positions before 2^20, against NumPy in float64."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
import tiny

import kvjax
from kvjax import decode
from kvjax.models.decoder import Decoder, shapes
from kvjax.models.spec import ModelSpec, Rope, Yarn

END = 2**20
YARN = Yarn(factor=32.0, original_max_position_embeddings=END // 32, attention_factor=1.3466)
SPEC = ModelSpec(
    family="llama",
    vocab_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    model_dim=32,
    mlp_dim=40,
    max_positions=END,
    rope=Rope(theta=1e6, scaling=YARN),
    tied=False,
)
WINDOW, SINKS, NEW = 16, 2, 12


@dataclasses.dataclass(frozen=True)
class Far(Decoder):
    """The model in a text whose first tokens nobody attends to: it counts from ``start``."""

    start: int = 0

    def layer(self, params, index, x, positions, attend, carry):
        return super().layer(params, index, x, positions + self.start, attend, carry)


def params():
    draw = np.random.default_rng(5)
    leaf = lambda shape: (draw.normal(size=shape) * 1.5 * shape[-1] ** -0.5).astype(np.float32)  # noqa: E731
    return jax.tree.map(leaf, shapes(SPEC), is_leaf=lambda x: isinstance(x, tuple))


def oracle(p, tokens, positions, visible):
    """Logits [T, V] of tokens at these positions; ``visible`` [T, T].

    An angle is a float32 product of position and frequency, as transformers multiplies them; all else is in
    float64.
    """
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), p)
    norm = lambda x, w: x / np.sqrt((x * x).mean(-1, keepdims=True) + SPEC.norm_eps) * w  # noqa: E731
    angle = (np.asarray(positions, np.float32)[:, None] * SPEC.rope.frequencies(16)).astype(np.float64)
    turn = YARN.attention_factor * np.exp(1j * angle)[:, None]

    def rotate(x):
        z = (x[..., :8] + 1j * x[..., 8:]) * turn
        return np.concatenate([z.real, z.imag], axis=-1)

    x = p["embed"][tokens]
    for w in p["layers"]:
        y = norm(x, w["attn_norm"])
        q, k = (rotate(np.einsum("td,nhd->tnh", y, w[name])) for name in ("wq", "wk"))
        v = np.einsum("td,khd->tkh", y, w["wv"])
        s = np.einsum("tkgh,skh->kgts", q.reshape(len(x), 2, 2, 16), k) / 4
        e = np.where(visible, np.exp(s - s.max(-1, keepdims=True)), 0)
        mixed = np.einsum("kgts,skh->tkgh", e / e.sum(-1, keepdims=True), v).reshape(len(x), 4, 16)
        x = x + np.einsum("tnh,dnh->td", mixed, w["wo"])
        y = norm(x, w["mlp_norm"])
        gate = y @ w["w_gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ w["w_up"].T)) @ w["w_down"].T
    return norm(x, p["final_norm"]) @ p["head"].T


def seen(positions):
    """By a window and sinks."""
    age = positions[:, None] - positions[None, :]
    return (age >= 0) & ((age < WINDOW) | (positions[None, :] < SINKS))


def logits_of(model, policy, prompt):
    """The prompt's last logits, those of the steps that feed the new tokens, and these tokens."""
    state, logits = kvjax.prefill(model, policy, [prompt], context=len(prompt) + NEW, chunk_size=2048)
    rows, tokens = [np.asarray(logits[0])], []
    for _ in range(NEW):
        tokens.append(int(rows[-1].argmax()))
        new, active = np.asarray(tokens[-1:], np.int32), np.ones(1, bool)
        state, logits = decode.step(model.network, policy, model.params, {}, state, new, active)
        rows.append(np.asarray(logits[0]))
    return np.stack(rows), tokens


def test_prompt_and_answer_end_at_the_last_position():
    """Positions 2^20 - 60 to 2^20 - 1, through prefill and steps."""
    p, prompt = params(), np.random.default_rng(1).integers(0, 96, 60 - NEW).tolist()
    positions, causal = np.arange(60), np.tri(60, dtype=bool)
    made, tokens = logits_of(tiny.Tiny(Far(SPEC, start=END - 60), p), kvjax.policy("full"), prompt)
    text = np.asarray([*prompt, *tokens])
    right = oracle(p, text, END - 60 + positions, causal)[len(prompt) - 1 :]
    np.testing.assert_allclose(made, right, atol=2e-5)
    near = oracle(p, text, positions, causal)[len(prompt) - 1 :]
    apart, moved = (np.abs(x - right).max() for x in (made, near))
    print(f"largest difference {apart:.1e}; of the same text from position 0 {moved:.1e}")
    assert moved > 2e-4, "float32 angles so far out are others"


@pytest.mark.slow
def test_a_text_of_a_million_tokens():
    """Two sinks and a window of 16 over 2^20 real tokens; the oracle reads the sinks and the last ones."""
    p, prompt = params(), np.random.default_rng(2).integers(0, 96, END - NEW)
    policy = kvjax.policy(f"window({WINDOW}) + sinks({SINKS})")
    made, tokens = logits_of(tiny.Tiny(Decoder(SPEC), p), policy, prompt.tolist())
    text = np.asarray([*prompt, *tokens])
    positions = np.concatenate([np.arange(SINKS), np.arange(END - 128, END)])
    right = oracle(p, text[positions], positions, seen(positions))
    np.testing.assert_allclose(made, right[-NEW - 1 :], atol=2e-5)
