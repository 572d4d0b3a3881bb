"""Policies on meshes of virtual devices against one device: a program, since JAX counts devices once.

    python tests/mesh_run.py MESH ... [--only POLICY ...] [--heads K] [--moved | --saved | --measured]

A line of JSON for each policy: the largest difference of logits, and how much else differed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if "device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import compiler  # noqa: E402

compiler.take_the_short_way()

import jax  # noqa: E402
import numpy as np  # noqa: E402
import tiny  # noqa: E402

import kvjax  # noqa: E402
from kvjax import decode, metrics  # noqa: E402
from kvjax.algebra import Policy  # noqa: E402
from kvjax.cache import hosted as hosting  # noqa: E402
from kvjax.cache.state import KVState, reshard  # noqa: E402
from kvjax.eval.measure import counted, forced  # noqa: E402
from kvjax.models import decoder  # noqa: E402
from kvjax.models.layout import drawn  # noqa: E402
from kvjax.models.spec import Experts, ModelSpec, Rope  # noqa: E402
from kvjax.sharding.mesh import ONE, Mesh  # noqa: E402
from kvjax.weights import fingerprint  # noqa: E402

LENGTHS, STEPS = (45, 30, 38, 25), 10
FULL = kvjax.policy("full")

COMBINED = (
    "conf_kv(alpha=0.8, gamma=0.9, recent=4) + confidence(18, 26, threshold=0.5) + int8(8)",
    "snapkv(6) + ada(20)",
    "expected_attention(16, sinks=2) + ada(20)",
    "snapkv(6) + ada(20, when=every(4))",
    "h2o(recent=4) + pyramid(20) + int4(4)",
    "random + uniform('24KiB', every_step)",
    "duo(0.5, window=12) + sinks(2)",
    "write_gate(0.5, window=12) + int8(8) + sinks(2)",
    "topk(4, sinks=2, tail=6) + phi(4)",
    "write_gate(0.5, window=8) + phi(4)",
    "tova + uniform(22, every_step) + int8(8)",
    "gvote(0.5, samples=2, ahead=8) + snapkv(6)",
    "full",
)


def policies() -> list[Policy]:
    """Every method's examples, and combinations that meet across heads or pools."""
    shown = [policy for method in kvjax.methods() for policy in method.examples]
    shown = [policy for policy in shown if not (policy.storage.hosted and hosting.absent())]
    return list(dict.fromkeys([*shown, *map(kvjax.policy, COMBINED)]))


WITH_EXPERTS: dict[str, Any] = {}
"""Fields of the models' specs; ``--experts`` sets them."""


@functools.cache
def model(kv_heads: int = 8) -> tiny.Tiny:
    """Two layers of 16 query heads of 4; all tokens of a prompt are distinct, so few scores tie."""
    spec = ModelSpec(
        family="llama",
        vocab_size=96,
        num_layers=2,
        num_heads=16,
        num_kv_heads=kv_heads,
        head_dim=4,
        model_dim=32,
        mlp_dim=48,
        max_positions=256,
        rope=Rope(theta=100.0),
        tied=False,
        **WITH_EXPERTS,
    )
    draw = np.random.default_rng(3)

    def one(name: str, shape: tuple[int, ...]) -> Any:
        if name.endswith("norm"):
            return jax.device_put(np.ones(shape, np.float32))
        if name.startswith(("experts_", "router")):
            return jax.device_put((shape[-1] ** -0.5 * draw.standard_normal(shape)).astype(np.float32))
        width = {"wo": shape[0] * shape[1], "embed": 1}.get(name, shape[0]) if len(shape) > 1 else 1
        values = (1.5 * width**-0.5 * draw.standard_normal(shape)).astype(np.float32)
        if name in ("wq", "wo"):
            values[draw.random(shape) < 1 / 8] = -0.0  # as in biases of trained models; its sign counts
        return jax.device_put(values)

    tree = decoder.shapes(spec)
    params = {name: drawn(one, name, shape) for name, shape in tree.items() if name != "layers"}
    params["layers"] = [{n: drawn(one, n, s) for n, s in names.items()} for names in tree["layers"]]
    return tiny.Tiny(decoder.Decoder(spec), params)


def learned(policy: Policy, network: Any) -> dict[str, Any]:
    """Random learned weights; φ is silent in every other query head, as it is in some of shipped maps."""
    weights = {p.place: p.example_weights(jax.random.key(1), network) for p in policy.learned}
    for maps in weights.get("completion", ()):
        maps["last_q"] = maps["last_q"].at[1::2].set(-np.inf)
    return weights


def prompts() -> list[list[int]]:
    draw = np.random.default_rng(5)
    return [draw.permutation(96)[:n].tolist() for n in LENGTHS]


@dataclasses.dataclass
class Life:
    """A prefill and steps by the likeliest token that a row has not had.

    A gate in the first layer sees nothing but the token: which of two equal ones goes is up to rounding.

    Attributes:
      logits: [STEPS + 1, B, V].
      text: what was fed, [STEPS, B].
      kept: which tokens each stream held, after the prompt and at the end.
      state: at the end.
    """

    logits: np.ndarray
    text: np.ndarray
    kept: list[np.ndarray]
    state: KVState


def live(policy: Policy, on: Mesh, kv_heads: int = 8) -> Life:
    """On a mesh, or one device."""
    it = model(kv_heads)
    weights = learned(policy, it.network)
    options = {"context": 72, "page": 8, "chunk_size": 16, "weights": weights}
    state, logits = kvjax.prefill(it, policy, prompts(), **options, mesh=on)
    kept, logits_read, text = [on.read(metrics.present(state))], [on.read(logits)], []
    sharded, weights = decode.on_mesh(it, policy, weights, on)
    had = np.zeros(logits_read[0].shape, bool)
    for row, prompt in enumerate(prompts()):
        had[row, prompt] = True
    for at in range(STEPS):
        if at % 5 == 0:
            state = decode.reserve(policy, state, 5, 1)
        fed = np.where(had, -np.inf, logits_read[-1]).argmax(axis=-1).astype(np.int32)
        had[np.arange(len(fed)), fed] = True
        text.append(fed)
        active = np.ones(len(fed), bool)
        state, logits = decode.step_program(
            sharded.network, policy, sharded.params, weights, state, on.put(fed), on.put(active)
        )
        logits_read.append(on.read(logits))
    kept.append(on.read(metrics.present(state)))
    metrics.nbytes(state)
    state = decode.reserve(policy, state, 1, 1)  # raises if a pool was too small
    return Life(np.stack(logits_read), np.stack(text), kept, state)


def difference(one: Life, many: Life) -> dict[str, Any]:
    """How much a mesh differs from one device."""
    return {
        "logits": float(np.abs(one.logits - many.logits).max()),
        "kept": [int((a != b).sum()) for a, b in zip(one.kept, many.kept)],
        "text": int((one.text != many.text).sum()),
        "held": [int(x.sum()) for x in one.kept],
        "models": [fingerprint(model()), fingerprint(decode.on_mesh(model(), FULL, {}, many.state.mesh)[0])],
    }


def measured(policy: Policy, on: Mesh, kv_heads: int = 8) -> dict[str, np.ndarray]:
    """What evaluations look at, of prompts that are read once and cut, and of given tokens after them."""
    it, weights = model(kv_heads), learned(policy, model(kv_heads).network)
    sharded, _ = decode.on_mesh(it, policy, weights, on)
    reading = decode.read_full(sharded, prompts(), context=72)
    state, _ = decode.cut(sharded, policy, reading, page=8, chunk_size=16, weights=weights)
    state = decode.roomy(policy, decode.reserve(policy, state, 6, 1), 1)
    before = counted.contents(state)
    following = [prompt[:6] for prompt in prompts()]
    _, after = forced.steps(sharded, policy, state, following, following, forced=True, weights=weights)
    held = {"slots": before.slots, "mask": before.mask, "bytes": np.asarray([before.slot, before.fixed])}
    return held | {name: getattr(after, name)[:, :6] for name in ("nll", "live", "reads")}


def moved(policy: Policy, on: Mesh, kv_heads: int = 8) -> dict[str, Any]:
    """What a compiled step brings from device to device: each collective and the shape of its result."""
    it = model(kv_heads)
    sharded, weights = decode.on_mesh(it, policy, learned(policy, it.network), on)
    rows = len(LENGTHS)
    space = {"rows": rows, "context": 256, "page": 32, "chunk_size": 16}
    state = decode.empty(it.network, policy, **space, dtype=np.float32, mesh=on)
    state = decode.roomy(policy, state, 1)
    fed = on.put((np.zeros(rows, np.int32), np.ones(rows, bool)))
    program = decode.step_program.lower(sharded.network, policy, sharded.params, weights, state, *fed)
    text = compiler.compiled_in_full(program).as_text()
    met = [match for line in text.splitlines() if (match := COLLECTIVE.search(line))]
    return {"moved": [f"{one[2]} [{shape}]" for one in met for shape in SHAPE.findall(one[1])]}


def hosted(policy: Policy, on: Mesh, kv_heads: int = 8) -> dict[str, Any]:
    """How many numbers differ, to the bit, between pages in host memory and the same mesh without."""
    here, there = (live(one, on, kv_heads) for one in (policy, kvjax.policy(f"{policy!r} + host(cache=0.5)")))
    owned = [int(on.read(x.hosted.owned).sum()) for x in there.state.layers if x.hosted is not None]
    return {
        "logits": int((here.logits != there.logits).sum()),
        "kept": [int((a != b).sum()) for a, b in zip(here.kept, there.kept)],
        "owned": owned,
    }


SHAPE = re.compile(r"\w+\[([\d,]*)\]")
COLLECTIVE = re.compile(
    r" = (.*?) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)


def differing(rows: list[int], one: KVState, other: KVState) -> int:
    """Streams of ``other``, whose rows are these of ``one``, that do not hold the same to the bit."""
    count = 0
    for ours, theirs in zip(reshard(one, ONE).layers, reshard(other, ONE).layers):
        held = tiny.held(*ours.pools)
        for (row, head), slots in tiny.held(*theirs.pools).items():
            wanted = held[rows[row], head]
            alike = [np.array_equal(x, y) for at in slots for x, y in zip(slots[at], wanted.get(at, ()))]
            count += slots.keys() != wanted.keys() or not all(alike)
        for pages in theirs.pools:
            tiny.owned_once(pages)
        for x, y in zip(jax.tree.leaves(ours.ring), jax.tree.leaves(theirs.ring)):
            count += not np.array_equal(np.asarray(x)[rows], y)
    return count


def onward(policy: Policy, state: KVState) -> np.ndarray:
    """Logits of three steps; the state is used up."""
    it, on, logits_read = model(), state.mesh, []
    sharded, _ = decode.on_mesh(it, policy, {}, on)
    state = decode.reserve(policy, state, 3, 1)
    for token in range(3):
        fed = on.put((np.full(state.rows, token, np.int32), np.ones(state.rows, bool)))
        state, logits = decode.step_program(sharded.network, policy, sharded.params, {}, state, *fed)
        logits_read.append(on.read(logits))
    return np.stack(logits_read)


def returned(policy: Policy, names: list[str], folder: Path) -> Iterator[dict[str, Any]]:
    """A state saved on the first mesh, opened on each, and forked: what differs, and the steps after."""
    meshes = [kvjax.mesh(name) for name in names]
    state, _ = kvjax.prefill(model(), policy, prompts(), context=72, page=8, chunk_size=16, mesh=meshes[0])
    kvjax.save(state, folder / "state", model=model(), policy=policy)
    same, twin = [0, 1, 2, 3], [1, 1, 1, 1]
    others = [(same, kvjax.open(folder / "state", model=model(), mesh=on).state) for on in meshes]
    others.append((twin, kvjax.fork(state, 1, len(twin))))
    streams = [differing(rows, state, other) for rows, other in others]
    first = onward(policy, state)
    for (rows, other), off in zip(others, streams):
        logits = np.abs(onward(policy, other) - first[:, rows]).max()
        yield {"streams": off, "logits": float(logits), "to": repr(other.mesh), "forked": rows is twin}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("mesh", nargs="+")
    parser.add_argument("--only", nargs="*", type=kvjax.policy, help="instead of policies()")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--moved", action="store_true", help="what a step brings from device to device")
    parser.add_argument("--saved", action="store_true", help="save on the first mesh, open on each")
    parser.add_argument("--measured", action="store_true", help="what evaluations look at")
    parser.add_argument("--hosted", action="store_true", help="pages in host memory, and the mesh without")
    parser.add_argument("--experts", action="store_true", help="a model with experts and attention sinks")
    arguments = parser.parse_args()
    if arguments.experts:
        WITH_EXPERTS.update(experts=Experts(count=8, chosen=2, width=24), sinks=True)
    for policy in arguments.only or policies():
        if arguments.saved:
            folder = Path(tempfile.gettempdir()) / f"kvjax-{os.getppid()}"  # of both processes
            folder.mkdir(exist_ok=True)
            for line in returned(policy, arguments.mesh, folder):
                print(json.dumps({"policy": repr(policy)} | line), flush=True)
            shutil.rmtree(folder, ignore_errors=True)
            continue
        if arguments.moved:
            line = moved(policy, kvjax.mesh(arguments.mesh[0]), arguments.heads)
            print(json.dumps({"policy": repr(policy)} | line), flush=True)
            continue
        if arguments.hosted:
            line = hosted(policy, kvjax.mesh(arguments.mesh[0]), arguments.heads)
            print(json.dumps({"policy": repr(policy)} | line), flush=True)
            continue
        if arguments.measured:
            one, many = (measured(policy, on, arguments.heads) for on in (ONE, kvjax.mesh(arguments.mesh[0])))
            off = {
                name: float(np.abs(np.subtract(x, many[name], dtype=float)).max()) for name, x in one.items()
            }
            print(json.dumps({"policy": repr(policy), "held": int(one["slots"].sum())} | off), flush=True)
            continue
        one = live(policy, ONE, arguments.heads)
        for name in arguments.mesh:
            try:
                line = difference(one, live(policy, kvjax.mesh(name), arguments.heads))
            except Exception as error:  # told beside its policy, so that the others are still seen
                line = {"error": f"{type(error).__name__}: {error}"[:2000]}
            print(json.dumps({"policy": repr(policy), "mesh": name} | line), flush=True)
        jax.clear_caches()


if __name__ == "__main__":
    main()
