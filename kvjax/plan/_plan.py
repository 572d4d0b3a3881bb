"""The answer to a question: programs compiled, bytes added up, the largest that fits."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvjax.cli import InputError
from kvjax.plan import _estimate as estimate
from kvjax.plan import _programs as programs
from kvjax.plan import _search as search
from kvjax.plan._arguments import Question
from kvjax.plan._case import Case
from kvjax.plan._estimate import Bytes, Known, Roofline
from kvjax.plan._programs import NoRoom, Program
from kvjax.sharding import mesh as meshes
from kvjax.sharding.specs import DATA

if TYPE_CHECKING:
    from pallas_kernels.measure import aot


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What a model under a policy needs on devices that are not here.

    Attributes:
      kind: of the devices, as JAX says it.
      step, prefill: the programs, of a prefill one layer's; for fewer rows than were asked for where the
        compiler finds no room for all; no prefill where it finds none for one row a device.
      decoding, reading: bytes of a device during a step, and while prompts are read.
      roofline: the least time of a step.
      most_rows: at this context, while decoding; 0 where not one fits.
      most_read: rows of which all prompts can be read at once.
      longest: context of so many rows.
      remedies: what would fit where a step does not.
      wheels: versions of what compiled.
      seconds: it took.
    """

    kind: str
    step: Known
    prefill: Known | None
    decoding: Bytes
    reading: Bytes | None
    roofline: Roofline
    most_rows: int
    most_read: int
    longest: int
    remedies: list[str]
    wheels: dict[str, str]
    seconds: float


def target(topology: str) -> aot.Target:
    """The devices, from the compiler that knows them.

    Raises:
      InputError: no compiler is installed, or it knows no such topology.
    """
    from pallas_kernels.measure import aot  # sets what libtpu reads when it loads: not beside real chips

    try:
        return aot.target(topology.partition(":")[0], topology)
    except (ValueError, RuntimeError) as reason:
        raise InputError(f"{topology}: {str(reason).splitlines()[0]}") from reason


def answer(question: Question) -> Plan:
    """Compiles, and adds up.

    Raises:
      InputError: no compiler for the devices, or no room for a single row.
    """
    from pallas_kernels.measure import aot

    began = time.monotonic()
    devices = target(question.topology)
    case = question.case
    where = meshes.mesh(repr(case.mesh), devices=devices.devices)
    case = dataclasses.replace(case, mesh=where)
    chip = question.chip
    step = _step(functools.partial(programs.step, target=devices, exact=question.exact), case)
    prefill = compiled(functools.partial(programs.prefill, target=devices), case)
    if prefill is not None:
        prefill = dataclasses.replace(prefill, padding=step.padding, reading=True)
    decoding = estimate.bytes_like(case, step)
    return Plan(
        kind=devices.kind,
        step=step,
        prefill=prefill,
        decoding=decoding,
        reading=estimate.bytes_like(case, prefill) if prefill else None,
        roofline=estimate.roofline(case, step, chip),
        most_rows=search.most_rows(case, step, chip.memory),
        most_read=search.most_rows(case, prefill, chip.memory) if prefill else 0,
        longest=search.longest_context(case, step, chip.memory),
        remedies=search.remedies(case, step, chip) if decoding.total > chip.memory else [],
        wheels=aot.wheels(),
        seconds=time.monotonic() - began,
    )


def _step(compile_: Callable[[Case], Program], case: Case) -> Known:
    """A step, and how much its layouts add to the state."""
    found = compiled(compile_, case)
    if found is None:
        raise InputError(
            f"--rows {case.rows} --context {case.context}: the compiler finds no room for one row a device. "
            "Give a shorter context, or more devices."
        )
    state = estimate.resident(found.case).allocated
    return dataclasses.replace(found, padding=found.program.padding / max(state, 1))


def compiled(compile_: Callable[[Case], Program], case: Case) -> Known | None:
    """A program of as many rows as the compiler finds room for, halving them; None: not one a device."""
    data, each = case.mesh.size(DATA), case.rows // case.mesh.size(DATA)
    while each:
        now = dataclasses.replace(case, rows=each * data)
        try:
            return Known(case=now, program=compile_(now))
        except NoRoom:
            each //= 2
    return None
