"""Compiles a training step for a TPU slice that is not attached, and reports the memory of a chip.

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
class StepMemory:
    """Bytes of one chip while the step runs.

    Attributes:
      arguments: weights, trained leaves, optimiser state and batch.
      outputs: results that reuse no argument.
      temporary: everything in between.
      code: the program.
      limit: the chip's memory.
      seconds: time of the compilation.
    """

    arguments: int
    outputs: int
    temporary: int
    code: int
    limit: int
    seconds: float

    @property
    def total(self) -> int:
        return self.arguments + self.outputs + self.temporary + self.code


def tpu_slice(name: str, axes: tuple[int, int]) -> tuple[aot.Target, mesh.Layout]:
    """The chips of a topology such as "v5e:2x4" and a mesh (data, tensor) over them.

    Raises:
      ConfigError: no such topology, no compiler for it, or another number of chips than the mesh has.
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
            f"--compile {name}: {len(target.devices)} devices, and the config shards the step over "
            f"{axes[0] * axes[1]} ({axes[0]} x {axes[1]}). Choose a topology or a config that agree."
        )
    return target, mesh.layout(*axes, target.devices)


def compiled_step(
    topology: str,
    target: aot.Target,
    layout: mesh.Layout,
    loss: Any,
    params: Any,
    optimizer: optax.GradientTransformation,
    batch: dict[str, Any],
) -> StepMemory:
    """Compiles one update.

    Args:
      topology, target, layout: of ``tpu_slice``.
      loss: with the shapes of its frozen weights bound.
      params: shapes of the trained leaves.
      optimizer: of the run.
      batch: shapes with their shardings.

    Raises:
      ConfigError: the program is too large for the compiler.
    """
    state = loop.State(params=params, opt=jax.eval_shape(optimizer.init, params))
    start = time.monotonic()
    shardings = layout.gates(state)
    step: Any = loop.make_step(optimizer, shardings)
    traced = step.trace(loss, sharded_shapes(state, shardings), batch)
    try:
        program = traced.lower(lowering_platforms=target.lowering).compile()
    except jax.errors.JaxRuntimeError as reason:
        if "RESOURCE_EXHAUSTED" not in str(reason):
            raise
        line = str(reason).splitlines()[0]
        raise ConfigError(f"--compile {topology}: the step does not fit a chip: {line}") from reason
    memory = program.memory_analysis()
    return StepMemory(
        arguments=memory.argument_size_in_bytes,
        outputs=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        temporary=memory.temp_size_in_bytes,
        code=memory.generated_code_size_in_bytes,
        limit=CHIPS[topology.split(":")[0]].memory,
        seconds=time.monotonic() - start,
    )


def sharded_shapes(tree: Any, shardings: Any) -> Any:
    """The shapes of a tree with a sharding each."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        tree,
        shardings,
    )


def report(title: str, memory: StepMemory) -> int:
    """Prints what a chip needs; the exit code: 0 where it fits, else 2."""
    print(title)
    for name in ("arguments", "outputs", "temporary", "code", "total", "limit"):
        print(f"  {name:10} {getattr(memory, name) / GIB:8.3f} GiB a chip")
    print(f"  compiled in {memory.seconds:.0f} s; room left: {(memory.limit - memory.total) / GIB:.2f} GiB")
    if memory.total > memory.limit:
        print("does not fit")
        return 2
    return 0
