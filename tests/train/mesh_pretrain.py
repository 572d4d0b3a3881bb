"""A few steps of pretraining on a mesh, from a config of its own: a program for one process or several.

    python tests/train/mesh_pretrain.py FOLDER DATA TENSOR STEPS [SECONDS]

Batches are random ids; the loss, the layout and the loop are those of ``train.embedded.pretrain``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import grain.python as grain
import jax
import numpy as np
import optax

from train import loop
from train.embedded import data, pretrain
from train.embedded.setup import initial_of
from train.rows import ANSWER

CONFIG: dict[str, Any] = {
    "seed": 0,
    "model": {
        **{"vocab_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64},
        **{"model_dim": 256, "mlp_dim": 96, "max_positions": 64, "theta": 1e4, "dtype": "float32"},
    },
    "attention": {"block": 16, "remat": True},
    "mix": {"tokens": 128, "levels": [{"lengths": [32]}]},
}


class Rows:
    """Batch i is a pure function of i."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng((3, int(index)))
        tokens = rng.integers(3, 64, (4, 32)).astype(np.int32)
        weight = np.where(np.arange(32) % 8 > 5, ANSWER, 0.5) * np.ones((4, 1))
        return {"tokens": tokens, **data.choose_scored(rng, tokens, weight, 48)}


def main() -> None:
    folder, sizes = Path(sys.argv[1]), list(map(int, sys.argv[2:5]))
    seconds = float(sys.argv[5]) if len(sys.argv) > 5 else None
    config = CONFIG | {"mesh": {"data": sizes[0], "tensor": sizes[1]}}
    layout, params = pretrain.make_layout(config), initial_of(config)
    if layout is not None:
        params = layout.put(params, layout.backbone(params))
        cut = [leaf.sharding.spec for leaf in jax.tree.leaves(params)]
        assert sum(any(axes) for axes in cut) > len(cut) // 2
    loop.train(
        params=params,
        # With a small eps Adam goes by signs, and rounding turns those of gradients near nought.
        optimizer=optax.adamw(1e-3, eps=0.1),
        loss=pretrain.make_loss_of(config, layout),
        layout=layout,
        batches=lambda level: grain.MapDataset.source(Rows()),
        folder=folder,
        plan=loop.Cadence(steps=sizes[2], log_every=1, seconds=seconds),
    )


if __name__ == "__main__":
    main()
