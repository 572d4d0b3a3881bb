"""The programs that would run, compiled for devices that are not here.

A step of a deep model is compiled at two small depths, and what it holds in between and sends is carried on
along the line through them; what it is given is known exactly. ``exact`` compiles the whole depth instead.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from kvjax import decode, layer
from kvjax.plan import _shapes as shapes
from kvjax.plan._case import Case
from kvjax.plan._collectives import Collective, collectives
from kvjax.sharding.specs import ROWS

if TYPE_CHECKING:
    from pallas_kernels.measure import aot


class NoRoom(Exception):  # noqa: N818, an absence, not an error
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
      collectives: operations among devices, and how many of each.
      kernels: "pallas" where it calls kernels of ours, else "xla".
      seconds: it took to compile.
      depths: layers that were compiled; two where the rest is carried on.
    """

    arguments: int
    padding: int
    outputs: int
    temporary: int
    code: int
    collectives: dict[Collective, int]
    kernels: str
    seconds: float
    depths: tuple[int, ...]

    @property
    def sent(self) -> float:
        """Bytes that one device sends."""
        return sum(one.sent * n for one, n in self.collectives.items())


def step(case: Case, target: aot.Target, *, exact: bool = False) -> Program:
    """One decode step of all rows (``decode.step_program``).

    Raises:
      NoRoom: the compiler says that it does not fit a device.
    """
    layers = case.spec.num_layers
    first, second = depths(_kinds(case))
    if exact or second >= layers:
        return _step(case, target)
    few, more = (_step(case.shallow(n), target) for n in (first, second))
    return carried_on(few, more, (layers - first) / (second - first), shapes.bytes_each(_given(case)))


def carried_on(few: Program, more: Program, times: float, given: int) -> Program:
    """The program of as many more layers as lie between two, times over.

    Args:
      few, more: the two.
      times: how often.
      given: bytes of the shapes it is given.
    """

    def on(a: float, b: float) -> int:
        return round(a + (b - a) * times)

    padding = on(few.padding, more.padding)
    counts = [few.collectives, more.collectives]
    each = {one: on(*(x.get(one, 0) for x in counts)) for one in sorted({*counts[0], *counts[1]})}
    return Program(
        arguments=given + padding,
        padding=padding,
        outputs=on(few.outputs, more.outputs),
        temporary=max(on(few.temporary, more.temporary), few.temporary, more.temporary),
        code=max(on(few.code, more.code), more.code),
        collectives={one: n for one, n in each.items() if n > 0},
        kernels=more.kernels,
        seconds=few.seconds + more.seconds,
        depths=(*few.depths, *more.depths),
    )


def depths(kinds: Sequence[Any]) -> tuple[int, int]:
    """Two depths, the second of which has one more period of a model's layers than the first.

    Args:
      kinds: what tells layers apart.
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


def _kinds(case: Case) -> list[Any]:
    """What tells layers apart beside the size of their pools."""
    windows, selection = case.spec.windows, case.policy.selection
    return [(window, selection.applies(i)) for i, window in enumerate(windows)]


def _given(case: Case) -> tuple[Any, ...]:
    """What a step is given, after the network and the policy."""
    state = shapes.state(case, shapes.held(case))
    mesh, rows = case.mesh, (case.rows,)
    fed = shapes.everywhere(mesh, rows, "int32"), shapes.everywhere(mesh, rows, "bool")
    return shapes.params(case), shapes.weights(case), state, *fed


def _step(case: Case, target: aot.Target) -> Program:
    # What is compiled is what runs: the policy's numbers are arguments, as always.
    given = _given(case)
    return _compiled(case, target, decode.step_program.trace(case.network, case.policy, *given), given)


def prefill(case: Case, target: aot.Target) -> Program:
    """One layer's part in reading prompts: a chunk of them, or all where the policy ranks afterwards.

    Raises:
      NoRoom: the compiler says that it does not fit a device.
    """
    one, mesh, rows = case.shallow(1), case.mesh, case.rows
    block, learned = shapes.params(one)["layers"][0], shapes.weights(case)
    cache = shapes.held(one, reading=True)[0].cache
    own = {
        p.place: jax.eval_shape(lambda w, p=p: p.at_layer(w, 0), learned[p.place])
        for p in case.policy.learned
    }
    own = mesh.shapes(own, layer.of_learned(case.policy, own))
    index, numbers = shapes.everywhere(mesh, (), "int32"), shapes.everywhere(mesh, (rows,), "int32")
    entering = (rows, case.read_at_once, case.spec.model_dim)
    x = jax.ShapeDtypeStruct(entering, jnp.dtype(case.dtype), sharding=mesh.sharding(ROWS))
    network = one.network.at(case.context)
    if case.policy.whole_prompt:
        seeds = shapes.everywhere(mesh, (rows,), "uint32")
        window, ring = case.spec.windows[0], cache.ring.window
        known: tuple[Any, ...] = (
            network,
            case.policy,
            window,
            ring,
            block,
            own,
            index,
            x,
            numbers,
            seeds,
            mesh,
        )
        traced = decode.prompt_layer.trace(*known)
    else:
        known = (network, 0, block, own, index, case.policy, cache, x, numbers, numbers, numbers)
        traced = decode.chunk_layer.trace(*known, mesh=mesh)
    return _compiled(one, target, traced, known)


def _compiled(case: Case, target: aot.Target, traced: Any, given: Any) -> Program:
    began = time.monotonic()
    try:
        program = traced.lower(lowering_platforms=target.lowering).compile()
    except jax.errors.JaxRuntimeError as reason:
        if "RESOURCE_EXHAUSTED" not in str(reason):
            raise
        raise NoRoom(str(reason).splitlines()[0]) from reason
    memory, text = program.memory_analysis(), program.as_text()
    ours = any(name in text for name in ("tpu_custom_call", "__gpu$xla.gpu.triton", "mosaic_gpu"))
    laid = [x for x in jax.tree.leaves(given) if isinstance(x, jax.ShapeDtypeStruct)]
    return Program(
        arguments=memory.argument_size_in_bytes,
        padding=max(memory.argument_size_in_bytes - shapes.bytes_each(laid), 0),
        outputs=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        temporary=memory.temp_size_in_bytes,
        code=memory.generated_code_size_in_bytes,
        collectives=collectives(text, len(target.devices)),
        kernels="pallas" if ours else "xla",
        seconds=time.monotonic() - began,
        depths=(case.spec.num_layers,),
    )
