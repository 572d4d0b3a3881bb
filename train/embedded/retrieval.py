"""Which KV heads retrieve, the entropy of their attention, and recall without them.

A KV head's weight is the mean over its query heads. It retrieves if it puts a tenth or more on the token that
must be written next, in a repeated sentence of prose or in the answer to a question.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.models import decoder
from kvjax.models.spec import ModelSpec
from kvjax.types import Heads, Params
from train.embedded import heads
from train.embedded.checks import CHECKS
from train.rows import ANSWER, Source, text_row

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

LENGTH = 1024
RETRIEVES = 0.1
SINKS, LOCAL, BEGIN = 4, 64, 256
"""A query's middle region lies between the first and the last tokens; queries count from ``BEGIN`` on."""
VALUE = 4
"""Tokens of a value whose weight is measured from the query before it."""


def copied_from(row: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Where each token of the answer last stands in the text, by the query that predicts it; else -1."""
    at = np.flatnonzero(weight >= ANSWER)
    windows = np.lib.stride_tricks.sliding_window_view(row[: at[0]], len(at))
    matches = np.flatnonzero((windows == row[at]).all(-1))
    wanted = np.full(len(row), -1)
    if len(matches):
        wanted[at - 1] = matches[-1] + np.arange(len(at))
    return wanted


def _drawn(name: str, source: Source, count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """(row, ``copied_from`` of it)."""
    rng = np.random.default_rng(7)
    rows: list[tuple[np.ndarray, np.ndarray]] = []
    while len(rows) < count:
        drawn = CHECKS[name](rng, source, LENGTH)
        if drawn is not None and (wanted := copied_from(*drawn)).max() >= 0:
            rows.append((drawn[0], wanted))
    return rows


def weight_on(
    spec: ModelSpec, params: Params, rows: Sequence[tuple[np.ndarray, np.ndarray]]
) -> Float[np.ndarray, "L K"]:
    """Mean weight on the wanted token over the queries that have one."""
    total, queries = np.zeros((spec.num_layers, spec.num_heads)), 0
    for row, wanted in rows:
        counted = wanted >= 0
        total += np.asarray(
            heads.attention_statistics(spec, params, row[None], counted[None], wanted[None])["copied"]
        )
        queries += int(counted.sum())
    return (total / max(queries, 1)).reshape(spec.num_layers, spec.num_kv_heads, -1).mean(-1)


def _offset(wanted: np.ndarray, by: int) -> np.ndarray:
    """For the answer's first query, the position ``by`` behind that of the token it must write; else -1."""
    at = np.flatnonzero(wanted >= 0)
    only = np.full(len(wanted), -1)
    if len(at) > by:
        only[at[0]] = wanted[at[0] + by]
    return only


@functools.partial(jax.jit, static_argnums=0)
def _middle(spec: ModelSpec, params: Params, tokens: Int[Array, "1 T"]) -> Float[Array, "L N"]:
    """Mean over queries of the entropy of the middle region's weights, divided by its maximum."""
    t = tokens.shape[1]
    age = jnp.arange(t)[:, None] - jnp.arange(t)[None, :]
    region = (age >= LOCAL) & (jnp.arange(t)[None, :] >= SINKS)
    attend, entropies = decoder.dense_attend(spec), []

    def attend_and_record(index: int, x: Heads, carry: None) -> tuple[Array, None]:
        q = x.q[0].reshape(t, spec.num_kv_heads, spec.groups, -1)
        s = jnp.einsum("tkgh,skh->kgts", q, x.k[0]) * spec.head_dim**-0.5
        p = jax.nn.softmax(jnp.where(region, s, -jnp.inf)[..., BEGIN:, :], axis=-1)
        entropy = -jnp.sum(p * jnp.log(jnp.maximum(p, 1e-30)), axis=-1)
        entropies.append(jnp.mean(entropy / jnp.log(region[BEGIN:].sum(-1)), axis=-1).reshape(-1))
        return attend(index, x, carry)

    decoder.forward(spec, params, tokens, jnp.arange(t)[None], attend_and_record, None)
    return jnp.stack(entropies)


def measure(spec: ModelSpec, params: Params, source: Source, *, count: int = 16) -> dict[str, Any]:
    """Weights on copied tokens and entropies.

    Args:
      spec, params: the model.
      source: held-out text and key words.
      count: rows of each sort, ``LENGTH`` tokens.

    Returns:
      "sentence" and "fact": weight on the token to be written next [L, K]; "value": from the query before a
      value, weight on its first ``VALUE`` tokens [L, K, 4]; "retrieving": (layer, KV head) pairs; "entropy"
      [L, N].
    """
    sentence, fact = (_drawn(name, source, count) for name in ("sentence", "four_keys"))
    weight_of = {"sentence": weight_on(spec, params, sentence), "fact": weight_on(spec, params, fact)}
    value = [
        weight_on(spec, params, [(row, _offset(wanted, by)) for row, wanted in fact]) for by in range(VALUE)
    ]
    rng = np.random.default_rng(8)
    texts = [text_row(rng, source, LENGTH)[0] for _ in range(max(1, count // 4))]
    entropy = np.mean([_middle(spec, params, row[None]) for row in texts], axis=0)
    strong = np.argwhere(np.maximum(weight_of["sentence"], weight_of["fact"]) >= RETRIEVES)
    return {
        **{name: weights.tolist() for name, weights in weight_of.items()},
        "value": np.stack(value, axis=-1).tolist(),
        "retrieving": [(int(layer), int(head)) for layer, head in strong],
        "entropy": entropy.tolist(),
    }


def silence(
    spec: ModelSpec,
    params: Params,
    retrieving: Sequence[tuple[int, int]],
    ask: Callable[[Params], dict[str, float]],
) -> dict[str, Any]:
    """The results of ``ask`` for the model, without each KV head, and without each layer's retrieving heads.

    Returns:
      "nothing"; "heads" [L][K]; "layers": by layer that retrieves.
    """

    def without(pairs: Sequence[tuple[int, int]]) -> dict[str, float]:
        silenced = tuple((layer, k * spec.groups + g) for layer, k in pairs for g in range(spec.groups))
        return ask(heads.without_heads(spec, params, silenced))

    layers = sorted({layer for layer, _ in retrieving})
    return {
        "nothing": ask(params),
        "heads": [
            [without([(layer, head)]) for head in range(spec.num_kv_heads)]
            for layer in range(spec.num_layers)
        ],
        "layers": {
            str(index): without([pair for pair in retrieving if pair[0] == index]) for index in layers
        },
    }
