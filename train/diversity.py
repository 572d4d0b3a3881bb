"""What each attention head of a trained model looks at, and what the model loses without it.

A KV method can only be judged on a model whose heads differ: sparse ones that a budget serves easily, local
ones that a window serves, diffuse ones that nothing but the whole cache serves. Measured on text and
on needle rows of held-out words, dense attention, queries from position 128 on:

  entropy    effective number of tokens looked at: exp of the mean entropy of a query's weights
  distance   share of the weight by distance to the query: itself, 1, 2-3, 4-7, ... (powers of two)
  sink       share of the weight on the first four tokens
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
from train import recall
from train.rows import Source, needle_row, text_row

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

LENGTH = 1024
BEGIN = 128
"""The first query that counts: before, there is too little to choose from."""
SINKS = 4
LOCAL = 16
CONSTRUCTED = ((0, 0), (1, 0))
"""(layer, KV head) of the constructed start (``train.start``)."""


@functools.partial(jax.jit, static_argnums=0)
def _looks(spec: ModelSpec, params: Params, tokens: Int[Array, "B T"]) -> dict[str, Float[Array, "L N *_"]]:
    """Means over rows and queries: entropy [L, N], sink [L, N], distance [L, N, bins]."""
    length = tokens.shape[1]
    age = jnp.arange(length)[:, None] - jnp.arange(length)[None, :]
    bins = 1 + int(np.log2(length)) + 1
    bin_of = jnp.where(age <= 0, 0, 1 + jnp.floor(jnp.log2(jnp.maximum(age, 1) + 0.5)).astype(int))
    attend, found = decoder.dense_attend(spec), []

    def look(index: int, x: Heads, carry: None) -> tuple[Array, None]:
        b, t, n, h = x.q.shape
        q = x.q.reshape(b, t, spec.num_kv_heads, spec.groups, h)
        s = jnp.einsum("btkgh,bskh->bkgts", q, x.k, preferred_element_type=jnp.float32) * h**-0.5
        p = jax.nn.softmax(jnp.where(age >= 0, s, -jnp.inf), axis=-1).reshape(b, n, t, t)[:, :, BEGIN:]
        entropy = -jnp.sum(p * jnp.log(jnp.maximum(p, 1e-30)), axis=-1).mean((0, 2))
        sink = p[..., :SINKS].sum(-1).mean((0, 2))
        near = jnp.stack(
            [jnp.where(bin_of[BEGIN:] == i, p, 0.0).sum(-1).mean((0, 2)) for i in range(bins)], axis=-1
        )
        found.append({"entropy": entropy, "sink": sink, "distance": near})
        return attend(index, x, carry)

    positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
    decoder.forward(spec, params, tokens, positions, look, None)
    return jax.tree.map(lambda *layers: jnp.stack(layers), *found)


def measure(spec: ModelSpec, params: Params, source: Source, *, count: int = 12) -> dict[str, Any]:
    """Entropy, distances, sink mass and the kind of every head, on text and on needle rows.

    Args:
      spec, params: the model.
      source: held-out text and key words.
      count: rows of each sort, of ``LENGTH`` tokens.

    Returns:
      For "text" and "needles": effective [L, N] tokens, sink [L, N], distance [L, N, bins]; and kinds [L, N],
      by the text: "local" (half of the weight within 16 tokens), "sink" (half of it on the first four),
      "sparse" (fewer than 16 tokens looked at), else "diffuse".
    """
    rng = np.random.default_rng(7)
    sorts = {"text": [text_row(rng, source, LENGTH)[0] for _ in range(count)], "needles": []}
    while len(sorts["needles"]) < count:
        row = needle_row(rng, source, LENGTH, keys=4, asked=4)
        sorts["needles"] += [] if row is None else [row[0]]
    result: dict[str, Any] = {}
    for name, drawn in sorts.items():
        parts = [_looks(spec, params, np.stack(drawn[i : i + 2])) for i in range(0, count, 2)]
        mean = jax.tree.map(lambda *leaves: np.mean(leaves, axis=0, dtype=np.float64), *parts)
        result[name] = {
            "effective": np.exp(mean["entropy"]).round(2).tolist(),
            "sink": mean["sink"].round(4).tolist(),
            "distance": mean["distance"].round(4).tolist(),
        }
    result["kinds"] = [
        [_kind(result["text"], i, n) for n in range(spec.num_heads)] for i in range(spec.num_layers)
    ]
    return result


def _kind(found: dict[str, Any], index: int, head: int) -> str:
    near = 1 + int(np.log2(LOCAL))  # bins of the distances 0 .. 15
    if sum(found["distance"][index][head][:near]) >= 0.5:
        return "local"
    if found["sink"][index][head] >= 0.5:
        return "sink"
    return "sparse" if found["effective"][index][head] < 16 else "diffuse"


def without(spec: ModelSpec, params: Params, heads: tuple[tuple[int, int], ...]) -> Params:
    """Params in which these (layer, query head) write nothing."""
    layers = [dict(p) for p in params["layers"]]
    for index, head in heads:
        layers[index]["wo"] = jnp.asarray(layers[index]["wo"]).at[head].set(0.0)
    return params | {"layers": layers}


def ablate(
    spec: ModelSpec, params: Params, source: Source, *, count: int, length: int = 512
) -> dict[str, Any]:
    """Recall of one needle and of one of four when heads write nothing.

    Args:
      spec, params: the model.
      source: held-out text and key words.
      count: needles a figure; the same for every ablation.
      length: tokens of a row.

    Returns:
      groups: name to {"one", "four"} for nothing, the constructed heads of each layer and all others of it;
      heads: {"one": [L, N], "four": [L, N]}, each query head alone.
    """

    def both(heads: tuple[tuple[int, int], ...]) -> dict[str, float]:
        lame = without(spec, params, heads)
        return {
            name: round(
                float(
                    recall.needle_recall(
                        spec, lame, source, length=length, keys=keys, count=count, seed=3
                    ).mean()
                ),
                4,
            )
            for name, keys in (("one", 1), ("four", 4))
        }

    constructed = tuple((i, k * spec.groups + g) for i, k in CONSTRUCTED for g in range(spec.groups))
    layers, heads = range(spec.num_layers), range(spec.num_heads)
    groups = {"nothing": both(()), "constructed heads": both(constructed)}
    for index in layers:
        mine = tuple((index, n) for n in heads if (index, n) in constructed)
        rest = tuple((index, n) for n in heads if (index, n) not in constructed)
        if mine:
            groups[f"constructed heads of layer {index}"] = both(mine)
        groups[f"learned heads of layer {index}"] = both(rest)
    alone = [[both(((index, n),)) for n in heads] for index in layers]
    return {
        "n": count,
        "length": length,
        "groups": groups,
        "heads": {name: [[cell[name] for cell in row] for row in alone] for name in ("one", "four")},
    }
