"""What pages in host memory spare on three chips and at three lengths, on paper.

Steps and pieces of prompts are compiled for the chips, not run: without ``host`` at one length, with it at
the longest, too. The bytes at other lengths are added up from shapes, as ``kvjax.plan`` does when it looks
for the longest context; what lies between operations is taken to grow with the context.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from kvjax import catalogue, cli
from kvjax.cache import hosted as hosting
from kvjax.models import published
from kvjax.plan import _estimate as estimate
from kvjax.plan import _plan as plans
from kvjax.plan import _programs as programs
from kvjax.plan import _shapes as shapes
from kvjax.plan._deployment import Deployment
from kvjax.sharding import mesh as meshes
from pallas_kernels.measure.chips import CHIPS, GIB

MODEL = "llama-3.1-8b"

DEVICES = {"v5e": ("v5e:2x2", 4), "v6e": ("v6e:2x2", 1), "v5p": ("v5p:2x2x1", 1)}
"""A topology, and on how many of its devices the heads lie: a single v5e has no room for the weights."""

CONTEXTS = (32_768, 131_072, 524_288)
COMPILED_AT = {False: (131_072,), True: (131_072, 524_288)}
"""By whether pages lie in host memory."""

POLICIES = (
    "quest(chunks=32, chunk=64, dense=0)",
    "quest(chunks=32, chunk=64, dense=0) + host(cache={cache})",
    "topk(0.02)",
    "topk(0.02) + host(cache={cache}, keys=int4)",
)
CACHES = {"quest": {32_768: 0.065, 131_072: 0.02, 524_288: 0.01}, "topk": dict.fromkeys(CONTEXTS, 0.021)}
"""Shares of a context that hold what one step chooses, by selection and context."""

HEAD = """\
# Pages in host memory, on paper

{model} in bfloat16, one row. Steps and pieces of prompts were compiled ahead of time ({wheels}) at
131,072 tokens, and those with pages in host memory at 524,288, too; nothing here ran on a TPU. Other lengths
are added up from shapes. Made by

    python -m studies.plan_host --out results/plan/host

GiB of one device, of those that one program may have. *The index* is what the selection chooses by. *Link*:
what a step chooses of the pages in host memory at most, of which it brings what the device's cache has not;
and what each piece of {chunk} tokens of a prompt brings. Without times: the makers publish no speed of the
link. Copies of a pool between the two memories, in either program: {copies}.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    return cli.run(_run, argv)


def _run(argv: Sequence[str]) -> None:
    parser = cli.Parser(prog="python -m studies.plan_host", description=__doc__)
    cli.add(parser, "--out", required=True)
    parser.add_argument("--only", metavar="CHIP", choices=DEVICES, help=f"one of {', '.join(DEVICES)}")
    values = parser.parse_args(argv)
    values.out.mkdir(parents=True, exist_ok=True)
    from pallas_kernels.measure import aot

    file = values.out / "plan.json"
    rows: list[dict[str, Any]] = (
        json.loads(file.read_text(encoding="utf-8"))["rows"] if file.is_file() else []
    )
    for chip in [values.only] if values.only else DEVICES:
        rows = [row for row in rows if row["chip"] != chip]
        for policy in POLICIES:
            rows += planned(chip, policy)
            print(f"{chip}, {rows[-1]['policy']}: {rows[-1]['total'] / GIB:.2f} GiB at most", flush=True)
        about = {"command": "python -m studies.plan_host --out results/plan/host", "wheels": aot.wheels()}
        file.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n", encoding="utf-8")
        (values.out / "README.md").write_text(page(about, rows), encoding="utf-8")


def planned(chip: str, template: str) -> Iterator[dict[str, Any]]:
    """A row for each context, of which some are compiled."""
    topology, count = DEVICES[chip]
    devices = plans.target(topology)
    mesh = meshes.mesh(f"tensor={count}", devices=devices.devices[:count])
    compiled = {}
    for at in COMPILED_AT["host" in template]:
        one = case(template, at, mesh)
        step = plans.compiled(functools.partial(programs.step, target=devices), one)
        piece = plans.compiled(functools.partial(programs.prefill, target=devices), one)
        if step is None or piece is None:
            raise AssertionError(f"no room for {one.policy!r} on {chip}")
        compiled[at] = step, dataclasses.replace(piece, reading=True)
    for context in CONTEXTS:
        one = case(template, context, mesh)
        at = max((at for at in compiled if at <= context), default=min(compiled))
        step, piece = compiled[at]
        held, reading = (estimate.bytes_like(one, program) for program in (step, piece))
        yield dataclasses.asdict(held) | {
            "chip": chip,
            "mesh": repr(mesh),
            "policy": repr(one.policy),
            "context": context,
            "compiled_at": at,
            "total": held.total,
            "reading": reading.total,
            "memory": CHIPS[chip].memory,
            "piece_linked": reading.linked,
            "copied": step.program.host_temporary + piece.program.host_temporary,
            "buffers": buffers(one),
        }


def buffers(one: Deployment) -> dict[str, str]:
    """Of a layer, what its programs are given in host memory: the shape, on all devices together."""
    far = shapes.layer_sizes(one)[0].cache.hosted
    if far is None:
        return {}
    return {
        name: f"{x.dtype}[{', '.join(map(str, x.shape))}] in {x.sharding.memory_kind}"
        for name, x in hosting.in_host(far).items()
    }


def case(template: str, context: int, mesh: meshes.Mesh) -> Deployment:
    """The model with so many positions, whatever it was trained for."""
    spec = published.spec(MODEL)
    spec = dataclasses.replace(spec, max_positions=max(spec.max_positions, context))
    cache = CACHES[template.partition("(")[0]][context]
    return Deployment(spec, catalogue.policy(template.format(cache=cache)), mesh, 1, context)


def page(about: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """The page: a table for each topology."""
    wheels = ", ".join(f"{name} {about['wheels'][name]}" for name in ("jax", "libtpu"))
    copies = max(row["copied"] for row in rows)
    chunk = case(POLICIES[0], CONTEXTS[0], estimate.abstract(1, 1, 1)).chunk
    parts = [HEAD.format(model=MODEL, wheels=wheels, copies=copies or "none", chunk=chunk)]
    for chip in [chip for chip in DEVICES if any(row["chip"] == chip for row in rows)]:
        own = [row for row in rows if row["chip"] == chip]
        parts.append(f"## {chip}, {own[0]['mesh']}, {own[0]['memory'] / GIB:.2f} GiB a device\n")
        parts.append("| context | policy | weights | KV | of it the index | total, a step | a prompt | fits ")
        parts[-1] += "| in host memory | link, a step | link, a piece |\n|" + "---|" * 11
        parts += [_line(row) for row in sorted(own, key=lambda row: row["context"])]
        parts.append("")
    longest = [row for row in rows if row["context"] == CONTEXTS[-1] and row["buffers"]]
    parts.append("## In host memory, of each layer\n")
    for policy, far in {row["policy"]: row["buffers"] for row in longest}.items():
        named = ", ".join(f"{name} `{shape}`" for name, shape in far.items())
        parts.append(f"* `{policy}`, {CONTEXTS[-1]:,} tokens: {named}; all else lies on the device.")
    return "\n".join(parts) + "\n"


def _line(row: dict[str, Any]) -> str:
    """A row of a table."""
    gib = {name: f"{row[name] / GIB:.2f}" for name in ("weights", "allocated", "total", "reading")}
    fits = "yes" if max(row["total"], row["reading"]) <= row["memory"] else "no"
    far = ["-"] * 4
    if row["host"]:
        far = [f"{row['index'] / GIB:.2f}", f"{row['host'] / GIB:.2f} GiB"]
        far += [f"{row['linked'] / 2**20:.0f} MiB", f"{row['piece_linked'] / GIB:.2f} GiB"]
    cells = [f"{row['context']:,}", f"`{row['policy']}`", gib["weights"], gib["allocated"], far[0]]
    cells += [gib["total"], gib["reading"], fits, *far[1:]]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # devices of this machine are left alone
    jax.config.update("jax_enable_compilation_cache", False)  # it cannot give back what is for other devices
    cli.start(main)
