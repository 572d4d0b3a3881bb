"""A training step compiled for a TPU slice that is not here: does it fit, and by how much?

Needs the wheels of the optional group ``aot``.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

import jax
import optax

from pallas_kernels.measure.chips import CHIPS, GIB
from train import loop, mesh
from train.config import ConfigError

if TYPE_CHECKING:
    from pallas_kernels.measure import aot


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
    """The chips of a topology such as "v5e:2x4" and a mesh (data, tensor) over them.

    Raises:
      ConfigError: no such topology, no compiler for it, or not as many chips as the mesh has places.
    """
    from pallas_kernels.measure import aot  # sets what libtpu reads when it loads: not beside real chips

    chip = name.split(":")[0]
    if chip not in aot.TPUS:
        raise ConfigError(
            f"--compile {name}: {chip!r} is none of {', '.join(aot.TPUS)}. Write v5e:2x4, for example."
        )
    try:
        target = aot.target(chip, name if ":" in name else None)
    except (ValueError, RuntimeError) as reason:  # not installed, or a name libtpu does not know
        line = str(reason).splitlines()[0]
        raise ConfigError(f"--compile {name}: {line}") from reason
    if len(target.devices) != axes[0] * axes[1]:
        raise ConfigError(
            f"--compile {name}: {len(target.devices)} devices, and the config lays the step over "
            f"{axes[0] * axes[1]} ({axes[0]} x {axes[1]}). Choose a topology or a config that agree."
        )
    return target, mesh.layout(*axes, target.devices)


def compiled(
    topology: str,
    target: aot.Target,
    layout: mesh.Layout,
    loss: Any,
    params: Any,
    optimizer: optax.GradientTransformation,
    batch: dict[str, Any],
) -> Fit:
    """Compiles one update.

    Args:
      topology, target, layout: of ``slice_of``.
      loss: with frozen shapes bound.
      params: shapes of the trained leaves.
      optimizer: of the run.
      batch: shapes with a place each.

    Raises:
      ConfigError: the program is too large for the compiler.
    """
    state = loop.State(params=params, opt=jax.eval_shape(optimizer.init, params))
    began = time.monotonic()
    where = layout.gates(state)
    step: Any = loop.make_step(optimizer, where)
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
        limit=CHIPS[topology.split(":")[0]].memory,
        flops=float(count.get("flops", 0.0)),
        seconds=time.monotonic() - began,
    )


def laid(tree: Any, shardings: Any) -> Any:
    """Shapes with a place for each."""
    place = lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)  # noqa: E731
    return jax.tree.map(place, tree, shardings)


def report(title: str, fit: Fit) -> int:
    """Prints what a chip needs; 0 where it fits and 2 where it does not."""
    print(title)
    for name in ("arguments", "outputs", "temporary", "code", "total", "limit"):
        print(f"  {name:10} {getattr(fit, name) / GIB:8.3f} GiB a chip")
    print(f"  compiled in {fit.seconds:.0f} s; room left: {(fit.limit - fit.total) / GIB:.2f} GiB")
    if fit.total > fit.limit:
        print("does not fit")
        return 2
    return 0
