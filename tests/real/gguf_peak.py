"""Loads a model and prints what that took, in bytes: ``python tests/real/gguf_peak.py FILE.gguf``.

A process of its own, since the kernel counts the highest resident size (VmHWM) from its start.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import jax

import kvjax
from kvjax.models import hf  # noqa: F401  imported before the count begins
from kvjax.models.gguf_file import read_header


def highest() -> int:
    return 1024 * int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def main() -> None:
    import gguf  # noqa: F401

    jax.numpy.zeros(8).block_until_ready()
    before = highest()
    model = kvjax.load(sys.argv[1])
    jax.block_until_ready(model.params)
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    shapes = [tensor.shape for tensor in read_header(Path(sys.argv[1])).tensors.values()]
    largest = 4 * max(shape[0] * shape[-1] for shape in shapes)
    print(json.dumps({"peak": highest() - before, "weights": weights, "largest": largest}))


if __name__ == "__main__":
    main()
