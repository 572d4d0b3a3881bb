"""The forward pass of training against the decoder's own: values and gradients within bfloat16's rounding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.models import decoder
from train.embedded import attention, forward, heads, products
from train.embedded.setup import initial, model_spec

SIZES = {
    "vocab_size": 320,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 64,
    "model_dim": 128,
    "mlp_dim": 96,
    "max_positions": 512,
    "theta": 1e6,
}


@pytest.fixture(scope="module")
def tiny():
    spec = model_spec(SIZES)
    tokens = np.random.default_rng(0).integers(3, 320, (2, 128)).astype(np.int32)
    return spec, initial(spec, 0, 0.05), jnp.asarray(tokens)


def close(got, want, share):
    """Mean absolute difference as a share of the mean absolute value."""
    want = np.asarray(want, np.float64)
    assert np.abs(np.asarray(got, np.float64) - want).mean() <= share * np.abs(want).mean() + 1e-12


def rounding(length: int) -> float:
    """bfloat16 keeps 8 bits; errors of a sum of ``length`` terms grow with its root, against one term's."""
    return 2.0**-8 * 4 * max(1.0, np.log2(length) / 4)


def test_a_product_and_its_gradients_are_those_of_float32():
    rng = np.random.default_rng(1)
    x, w, dy = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((96, 64), (64, 80), (96, 80)))
    got, back = jax.vjp(products.product, x, w)
    close(got, x @ w, rounding(64))
    dx, dw = back(dy)
    assert dx.dtype == dw.dtype == jnp.float32
    close(dx, dy @ w.T, rounding(80))
    close(dw, x.T @ dy, rounding(96))


@pytest.mark.parametrize("tile", [1 << 17, 1 << 12])  # one block of queries, and several
def test_attention_and_its_gradients_are_those_of_dense_attention(tiny, monkeypatch, tile):
    monkeypatch.setattr(attention, "TILE", tile)
    spec = tiny[0]
    b, t, k, g, h = 2, 128, 2, 2, 64
    rng = np.random.default_rng(3)
    y = jnp.asarray(rng.normal(size=(b, t, k, (g + 2) * h)), jnp.float32)
    dy = jnp.asarray(rng.normal(size=(b, t, k, g * h)), jnp.float32)
    freq = tuple(map(float, spec.rope.frequencies(h)))

    def dense(y):
        parts = y.reshape(b, t, k, g + 2, h)
        a, c = jnp.split(parts, 2, axis=-1)
        angle = jnp.arange(t)[:, None, None, None] * jnp.asarray(freq)
        turned = jnp.concatenate(
            [a * jnp.cos(angle) - c * jnp.sin(angle), c * jnp.cos(angle) + a * jnp.sin(angle)], axis=-1
        )
        s = jnp.einsum("btkgh,bskh->bkgts", turned[..., :g, :], turned[..., g, :]) * h**-0.5
        p = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((t, t), bool)), s, -jnp.inf), axis=-1)
        return jnp.einsum("bkgts,bskh->btkgh", p, parts[..., g + 1, :]).reshape(b, t, k, g * h)

    got, back = jax.vjp(lambda y: attention.attention(y, g, freq), y)
    want, wanted = jax.vjp(dense, y)
    close(got, want, rounding(t))
    close(back(dy)[0], wanted(dy)[0], 2 * rounding(t))


def test_rows_that_tiles_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="rows of 1000 tokens .* multiple of 64"):
        attention.attention(jnp.zeros((1, 1000, 1, 4 * 64)), 2, tuple([1.0] * 32))


@pytest.mark.slow
def test_states_are_the_decoders(tiny):
    spec, params, tokens = tiny
    got = forward.states(spec, params, tokens).reshape(2, 128, -1)
    positions = jnp.broadcast_to(jnp.arange(128), tokens.shape)
    want, _ = decoder.forward(spec, params, tokens, positions, decoder.dense_attend(spec), None)
    close(got, want, rounding(128))


def test_a_hushed_stream_writes_nothing_in_its_row_only(tiny):
    spec, params, tokens = tiny
    speak = np.ones((2, 2, 2), bool)
    speak[1, 1, 0] = False
    got = forward.states(spec, params, tokens, speak=speak).reshape(2, 128, -1)
    whole = forward.states(spec, params, tokens).reshape(2, 128, -1)
    lame = heads.without_heads(spec, params, ((1, 0), (1, 1)))
    np.testing.assert_array_equal(got[0], whole[0])
    close(got[1], forward.states(spec, lame, tokens).reshape(2, 128, -1)[1], 1e-3)
    assert np.abs(np.asarray(got[1] - whole[1])).max() > 1e-2


def test_cross_entropy_and_its_gradients_are_those_of_all_logits():
    rng = np.random.default_rng(4)
    x = jnp.asarray(rng.normal(size=(512, 64)), jnp.float32)  # two pieces
    table = jnp.asarray(rng.normal(size=(200, 64)) * 0.3, jnp.float32)
    target = jnp.asarray(rng.integers(0, 200, 512))
    weight = jnp.asarray(rng.random(512), jnp.float32)

    def whole(x, table):
        z = x @ table.T
        return jnp.sum((jax.nn.logsumexp(z, -1) - jnp.take_along_axis(z, target[:, None], 1)[:, 0]) * weight)

    def pieces(x, table):
        return jnp.sum(forward.cross_entropy(x, table, target)[0] * weight)

    (got, grads), (want, wanted) = (jax.value_and_grad(f, (0, 1))(x, table) for f in (pieces, whole))
    np.testing.assert_allclose(got, want, rtol=1e-3)
    for a, b in zip(grads, wanted):
        close(a, b, rounding(512))
    hit = forward.cross_entropy(x, table, target)[1]
    assert np.mean(np.asarray(hit) == np.asarray((x @ table.T).argmax(-1) == target)) > 0.98


@pytest.mark.slow
def test_gradients_of_the_whole_loss_are_those_of_the_plain_one(tiny):
    from train.embedded import data, pretrain

    spec, params, tokens = tiny
    weight = np.where(np.arange(128) > 100, 6.0, 0.5) * np.ones((2, 1))
    batch = data.choose_scored(np.random.default_rng(0), np.asarray(tokens), weight, 64)
    batch["tokens"] = tokens
    losses = pretrain.make_quick_loss(spec), pretrain.make_loss(spec, "float32")
    (a, ga), (b, gb) = (jax.value_and_grad(lambda p, f=f: f(p, batch)[0])(params) for f in losses)
    np.testing.assert_allclose(a, b, rtol=2e-2)
    flat = [jnp.concatenate([x.ravel() for x in jax.tree.leaves(g)]) for g in (ga, gb)]
    cosine = jnp.vdot(*flat) / jnp.linalg.norm(flat[0]) / jnp.linalg.norm(flat[1])
    assert float(cosine) > 0.999
