"""The command line of ``python -m kvjax.plan``: its options, and what is refused before any work."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Sequence
from pathlib import Path

from kvjax import catalogue, cli, loading
from kvjax.cli import InputError, option, shared, whole
from kvjax.models import hf, published
from kvjax.models.spec import ModelSpec
from kvjax.plan import _estimate as estimate
from kvjax.plan._deployment import Deployment, check
from kvjax.sharding.mesh import Mesh, MeshError, axis_sizes
from kvjax.sharding.specs import AXES, DATA
from pallas_kernels.measure.chips import CHIPS, Chip

TPUS = ("v5e", "v6e", "v5p", "tpu7x")
OTHER_NAMES = {"7x": "tpu7x"}
DEVICES = {"tpu7x": 2}
"""Devices that JAX counts on one chip, if there are several."""

_UNEVEN = "slots of the fullest device over the mean, if the policy fills heads unevenly (default: 1)"
_SHARE = cli.Rule(float, lambda x: 0 < x <= 1, "a number above 0, at most 1")
_IMBALANCE = cli.Rule(float, lambda x: 1 <= x <= 100, "a number from 1 to 100")

_EXAMPLES = """\
examples:
  python -m kvjax.plan --model llama-3.1-8b --policy full --context 131072 --rows 12 --tpu v5e:4x4
  python -m kvjax.plan --model llama-3.1-8b --policy wg-kv --share 0.25 --imbalance 1.5 \\
                       --context 131072 --rows 32 --tpu v5e:4x4
  python -m kvjax.plan --model llama-3.1-70b --policy snapkv --context 65536 --rows 16 --tpu v5p:2x2x2
  python -m kvjax.plan --model qwen2.5-7b --policy quest --context 65536 --rows 8 --gpu h200:4
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The command line."""

    model: str = shared(
        "--model",
        metavar="NAME|DIR|HUB_ID",
        required=True,
        help=f"{', '.join(published.CONFIGS)}, or a model whose config.json is read",
    )
    policy: str = shared("--policy", "full", "what the KV cache keeps")
    context: int = option(None, "tokens that a row has seen", type=whole(64), required=True)
    rows: int = option(None, "rows at a time", required=True)
    tpu: str | None = option(
        None, f"chips and their topology: {', '.join(TPUS)}", "v5e:4x4", alone="devices", required=True
    )
    gpu: str | None = option(None, "GPUs of one host", "h200:8", alone="devices")
    mesh: str | None = shared(
        "--mesh", help="how the devices are arranged (default: the mesh with the fewest bytes a device)"
    )
    dtype: str | None = shared(
        "--dtype", help="of weights and cache (default: as config.json says; shapes by name bfloat16)"
    )
    weight_dtype: str | None = shared("--weight-dtype", help="quantise weights to it (default: no)")
    share: float | None = option(
        None, "of the tokens that stays, if the policy learns or votes that", type=_SHARE
    )
    imbalance: float = option(1.0, _UNEVEN, type=_IMBALANCE)
    chunk: int = option(256, "prompt tokens read at a time")
    exact: bool = option(False, "compile all layers, not two small depths")
    out: Path | None = shared("--out", metavar="FILE", help="a JSON file for the answer")
    json: bool = shared("--json", False, "the answer as one JSON object")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question(Options):
    """The command line, checked.

    Attributes:
      case: the deployment, on a mesh of devices that are not here.
      chip: what one device has.
      topology: of the devices, "v5e:4x4" or "h200:8".
      chosen: whether ``parse`` chose the mesh.
    """

    case: Deployment
    chip: Chip
    topology: str
    chosen: bool


def parse(argv: Sequence[str]) -> Question:
    """The question in ``argv``.

    Raises:
      InputError: an unknown word, a number out of range, no such chip or topology, another number of devices
        than the mesh has, a missing share, pages in host memory whose index is too large.
      MeshError: a mesh that does not divide the rows or the model's heads.
      ModelError: no such model.
      PolicyError: a policy that cannot be built.
    """
    options = cli.parse(
        Options,
        argv,
        prog="python -m kvjax.plan",
        description="What a model under a policy needs on chips that are not here: its sharded prefill and "
        "decode steps are compiled ahead of time. Needs pip install 'kvjax[aot]'.",
        examples=_EXAMPLES,
    )
    spec, dtype = _model(options.model)
    chip, topology, devices = _devices(options.tpu, options.gpu)
    case = Deployment(
        spec=spec,
        policy=catalogue.policy(options.policy),
        mesh=estimate.abstract(1, 1, 1),
        rows=options.rows,
        context=options.context,
        dtype=options.dtype or dtype,
        weight_dtype=options.weight_dtype,
        share=options.share,
        imbalance=options.imbalance,
        chunk=options.chunk,
    )
    check(case)
    case = dataclasses.replace(case, mesh=_mesh(case, options.mesh, topology, devices))
    check(case)
    estimate.refuse_large_index(case)
    return Question(**vars(options), case=case, chip=chip, topology=topology, chosen=options.mesh is None)


def _model(name: str) -> tuple[ModelSpec, str]:
    if name in published.CONFIGS:
        return published.spec(name), "bfloat16"
    if name == loading.EMBEDDED:
        return hf.read_spec(loading.embedded_folder())[0], "float32"
    if "/" not in name and not Path(name).exists():
        raise InputError(
            f"--model {name} is neither the name of a model nor a folder. Give one of "
            f"{', '.join(published.CONFIGS)}, a folder, or a hub id like owner/name."
        )
    spec, dtype = hf.read_spec(name)
    return spec, dtype or "float32"


def _devices(tpu: str | None, gpu: str | None) -> tuple[Chip, str, int]:
    """The chip, its topology as the compiler knows it, and how many devices that is."""
    if gpu is not None:
        match = re.fullmatch(r"h200(?::([1-8]))?", gpu)
        if match is None:
            raise InputError(f"--gpu {gpu} is not known. Write h200:1 to h200:8, those of one host.")
        count = int(match[1] or 1)
        return CHIPS["h200"], f"h200:{count}", count
    name, _, dims = str(tpu).partition(":")
    name = OTHER_NAMES.get(name, name)
    if name not in TPUS:
        raise InputError(f"--tpu {tpu}: {name!r} is none of {', '.join(TPUS)}. Write v5e:4x4, for example.")
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", dims):
        raise InputError(
            f"--tpu {tpu} has no topology. Write the chip and its sides, as v5e:4x4 or v5p:2x2x1."
        )
    count = math.prod(int(side) for side in dims.split("x")) * DEVICES.get(name, 1)
    return CHIPS[name], f"{name}:{dims}", count


def _mesh(case: Deployment, text: str | None, topology: str, devices: int) -> Mesh:
    if text is not None:
        shape, _ = axis_sizes(text)
        if math.prod(shape) != devices:
            raise InputError(
                f"--mesh {text} has {math.prod(shape)} devices, {topology} has {devices}. Make them agree."
            )
        return estimate.abstract(*shape)
    mesh = estimate.best_mesh(case, devices)
    if mesh is None:
        # The numbers of rows that some mesh of these devices divides, if it divides the model's heads.
        rows = []
        for other in estimate.meshes(devices):
            with contextlib.suppress(MeshError):
                dataclasses.replace(case, mesh=other, rows=other.size(DATA)).check_mesh()
                rows.append(other.size(DATA))
        way = f"Give a multiple of {min(rows)} rows" if rows else "Take other devices"
        raise InputError(
            f"{topology} has {devices} devices, and no mesh of {' x '.join(AXES)} divides {case.rows} rows, "
            f"{case.spec.num_kv_heads} KV heads and {case.spec.num_heads} query heads. {way}."
        )
    return mesh
