"""The constructed start: an induction circuit in the initial weights.

Copying "what followed this token last time" takes two attention heads in a row. Small models need millions of
tokens to learn them; constructed, they recall from the first step, and everything stays trainable.

  layer 0, KV head 0   previous-token head. Keys and queries are their biases alone: the query bias is
                       the key bias turned by one position in the fast rotary frequencies. The value
                       map reads a random projection of the token, the output map writes it into a
                       random subspace of the residual stream: "the previous token was x".
  layer 1, KV head 0   induction head. Keys read that subspace, queries the current token's projection,
                       both only in the slow frequencies, whose rotation is negligible over a few thousand
                       positions. Value and output map copy the token found.

Slow means: less than one radian in 330 positions; fast: more than one in 50.
"""

from __future__ import annotations

import numpy as np

from kvjax.models.layout import inputs_first, inputs_last
from kvjax.models.spec import ModelSpec
from kvjax.types import Params

SLOW = 3e-3
FAST = 0.02
BIAS = 4.0
"""Length of the key bias in each fast frequency; attention to the previous token is 0.72 from the start."""


def construct(
    spec: ModelSpec,
    params: Params,
    seed: int,
    *,
    spread: float = 0.0,
    logit_scale: float = 1 / (0.02 * 16),
) -> Params:
    """Writes the circuit into layers 0 and 1 of freshly drawn weights.

    Args:
      spec: at least two layers and q / k / v biases.
      params: as drawn by ``kvjax.models.module.Decoder``.
      seed: of the random projections.
      spread: relative noise on the inputs of layer 1's query heads. Without it they start equal, get equal
        gradients and stay equal.
      logit_scale: initial value of the final norm; a tied output of standard deviation 0.02 needs one
        well above 1 to reach confident logits.

    Returns:
      New params, float32, same tree.

    Raises:
      ValueError: when the spec has one layer or no biases.
    """
    if spec.num_layers < 2 or not spec.qkv_bias:
        raise ValueError(
            f"construct(num_layers={spec.num_layers}, qkv_bias={spec.qkv_bias}) has no place for the "
            "circuit: it needs two layers and q / k / v biases. Use a Qwen2 spec with num_layers >= 2."
        )
    rng = np.random.default_rng(seed)
    dim, head_dim, groups = spec.model_dim, spec.head_dim, spec.groups
    freq = spec.rope.frequencies(head_dim)
    slow = np.flatnonzero(freq < SLOW)
    slots = np.concatenate([slow, slow + head_dim // 2])  # both halves of each slow rotary pair
    read = rng.normal(size=(dim, len(slots))) / np.sqrt(len(slots))  # token -> its projection
    frame = np.linalg.qr(rng.normal(size=(dim, dim)))[0][:, : len(slots)]  # where predecessors are written
    copy = rng.normal(size=(dim, head_dim)) / np.sqrt(head_dim)

    layers = [
        inputs_first({name: np.array(leaf, np.float32) for name, leaf in p.items()}) for p in params["layers"]
    ]
    previous, induction = layers[0], layers[1]
    queries = slice(0, groups)  # the query heads that share KV head 0
    fast = freq > FAST
    previous["wk"][:, 0] *= 0.05
    previous["wq"][:, queries] *= 0.05
    previous["bk"][0] = BIAS * np.concatenate([fast, np.zeros_like(fast)])
    previous["bq"][queries] = BIAS * np.concatenate([np.cos(freq) * fast, -np.sin(freq) * fast])
    previous["wv"][:, 0] = np.pad(read, ((0, 0), (0, head_dim - len(slots))))
    previous["wo"][queries] = np.pad(0.06 / groups * frame.T, ((0, head_dim - len(slots)), (0, 0)))

    induction["wk"][:, 0] = 0.0
    induction["wk"][:, 0, slots] = frame
    induction["wq"][:, queries] = 0.0
    induction["wq"][:, queries, slots] = read[:, None, :]
    if spread:
        noise = rng.normal(size=(dim, groups, head_dim)) / np.sqrt(len(slots))
        induction["wq"][:, queries] += spread * noise
    induction["wv"][:, 0] = copy
    induction["wo"][queries] = 0.01 * copy.T
    layers = list(map(inputs_last, layers))
    return params | {"layers": layers, "final_norm": np.full((dim,), logit_scale, np.float32)}
