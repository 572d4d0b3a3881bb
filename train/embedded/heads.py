"""Statistics of each head's attention, and models without some of their heads.

A KV method can only be judged on a model whose heads differ: sparse heads that need a small budget, local
heads that need a window, diffuse heads that need the whole cache. Measured with dense attention on held-out
text (queries from position 128 on) and at answers (the queries that predict the digits of one of four
needles):

  effective  number of tokens attended to: exp of the mean entropy of a query's weights
  distance   share of the weight by distance to the query: itself, 1, 2-3, 4-7, ... (powers of two)
  sink       share of the weight on the first four tokens
  copied     share of the weight on the token that must be written next (retrieval score, arXiv 2404.15574)
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.models import decoder
from kvjax.models.spec import ModelSpec
from kvjax.types import Heads, Params
from train.rows import ANSWER, Source, needle_row, text_row

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int

LENGTH = 1024
BEGIN = 128
"""The first query of a text that counts: earlier ones have few tokens to choose from."""
SINKS = 4
LOCAL = 16
FEW = 16
"""A head with fewer effective tokens is sparse."""


@functools.partial(jax.jit, static_argnums=0)
def attention_statistics(
    spec: ModelSpec,
    params: Params,
    tokens: Int[Array, "B T"],
    counted: Bool[Array, "B T"],
    wanted: Int[Array, "B T"],
) -> dict[str, Float[Array, "L N *_"]]:
    """Sums over the ``asks`` queries: entropy, sink, copied [L, N], distance [L, N, bins]."""
    length = tokens.shape[1]
    age = jnp.arange(length)[:, None] - jnp.arange(length)[None, :]
    bins = 1 + int(np.log2(length)) + 1
    bin_of = jnp.where(age <= 0, 0, 1 + jnp.floor(jnp.log2(jnp.maximum(age, 1) + 0.5)).astype(int))
    copies = wanted[..., None] == jnp.arange(length)
    attend, by_layer = decoder.dense_attend(spec), []

    def attend_and_record(index: int, x: Heads, carry: None) -> tuple[Array, None]:
        b, t, n, h = x.q.shape
        q = x.q.reshape(b, t, spec.num_kv_heads, spec.groups, h)
        s = jnp.einsum("btkgh,bskh->bkgts", q, x.k, preferred_element_type=jnp.float32) * h**-0.5
        p = jax.nn.softmax(jnp.where(age >= 0, s, -jnp.inf), axis=-1).reshape(b, n, t, t)
        sum_over_queries = lambda by_query: jnp.einsum("bnt,bt->n", by_query, counted.astype(jnp.float32))  # noqa: E731
        shares = [sum_over_queries(jnp.where(bin_of == i, p, 0.0).sum(-1)) for i in range(bins)]
        by_layer.append(
            {
                "entropy": sum_over_queries(-jnp.sum(p * jnp.log(jnp.maximum(p, 1e-30)), axis=-1)),
                "sink": sum_over_queries(p[..., :SINKS].sum(-1)),
                "copied": sum_over_queries(jnp.where(copies[:, None], p, 0.0).sum(-1)),
                "distance": jnp.stack(shares, axis=-1),
            }
        )
        return attend(index, x, carry)

    positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
    decoder.forward(spec, params, tokens, positions, attend_and_record, None)
    return jax.tree.map(lambda *layers: jnp.stack(layers), *by_layer)


CountedRow = tuple[np.ndarray, np.ndarray, np.ndarray]
"""A row, which of its queries count, and where the token stands that each must copy (or -1); [T]."""


def _text(rng: np.random.Generator, source: Source) -> CountedRow:
    row = text_row(rng, source, LENGTH)[0]
    return row, np.arange(LENGTH) >= BEGIN, np.full(LENGTH, -1)


def _answers(rng: np.random.Generator, source: Source) -> CountedRow:
    drawn = None
    while drawn is None:
        drawn = needle_row(rng, source, LENGTH, keys=4)
    row, weight = drawn
    at = np.flatnonzero(weight >= ANSWER)
    windows = np.lib.stride_tricks.sliding_window_view(row[: at[0]], len(at))
    needle = int(np.flatnonzero((windows == row[at]).all(-1))[-1])
    wanted = np.full(LENGTH, -1)
    wanted[at - 1] = needle + np.arange(len(at))
    return row, wanted >= 0, wanted


def measure(spec: ModelSpec, params: Params, source: Source, *, count: int = 24) -> dict[str, Any]:
    """The statistics and the kind of every head.

    Args:
      spec, params: the model.
      source: held-out text and key words.
      count: rows of each sort, of ``LENGTH`` tokens.

    Returns:
      For "text" and "answers": effective [L, N] tokens, sink [L, N], copied [L, N] (zero on text), distance
      [L, N, bins]; and kinds [L, N]: "local" (on text half of the weight within 16 tokens), "sink" (on text
      half of it on the first four), "sparse" (fewer than 16 effective tokens, on text or at answers), else
      "diffuse".
    """
    rng = np.random.default_rng(7)
    result: dict[str, Any] = {}
    for name, draw in (("text", _text), ("answers", _answers)):
        rows = [draw(rng, source) for _ in range(count)]
        parts = [
            attention_statistics(spec, params, *map(np.stack, zip(*rows[i : i + 2])))
            for i in range(0, count, 2)
        ]
        queries = sum(int(counted.sum()) for _, counted, _ in rows)
        mean = {key: np.sum([part[key] for part in parts], axis=0) / queries for key in parts[0]}
        result[name] = {
            "effective": np.exp(mean.pop("entropy")).round(2).tolist(),
            **{key: value.round(4).tolist() for key, value in mean.items()},
        }
    result["kinds"] = [[_kind(result, i, n) for n in range(spec.num_heads)] for i in range(spec.num_layers)]
    return result


def _kind(measured: dict[str, Any], index: int, head: int) -> str:
    bins = 1 + int(np.log2(LOCAL))  # bins of the distances 0 .. 15
    if sum(measured["text"]["distance"][index][head][:bins]) >= 0.5:
        return "local"
    if measured["text"]["sink"][index][head] >= 0.5:
        return "sink"
    is_sparse = min(measured[sort]["effective"][index][head] for sort in ("text", "answers")) < FEW
    return "sparse" if is_sparse else "diffuse"


def without_heads(spec: ModelSpec, params: Params, heads: tuple[tuple[int, int], ...]) -> Params:
    """Params in which these (layer, query head) output nothing."""
    layers = [dict(p) for p in params["layers"]]
    for index, head in heads:
        layers[index]["wo"] = jnp.asarray(layers[index]["wo"]).at[:, head].set(0.0)
    return params | {"layers": layers}
