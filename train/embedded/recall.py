"""Likelihood of next tokens under full attention, and recall and bits per byte measured by it."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.models import decoder
from kvjax.models.spec import ModelSpec
from kvjax.sharding.mesh import ONE, Mesh
from kvjax.sharding.specs import MODEL_HEADS
from kvjax.types import AttendFn, Heads, Params
from train.embedded import forward
from train.embedded.tasks.pieces import RowFn
from train.needles import Score
from train.rows import ANSWER, Source
from train.text import BOS

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int


def blocked_attend(
    spec: ModelSpec,
    block: int = 128,
    *,
    remat: bool = False,
    speak: Bool[Array, "B L N"] | None = None,
    on: Mesh = ONE,
) -> AttendFn[None]:
    """``decoder.dense_attend`` for full-attention layers, in blocks of queries that read their past only.

    Half the work and a fraction of the memory traffic at 1024 tokens; same values. With ``remat`` the weights
    of a block are recomputed in the backward pass: [B, N, block, T] floats at a time instead of half of
    [L, B, N, T, T]. A head that may not ``speak`` in a row outputs zeros there. On a mesh each device
    computes its rows and heads.
    """

    def attend(index: int, x: Heads, carry: None) -> tuple[Array, None]:
        b, t, n, h = x.q.shape
        q, k, v = on.pinned((x.q, x.k, x.v), MODEL_HEADS)
        q = q.reshape(b, t, spec.num_kv_heads, spec.groups, h) * jnp.asarray(h**-0.5, x.q.dtype)

        def mix(q: Array, k: Array, v: Array, first: int) -> Array:
            s = jnp.einsum("btkgh,bskh->bkgts", q, k, preferred_element_type=jnp.float32)
            visible = first + jnp.arange(q.shape[1])[:, None] >= jnp.arange(k.shape[1])[None, :]
            p = jax.nn.softmax(jnp.where(visible, s, -jnp.inf), axis=-1).astype(v.dtype)
            return jnp.einsum("bkgts,bskh->btkgh", p, v)

        run = jax.checkpoint(mix, static_argnums=3) if remat else mix
        starts = range(0, t, block)
        parts = [run(q[:, a : a + block], k[:, : a + block], v[:, : a + block], a) for a in starts]
        out = on.pinned(jnp.concatenate(parts, axis=1).reshape(b, t, n, h), MODEL_HEADS)
        return out if speak is None else jnp.where(speak[:, None, index, :, None], out, 0), carry

    return attend


def scored_logits(
    spec: ModelSpec,
    params: Params,
    tokens: Int[Array, "B T"],
    at: Int[Array, " S"],
    *,
    block: int = 128,
    remat: bool = False,
    speak: Bool[Array, "B L N"] | None = None,
    on: Mesh = ONE,
) -> Float[Array, "S V"]:
    """Logits at the row-major positions ``at``, float32; other arguments as in ``blocked_attend``."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    attend = blocked_attend(spec, block, remat=remat, speak=speak, on=on)
    x, _ = decoder.forward(spec, params, tokens, positions, attend, None)
    x = on.by_row(x)
    return decoder.logits(spec, params, x.reshape(-1, spec.model_dim)[at])


@functools.partial(jax.jit, static_argnums=0)
def nll(
    spec: ModelSpec, params: Params, tokens: Int[Array, "B T"], at: Int[Array, " S"]
) -> tuple[Float[Array, " S"], Array]:
    """Negative log likelihood of the token after each ``at``, and whether it is the likeliest."""
    logits = scored_logits(spec, params, tokens, at)
    target = tokens.reshape(-1)[at + 1]
    target_logit = jnp.take_along_axis(logits, target[:, None], axis=1)[:, 0]
    return jax.nn.logsumexp(logits, axis=-1) - target_logit, logits.argmax(-1) == target


@functools.partial(jax.jit, static_argnums=0)
def quick_nll(
    spec: ModelSpec, params: Params, tokens: Int[Array, "B T"], at: Int[Array, " S"]
) -> tuple[Float[Array, " S"], Array]:
    """``nll`` in the products of training (``forward``): several times faster, with bfloat16's rounding."""
    x = forward.states(spec, params, tokens)[at]
    target = tokens.reshape(-1)[at + 1]
    return forward.cross_entropy(decoder.norm(spec, params, "final_norm", x), params["embed"], target)


def task_recall(
    score: Score,
    row: RowFn,
    source: Source,
    *,
    length: int,
    count: int,
    seed: int,
    by_word: bool = False,
    by_token: bool = False,
) -> float:
    """Share of the answers that greedy decoding would write, given the right tokens before each.

    An answer is a run of tokens of the row with the weight ``ANSWER``, or each word of such a run (as
    RULER scores lists); each row counts the same.

    Args:
      score: the model.
      row: the task, one of ``train.embedded.tasks.TASKS`` or a form of it.
      source: text and key words; held-out ones for a claim.
      length: tokens of a row.
      count: rows.
      seed: of the rows; the same rows for every model.
      by_word: whether each word of a run is an answer.
      by_token: whether each token is.

    Raises:
      ValueError: when the task does not fit into ``length`` tokens.
    """
    rows = []
    for i in range(count):
        rng = np.random.default_rng((seed, length, i))
        drawn = next((r for r in (row(rng, source, length) for _ in range(100)) if r is not None), None)
        if drawn is None:
            raise ValueError(
                f"task_recall(row={row.__name__}, length={length}) found no row of that length in 100 draws. "
                "Ask for longer rows."
            )
        rows.append(drawn)
    vocabulary = range(source.tokenizer.get_vocab_size())
    begins = np.array(
        [by_token or by_word and source.tokenizer.decode([i]).startswith(" ") for i in vocabulary]
    )
    scores: list[float] = []
    step = max(1, min(count, 8192 // length))
    for first in range(0, count, step):
        part = rows[first : first + step]
        tokens = np.stack([ids for ids, _ in part])
        answer = np.stack([weight >= ANSWER for _, weight in part])
        flat = np.flatnonzero(answer)
        at = np.pad(flat - 1, (0, (-len(flat)) % 256))  # few sizes of the compiled program
        whole = np.pad(tokens, ((0, step - len(part)), (0, 0)))
        hit = np.asarray(score(whole, at)[1])[: len(flat)]
        right = np.ones(answer.shape, bool)
        right[answer] = hit
        scores += [_share_right(*one) for one in zip(answer, right, begins[tokens])]
    return float(np.mean(scores))


def _share_right(answer: np.ndarray, right: np.ndarray, begins: np.ndarray) -> float:
    """Share of a row's answers without a wrong token; one begins with each run and where ``begins``."""
    first = answer & (begins | ~np.pad(answer, (1, 0))[:-1])
    number = np.cumsum(first)[answer]  # which answer each token belongs to, from 1
    wrong = np.bincount(number, weights=~right[answer])[1:]
    return float(np.mean(wrong == 0))


def bits_per_byte(score: Score, source: Source, *, windows: int, length: int = 512) -> float:
    """Cost of a text in bits a byte, over evenly spaced windows that each start with <bos>."""
    starts = np.linspace(0, len(source.text) - length, windows).astype(int)
    nats, size = 0.0, 0
    step = max(1, 8192 // length)
    for first in range(0, windows, step):
        ids = np.stack([source.text[s : s + length] for s in starts[first : first + step]])
        size += sum(len(source.tokenizer.decode(row[1:].tolist()).encode()) for row in ids)
        tokens = ids.copy()
        tokens[:, 0] = BOS
        at = np.arange(tokens.size).reshape(tokens.shape)[:, :-1].ravel()
        nats += float(score(tokens, at)[0].sum())
    return nats / np.log(2) / size
