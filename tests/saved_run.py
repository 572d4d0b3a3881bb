"""States written by some processes and opened by others: a program for one process, or for ``kvjax.launch``.

    python tests/saved_run.py write FOLDER MESH POLICY ...
    python tests/saved_run.py read FOLDER MESH ...

A line of JSON for each state, and when reading for each mesh: digests of what streams and rings hold, and
logits of the steps after.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

from mesh_run import model, onward, prompts  # first: it says how many devices there are

import jax  # isort: skip
import numpy as np
import pytest
import tiny

import kvjax
from kvjax.cache.state import KVState, reshard
from kvjax.sharding.mesh import ONE


def held(state: KVState) -> list[str]:
    """A digest of every stream's slots by position, layer after layer, and of every ring and summary."""
    digests = []
    for cache in reshard(state, ONE).layers:
        for stream, slots in sorted(tiny.held(*cache.pools).items()):
            whole = hashlib.sha256(repr(stream).encode())
            for at in sorted(slots):
                whole.update(b"".join([str(at).encode(), *(np.asarray(x).tobytes() for x in slots[at])]))
            digests.append(whole.hexdigest())
        rest = [np.asarray(x).tobytes() for x in jax.tree.leaves((cache.ring, cache.summary))]
        digests.append(hashlib.sha256(b"".join(rest)).hexdigest())
    return digests


def say(state: KVState, policy: kvjax.Policy, at: str) -> None:
    line = {"at": at, "to": repr(state.mesh), "rows": np.asarray(state.mesh.read(state.length)).tolist()}
    line["held"] = held(state)
    line["logits"] = onward(policy, state).tolist()  # the state is used up
    print(json.dumps(line), flush=True)


def refused(policy: kvjax.Policy, on: kvjax.Mesh, path: Path) -> str:
    """What the first process hears where the disk of the last is full; the state that was there stays."""
    state, _ = kvjax.prefill(model(), policy, prompts(), context=72, page=8, chunk_size=16, mesh=on)
    with pytest.MonkeyPatch.context() as patch:
        if jax.process_index() == jax.process_count() - 1:
            patch.setattr("os.fsync", full)
        try:
            kvjax.save(state, path, model=model(), policy=policy)
        except OSError as error:
            return str(error)
    return ""


def full(_: int) -> None:
    raise OSError("disk full")


def main() -> None:
    what, folder, *words = sys.argv[1:]
    if what == "write":
        on, policies = kvjax.mesh(words[0]), [kvjax.policy(word) for word in words[1:]]
        for at, policy in enumerate(policies):
            options = {"context": 72, "page": 8, "chunk_size": 16, "mesh": on}
            state, _ = kvjax.prefill(model(), policy, prompts(), **options)
            extra = {"tokens": np.arange(5)}
            kvjax.save(state, Path(folder) / str(at), model=model(), policy=policy, extra=extra)
            say(state, policy, str(at))
        print(json.dumps({"refused": refused(policies[0], on, Path(folder) / "0")}), flush=True)
        return
    for file in sorted(Path(folder).iterdir()):
        for word in words:
            saved = kvjax.open(file, model=model(), mesh=word)
            np.testing.assert_array_equal(saved.extra["tokens"], np.arange(5))
            say(saved.state, saved.policy, file.name)


if __name__ == "__main__":
    main()
