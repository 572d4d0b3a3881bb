"""The command line of ``python -m kvjax.plan``: what is asked, and what is refused beforehand."""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvjax import catalogue, cli, loading
from kvjax.cli import InputError
from kvjax.models import hf, published
from kvjax.models.spec import ModelSpec
from kvjax.plan import _case as cases
from kvjax.plan import _search as search
from kvjax.plan._case import Case
from kvjax.sharding.mesh import Mesh, axis_sizes
from kvjax.sharding.specs import AXES, DATA
from pallas_kernels.measure.chips import CHIPS, Chip

TPUS = ("v5e", "v6e", "v5p", "tpu7x")
ALSO = {"7x": "tpu7x"}
"""Other names of a chip."""

DEVICES = {"tpu7x": 2}
"""Devices of a chip as JAX counts them, where it has several."""

_EXAMPLES = """\
examples:
  python -m kvjax.plan --model llama-3.1-8b --policy full --context 131072 --rows 12 --tpu v5e:4x4
  python -m kvjax.plan --model llama-3.1-8b --policy wg-kv --share 0.25 --imbalance 1.5 \\
                       --context 131072 --rows 32 --tpu v5e:4x4
  python -m kvjax.plan --model llama-3.1-70b --policy snapkv --context 65536 --rows 16 --tpu v5p:2x2x2
  python -m kvjax.plan --model qwen2.5-7b --policy quest --context 65536 --rows 8 --gpu h200:4
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """The command line, checked.

    Attributes:
      model: as it was asked for.
      case: what is planned, on a mesh of devices that are not here.
      chip: what one device has.
      topology: of the devices, "v5e:4x4" or "h200:8".
      chosen: was the mesh chosen here?
      exact: compile the model's whole depth.
      out: a file for the answer, or None.
      json: the answer on standard output as JSON.
    """

    model: str
    case: Case
    chip: Chip
    topology: str
    chosen: bool
    exact: bool = False
    out: Path | None = None
    json: bool = False


def parse(argv: Sequence[str]) -> Question:
    """The question in ``argv``.

    Raises:
      InputError: an unknown word, a number out of range, a chip or topology that is none, devices that do not
        agree with the mesh, a share that is missing.
      MeshError: a mesh that does not divide the rows or the model's heads.
      ModelError: no such model.
      PolicyError: a policy that cannot be built.
    """
    said = _parser().parse_args(argv)
    spec, dtype = _model(said.model)
    chip, topology, devices = _devices(said.tpu, said.gpu)
    case = Case(
        spec=spec,
        policy=catalogue.policy(said.policy),
        mesh=search.abstract(1, 1, 1),
        rows=said.rows,
        context=said.context,
        dtype=said.dtype or dtype,
        share=said.share,
        imbalance=said.imbalance,
        chunk=said.chunk,
    )
    cases.check(case)
    mesh = _mesh(case, said.mesh, topology, devices)
    case = dataclasses.replace(case, mesh=mesh)
    cases.check(case)
    how: dict[str, Any] = {name: getattr(said, name) for name in ("exact", "out", "json")}
    chosen = said.mesh is None
    return Question(model=said.model, case=case, chip=chip, topology=topology, chosen=chosen, **how)


def _parser() -> cli.Parser:
    parser = cli.Parser(
        prog="python -m kvjax.plan",
        description="What a model under a policy needs on chips that are not here: its sharded prefill and "
        "decode steps are compiled ahead of time. Needs pip install 'kvjax[aot]'.",
        ending=lambda: _EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    cli.add(
        parser,
        "--model",
        metavar="NAME|DIR|HUB_ID",
        required=True,
        help=f"{', '.join(published.CONFIGS)}, or a model of which config.json is read",
    )
    cli.add(parser, "--policy", default="full", help="what the KV cache keeps (default: full)")
    parser.add_argument(
        "--context",
        metavar="N",
        type=cli.whole("--context", 64),
        required=True,
        help="tokens that a row has seen",
    )
    parser.add_argument("--rows", metavar="N", type=cli.whole("--rows"), required=True, help="rows at a time")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--tpu", metavar="v5e:4x4", help=f"chips and their topology: {', '.join(TPUS)}")
    where.add_argument("--gpu", metavar="h200:8", help="GPUs of one host")
    cli.add(parser, "--mesh", help="how they are laid (default: the one with the fewest bytes a device)")
    cli.add(
        parser, "--dtype", help="of weights and cache (default: as config.json says; shapes by name bfloat16)"
    )
    part = cli.number("--share", float, lambda x: 0 < x <= 1, "a number above 0, at most 1")
    parser.add_argument(
        "--share", metavar="X", type=part, help="of the tokens that stay, where a policy learns or votes that"
    )
    fullest = cli.number("--imbalance", float, lambda x: 1 <= x <= 100, "a number from 1 to 100")
    parser.add_argument(
        "--imbalance",
        metavar="X",
        type=fullest,
        default=1.0,
        help="slots of the fullest device over the mean, where a policy fills heads unevenly (default: 1)",
    )
    parser.add_argument(
        "--chunk", metavar="N", type=cli.whole("--chunk"), default=256, help="prompt tokens read at a time"
    )
    parser.add_argument("--exact", action="store_true", help="compile all layers, not two small depths")
    cli.add(parser, "--out", metavar="FILE", help="a JSON file for the answer")
    cli.add(parser, "--json", help="the answer as one JSON object")
    return parser


def _model(name: str) -> tuple[ModelSpec, str]:
    if name in published.CONFIGS:
        return published.spec(name), "bfloat16"
    if name == loading.EMBEDDED:
        return hf.read_spec(loading.embedded_folder())[0], "float32"
    if "/" not in name and not Path(name).exists():
        raise InputError(
            f"--model {name} is no shape that is known by name, and no folder. Give one of "
            f"{', '.join(published.CONFIGS)}, a folder, or a hub id such as owner/name."
        )
    spec, dtype = hf.read_spec(name)
    return spec, dtype or "float32"


def _devices(tpu: str | None, gpu: str | None) -> tuple[Chip, str, int]:
    """The chip, its topology as the compiler knows it, and how many devices that is."""
    if gpu is not None:
        found = re.fullmatch(r"h200(?::([1-8]))?", gpu)
        if found is None:
            raise InputError(f"--gpu {gpu} is none that is known. Write h200:1 to h200:8, those of one host.")
        count = int(found[1] or 1)
        return CHIPS["h200"], f"h200:{count}", count
    name, _, dims = str(tpu).partition(":")
    name = ALSO.get(name, name)
    if name not in TPUS:
        raise InputError(f"--tpu {tpu}: {name!r} is none of {', '.join(TPUS)}. Write v5e:4x4, for example.")
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", dims):
        raise InputError(
            f"--tpu {tpu} has no topology. Write the chip and its sides, as v5e:4x4 or v5p:2x2x1."
        )
    count = math.prod(int(side) for side in dims.split("x")) * DEVICES.get(name, 1)
    return CHIPS[name], f"{name}:{dims}", count


def _mesh(case: Case, given: str | None, topology: str, devices: int) -> Mesh:
    if given is not None:
        shape, _ = axis_sizes(given)
        if math.prod(shape) != devices:
            raise InputError(
                f"--mesh {given} lays {math.prod(shape)} devices, and {topology} has {devices}. Make them "
                "agree."
            )
        return search.abstract(*shape)
    mesh = search.best_mesh(case, devices)
    if mesh is None:
        rows = sorted({m.size(DATA) for m in search.meshes(devices) if _divides(case, m)})
        way = f"Give a multiple of {rows[0]} rows" if rows else "Take other devices"
        raise InputError(
            f"{topology} has {devices} devices, and no grid of {' x '.join(AXES)} divides {case.rows} rows, "
            f"{case.spec.num_kv_heads} KV heads and {case.spec.num_heads} query heads. {way}."
        )
    return mesh


def _divides(case: Case, mesh: Mesh) -> bool:
    """Does it divide the model's heads?"""
    tensor, all_cut = mesh.size(AXES[1]), mesh.size(AXES[1]) * mesh.size(AXES[2])
    return case.spec.num_kv_heads % tensor == 0 and case.spec.num_heads % all_cut == 0
