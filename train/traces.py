"""Runs a model over a corpus once and stores what its heads saw: traces, on which rankers are trained.

python -m train.traces --config configs/ranker/embedded.yaml
python -m train.traces --config configs/ranker/embedded.yaml --model FOLDER --out DIR

Queries, keys and values of every layer and head; attention is computed from them again when it is needed. A
run that was stopped goes on where it was when it is started again (``train.trace_file``).
"""

from __future__ import annotations

import argparse
import functools
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from kvjax.models.hf import ModelError
from kvjax.types import Heads, Network, Params
from kvjax.weights import fingerprint
from pallas_kernels.blockwise.api import blockwise
from train import trace_file, trace_rows
from train.config import ConfigError
from train.ranker import settings as ranker
from train.trace_file import About, TraceError

if TYPE_CHECKING:
    from jaxtyping import Array, Int

    from kvjax.loading import LanguageModel

Seen = tuple["Array", "Array", "Array", "Array"]
"""q, k, k_pre and v of a layer, [heads, T, H]."""


@functools.partial(jax.jit, static_argnames=("network", "index"))
def _layer(network: Network, index: int, block: Params, x: Array, at: Array) -> tuple[Array, Seen]:
    def attend(_layer: int, heads: Heads, carry: Seen | None) -> tuple[Array, Seen]:
        del carry
        q, k, k_pre, v = (jnp.swapaxes(part, 1, 2) for part in (heads.q, heads.k, heads.k_pre, heads.v))
        out, _lse = blockwise(q, k, v, q_pos=at, k_pos=at, softcap=heads.softcap)
        return jnp.swapaxes(out, 1, 2).astype(heads.v.dtype), (q[0], k[0], k_pre[0], v[0])

    x, seen = network.layer(block, index, x, at, attend, None)
    assert seen is not None  # noqa: S101  (attend has run)
    return x, seen


def trace(model: LanguageModel, about: About, tokens: Int[np.ndarray, " T"]) -> dict[str, np.ndarray]:
    """One sequence as it is stored; layer by layer, so that one layer's heads are on the device at a time.

    Raises:
      TraceError: values that are no numbers in ``about.dtype``.
    """
    network, at = model.network.at(len(tokens)), jnp.arange(len(tokens))[None]
    asked, dtype = about.asked(len(tokens)), np.dtype(about.dtype)
    x = network.embed(model.params, jnp.asarray(tokens)[None], at)
    found: dict[str, list[np.ndarray]] = {"q": [], "k": [], "v": []}
    if "pre" in about.keys:
        found["k_pre"] = []
    for index, block in enumerate(model.params["layers"]):
        x, (q, k, k_pre, v) = _layer(network, 0, block, x, at)  # all layers are alike: one program
        given = {"q": q[:, asked], "k": k, "v": v, "k_pre": k_pre}
        for name, kept in found.items():
            with np.errstate(over="ignore"):
                kept.append(np.asarray(given[name].astype(jnp.float32)).astype(dtype))
            if not np.isfinite(kept[-1]).all():
                raise TraceError(
                    f"layer {index}: {name} is no number in {dtype}. Store traces.dtype: float32, or repair "
                    "the model."
                )
    arrays = {name: np.stack(kept) for name, kept in found.items()}
    return arrays | {"tokens": np.asarray(tokens, np.int32), "at": asked}


def describe(settings: ranker.Settings, model: LanguageModel) -> About:
    """The manifest of a run.

    Raises:
      ConfigError: a model whose traces cannot be made, or lengths it was not trained for.
    """
    spec, asked = model.spec, settings.recording
    if any(window is not None for window in spec.windows):
        raise ConfigError(
            f"traces of a {spec.family} with sliding-window layers: such a layer is a ring already and takes "
            "no eviction. Choose a model whose layers all attend fully."
        )
    if max(asked.lengths) > spec.max_positions:
        raise ConfigError(
            f"traces.lengths: {max(asked.lengths)} tokens, the model was trained for {spec.max_positions}. "
            "Give shorter ones."
        )
    settings.check_length(min(asked.lengths))
    return About(
        model=Path(model.name).name,
        fingerprint=fingerprint(model),
        parameters=sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(model.params)),
        layers=spec.num_layers,
        heads=spec.num_heads,
        kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        softcap=spec.attn_softcap,
        dtype=asked.dtype,
        keys=asked.keys,
        queries=asked.queries,
        shard=asked.shard,
        lengths=tuple(trace_rows.length(settings, i) for i in range(asked.sequences + asked.held)),
        train=asked.sequences,
        seed=settings.seed,
        data=asked.data,
    )


def run(settings: ranker.Settings, folder: Path) -> None:
    """Makes what is missing of a config's traces.

    Raises:
      ConfigError, ModelError: see ``describe``, ``train.trace_rows``; a disk that is too small.
    """
    model = settings.model()
    about = describe(settings, model)
    drawn = trace_rows.sequences(settings, model.text)
    left = [shard for shard in range(about.shards) if not trace_file.file(folder, shard).exists()]
    size = {shard: sum(about.bytes(about.lengths[i]) for i in about.of_shard(shard)) for shard in left}
    total, need = sum(about.bytes(n) for n in about.lengths), sum(size.values())
    print(
        f"{len(about.lengths)} sequences of {min(about.lengths)} to {max(about.lengths)} tokens in "
        f"{about.shards} files: {total / 1e9:.2f} GB, {need / 1e9:.2f} GB of them to write",
        file=sys.stderr,
    )
    there = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(there).free
    if need > free:
        raise ConfigError(
            f"--out {folder}: {need / 1e9:.2f} GB to write, {free / 1e9:.2f} GB are free. Give another disk, "
            "or make traces.sequences, traces.queries or traces.lengths smaller."
        )
    trace_file.begin(folder, about)
    with tqdm(total=need, unit="B", unit_scale=True, mininterval=5) as bar:
        for shard in left:
            arrays: dict[str, np.ndarray] = {}
            tasks = []
            for index in about.of_shard(shard):
                task, tokens = drawn.draw(index)
                tasks.append(task)
                arrays |= {f"{n}.{index}": x for n, x in trace(model, about, tokens).items()}
            trace_file.write(folder, about, shard, tasks, arrays)
            bar.update(size[shard])


def main(words: list[str] | None = None) -> int:
    """The command line; its exit code: 0, 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m train.traces", description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--model", help="folder or hub id, instead of the config's")
    parser.add_argument("--out", type=Path, metavar="DIR", help="instead of the config's traces.folder")
    args = parser.parse_args(words)
    try:
        settings = ranker.read(args.config, args.model)
        run(settings, args.out or settings.recording.folder)
    except (ConfigError, ModelError) as reason:
        print(f"error: {reason}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
