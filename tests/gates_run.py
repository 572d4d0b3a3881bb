"""The embedded model under its shipped write gates: a program for one process, or for ``kvjax.launch``.

    python tests/gates_run.py FILE write|read MESH

Writes a state, or goes on from one. A line of JSON: the model's fingerprint, the label of the gates, what the
state holds, and the text after it.
"""

from __future__ import annotations

import json
import sys

from mesh_run import reshard  # first: it says how many devices there are

import jax  # isort: skip
import numpy as np

import kvjax
from kvjax import weights
from kvjax.sharding.mesh import ONE


def main() -> None:
    file, what, mesh = sys.argv[1:]
    model, policy = kvjax.load(mesh=mesh), kvjax.policy("wg-kv")
    gates = weights.find(policy, model)
    if what == "write":
        prompt = np.random.default_rng(3).integers(3, 200, 400)
        state, logits = kvjax.prefill(model, policy, [prompt], context=512, weights=gates.weights)
        extra = {"logits": state.mesh.read(logits)}
        kvjax.save(state, file, model=model, policy=policy, label=gates.label, extra=extra)
    saved = kvjax.open(file, model=model, policy=policy, label=gates.label)
    held = [
        [int(x) for x in np.asarray(cache.pages.length).ravel()] for cache in reshard(saved.state, ONE).layers
    ]
    logits, text = saved.state.mesh.put(saved.extra["logits"]), []
    how = {"max_new_tokens": 12, "stops": (), "weights": gates.weights}
    for piece, _ in kvjax.stream(model, policy, saved.state, logits, **how):
        text += piece.ravel().tolist()
    line = {"model": weights.fingerprint(model), "label": gates.label, "held": held, "text": text}
    if jax.process_index() == 0:
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
