"""The second constructed start, measured at initialisation: four distances back, six heads that copy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax.models import decoder, module
from train.embedded import heads, start_many
from train.embedded.setup import model_spec
from train.text import BOS

SIZES = {
    "vocab_size": 1024,
    "num_layers": 4,
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 64,
    "model_dim": 256,
    "mlp_dim": 64,
    "max_positions": 1024,
    "theta": 1e6,
}
BLOCK = 200
"""Random tokens, met twice."""


@pytest.fixture(scope="module")
def built():
    spec = model_spec(SIZES)
    drawn = module.leaves(module.Decoder(spec, rngs=nnx.Rngs(params=0)))
    return spec, start_many.construct(spec, drawn, 0, spread=0.05)


@pytest.mark.slow
def test_without_a_match_tokens_are_foretold_by_their_frequency():
    """What is not repeated costs little more than frequencies do, so text need not undo this."""
    spec = model_spec(SIZES)
    counts = np.random.default_rng(1).permutation(1e6 / np.arange(1, spec.vocab_size + 1)).astype(int)
    share = counts / counts.sum()
    tokens = np.concatenate([[BOS], np.random.default_rng(3).permutation(spec.vocab_size)[:200]])

    def cost(known) -> float:
        drawn = module.leaves(module.Decoder(spec, rngs=nnx.Rngs(params=0)))
        params = start_many.construct(spec, drawn, 0, spread=0.05, counts=known)
        logits = decoder.dense_logits(spec, params, jnp.asarray(tokens)[None])[0]
        return float(np.median(-np.asarray(jax.nn.log_softmax(logits)) @ share))  # of a token drawn anew

    entropy = -share @ np.log(share)
    assert cost(counts) < entropy + 0.7
    assert cost(None) > entropy + 1.5


def attention(spec, params) -> np.ndarray:
    """[L, N, T, T] over random tokens, the second half of which is the first again."""
    block = np.random.default_rng(2).integers(3, spec.vocab_size, BLOCK)
    return attention_to(spec, params, np.concatenate([[BOS], block, block]))


def attention_to(spec, params, row: np.ndarray) -> np.ndarray:
    """[L, N, T, T] over ``row``."""
    tokens = jnp.asarray(row)[None]
    inner, weights = decoder.dense_attend(spec), []

    def look(index, x, carry):
        q = x.q[0].reshape(x.q.shape[1], spec.num_kv_heads, spec.groups, spec.head_dim)
        s = jnp.einsum("tkgh,skh->kgts", q, x.k[0]) * spec.head_dim**-0.5
        s = jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool)), s, -jnp.inf)
        weights.append(jax.nn.softmax(s, axis=-1).reshape(spec.num_heads, *s.shape[-2:]))
        return inner(index, x, carry)

    decoder.forward(spec, params, tokens, jnp.arange(tokens.shape[1])[None], look, None)
    return np.asarray(jnp.stack(weights))


def on_copied(weights: np.ndarray, ahead: int = 1) -> np.ndarray:
    """[L, N]: mean weight on the token ``ahead`` after the earlier occurrence, from the fifth repeat on."""
    queries = np.arange(BLOCK + 6, 2 * BLOCK - 4)
    return weights[:, :, queries, queries + ahead - BLOCK].mean(-1)


def copying_heads(spec, params) -> set[tuple[int, int]]:
    """(layer, KV head) with a tenth of a query head's weight on the token to be copied."""
    share = on_copied(attention(spec, params)).reshape(spec.num_layers, spec.num_kv_heads, spec.groups)
    return {(int(i), int(k)) for i, k in np.argwhere(share.max(-1) >= 0.1)}


def continued(spec, params) -> float:
    """Share of repeated random tokens that are the most likely ones."""
    block = np.random.default_rng(2).integers(3, spec.vocab_size, BLOCK)
    tokens = np.concatenate([[BOS], block, block])
    says = np.asarray(decoder.dense_logits(spec, params, jnp.asarray(tokens)[None])[0].argmax(-1))
    queries = np.arange(BLOCK + 6, 2 * BLOCK)
    return np.mean(says[queries] == tokens[queries + 1])


def test_random_tokens_met_again_are_continued(built):
    """Before any training nearly all repeated tokens are the most likely ones."""
    assert continued(*built) > 0.97


def test_a_rare_token_near_by_is_the_topic_and_what_followed_it_is_looked_up(built):
    """By the third KV head of layer 1; by those of layers 2 and 3, two to four tokens behind it."""
    spec, params = built
    counts = np.ones(spec.vocab_size, int)
    counts[:900] = 10_000
    drawn = module.leaves(module.Decoder(spec, rngs=nnx.Rngs(params=0)))
    params = start_many.construct(spec, drawn, 0, spread=0.05, counts=counts)
    rng = np.random.default_rng(5)
    text, rare = rng.integers(3, 900, 200), 1000
    text[40], text[-5] = rare, rare  # again with other tokens around it
    weights = attention_to(spec, params, np.concatenate([[BOS], text]))
    groups = slice(2 * spec.groups, 3 * spec.groups)
    assert weights[1, groups, -1, -5].min() > 0.5
    for layer, behind in start_many.LOOKS_UP.items():
        seen = weights[layer, groups, -1][:, [41 + d for d in behind]].sum(-1)
        assert seen.min() > 0.3, (layer, seen)


def test_layer_0_looks_back_as_it_says(built):
    weights = attention(*built)[0]
    for head, distance in enumerate(sum(start_many.BACK, ())):
        assert np.diagonal(weights[head], offset=-distance, axis1=-2, axis2=-1)[5:].mean() > 0.9


@pytest.mark.parametrize("head", [0, 2])
def test_no_head_of_layer_0_is_alone_in_looking_one_back_or_at_itself(built, head):
    """The second copies of both are enough to go on with a repeated block."""
    spec, params = built
    lame = heads.without_heads(spec, params, tuple((0, head * spec.groups + i) for i in range(spec.groups)))
    assert continued(spec, lame) > 0.9


def test_six_kv_heads_in_three_layers_put_weight_on_the_token_to_be_copied(built):
    copying = copying_heads(*built)
    assert copying == {(layer, head) for layer in (1, 2, 3) for head in (0, 1)}


def test_second_query_heads_look_at_the_whole_value(built):
    """From the query before a repeated stretch, its 2nd, 3rd and 4th token are looked at, too."""
    weights = attention(*built)
    for layer, distance in ((1, 2), (2, 3), (3, 4)):
        seen = on_copied(weights, ahead=distance)[layer]
        assert seen[3] >= 0.1  # the second query head of the second KV head
        assert seen[2] < 0.05  # the first one looks at the next token


@pytest.mark.slow
def test_without_any_one_head_others_still_look_at_the_token_to_be_copied(built):
    spec, params = built
    whole = copying_heads(spec, params)
    for layer in range(spec.num_layers):
        for head in range(spec.num_kv_heads):
            removed = tuple((layer, head * spec.groups + i) for i in range(spec.groups))
            left = copying_heads(spec, heads.without_heads(spec, params, removed)) - {(layer, head)}
            # Of layer 0 the second alone looks two tokens back, which three copying heads read.
            assert len(left) >= (3 if (layer, head) == (0, 1) else 4), (layer, head, left)
    assert len(whole) == 6


def test_a_model_without_room_is_refused():
    for wrong in ({"num_layers": 3}, {"num_kv_heads": 2}, {"num_heads": 4}, {"model_dim": 192}):
        spec = model_spec(SIZES | wrong)
        drawn = module.leaves(module.Decoder(spec, rngs=nnx.Rngs(params=0)))
        with pytest.raises(ValueError, match="Use start: one"):
            start_many.construct(spec, drawn, 0)
