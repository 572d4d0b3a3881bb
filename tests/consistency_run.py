"""One process of several, given other things than process 0: a program for ``kvjax.launch``.

    python -m kvjax.launch --local 2 --devices 1 -- tests/consistency_run.py FOLDER OTHER STATES

Prints what each call is refused with, and whether both write what one device does, as one line of JSON.
OTHER holds a model like FOLDER's, trained on; STATES two states of the tiny model, "first" and "other".
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tiny

import kvjax
from kvjax import decode, launch
from kvjax.algebra import Policy
from kvjax.models import hf
from kvjax.sharding.consistency import check_consistent


def refused(call: Callable[[], Any]) -> str:
    try:
        call()
    except kvjax.MeshError as error:
        return str(error)
    return ""


def main() -> None:
    folder, other, states = sys.argv[1:]
    first, mesh = jax.process_index() == 0, kvjax.mesh("tensor=2")
    model, prompts = tiny.model(), [tiny.prompt(9)]
    more = jax.tree.map(lambda x: -x, model.params)
    trained = model if first else tiny.Tiny(model.network, more)
    sharded = decode.on_mesh(model, Policy(), {}, mesh)[0]
    gates = {"admission": [{"w1": np.full(4, 0.0 if first else 1.0)}]}
    row = {"policy": "snapkv(8) + uniform(24)", "prompts": prompts}

    def prefill(**changes: Any) -> Any:
        return lambda: kvjax.prefill(sharded, **row | changes)

    def extend(policy: str = KEPT, tokens: int = 5) -> Any:
        return lambda: kvjax.extend(sharded, policy, state(), [tiny.prompt(tokens)])

    def state() -> Any:
        return kvjax.open(Path(states) / "first", model=sharded).state

    def opened(name: str = "first", **changes: Any) -> Any:
        return lambda: kvjax.open(Path(states) / name, model=sharded, **changes)

    def saved(name: str = "state", **changes: Any) -> Any:
        options = {"model": sharded, "policy": KEPT, **changes}
        return lambda: kvjax.save(state(), Path(states) / name, **options)

    refusals = {
        "versions": refused(lambda: launch._compare(launch.versions() if first else OLDER)),
        "files": refused(lambda: hf.load(Path(folder if first else other), mesh=mesh)),
        "dtype": refused(lambda: hf.load(Path(folder), dtype="float32" if first else "bfloat16", mesh=mesh)),
        "weight_dtype": refused(
            lambda: hf.load(Path(folder), weight_dtype="int8" if first else None, mesh=mesh)
        ),
        "model": refused(lambda: kvjax.prefill(trained, **row, mesh=mesh)),
        "policy": refused(prefill(policy="snapkv(8) + uniform(24)" if first else "snapkv(12) + uniform(24)")),
        "prompts": refused(prefill(prompts=prompts if first else [tiny.prompt(9)[::-1]])),
        "context": refused(prefill(context=64 if first else 72)),
        "weights": refused(lambda: check_consistent("prefill", mesh, {"the learned weights": gates})),
        "mesh": refused(
            lambda: kvjax.prefill(model, **row, mesh=kvjax.mesh("tensor=2" if first else "context=2"))
        ),
        "extend": refused(extend(tokens=5 if first else 6)),
        "extend_policy": refused(extend(KEPT if first else "window(8) + sinks(1)")),
        "open": refused(opened("first" if first else "other")),
        "open_none": refused(opened("first" if first else "nowhere")),
        "open_label": refused(opened(label="" if first else "gates@1")),
        "open_mesh": refused(opened(mesh="tensor=2" if first else "context=2")),
        "save": refused(saved(extra={"tokens": np.arange(5 if first else 6)})),
        "save_path": refused(saved("here" if first else "there")),
        "sampling": refused(lambda: kvjax.generate(sharded, **row, seed=0 if first else 1)),
        "two": refused(
            prefill(policy="full" if first else "snapkv(8) + uniform(24)", seeds=0 if first else 1)
        ),
        "call": refused(
            lambda: check_consistent("extend" if first else "prefill", mesh, {"the prompts": prompts})
        ),
    }
    alike = hf.load(Path(folder), mesh=mesh)
    whole = [mesh.read(x) for x in jax.tree.leaves(alike.params)]
    there = jax.tree.leaves(hf.load(Path(folder)).params)
    refusals["read"] = str(all(np.array_equal(x, y) for x, y in zip(whole, there, strict=True)))
    texts = [kvjax.generate(one, **row, max_new_tokens=6).tokens for one in (model, sharded)]
    refusals["text"] = str(texts[0] == texts[1])
    print(json.dumps(refusals), flush=True)


KEPT = "window(8) + sinks(2)"
OLDER = launch.versions() | {"the version of numpy": "0.9"}

if __name__ == "__main__":
    main()
