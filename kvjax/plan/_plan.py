"""The answer to a question: programs compiled, bytes added up, the largest that fits."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax

from kvjax.cli import InputError
from kvjax.plan import _estimate as estimate
from kvjax.plan import _programs as programs
from kvjax.plan._arguments import Question
from kvjax.plan._deployment import Deployment
from kvjax.plan._estimate import Bytes, Roofline
from kvjax.plan._programs import Compiled, NoRoomError, Program
from kvjax.sharding import mesh as meshes
from kvjax.sharding.specs import DATA

if TYPE_CHECKING:
    from pallas_kernels.measure import aot


@dataclasses.dataclass(frozen=True, kw_only=True)
class DevicePlan:
    """What a model under a policy needs on devices that are not here.

    Attributes:
      kind: of the devices, as JAX says it.
      step, prefill: the programs (prefill: of one layer), with fewer rows if the compiler finds no room for
        all; prefill is None if it finds none for one row a device.
      decoding, reading: bytes of a device during a step, and while prompts are read.
      roofline: the least time of a step.
      most_rows: at this context, while decoding; 0 if not one fits.
      most_read: rows of which all prompts can be read at once.
      longest: context of these rows.
      remedies: what would fit if a step does not.
      wheels: versions of the compilers.
    """

    kind: str
    step: Compiled
    prefill: Compiled | None
    decoding: Bytes
    reading: Bytes | None
    roofline: Roofline
    most_rows: int
    most_read: int
    longest: int
    remedies: list[str]
    wheels: dict[str, str]


def target(topology: str) -> aot.Target:
    """The devices, from the compiler that knows them.

    Raises:
      InputError: no compiler is installed, or it knows no such topology; GPUs, with jax 0.7.
    """
    from pallas_kernels.measure import aot  # sets what libtpu reads when it loads: not beside real chips

    chip = topology.partition(":")[0]
    if chip in aot.GPUS and jax.__version_info__ < (0, 8):
        raise InputError(
            f"{topology}: XLA of jax {jax.__version__} times products on the GPU that it compiles for, and "
            "there is none. Plan for GPUs in an environment with a newer jax."
        )
    try:
        return aot.target(chip, topology)
    except (ValueError, RuntimeError) as reason:
        raise InputError(f"{topology}: {str(reason).splitlines()[0]}") from reason


def answer(question: Question) -> DevicePlan:
    """Compiles, and adds up.

    Raises:
      InputError: no compiler for the devices, or no room for a single row.
    """
    from pallas_kernels.measure import aot

    devices = target(question.topology)
    mesh = meshes.mesh(repr(question.case.mesh), devices=devices.devices)
    case, chip = dataclasses.replace(question.case, mesh=mesh), question.chip
    step = compiled(functools.partial(programs.step, target=devices, exact=question.exact), case)
    if step is None:
        raise InputError(
            f"--rows {case.rows} --context {case.context}: the compiler finds no room for one row a device. "
            "Give a shorter context, or more devices."
        )
    padding = step.program.padding / max(estimate.resident(step.case).allocated, 1)
    step = dataclasses.replace(step, padding=padding)
    prefill = compiled(functools.partial(programs.prefill, target=devices), case)
    if prefill is not None:
        prefill = dataclasses.replace(prefill, padding=padding, reading=True)
    decoding = estimate.bytes_like(case, step)
    return DevicePlan(
        kind=devices.kind,
        step=step,
        prefill=prefill,
        decoding=decoding,
        reading=estimate.bytes_like(case, prefill) if prefill else None,
        roofline=estimate.roofline(case, step, chip),
        most_rows=estimate.most_rows(case, step, chip.memory),
        most_read=estimate.most_rows(case, prefill, chip.memory) if prefill else 0,
        longest=estimate.longest_context(case, step, chip.memory),
        remedies=estimate.remedies(case, step, chip) if decoding.total > chip.memory else [],
        wheels=aot.wheels(),
    )


def compiled(compile_: Callable[[Deployment], Program], case: Deployment) -> Compiled | None:
    """A program of as many rows as the compiler finds room for, halving them; None: not one a device."""
    each = case.device_rows
    while each:
        smaller = dataclasses.replace(case, rows=each * case.mesh.size(DATA))
        try:
            return Compiled(case=smaller, program=compile_(smaller))
        except NoRoomError:
            each //= 2
    return None
