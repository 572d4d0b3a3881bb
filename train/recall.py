"""Measured recall and bits per byte of a model, by dense attention.

A needle counts as found when every token of the number is the most likely one given the tokens
before it, which is what greedy decoding needs to write it.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.models import decoder
from kvjax.models.spec import ModelSpec
from kvjax.types import AttendFn, Heads, Params
from train.rows import ANSWER, Source, needle_row
from train.text import BOS

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Where the needle stands, from the start of the text."""


def blocked_attend(spec: ModelSpec, block: int = 128) -> AttendFn[None]:
    """``decoder.dense_attend`` for full-attention layers, in blocks of queries against their past only.

    Half the work and a fraction of the memory traffic at 1024 tokens; same values.
    """

    def attend(index: int, x: Heads, carry: None) -> tuple[Array, None]:
        del index
        b, t, n, h = x.q.shape
        q = x.q.reshape(b, t, spec.num_kv_heads, spec.groups, h) * jnp.asarray(h**-0.5, x.q.dtype)
        parts = []
        for start in range(0, t, block):
            end = min(t, start + block)
            s = jnp.einsum(
                "btkgh,bskh->bkgts", q[:, start:end], x.k[:, :end], preferred_element_type=jnp.float32
            )
            visible = jnp.arange(start, end)[:, None] >= jnp.arange(end)[None, :]
            p = jax.nn.softmax(jnp.where(visible, s, -jnp.inf), axis=-1).astype(x.v.dtype)
            parts.append(jnp.einsum("bkgts,bskh->btkgh", p, x.v[:, :end]))
        return jnp.concatenate(parts, axis=1).reshape(b, t, n, h), carry

    return attend


def scored_logits(
    spec: ModelSpec, params: Params, tokens: Int[Array, "B T"], at: Int[Array, " S"]
) -> Float[Array, "S V"]:
    """Logits at the row-major positions ``at`` only, float32."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    x, _ = decoder.forward(spec, params, tokens, positions, blocked_attend(spec), None)
    return decoder.logits(spec, params, x.reshape(-1, spec.model_dim)[at])


@functools.partial(jax.jit, static_argnums=0)
def _nll(
    spec: ModelSpec, params: Params, tokens: Int[Array, "B T"], at: Int[Array, " S"]
) -> tuple[Float[Array, " S"], Array]:
    """Negative log likelihood of the token after each ``at``, and whether it is the likeliest."""
    logits = scored_logits(spec, params, tokens, at)
    target = tokens.reshape(-1)[at + 1]
    nll = jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, target[:, None], axis=1)[:, 0]
    return nll, logits.argmax(-1) == target


def needle_recall(
    spec: ModelSpec, params: Params, source: Source, *, length: int, keys: int, count: int, seed: int
) -> np.ndarray:
    """Needles found, by depth.

    Args:
      spec, params: the model.
      source: text and key words to build rows from; held-out ones for a claim.
      length: tokens of a row, answer included.
      keys: needles in a row, one of them asked for.
      count: rows; depths take turns.
      seed: of the rows; the same rows for every model.

    Returns:
      bool [5, count / 5], one row per depth of ``DEPTHS``.

    Raises:
      ValueError: when needles and question do not fit into ``length`` tokens.
    """
    rows = []
    for i in range(count):
        rng = np.random.default_rng((seed, length, keys, i))
        depth = DEPTHS[i % len(DEPTHS)]
        tries = (needle_row(rng, source, length, keys=keys, depth=depth) for _ in range(100))
        row = next((row for row in tries if row is not None), None)  # two keys may fall on the same words
        if row is None:
            raise ValueError(
                f"needle_recall(length={length}, keys={keys}) leaves no room for text in {length} tokens. "
                "Ask for longer rows or fewer keys."
            )
        rows.append(row)
    answer = int((rows[0][1] >= ANSWER).sum())
    found: list[bool] = []
    step = max(1, min(count, 8192 // length))
    for first in range(0, count, step):
        tokens = np.stack([row for row, _ in rows[first : first + step]])
        real = len(tokens)
        tokens = np.pad(tokens, ((0, step - real), (0, 0)))
        at = (np.arange(step)[:, None] * length + np.arange(length - answer - 1, length - 1)).ravel()
        right = np.asarray(_nll(spec, params, tokens, at)[1]).reshape(step, answer)
        found += np.all(right[:real], axis=-1).tolist()
    return np.asarray(found).reshape(-1, len(DEPTHS)).T


def bits_per_byte(
    spec: ModelSpec, params: Params, source: Source, *, windows: int, length: int = 512
) -> float:
    """Cost of held-out text in bits a byte, over evenly spaced windows that each start at <bos>."""
    starts = np.linspace(0, len(source.text) - length, windows).astype(int)
    nats, size = 0.0, 0
    step = max(1, 8192 // length)
    for first in range(0, windows, step):
        ids = np.stack([source.text[s : s + length] for s in starts[first : first + step]])
        size += sum(len(source.tokenizer.decode(row[1:].tolist()).encode()) for row in ids)
        tokens = ids.copy()
        tokens[:, 0] = BOS
        at = np.arange(tokens.size).reshape(tokens.shape)[:, :-1].ravel()
        nats += float(_nll(spec, params, tokens, at)[0].sum())
    return nats / np.log(2) / size
