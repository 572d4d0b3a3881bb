"""Calibrates what a model's queries say about its keys: directions (Q-Filters), means and covariances.

python -m train.queries --config configs/ranker/embedded.yaml --part qfilter --export FILE
python -m train.queries --config configs/ranker/embedded.yaml --part expected_attention --export FILE
python -m train.queries --config configs/ranker/embedded.yaml --part tri_attention --export FILE

Runs the model once over the training sequences that a config of traces names (``train.trace_rows``) and keeps
sums of queries and of their products, nothing else. The parts:

  qfilter             the first right singular vector of each head's queries after RoPE, turned so that their
                      sum has a positive product with it; mean over a group's heads
  expected_attention  mean and covariance of the queries before RoPE, without the first tokens (sinks)
  tri_attention       mean of the queries before RoPE, and mean length of each pair of channels that it turns
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from kvjax import cli
from kvjax.policies.expected_attention import ExpectedAttention
from kvjax.policies.qfilter import QFilter
from kvjax.policies.tri_attention import TriAttention, pair_lengths, pairs
from kvjax.types import Heads, Network, Params
from kvjax.weights import save_weights
from pallas_kernels.blockwise.api import blockwise
from train import text, trace_rows
from train.config import ConfigError
from train.ranker import settings as ranker
from train.settings import add_options

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

    from kvjax.loading import LanguageModel

PARTS = {
    "qfilter": QFilter(),
    "expected_attention": ExpectedAttention(stored=True),
    "tri_attention": TriAttention(),
}


@dataclasses.dataclass
class Moments:
    """Sums over tokens, float64.

    Attributes:
      count: of tokens.
      first: of queries.
      second: of their outer products.
      length: of the length of each channel's pair.
    """

    count: int
    first: Float[np.ndarray, "L N H"]
    second: Float[np.ndarray, "L N H H"]
    length: Float[np.ndarray, "L N H"]

    @classmethod
    def none(cls, network: Network) -> Moments:
        """Of no token."""
        shape = network.num_layers, network.num_heads, network.head_dim
        return cls(0, np.zeros(shape), np.zeros((*shape, network.head_dim)), np.zeros(shape))


@functools.partial(jax.jit, static_argnames=("network", "index", "turned", "skip"))
def _layer(
    network: Network, index: int, block: Params, x: Array, at: Array, turned: bool, skip: int
) -> tuple[Array, tuple[Array, Array, Array]]:
    """The layer's output, and the sums of its queries behind the first ``skip`` ones, as in ``Moments``."""

    def attend(_layer: int, heads: Heads, carry: Any) -> tuple[Array, tuple[Array, Array, Array]]:
        q, k, v = (jnp.swapaxes(part, 1, 2) for part in (heads.q, heads.k, heads.v))
        out, _ = blockwise(q, k, v, q_pos=at, k_pos=at, softcap=heads.softcap)
        seen = (heads.q if turned else heads.q_pre)[0, skip:].astype(jnp.float32)
        second = jnp.einsum("tni,tnj->nij", seen, seen, precision=jax.lax.Precision.HIGHEST)
        lengths = pair_lengths(seen, pairs(heads.rotate, seen.shape[-1]))
        sums = seen.sum(axis=0), second, lengths.sum(axis=0)
        return jnp.swapaxes(out, 1, 2).astype(heads.v.dtype), sums

    return network.layer(block, index, x, at, attend, None)  # type: ignore[arg-type]


def add(
    moments: Moments, model: LanguageModel, tokens: Int[np.ndarray, " T"], *, turned: bool, skip: int
) -> None:
    """Adds one sequence.

    Args:
      moments: added to in place.
      model: whose queries they are.
      tokens: of the sequence.
      turned: queries after RoPE, else before.
      skip: first tokens that do not count.
    """
    network, at = model.network.at(len(tokens)), jnp.arange(len(tokens))[None]
    x = network.embed(model.params, jnp.asarray(tokens)[None], at)
    alike = not getattr(getattr(network, "spec", None), "unturned", ())  # then one program serves all layers
    for index, block in enumerate(model.params["layers"]):
        x, sums = _layer(network, 0 if alike else index, block, x, at, turned, skip)
        moments.first[index] += np.asarray(sums[0], np.float64)
        moments.second[index] += np.asarray(sums[1], np.float64)
        moments.length[index] += np.asarray(sums[2], np.float64)
    moments.count += max(len(tokens) - skip, 0)


def filters(moments: Moments, kv_heads: int) -> list[Params]:
    """The weights of ``qfilter``."""
    vectors = np.linalg.eigh(moments.second)[1][..., -1]
    vectors *= np.where((vectors * moments.first).sum(axis=-1, keepdims=True) < 0, -1, 1)
    layers, _, h = vectors.shape
    return [{"filter": layer} for layer in vectors.reshape(layers, kv_heads, -1, h).mean(axis=2)]


def statistics(moments: Moments) -> list[Params]:
    """The weights of ``expected_attention(stored=True)``."""
    mean = moments.first / moments.count
    covariance = moments.second / moments.count - mean[..., :, None] * mean[..., None, :]
    return [{"mean": m, "covariance": c} for m, c in zip(mean, covariance)]


def centres(moments: Moments) -> list[Params]:
    """The weights of ``tri_attention``."""
    both = zip(moments.first / moments.count, moments.length / moments.count)
    return [{"mean": mean, "length": length} for mean, length in both]


def run(settings: ranker.Settings, name: str, file: Path, dtype: Any) -> None:
    """Calibrates a part and writes its weights.

    Raises:
      ConfigError, ModelError: sliding windows; see ``train.trace_rows``.
    """
    model, part, recording = settings.model(), PARTS[name], settings.recording
    if any(window is not None for window in model.network.windows):
        raise ConfigError(
            "calibration of a model with sliding-window layers: such a layer takes no eviction. Choose a "
            "model whose layers all attend fully."
        )
    sequences, moments = trace_rows.sequences(settings, model.text), Moments.none(model.network)
    turned, skip = name == "qfilter", getattr(part, "sinks", 0)
    for index in tqdm(range(recording.sequences), mininterval=5):
        add(moments, model, sequences.draw(index)[1], turned=turned, skip=skip)
    if turned:
        layers = filters(moments, model.network.num_kv_heads)
    else:
        layers = centres(moments) if name == "tri_attention" else statistics(moments)
    source = recording.data.get("kind", "rows")
    if source == "rows":
        source = "stand-in" if text.data_folder() is None else "books"
    notes = {"tokens": moments.count, "config": settings.name, "seed": settings.seed, "text": source}
    save_weights(file, model, part, layers, notes=notes, dtype=dtype)
    print(f"{file} holds the weights of {name}, from {moments.count:,} tokens")


def main(words: Sequence[str] | None = None) -> int:
    """The command line; its exit code: 0, 2 for bad input."""
    return cli.run(_command, words)


def _command(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m train.queries", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--config", type=Path, required=True, help="of traces, as configs/ranker/embedded.yaml"
    )
    parser.add_argument("--part", choices=sorted(PARTS), required=True, help="whose weights are made")
    parser.add_argument("--export", type=Path, metavar="FILE", required=True, help="written, or replaced")
    add_options(parser)
    args = parser.parse_args(words)
    run(ranker.read(args.config, args.model), args.part, args.export, args.export_dtype)


if __name__ == "__main__":
    cli.start(main)
