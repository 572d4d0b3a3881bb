"""Somebody's own NNX model on two virtual devices beside one: a program, since JAX counts devices once.

    python tests/flax/own_mesh.py POLICY ...

One line of JSON for each policy.
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
import own_model  # noqa: E402

import kvjax  # noqa: E402
from kvjax import metrics  # noqa: E402
from kvjax.engine import Engine, Request  # noqa: E402

PROMPTS = [
    np.random.default_rng(seed).integers(0, own_model.VOCAB, n).tolist() for seed, n in ((1, 30), (2, 17))
]
NEW = 6


def served(model: kvjax.loading.OwnModel, policy: str) -> list[list[int]]:
    """What an engine writes."""
    with Engine(model, max_rows=2, context=64, page=8, kv_memory=2**26) as engine:
        tickets = [
            engine.submit(Request(prompt=prompt, max_new_tokens=NEW, policy=policy)) for prompt in PROMPTS
        ]
        return [ticket.result(300) for ticket in tickets]


def main(policies: list[str]) -> None:
    one, two = (kvjax.load(own_model.Own(), mesh=mesh) for mesh in (None, "tensor=2"))
    kernel = two.params["layers"][0]["self.q.kernel"]
    assert kernel.sharding.is_fully_replicated
    lies = jax.device_put(kernel, jax.sharding.NamedSharding(kernel.sharding.mesh, jax.P(None, "tensor")))
    module = own_model.Own()
    module.layers[0].q.kernel.value = lies
    kept = kvjax.load(module, mesh="tensor=2").params["layers"][0]["self.q.kernel"]
    for policy in policies:
        runs = [kvjax.generate(model, policy, PROMPTS, max_new_tokens=NEW) for model in (one, two)]
        held = [np.asarray(metrics.present(run.state)) for run in runs]
        print(
            json.dumps(
                {
                    "policy": policy,
                    "said": [np.asarray(run.tokens).tolist() for run in runs],
                    "served": served(two, policy),
                    "held": int(held[0].sum()),
                    "apart": int((held[0] != held[1]).sum()),
                    "ring": runs[1]
                    .state.layers[0]
                    .ring.k.sharding.shard_shape(runs[1].state.layers[0].ring.k.shape),
                    "kept": kept.sharding.shard_shape(kept.shape),
                }
            )
        )


if __name__ == "__main__":
    main(sys.argv[1:])
