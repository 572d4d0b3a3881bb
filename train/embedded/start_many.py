"""The constructed start, second form: six KV heads in three layers copy, by matches of one to four tokens.

  layer 0, eight query     each looks d tokens back (``BACK``; d = 0 ... 4), by its q / k biases alone: the
  heads                    query bias is the key bias turned by d positions in the fast rotary frequencies.
                           It writes what it finds into the subspace of d: "the token d back was x"; those of
                           d = 0 remove the token's own name. All copying needs d = 0 and d = 1, so several
                           KV heads do these, and no single one is indispensable.
  layers 1, 2 and 3        two copying KV heads each (``COPIES``). Keys read the subspace of d; the first
                           query head of the group reads the token d - 1 back (the current one for d = 1), so
                           it finds the token that follows a match of d tokens and writes it to the output.
                           The second query head reads the current token, so it finds the token d after its
                           last occurrence: the d-th token of a value that begins there. It writes nothing
                           yet.
  layer 1, KV head 2       looks at the rarest of the last tokens, what the text is about, and writes its face
                           into a subspace of its own: the topic.
  layers 2 and 3,          look the topic up: they read a few tokens behind its occurrence (``LOOKS_UP``).
  KV head 2                If a question paraphrases a fact, its key leads near the value; training has to do
                           the rest.

The channels of the residual stream are divided: ``face``, by which tokens are recognised; ``name``, by which
they are written; four subspaces of marks, one for each distance; one channel for a token's frequency and one
for <bos>; the rest is free. A token's name is a fixed rotation of its face: heads read faces and write names,
so a copied token disturbs no later match. A copying head without a match attends to <bos>, which has no face
and no name, and writes nothing. So from the start the model predicts tokens by their frequency unless heads
agree on one to copy, and text, which comes first in training, has no reason to undo the circuit. All of it
stays trainable.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from kvjax.models.layout import inputs_first, inputs_last
from kvjax.models.spec import ModelSpec
from kvjax.types import Params
from train.embedded.start import FAST, SLOW
from train.text import BOS

DISTANCES = (1, 2, 3, 4)
BACK = ((1, 0), (2, 1), (3, 0), (4, 1))
"""Distances back of the query heads, by KV head of layer 0."""
COPIES = {1: (1, 2), 2: (2, 3), 3: (1, 4)}
"""Layer to the distances of its first KV heads."""
LOOKS_UP = {2: (2, 3), 3: (3, 4)}
"""Layer to the distances behind the topic that its third KV head reads."""
BIAS = 6.0
"""Length of the key bias in each fast frequency; attention to the token looked for is 0.95 from the start."""
FACE, NAME, MARK, FREE = 0.06, 0.06, 0.045, 0.01
"""Size of a channel: of an embedding's face and name, of what layer 0 writes, of the rest."""
SHARP, SINK = 26.0, 14.0
"""Score of a match, and of <bos>, which is above that of most chance matches."""
AGREED = 42.0
"""Logit of a token that all six heads agree on, if their output did not change the stream's size."""
RARE, NEAR, FAR = 1.5, (12.0, 7.0), 6.0
"""Of the topic's score: its fall by a unit of the frequency channel, and with distance for the two query
heads. Of a look-up's score: the cost of being close."""
FALL = (0.02, 0.05)
"""Rotary frequencies whose products fall with distance, over about 60 tokens."""
HEARD = 0.5
"""Output of a look-up, as a share of a copying head's."""
QUIET = 0.25
"""Factor on the random outputs of other heads and the MLPs."""
GAINS = {"face": 0.3, "name": 4.0, "mark": 1.0, "often": 3.0, "free": 1.0}
"""Of the final norm: the output reads names and frequencies."""
OFTEN = 8.0
"""The frequency channel of the normed stream."""


@dataclasses.dataclass(frozen=True)
class Channels:
    """The parts of the residual stream."""

    face: slice
    name: slice
    marks: tuple[slice, ...]
    topic: slice
    often: int
    sink: int
    free: slice


def channels(width: int, dim: int) -> Channels:
    """The division of the stream, with ``width`` channels for a token."""
    ends = [i * width for i in range(8)]
    return Channels(
        face=slice(0, width),
        name=slice(width, 2 * width),
        marks=tuple(slice(a, a + width) for a in ends[2:6]),
        topic=slice(ends[6], ends[7]),
        often=ends[7],
        sink=ends[7] + 1,
        free=slice(ends[7] + 2, dim),
    )


def construct(
    spec: ModelSpec,
    params: Params,
    seed: int,
    *,
    spread: float = 0.0,
    counts: np.ndarray | None = None,
) -> Params:
    """Writes the circuit into layers 0 to 3 of freshly drawn weights.

    Args:
      spec: at least four layers of at least four KV heads, groups of at least two, q / k / v biases.
      params: as drawn by ``kvjax.models.module.Decoder``.
      seed: of the tokens' faces.
      spread: relative noise on the inputs of query heads, so that heads of a group differ.
      counts: [V], how often each token occurs in text; None leaves frequencies out.

    Returns:
      New params, float32, same tree.

    Raises:
      ValueError: when the circuit does not fit into the spec.
    """
    width = 2 * int((spec.rope.frequencies(spec.head_dim) < SLOW).sum()) - 2  # the slowest pair is the sink's
    fits = spec.num_layers > max(COPIES) and spec.num_kv_heads >= len(DISTANCES) and spec.groups >= 2
    least_dim = (3 + len(DISTANCES)) * width + 2
    if not fits or not spec.qkv_bias or spec.model_dim < least_dim or width >= spec.head_dim:
        raise ValueError(
            f"construct(num_layers={spec.num_layers}, num_kv_heads={spec.num_kv_heads}, "
            f"groups={spec.groups}, model_dim={spec.model_dim}, qkv_bias={spec.qkv_bias}) has no place for "
            "the circuit: it needs four layers, four KV heads, groups of two, q / k / v biases and "
            f"model_dim >= {least_dim}. Use start: one in the config, or a larger model."
        )
    rng = np.random.default_rng(seed)
    layout = channels(width, spec.model_dim)
    layers = [
        inputs_first({name: np.array(leaf, np.float32) for name, leaf in p.items()}) for p in params["layers"]
    ]
    for layer in layers:  # the random parts are made quiet
        layer["wo"] *= QUIET
        layer["w_down"] *= QUIET
    turn = np.linalg.qr(rng.normal(size=(width, width)))[0]
    embed = _embed(spec, layout, turn, counts, rng)
    size = np.sqrt(np.mean(np.square(embed), dtype=np.float64))
    _look_back(spec, layers[0], layout, turn, size)
    # Behind layer 0: face and marks as they stand, the frequency channel, no name.
    energy = np.square(embed).sum(1).mean() - width * NAME**2 + len(DISTANCES) * width * MARK**2
    size = np.sqrt(energy / (spec.model_dim - OFTEN**2))
    name_queries = [
        head * spec.groups + i for head, backs in enumerate(BACK) for i, d in enumerate(backs) if d == 0
    ]
    for query in name_queries:
        layers[0]["wo"][query, width, layout.often] = OFTEN * size / len(name_queries)
        layers[0]["bv"][query // spec.groups, width] = 1.0
    _topic(spec, layers[1], 2, layout, size)
    writers = sum(map(len, COPIES.values()))
    written = AGREED / (GAINS["name"] * width * NAME)  # of the normed stream, in each channel of a name
    for index, distances in COPIES.items():
        for head, distance in enumerate(distances):
            write = written * size**2 / FACE / writers * turn
            _copy(spec, layers[index], head, distance, layout, size, write, spread, rng)
    for index, distances in LOOKS_UP.items():
        write = HEARD * written * size**2 / FACE / writers * turn
        _look_up(spec, layers[index], 2, distances, layout, size, write, spread, rng)
    final = np.zeros(spec.model_dim, np.float32)
    places: dict[str, Any] = {
        "face": layout.face,
        "name": layout.name,
        "often": layout.often,
        "free": layout.free,
    }
    for name, place in (*places.items(), *(("mark", place) for place in layout.marks)):
        final[place] = GAINS[name]
    final[layout.sink] = GAINS["free"]
    layers = list(map(inputs_last, layers))
    return params | {"layers": layers, "embed": embed.astype(np.float32), "final_norm": final}


def _embed(
    spec: ModelSpec, layout: Channels, turn: np.ndarray, counts: np.ndarray | None, rng: np.random.Generator
) -> np.ndarray:
    faces = rng.normal(size=(spec.vocab_size, len(turn)))
    faces *= np.sqrt(len(turn)) / np.linalg.norm(faces, axis=1, keepdims=True)
    embed = FREE * rng.normal(size=(spec.vocab_size, spec.model_dim))
    embed[:, layout.face], embed[:, layout.name] = FACE * faces, NAME * faces @ turn
    embed[:, layout.often] = embed[:, layout.sink] = 0.0
    if counts is not None:
        logs = np.log(counts + 1.0)
        embed[:, layout.often] = (logs - logs.mean()) / (OFTEN * GAINS["often"])
    embed[BOS] = 0.0
    embed[BOS, layout.sink] = FACE * np.sqrt(2 * len(turn))  # as large as the others
    return embed


def _look_back(spec: ModelSpec, layer: Params, layout: Channels, turn: np.ndarray, size: float) -> None:
    """``size`` is the stream's root mean square."""
    freq = spec.rope.frequencies(spec.head_dim)
    fast = freq > FAST
    width = len(turn)
    for head, backs in enumerate(BACK):
        layer["wk"][:, head] *= 0.05
        layer["bk"][head] = BIAS * np.concatenate([fast, np.zeros_like(fast)])
        layer["wv"][:, head] = 0.0
        layer["wv"][layout.face, head, :width] = np.eye(width)
        for i, back in enumerate(backs):
            query = head * spec.groups + i
            writers = sum(others.count(back) for others in BACK)
            layer["wq"][:, query] *= 0.05
            turned = np.concatenate([np.cos(back * freq) * fast, -np.sin(back * freq) * fast])
            layer["bq"][query] = BIAS * turned
            layer["wo"][query] = 0.0
            if back == 0:
                layer["wo"][query, :width, layout.name] = -NAME * size / FACE / writers * turn
            else:
                layer["wo"][query, :width, layout.marks[back - 1]] = (
                    MARK * size / FACE / writers * np.eye(width)
                )


def _topic(spec: ModelSpec, layer: Params, head: int, layout: Channels, size: float) -> None:
    """The head that looks at the rarest of the last tokens."""
    dim, width = spec.head_dim, layout.face.stop
    slot = dim // 2 - 1  # of the slowest rotary pair
    fall = _falls(spec)
    layer["wk"][:, head] = 0.0
    layer["wk"][layout.often, head, slot] = -1.0
    layer["wk"][layout.sink, head, slot] = -2.0
    layer["bk"][head] = fall
    layer["wv"][:, head] = 0.0
    layer["wv"][layout.face, head, :width] = np.eye(width)
    for i in range(spec.groups):
        query = head * spec.groups + i
        layer["wq"][:, query] = 0.0
        layer["bq"][query] = NEAR[i % 2] * np.sqrt(dim) * fall / fall.sum()
        layer["bq"][query, slot] = RARE * np.sqrt(dim)
        layer["wo"][query] = 0.0
        layer["wo"][query, :width, layout.topic] = MARK * size / FACE / spec.groups * np.eye(width)


def _falls(spec: ModelSpec) -> np.ndarray:
    """[H], 1 on the first half of each rotary pair whose product falls with distance."""
    freq = spec.rope.frequencies(spec.head_dim)
    inside = (freq > FALL[0]) & (freq < FALL[1])
    return np.concatenate([inside, np.zeros_like(inside)]).astype(np.float32)


def _copy(
    spec: ModelSpec,
    layer: Params,
    head: int,
    distance: int,
    layout: Channels,
    size: float,
    write: np.ndarray,
    spread: float,
    rng: np.random.Generator,
) -> None:
    dim, width = spec.head_dim, len(write)
    slow = np.flatnonzero(spec.rope.frequencies(dim) < SLOW)[:-1]
    slots = np.concatenate([slow, slow + dim // 2])  # both halves of each slow rotary pair
    sink = dim // 2 - 1  # the slowest one
    bos = FACE * np.sqrt(2 * width)
    loud = np.sqrt(spec.model_dim) * bos / np.hypot(bos, OFTEN * size)  # its channel in the normed stream
    layer["wk"][:, head] = 0.0
    layer["wk"][layout.sink, head, sink] = 1.0
    layer["wk"][layout.marks[distance - 1], head, slots] = np.eye(width)
    layer["wv"][:, head] = 0.0
    layer["wv"][layout.face, head, :width] = np.eye(width)
    for i in range(spec.groups):
        query = head * spec.groups + i
        back = distance - 1 if i == 0 else 0
        reads, seen = (layout.marks[back - 1], MARK) if back else (layout.face, FACE)
        gain = SHARP * np.sqrt(dim) / (width * (seen / size) * (MARK / size))
        reader = np.zeros((spec.model_dim, width))
        reader[reads] = gain * np.eye(width)
        if spread:
            reader += spread * gain * rng.normal(size=reader.shape) / np.sqrt(spec.model_dim)
        layer["wq"][:, query] = 0.0
        layer["wq"][:, query, slots] = reader
        layer["bq"][query] = 0.0
        layer["bq"][query, sink] = SINK * np.sqrt(dim) / loud
        layer["wo"][query] = 0.0
        if i == 0 or distance == 1:
            writers = spec.groups if distance == 1 else 1
            layer["wo"][query, :width, layout.name] = write / writers


def _look_up(
    spec: ModelSpec,
    layer: Params,
    head: int,
    distances: tuple[int, ...],
    layout: Channels,
    size: float,
    write: np.ndarray,
    spread: float,
    rng: np.random.Generator,
) -> None:
    dim, width = spec.head_dim, len(write)
    slow = np.flatnonzero(spec.rope.frequencies(dim) < SLOW)[:-1]
    slots, sink = np.concatenate([slow, slow + dim // 2]), dim // 2 - 1
    bos = FACE * np.sqrt(2 * width)
    loud = np.sqrt(spec.model_dim) * bos / np.hypot(bos, OFTEN * size)
    fall = _falls(spec)
    layer["wk"][:, head] = 0.0
    layer["wk"][layout.sink, head, sink] = 1.0
    for distance in distances:
        layer["wk"][layout.marks[distance - 1], head, slots] = np.eye(width)
    layer["bk"][head] = fall
    layer["wv"][:, head] = 0.0
    layer["wv"][layout.face, head, :width] = np.eye(width)
    for i in range(spec.groups):
        query = head * spec.groups + i
        gain = SHARP * np.sqrt(dim) / (width * (MARK / size) ** 2)
        reader = np.zeros((spec.model_dim, width))
        reader[layout.topic] = gain * np.eye(width)
        reader += spread * gain * rng.normal(size=reader.shape) / np.sqrt(spec.model_dim)
        layer["wq"][:, query] = 0.0
        layer["wq"][:, query, slots] = reader
        layer["bq"][query] = -FAR * np.sqrt(dim) * fall / fall.sum()
        layer["bq"][query, sink] = SINK * np.sqrt(dim) / loud
        layer["wo"][query] = 0.0
        layer["wo"][query, :width, layout.name] = write / spec.groups
