"""The training step of a config, compiled for a TPU slice that is not here: does it fit, and by how much?

Needs the wheels of the optional group ``aot``; reads no weights where the config writes its model out.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax

from kvjax.models.spec import ModelSpec
from train import loop, mesh
from train.gate_settings import ConfigError, Settings, backbone, optimizer

if TYPE_CHECKING:
    from pallas_kernels.measure import aot

LIMITS = {"v5e": 15.75, "v6e": 31.25, "v5p": 95.74, "tpu7x": 94.75}
"""GiB of a chip's memory that libtpu lets one program have (tpu7x: of one of its two cores)."""

GIB = 2**30

Build = Callable[[Settings, ModelSpec, mesh.Layout, str], tuple[loop.Loss, Any]]
"""``(settings, spec, layout, impl) -> (loss with frozen shapes bound, shapes of the trained leaves)``."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fit:
    """What one chip holds while the step runs, in bytes.

    Attributes:
      arguments: weights, trained leaves, optimiser and batch.
      outputs: results that reuse no argument.
      temporary: everything in between.
      code: the program.
      limit: what a chip has.
      flops: of one chip, as far as the compiler counts them (a scan's body once, no Pallas bodies).
      seconds: it took to compile.
    """

    arguments: int
    outputs: int
    temporary: int
    code: int
    limit: int
    flops: float
    seconds: float

    @property
    def total(self) -> int:
        """All of it."""
        return self.arguments + self.outputs + self.temporary + self.code


def slice_of(name: str, axes: tuple[int, int]) -> tuple[aot.Target, mesh.Layout]:
    """The chips of a topology such as "v5e:2x4" and the config's mesh over them.

    Raises:
      ConfigError: no such topology, no compiler for it, or not as many chips as the mesh has places.
    """
    from pallas_kernels.measure import aot  # sets what libtpu reads when it loads: not beside real chips

    chip = name.split(":")[0]
    if chip not in LIMITS:
        raise ConfigError(
            f"--compile {name}: {chip!r} is none of {', '.join(LIMITS)}. Write v5e:2x4, for example."
        )
    try:
        target = aot.target(chip, name if ":" in name else None)
    except (ValueError, RuntimeError) as reason:  # not installed, or a name libtpu does not know
        line = str(reason).splitlines()[0]
        raise ConfigError(f"--compile {name}: {line}") from reason
    if len(target.devices) != axes[0] * axes[1]:
        raise ConfigError(
            f"--compile {name}: {len(target.devices)} devices, mesh: {{fsdp: {axes[0]}, tensor: {axes[1]}}} "
            f"has {axes[0] * axes[1]} places. Choose a topology or a mesh that agree."
        )
    return target, mesh.layout(*axes, target.devices)


def compiled(settings: Settings, topology: str, build: Build) -> Fit:
    """Compiles the update of the longest batch for ``topology``.

    Raises:
      ConfigError: see ``slice_of``; or the program is too large for the compiler.
    """
    target, layout = slice_of(topology, settings.mesh)
    spec = settings.spec or backbone(settings).spec
    loss, params = build(settings, spec, layout, target.impl)
    chosen = optimizer(settings.rate, settings.plan.steps)
    state = loop.State(params=params, opt=jax.eval_shape(chosen.init, params))
    length = max(settings.data["lengths"])
    rows = max(1, settings.data["tokens"] // length)
    batch = {"tokens": jax.ShapeDtypeStruct((rows, length), "int32", sharding=layout.of(mesh.P(mesh.ROWS)))}
    began = time.monotonic()
    where = layout.gates(state)
    step: Any = loop.make_step(chosen, where)
    traced = step.trace(loss, laid(state, where), batch)
    try:
        program = traced.lower(lowering_platforms=target.lowering).compile()
    except jax.errors.JaxRuntimeError as reason:
        if "RESOURCE_EXHAUSTED" not in str(reason):
            raise
        line = str(reason).splitlines()[0]
        raise ConfigError(f"--compile {topology}: the step does not fit a chip: {line}") from reason
    memory, count = program.memory_analysis(), program.cost_analysis() or {}
    return Fit(
        arguments=memory.argument_size_in_bytes,
        outputs=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        temporary=memory.temp_size_in_bytes,
        code=memory.generated_code_size_in_bytes,
        limit=int(LIMITS[topology.split(":")[0]] * GIB),
        flops=float(count.get("flops", 0.0)),
        seconds=time.monotonic() - began,
    )


def laid(tree: Any, shardings: Any) -> Any:
    """Shapes with a place for each."""
    place = lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)  # noqa: E731
    return jax.tree.map(place, tree, shardings)


def report(settings: Settings, topology: str, build: Build) -> int:
    """Prints what a chip needs; 0 where it fits and 2 where it does not."""
    fit = compiled(settings, topology, build)
    length, (fsdp, tensor) = max(settings.data["lengths"]), settings.mesh
    print(f"{settings.name}: one step of {length} tokens on {topology}, fsdp {fsdp} x tensor {tensor}")
    for name in ("arguments", "outputs", "temporary", "code", "total", "limit"):
        print(f"  {name:10} {getattr(fit, name) / GIB:8.3f} GiB a chip")
    print(f"  compiled in {fit.seconds:.0f} s; room left: {(fit.limit - fit.total) / GIB:.2f} GiB")
    if fit.total > fit.limit:
        print("does not fit")
        return 2
    return 0
