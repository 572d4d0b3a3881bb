"""The programs that would run, compiled for devices that are not here.

A step of a deep model is compiled at two small depths; its temporaries and what it sends are extrapolated
linearly from them. The sizes of its arguments are known exactly. ``exact`` compiles the whole depth instead.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from kvjax import decode, layer
from kvjax.plan import _shapes as shapes
from kvjax.plan._deployment import Deployment
from kvjax.sharding.specs import ROWS

if TYPE_CHECKING:
    from pallas_kernels.measure import aot


class NoRoomError(Exception):
    """The compiler finds no room for a program on a device."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """What one device holds while a program runs, in bytes, and what it sends.

    Attributes:
      arguments: all it is given, as the device lays it out.
      padding: of that, what the layout adds to the shapes.
      outputs: results that reuse no argument.
      temporary: everything in between.
      code: the program itself.
      host: of its arguments, what lies in host memory.
      host_temporary: what it makes there in between; a copy of a pool would be here.
      collectives: operations among devices, and how many of each.
      kernels: "pallas" where it calls kernels of ours, else "xla".
      depths: layers that were compiled; two if the rest is extrapolated.
    """

    arguments: int
    padding: int
    outputs: int
    temporary: int
    code: int
    host: int
    host_temporary: int
    collectives: dict[Collective, int]
    kernels: str
    depths: tuple[int, ...]

    @property
    def sent(self) -> float:
        """Bytes that one device sends."""
        return sum(one.sent * n for one, n in self.collectives.items())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """A program, and what it was compiled for.

    Attributes:
      case: the deployment.
      program: the result.
      padding: of a state, over its shapes.
      reading: it reads prompts.
    """

    case: Deployment
    program: Program
    padding: float = 0.0
    reading: bool = False


def step(case: Deployment, target: aot.Target, *, exact: bool = False) -> Program:
    """One decode step of all rows (``decode.step_program``).

    Raises:
      NoRoomError: the compiler says that it does not fit a device.
    """
    layers, selection = case.spec.num_layers, case.policy.selection
    # What makes two layers' programs differ, beside the size of their pools.
    first, second = depths([(window, selection.applies(i)) for i, window in enumerate(case.spec.windows)])
    if exact or second >= layers:
        return _step(case, target)
    few, more = (_step(case.shallow(n), target) for n in (first, second))
    times = (layers - first) / (second - first)
    return extrapolated(few, more, times, shapes.device_bytes(_arguments(case)))


def extrapolated(few: Program, more: Program, times: float, argument_bytes: int) -> Program:
    """The program of a deeper model, from two shallow ones.

    Args:
      few, more: the two.
      times: how often the layers between the two are added to the first.
      argument_bytes: of the shapes of the deeper model's arguments.
    """

    def on(a: float, b: float) -> int:
        return round(a + (b - a) * times)

    padding = on(few.padding, more.padding)
    kinds = sorted({*few.collectives, *more.collectives})
    counts = {one: on(few.collectives.get(one, 0), more.collectives.get(one, 0)) for one in kinds}
    return Program(
        arguments=argument_bytes + padding,
        padding=padding,
        outputs=on(few.outputs, more.outputs),
        temporary=max(on(few.temporary, more.temporary), few.temporary, more.temporary),
        code=max(on(few.code, more.code), more.code),
        host=on(few.host, more.host),
        host_temporary=max(on(few.host_temporary, more.host_temporary), more.host_temporary),
        collectives={one: n for one, n in counts.items() if n > 0},
        kernels=more.kernels,
        depths=(*few.depths, *more.depths),
    )


def depths(kinds: Sequence[Any]) -> tuple[int, int]:
    """Two depths, the second of which has one more period of a model's layers than the first.

    Args:
      kinds: one value for each kind of layer.
    """
    layers = len(kinds)
    starts = [
        (head + period, head, period)
        for period in range(1, layers + 1)
        for head in range(layers - period + 1)
        if all(kinds[i] == kinds[i + period] for i in range(head, layers - period))
    ]
    _, head, period = min(starts)
    first = head + period + (layers - head) % period
    return first, first + period


def _arguments(case: Deployment) -> tuple[Any, ...]:
    """Shapes of a step's arguments after the network and the policy."""
    mesh, rows = case.mesh, (case.rows,)
    fed = shapes.replicated(mesh, rows, "int32"), shapes.replicated(mesh, rows, "bool")
    return shapes.params(case), shapes.weights(case), shapes.state(case, shapes.layer_sizes(case)), *fed


def _step(case: Deployment, target: aot.Target) -> Program:
    # What is compiled is what runs: the policy's numbers are arguments, as always.
    arguments = _arguments(case)
    traced = decode.step_program.trace(case.network, case.policy, *arguments)
    return _compiled(case, target, traced, arguments)


def prefill(case: Deployment, target: aot.Target) -> Program:
    """One layer's part in reading prompts: a chunk of them, or all where the policy ranks afterwards.

    Raises:
      NoRoomError: the compiler says that it does not fit a device.
    """
    one, mesh, rows, policy = case.shallow(1), case.mesh, case.rows, case.policy
    block, learned = shapes.params(one)["layers"][0], shapes.weights(case)
    cache = shapes.layer_sizes(one, reading=True)[0].cache
    own = {
        part.place: jax.eval_shape(functools.partial(part.at_layer, layer=0), learned[part.place])
        for part in policy.learned
    }
    own = mesh.shapes(own, layer.of_learned(policy, own))
    index, numbers = shapes.replicated(mesh, (), "int32"), shapes.replicated(mesh, (rows,), "int32")
    entering = (rows, case.read_at_once, case.spec.model_dim)
    x = jax.ShapeDtypeStruct(entering, jnp.dtype(case.dtype), sharding=mesh.sharding(ROWS))
    network = one.network.at(case.context)
    arguments: tuple[Any, ...]
    if policy.eviction.replays:  # the first pass; a piece runs the same layer behind it
        arguments = network, case.spec.windows[0], block, x, numbers, mesh
        traced = decode.hold_layer.trace(*arguments)
    elif policy.holds_prompt:
        seeds = shapes.replicated(mesh, (rows,), "uint32")
        arguments = network, policy, case.spec.windows[0], block, own, index, x, numbers, seeds, mesh
        traced = decode.rank_layer.trace(*arguments)
    elif policy.whole_prompt:
        seeds = shapes.replicated(mesh, (rows,), "uint32")
        sizes = case.spec.windows[0], cache.ring.window
        arguments = network, policy, *sizes, block, own, index, x, numbers, seeds, mesh
        traced = decode.prompt_layer.trace(*arguments)
    else:
        arguments = network, 0, block, own, index, policy, cache, x, numbers, numbers, numbers
        traced = decode.chunk_layer.trace(*arguments, mesh=mesh)
    return _compiled(one, target, traced, arguments)


def _compiled(case: Deployment, target: aot.Target, traced: Any, arguments: Any) -> Program:
    try:
        program = traced.lower(lowering_platforms=target.lowering).compile()
    except jax.errors.JaxRuntimeError as reason:
        if "RESOURCE_EXHAUSTED" not in str(reason):
            raise
        raise NoRoomError(str(reason).splitlines()[0]) from reason
    memory, text = program.memory_analysis(), program.as_text()
    ours = any(name in text for name in ("tpu_custom_call", "__gpu$xla.gpu.triton", "mosaic_gpu"))
    sharded = [x for x in jax.tree.leaves(arguments) if isinstance(x, jax.ShapeDtypeStruct)]
    return Program(
        arguments=memory.argument_size_in_bytes,
        padding=max(memory.argument_size_in_bytes - shapes.device_bytes(sharded), 0),
        outputs=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        temporary=memory.temp_size_in_bytes,
        code=memory.generated_code_size_in_bytes,
        host=memory.host_argument_size_in_bytes,
        host_temporary=memory.host_temp_size_in_bytes,
        collectives=collectives(text, len(target.devices)),
        kernels="pallas" if ours else "xla",
        depths=(case.spec.num_layers,),
    )


# --- collectives ---------------------------------------------------------------------------------

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")

_OP = re.compile(rf"^\s*(?:ROOT )?%?[\w.-]+ = (.*?) ({'|'.join(KINDS)})(-start)?\((.*)$")
_SHAPE = re.compile(r"\b([a-z]\w*?)\[([\d,]*)\]")
_LISTED = re.compile(r"replica_groups=\{\{([\d,]*)\}")
_IOTA = re.compile(r"replica_groups=\[\d+,(\d+)\]<=")
_NAMED = re.compile(r"replica_groups=mesh\[([^\]]*)\].*?\{([^}]*)\}")
_DTYPES = {
    **dict.fromkeys(("s16", "u16", "f16", "bf16"), 2),
    **dict.fromkeys(("s32", "u32", "f32"), 4),
    **dict.fromkeys(("s64", "u64", "f64", "c64"), 8),
}
"""Bytes of what takes more than one."""


@dataclasses.dataclass(frozen=True, order=True)
class Collective:
    """A collective operation.

    Attributes:
      kind: of ``KINDS``.
      devices: how many take part together.
      nbytes: of its result on one device.
    """

    kind: str
    devices: int
    nbytes: int

    @property
    def sent(self) -> float:
        """The least bytes that one device sends, in a ring: every byte of a sum goes around twice."""
        others = (self.devices - 1) / self.devices
        return {
            "all-reduce": 2 * self.nbytes * others,
            "all-gather": self.nbytes * others,
            "reduce-scatter": self.nbytes * (self.devices - 1),
            "all-to-all": self.nbytes * others,
            "collective-permute": float(self.nbytes),
        }[self.kind]


def collectives(text: str, devices: int) -> dict[Collective, int]:
    """How often each occurs in a compiled program's text; those in the body of a loop count once.

    An operation that names no groups is among all ``devices`` of the program.
    """
    counts: collections.Counter[Collective] = collections.Counter()
    for line in text.splitlines():
        op = _OP.match(line)
        if op is None:
            continue
        result, kind, starts, rest = op.groups()
        sizes = [_nbytes(*shape) for shape in _SHAPE.findall(result)]
        if starts and kind in ("all-gather", "collective-permute"):
            sizes = [max(sizes)]  # a tuple of operand, result and flags
        one = Collective(kind, _group(rest, devices), sum(sizes))
        if one.devices > 1:
            counts[one] += 1
    return dict(counts)


def _nbytes(dtype: str, dims: str) -> int:
    return _DTYPES.get(dtype, 1) * math.prod(int(n) for n in dims.split(",") if n)


def _group(rest: str, devices: int) -> int:
    if listed := _LISTED.search(rest):
        return len(listed[1].split(","))
    if iota := _IOTA.search(rest):
        return int(iota[1])
    if named := _NAMED.search(rest):
        sizes = {name: int(n) for name, n in re.findall(r"'(\w+)'=(\d+)", named[1])}
        return math.prod(sizes[name] for name in re.findall(r"'(\w+)'", named[2]))
    return 2 if "source_target_pairs=" in rest else devices
