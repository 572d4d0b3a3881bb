"""A model on two virtual devices beside one: a program, since JAX counts devices once.

    python tests/two_devices.py FOLDER POLICY [WEIGHT_DTYPE]

One line of JSON.
"""

from __future__ import annotations

import json
import os
import sys

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"

import compiler

compiler.take_the_short_way()

import jax  # noqa: E402
import numpy as np  # noqa: E402

import kvjax  # noqa: E402
from kvjax import decode, metrics  # noqa: E402
from kvjax.models import quantised  # noqa: E402
from kvjax.sharding.mesh import mesh_of  # noqa: E402
from kvjax.weights import fingerprint  # noqa: E402

LENGTHS, NEW = (45, 30), 8


def main(folder: str, policy: str, weight_dtype: str | None = None) -> None:
    one = kvjax.load(folder, "float32", weight_dtype=weight_dtype)
    two = kvjax.load(folder, "float32", weight_dtype=weight_dtype, mesh="tensor=2")
    draw = np.random.default_rng(0)
    prompts = [draw.permutation(one.spec.vocab_size)[:length].tolist() for length in LENGTHS]
    lives = {"one": (one, None), "two": (two, None), "moved": (one, "tensor=2")}
    said = {
        name: np.asarray(
            kvjax.generate(model, policy, prompts, max_new_tokens=NEW, stops=(), mesh=mesh).tokens
        ).tolist()
        for name, (model, mesh) in lives.items()
    }
    if weight_dtype:
        quantised.TILE = 1024  # less than any weight
    read = [kvjax.prefill(model, policy, prompts, context=64) for model in (one, two)]
    logits = [np.asarray(last) for _, last in read]
    held = [np.asarray(metrics.present(state)) for state, _ in read]
    shapes = {
        jax.tree_util.keystr(path): [leaf.shape, leaf.sharding.shard_shape(leaf.shape)]
        for path, leaf in jax.tree_util.tree_leaves_with_path(two.params["layers"][0])
    }
    print(
        json.dumps(
            {
                "said": said,
                "fingerprints": [fingerprint(one), fingerprint(two)],
                "apart": float(np.abs(logits[0] - logits[1]).max()),
                "held": [int(x.sum()) for x in held],
                "held_apart": int((held[0] != held[1]).sum()),
                "shapes": shapes,
                "floats": _floats(two, policy) if weight_dtype else [],
            }
        )
    )


def _floats(model: kvjax.loading.LanguageModel, policy: str) -> list[int]:
    """Sizes of the floating arrays that a device's program of a decode step writes."""
    where, chosen = mesh_of(model.params), kvjax.policy(policy)
    state, _ = kvjax.prefill(model, chosen, [[1, 2], [3, 4]], context=16)
    token, active = where.put(np.zeros(2, np.int32)), where.put(np.ones(2, bool))
    lowered = decode.step_program.lower(model.network, chosen, model.params, {}, state, token, active)
    arrays = compiler.written(compiler.compiled_in_full(lowered).as_text())
    return sorted({size for dtype, size, _ in arrays if dtype.startswith(("f", "bf"))})


if __name__ == "__main__":
    main(*sys.argv[1:])
