"""Runs a model over a corpus once and stores queries, keys and values: traces, for rankers and φ maps.

python -m train.traces --config configs/ranker/embedded.yaml
python -m train.traces --config configs/ranker/embedded.yaml --model FOLDER --out DIR

Every layer and head is stored; attention is recomputed from them when it is needed. A run that was stopped
continues where it was (``train.trace_file``).
"""

from __future__ import annotations

import argparse
import functools
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from kvjax import cli
from kvjax.models.quantised import refuse
from kvjax.types import Heads, Network, Params
from kvjax.weights import fingerprint
from pallas_kernels.blockwise.api import blockwise
from train import trace_file, trace_rows
from train.config import ConfigError
from train.ranker import settings as ranker
from train.trace_file import Manifest, TraceError

if TYPE_CHECKING:
    from jaxtyping import Array, Int

    from kvjax.loading import LanguageModel

QKV = tuple["Array", "Array", "Array", "Array"]
"""q, k, k_pre and v of a layer, [heads, T, H]."""


@functools.partial(jax.jit, static_argnames=("network", "index"))
def _layer(network: Network, index: int, block: Params, x: Array, at: Array) -> tuple[Array, QKV]:
    def attend(_layer: int, heads: Heads, carry: QKV | None) -> tuple[Array, QKV]:
        q, k, k_pre, v = (jnp.swapaxes(part, 1, 2) for part in (heads.q, heads.k, heads.k_pre, heads.v))
        out, _lse = blockwise(q, k, v, q_pos=at, k_pos=at, softcap=heads.softcap)
        return jnp.swapaxes(out, 1, 2).astype(heads.v.dtype), (q[0], k[0], k_pre[0], v[0])

    x, qkv = network.layer(block, index, x, at, attend, None)
    assert qkv is not None  # attend has run
    return x, qkv


def trace(model: LanguageModel, manifest: Manifest, tokens: Int[np.ndarray, " T"]) -> dict[str, np.ndarray]:
    """The stored arrays of one sequence, computed layer by layer to hold one layer's heads at a time.

    Raises:
      TraceError: values that are not finite in ``manifest.dtype``.
    """
    network, at = model.network.at(len(tokens)), jnp.arange(len(tokens))[None]
    queries, dtype = manifest.query_positions(len(tokens)), np.dtype(manifest.dtype)
    x = network.embed(model.params, jnp.asarray(tokens)[None], at)
    stored: dict[str, list[np.ndarray]] = {"q": [], "k": [], "v": []}
    if "pre" in manifest.keys:
        stored["k_pre"] = []
    for index, block in enumerate(model.params["layers"]):
        x, (q, k, k_pre, v) = _layer(network, 0, block, x, at)  # all layers have the same program
        layer = {"q": q[:, queries], "k": k, "v": v, "k_pre": k_pre}
        for name, layers in stored.items():
            with np.errstate(over="ignore"):
                layers.append(np.asarray(layer[name].astype(jnp.float32)).astype(dtype))
            if not np.isfinite(layers[-1]).all():
                raise TraceError(
                    f"layer {index}: {name} is not finite in {dtype}. Store traces.dtype: float32, or repair "
                    "the model."
                )
    arrays = {name: np.stack(layers) for name, layers in stored.items()}
    return arrays | {"tokens": np.asarray(tokens, np.int32), "at": queries}


def describe(settings: ranker.Settings, model: LanguageModel) -> Manifest:
    """The manifest of a run.

    Raises:
      ConfigError: a model whose traces cannot be made, or lengths it was not trained for.
    """
    refuse(model.params, "training")
    network, recording = model.network, settings.recording
    if any(window is not None for window in network.windows):
        family = getattr(getattr(network, "spec", None), "family", "model")
        raise ConfigError(
            f"traces of a {family} with sliding-window layers: such a layer is a ring already and takes "
            "no eviction. Choose a model whose layers all attend fully."
        )
    if getattr(getattr(network, "spec", None), "sinks", False):
        raise ConfigError(
            "traces of a model with attention sinks: no objective here has a term for them. Choose a model "
            "without."
        )
    if max(recording.lengths) > network.max_positions:
        raise ConfigError(
            f"traces.lengths: {max(recording.lengths)} tokens, the model was trained for "
            f"{network.max_positions}. Give shorter ones."
        )
    settings.check_length(min(recording.lengths))
    return Manifest(
        model=Path(model.name).name,
        fingerprint=fingerprint(model),
        parameters=sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(model.params)),
        layers=network.num_layers,
        heads=network.num_heads,
        kv_heads=network.num_kv_heads,
        head_dim=network.head_dim,
        softcap=_softcap(model),
        dtype=recording.dtype,
        keys=recording.keys,
        queries=recording.queries,
        shard=recording.shard,
        lengths=tuple(trace_rows.length(settings, i) for i in range(recording.sequences + recording.held)),
        train=recording.sequences,
        seed=settings.seed,
        data=recording.data,
    )


def _softcap(model: LanguageModel) -> float | None:
    """What the layers hand to attention; nothing is computed."""
    network, at, caps = model.network, jnp.zeros((1, 1), jnp.int32), []

    def attend(_layer: int, heads: Heads, carry: None) -> tuple[Array, None]:
        caps.append(heads.softcap)
        return heads.q, carry

    def first(params: Params) -> Array:
        return network.layer(params["layers"][0], 0, network.embed(params, at, at), at, attend, None)[0]

    jax.eval_shape(first, model.params)
    return caps[0]


def run(settings: ranker.Settings, folder: Path) -> None:
    """Writes the files of a config's traces that are missing.

    Raises:
      ConfigError, ModelError: see ``describe``, ``train.trace_rows``; a disk that is too small.
    """
    model = settings.model()
    manifest = describe(settings, model)
    sequences = trace_rows.sequences(settings, model.text)
    lengths, bytes_of = manifest.lengths, manifest.bytes
    missing = [s for s in range(manifest.shards) if not trace_file.shard_path(folder, s).exists()]
    size = {shard: sum(bytes_of(lengths[i]) for i in manifest.of_shard(shard)) for shard in missing}
    total, need = sum(bytes_of(n) for n in lengths), sum(size.values())
    print(
        f"{len(lengths)} sequences of {min(lengths)} to {max(lengths)} tokens in "
        f"{manifest.shards} files: {total / 1e9:.2f} GB, {need / 1e9:.2f} GB of them to write",
        file=sys.stderr,
    )
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if need > free:
        raise ConfigError(
            f"--out {folder}: {need / 1e9:.2f} GB to write, {free / 1e9:.2f} GB are free. Give another disk, "
            "or make traces.sequences, traces.queries or traces.lengths smaller."
        )
    trace_file.write_manifest(folder, manifest)
    with tqdm(total=need, unit="B", unit_scale=True, mininterval=5) as bar:
        for shard in missing:
            arrays: dict[str, np.ndarray] = {}
            tasks = []
            for index in manifest.of_shard(shard):
                task, tokens = sequences.draw(index)
                tasks.append(task)
                arrays |= {f"{n}.{index}": x for n, x in trace(model, manifest, tokens).items()}
            trace_file.write_shard(folder, manifest, shard, tasks, arrays)
            bar.update(size[shard])


def main(words: Sequence[str] | None = None) -> int:
    """The command line; its exit code: 0, 2 for bad input."""
    return cli.run(_command, words)


def _command(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m train.traces", description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--model", help="folder or hub id, instead of the config's")
    parser.add_argument("--out", type=Path, metavar="DIR", help="instead of the config's traces.folder")
    args = parser.parse_args(words)
    settings = ranker.read(args.config, args.model)
    run(settings, args.out or settings.recording.folder)


if __name__ == "__main__":
    cli.start(main)
