"""A transformer that nobody but its author knows: NNX, learned positions or RoPE, grouped heads, a window."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

import kvjax

SIZES = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "max_positions": 256}
VOCAB, WIDTH = 61, 32
many = getattr(nnx, "List", list)
wide = nnx.initializers.normal(1.0)
bold = nnx.initializers.normal(0.4)  # attention is peaked, and texts vary


def turned(x, positions):
    half = x.shape[-1] // 2
    angle = positions[..., None, None] * 100.0 ** (-jnp.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate(
        [a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle)], -1
    )


class Block(nnx.Module):
    """Attention and MLP in parallel, both after one norm."""

    def __init__(self, rngs: nnx.Rngs):
        n, k, h = SIZES["num_heads"], SIZES["num_kv_heads"], SIZES["head_dim"]
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.q = nnx.LinearGeneral(WIDTH, (n, h), rngs=rngs, kernel_init=bold)
        self.k = nnx.LinearGeneral(WIDTH, (k, h), rngs=rngs, kernel_init=bold)
        self.v = nnx.LinearGeneral(WIDTH, (k, h), rngs=rngs, kernel_init=bold)
        self.out = nnx.LinearGeneral((n, h), WIDTH, axis=(-2, -1), rngs=rngs, kernel_init=bold)
        self.up = nnx.Linear(WIDTH, 48, rngs=rngs)
        self.down = nnx.Linear(48, WIDTH, rngs=rngs)

    def __call__(self, x, positions, attend):
        y = self.norm(x)
        q, k, v = self.q(y), self.k(y), self.v(y)
        heads = kvjax.Heads(
            q=turned(q, positions),
            k=turned(k, positions),
            v=v,
            q_pre=q,
            k_pre=k,
            hidden=y,
            rotate=turned,
            project=self.q,
        )
        return x + self.out(attend(heads)) + self.down(jax.nn.gelu(self.up(y)))


class Own(nnx.Module):
    """The model; ``block`` is the class of its layers."""

    def __init__(self, seed: int = 0, layers: int = 2, windows=None, block=Block, vocab: int = VOCAB):
        rngs = nnx.Rngs(seed)
        self.num_heads, self.num_kv_heads, self.head_dim, self.max_positions = SIZES.values()
        self.windows = windows or (None,) * layers
        self.tokens = nnx.Embed(vocab, WIDTH, rngs=rngs, embedding_init=wide)
        self.layers = many([block(rngs) for _ in range(layers)])
        self.last = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, vocab, rngs=rngs, kernel_init=bold)

    def embed(self, tokens, positions):
        del positions
        return self.tokens(tokens)

    def logits(self, x):
        return self.head(self.last(x))


def of_bytes() -> Own:
    """A model whose tokens are the tiny tokenizer's, for trainers' configs."""
    return Own(vocab=260)
