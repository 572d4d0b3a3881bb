"""An engine on a mesh of virtual devices beside one on one device: a program, since JAX counts devices once.

    python tests/engine/engine_mesh.py MESH [N ...]          of POLICIES

Prints what differs as a line of JSON. Rows of several policies come and go in small batches, and a context is
kept, saved and continued.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import mesh_run  # takes eight devices, and the compiler's short way, before jax is imported
import numpy as np

import kvjax
from kvjax import decode
from kvjax.algebra import Policy
from kvjax.engine import Engine, Request
from kvjax.sharding.mesh import ONE, Mesh
from kvjax.weights import save_weights

POLICIES = (
    "full",
    "snapkv(6) + ada(20)",
    "tova + uniform(22, every_step) + int8(8)",
    "duo(0.5, window=12)",  # looks at the weights of all layers; what it makes of them is a row's own
    "write_gate(0.5, window=12) + phi(4)",
)
SIZES: dict[str, Any] = {"max_rows": 2, "context": 72, "chunk": 16, "segment": 4, "page": 8}


def learned(policy: str, home: Path) -> dict[str, Path]:
    """Files of random weights of its parts, by their names."""
    model, files = mesh_run.model(), {}
    for part in kvjax.policy(policy).learned:
        files[part.name] = home / f"{part.name}.safetensors"
        save_weights(files[part.name], model, part, part.example_weights(jax.random.key(1), model.network))
    return files


def served(on: Mesh, policies: list[str], home: Path) -> dict[str, Any]:
    """Texts, what rows held at their end, pages that are left over."""
    model = mesh_run.model()
    sources = {policy: learned(policy, home) or None for policy in policies}
    sharded = model if on == ONE else decode.on_mesh(model, Policy(), {}, on)[0]
    prompts = mesh_run.prompts()
    requests = [
        Request(
            prompt=prompts[at],
            max_new_tokens=6 + 2 * at,
            policy=policy,
            weights=sources[policy],
            logprobs=0,
            inspect=True,
        )
        for policy in policies
        for at in (0, 1, 3)
    ]
    with Engine(sharded, kv_memory=1 << 24, **SIZES) as engine:
        tickets = [engine.submit(request) for request in requests]
        events = [list(ticket) for ticket in tickets]
        engine.metrics()  # after the segment in which the last of them ended
        inspections = [engine.inspect(ticket) for ticket in tickets]
        kv = [ticket.usage.kv for ticket in tickets]
        engine.contexts.create("kept", prompts[2], policy="full")
        engine.contexts.save(home / "contexts")
        engine.contexts.delete("kept")
        engine.contexts.load(home / "contexts")
        onward = Request(prompt=[3, 4], context="kept", max_new_tokens=5, logprobs=0)
        events.append(list(engine.submit(onward)))
        left = [(batch.pages, batch.pages_used, batch.rows) for batch in engine.metrics().batches]
    return {
        "tokens": [[event.token for event in row] for row in events],
        "logprobs": [[event.logprob or 0.0 for event in row] for row in events],
        "held": [[[h.ring, h.pages, h.codes] for layer in one.heads for h in layer] for one in inspections],
        "live": [(one.live, one.layers.tolist()) for one in kv],
        "left": left,
    }


def main() -> None:
    policies = [POLICIES[int(at)] for at in sys.argv[2:]] or list(POLICIES)
    with tempfile.TemporaryDirectory() as one_home, tempfile.TemporaryDirectory() as home:
        one = served(ONE, policies, Path(one_home))
        many = served(kvjax.mesh(sys.argv[1]), policies, Path(home))
    apart = [np.abs(np.subtract(a, b)).max() for a, b in zip(one["logprobs"], many["logprobs"])]
    same = [
        all(np.array_equal(x, y) for a, b in zip(left, right) for x, y in zip(a, b))
        for left, right in zip(one["held"], many["held"])
    ]
    result = {
        "tokens": one["tokens"] == many["tokens"],
        "logprobs": float(max(apart)),
        "held": all(same),
        "live": one["live"] == many["live"],
        "used": [used for _, used, _ in many["left"]],
        "slots": sum(len(x) for row in many["held"] for head in row for x in head),
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
