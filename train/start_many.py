"""The constructed start, second form: four distances back, six KV heads in three layers that copy.

  layer 0, KV head d - 1   looks d tokens back (d = 1 ... 4), by its q / k biases alone: the query bias is
                           the key bias turned by d positions in the fast rotary frequencies. It writes a
                           random projection of what it finds into a subspace of its own: "the token d back
                           was x".
  layers 1, 2 and 3        two copying KV heads each (``COPIES``). Keys read the subspace of d; the first
                           query head of the group reads the token d - 1 back (the current one for d = 1), so
                           it finds what has to be written next after a match of d tokens; it writes the
                           found token to the output. The second query head reads the current token, so it
                           finds the token d after its last occurrence: the d-th token of a value that
                           begins there. It writes nothing yet.

The residual stream is cut in six: four subspaces for what layer 0 writes, one that copies are read from and
written to, and the rest, where tokens are recognised; so a copied token does not disturb what later layers
match. All of it stays trainable.
"""

from __future__ import annotations

import numpy as np

from kvjax.models.spec import ModelSpec
from kvjax.types import Params
from train.start import FAST, SLOW

DISTANCES = (1, 2, 3, 4)
COPIES = {1: (1, 2), 2: (1, 3), 3: (1, 4)}
"""Layer to the distances of its first KV heads."""
BIAS = 6.0
"""Length of the key bias in each fast frequency; attention to the token looked for is 0.95 from the start."""
MARK = 0.02
"""Size of what layer 0 writes, a head: as large as the embedding."""
SHARP = {1: 11.0, 2: 15.0, 3: 20.0}
"""Score of a match by layer, as the stream would be without copies: what layers before add shrinks it."""
WRITE = {1: 0.07, 2: 0.01, 3: 0.01}
"""Size of what a copying head writes, by layer. Later layers also read what earlier ones wrote where there
was nothing to copy, so they begin small."""


def construct(
    spec: ModelSpec,
    params: Params,
    seed: int,
    *,
    spread: float = 0.0,
    logit_scale: float = 1 / (0.02 * 16),
) -> Params:
    """Writes the circuit into layers 0 to 3 of freshly drawn weights.

    Args:
      spec: at least four layers of at least four KV heads, groups of at least two, q / k / v biases.
      params: as drawn by ``kvjax.models.module.Decoder``.
      seed: of the random projections.
      spread: noise on what query heads read, in shares of it, so that heads of a group part.
      logit_scale: initial value of the final norm, as in ``train.start``.

    Returns:
      New params, float32, same tree.

    Raises:
      ValueError: when the spec has no place for it.
    """
    width = 2 * int((spec.rope.frequencies(spec.head_dim) < SLOW).sum())
    fits = spec.num_layers > max(COPIES) and spec.num_kv_heads >= len(DISTANCES) and spec.groups >= 2
    if not fits or not spec.qkv_bias or spec.model_dim < _room(spec, width):
        raise ValueError(
            f"construct(num_layers={spec.num_layers}, num_kv_heads={spec.num_kv_heads}, "
            f"groups={spec.groups}, model_dim={spec.model_dim}, qkv_bias={spec.qkv_bias}) has no place for "
            "the circuit: it needs four layers, four KV heads, groups of two, q / k / v biases and "
            f"model_dim >= {_room(spec, width)}. Use start: one in the config, or a larger model."
        )
    rng = np.random.default_rng(seed)
    layers = [{name: np.array(leaf, np.float32) for name, leaf in p.items()} for p in params["layers"]]
    basis = np.linalg.qr(rng.normal(size=(spec.model_dim,) * 2))[0]
    marks, copies, rest = np.split(basis, [4 * width, 4 * width + spec.head_dim], axis=1)
    frames = np.split(marks, 4, axis=1)
    read = rest @ rng.normal(size=(rest.shape[1], width)) * np.sqrt(spec.model_dim / rest.shape[1] / width)
    _look_back(spec, layers[0], read, frames)
    gains = _gains(np.asarray(params["embed"], np.float32), read, frames, rng)
    for index, distances in COPIES.items():
        for head, distance in enumerate(distances):
            sharp = [SHARP[index] * gain for gain in gains]
            _copy(spec, layers[index], head, distance, read, frames, copies, sharp, WRITE[index], spread, rng)
    return params | {
        "layers": layers,
        "final_norm": np.full((spec.model_dim,), logit_scale, np.float32),
    }


def _room(spec: ModelSpec, width: int) -> int:
    """Channels that marks, copies and the recognition of tokens take."""
    return len(DISTANCES) * width + spec.head_dim + width


def _look_back(spec: ModelSpec, layer: Params, read: np.ndarray, frames: list[np.ndarray]) -> None:
    freq = spec.rope.frequencies(spec.head_dim)
    fast = freq > FAST
    pad = (0, spec.head_dim - read.shape[1])
    for head, distance in enumerate(DISTANCES):
        queries = slice(head * spec.groups, (head + 1) * spec.groups)
        layer["wk"][:, head] *= 0.05
        layer["wq"][:, queries] *= 0.05
        layer["bk"][head] = BIAS * np.concatenate([fast, np.zeros_like(fast)])
        turned = np.concatenate([np.cos(distance * freq) * fast, -np.sin(distance * freq) * fast])
        layer["bq"][queries] = BIAS * turned
        layer["wv"][:, head] = np.pad(read, ((0, 0), pad))
        layer["wo"][queries] = np.pad(MARK / spec.groups * frames[head].T, (pad, (0, 0)))


def _gains(
    embed: np.ndarray, read: np.ndarray, frames: list[np.ndarray], rng: np.random.Generator
) -> list[float]:
    """What queries that read the token 0, 1, 2, 3 back are scaled by, so that a match scores 1."""
    normed = lambda x: x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True))  # noqa: E731
    tokens = rng.integers(0, len(embed), (512, 1 + len(frames)))  # each the current token and four back

    def states(tokens: np.ndarray) -> np.ndarray:
        marks = [MARK * (normed(embed[back]) @ read) @ frame.T for back, frame in zip(tokens.T[1:], frames)]
        return normed(embed[tokens[:, 0]] + np.sum(marks, axis=0))

    # A key d back from the match of a query: its token d back is the query's token d - 1 back.
    follow = np.concatenate([rng.integers(0, len(embed), (512, 1)), tokens[:, :-1]], axis=1)
    query, key = states(tokens), states(follow)
    readers = [read, *frames[:-1]]
    scores = [np.mean(np.sum((query @ r) * (key @ f), axis=1)) for r, f in zip(readers, frames)]
    return [8.0 / float(score) for score in scores]


def _copy(
    spec: ModelSpec,
    layer: Params,
    head: int,
    distance: int,
    read: np.ndarray,
    frames: list[np.ndarray],
    copies: np.ndarray,
    gains: list[float],
    write: float,
    spread: float,
    rng: np.random.Generator,
) -> None:
    dim, size, width = spec.model_dim, spec.head_dim, read.shape[1]
    slow = np.flatnonzero(spec.rope.frequencies(size) < SLOW)
    slots = np.concatenate([slow, slow + size // 2])  # both halves of each slow rotary pair
    layer["wk"][:, head] = 0.0
    layer["wk"][:, head, slots] = frames[distance - 1]
    copy = copies @ np.linalg.qr(rng.normal(size=(size, size)))[0]
    layer["wv"][:, head] = copy
    for i in range(spec.groups):
        query = head * spec.groups + i
        back = distance - 1 if i == 0 else 0
        reader = frames[back - 1] if back else read
        layer["wq"][:, query] = 0.0
        layer["wq"][:, query, slots] = gains[back] * reader
        if spread:
            noise = rng.normal(size=(dim, size)) * np.linalg.norm(gains[back] * reader) / np.sqrt(dim * width)
            layer["wq"][:, query] += spread * noise
        if i == 0 or distance == 1:
            layer["wo"][query] = write * copy.T
