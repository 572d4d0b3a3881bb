"""Kernels on the device at hand: do they agree with the definition, and which blocks suit it.

First every operation is checked, then, in the order of ``OPERATIONS``, blocks are chosen. Each operation's
record is written whenever something is added to it. The device is used by a process of its own
(``on_device``): if that dies or hangs, its task is reported lost and the next one gets a new process.
``benchmarks.kernels`` runs the same program with more tasks (``Extra``).
"""

from __future__ import annotations

import json
import pathlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from pallas_kernels import dispatch, lowering, records
from pallas_kernels.measure.child import Child, LostError
from pallas_kernels.measure.work import OPERATIONS

SHARES = {
    "ragged_decode": 30,
    "blockwise": 20,
    "decode_step": 10,
    "vertical_slash": 15,
    "gated": 15,
    "phi": 10,
}
"""Of the time that is left after the checks."""

CHECKS = 45.0
"""Most seconds for the checks of one operation; most of them compile."""

GRACE = 20.0
"""Seconds that a task may take beyond its box, to finish what it has begun."""

BESIDE = {"mosaic_gpu": ("ragged_decode", "blockwise", "vertical_slash")}
"""Bodies besides the platform's main one, for Hopper GPUs, and the operations that have them."""

Record = dict[str, Any]


class NoDeviceError(ValueError):
    """There is no GPU or TPU here."""


class Extra(NamedTuple):
    """What is done besides checks; by default blocks are chosen.

    Attributes:
      module: the process that does the tasks.
      first: tasks before the checks.
      last: the task of each operation after the checks; it takes the time that is left.
      targets: from an operation, its record and the ceilings to the record's "targets".
    """

    module: str = "pallas_kernels.measure.on_device"
    first: tuple[str, ...] = ()
    last: str = "blocks"
    targets: Callable[[str, Record, Record], Record] | None = None


TUNE = Extra()
"""What ``kvjax.tune`` does."""


def _worker(module: str, tiny: bool) -> Child:
    # Other libraries need memory too.
    flags = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_TRACEBACK_FILTERING": "off"}
    return Child.running(module, env=flags | ({"JAX_PLATFORMS": "cpu"} if tiny else {}))


def _do(worker: Child, task: dict[str, Any], limit: float, record: Any) -> str | None:
    """Give the worker a task and pass on its results; why it did not finish, or None."""
    end = time.monotonic() + limit
    try:
        worker.tell(task)
        while (result := worker.hear(end - time.monotonic())) != "done":
            record(*result)
    except LostError as reason:
        return f"no end after {limit:.0f} s" if time.monotonic() >= end else str(reason)
    return None


class Records:
    """Results, in the files of a folder."""

    def __init__(self, folder: pathlib.Path, base: Record, show: bool = True, targets: Any = None) -> None:
        self.folder, self.base, self.show, self.targets = folder, base, show, targets
        self.by_op: dict[str, Record] = {}

    def of(self, op: str) -> Record:
        """The record of an operation, begun anew; one of an earlier run lasts until it is first written."""
        if op not in self.by_op:
            parts: Record = {x: {} for x in ("checks", "blocks", "cases", "compared", "problems")}
            made = {**self.base, "sources": records.sources(op)}
            made |= {"impl": op.partition(".")[2]} if "." in op else {}
            self.by_op[op] = {**made, "agrees": False, "checked": False, **parts, "targets": {}}
        return self.by_op[op]

    def add(self, op: str, part: str, name: str, value: Record) -> None:
        """Add a result, print it and write the operation's file."""
        if part in ("hello", "limits"):
            self.base.update(value)
            self._show(f"{part}: {json.dumps(value)}")
            return
        record = self.of(op)
        if "refused" in value:
            for entry in record["blocks"].values():
                entry |= {"chosen": {}, **value}
        else:
            record[part][name] = value
        self._show(f"{op:14} {part:9} {name:36} {json.dumps(value)}")
        self.write(op)

    def _show(self, line: str) -> None:
        if self.show:
            print(line, flush=True)

    def write(self, op: str) -> None:
        """Put an operation's record in its file, whole or not at all."""
        record = self.of(op)
        checks = [
            x["agrees"]
            for name, x in record["checks"].items()
            if "agrees" in x and not name.endswith("_tuned")
        ]
        record["agrees"] = record["checked"] and bool(checks) and all(checks)
        if self.targets:
            record["targets"] = self.targets(op, record, self.base)
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / f"{op}.json"
        part = file.with_suffix(".part")
        part.write_text(json.dumps(record, indent=1) + "\n")
        part.replace(file)


def _device_of(worker: Child, tiny: bool) -> tuple[str, str]:
    device: dict[str, Any] = {}
    lost = _do(worker, {"what": "hello", "tiny": tiny}, 120.0, lambda op, part, name, x: device.update(x))
    if lost:
        raise RuntimeError(f"no device could be used: {lost}")
    if not tiny and device["platform"] not in dispatch.PREFERRED:
        raise NoDeviceError(
            f"measuring needs a GPU or TPU; this is {device['platform']}. --tiny runs interpreted bodies."
        )
    return device["platform"], device["kind"]


def _tasks(impl: str, tiny: bool, only: tuple[str, ...], extra: Extra) -> list[dict[str, Any]]:
    common = {"impl": impl, "tiny": tiny}
    ops = [op for op in OPERATIONS if not only or op in only]
    return [
        *({"what": what, **common} for what in extra.first),
        *({"what": "numerics", "op": op, **common} for op in ops),
        *({"what": extra.last, "op": op, **common} for op in ops),
    ]


def _mosaic_gpu_tasks(platform: str, kind: str, only: tuple[str, ...], extra: Extra) -> list[dict[str, Any]]:
    """Tasks of bodies besides the main one, last: results of that must not wait for them."""
    tasks = []
    for impl, ops in BESIDE.items() if platform == "gpu" and lowering.is_hopper(kind) else ():
        for op in ops if not only else [op for op in ops if op in only]:
            common = {"op": op, "impl": impl, "tiny": False, "record": dispatch.filed(op, impl)}
            tasks += [{"what": "numerics", **common}, {"what": extra.last, **common}]
    return tasks


def _box(task: dict[str, Any], left: float, later: list[dict[str, Any]]) -> float:
    """Seconds for a task when ``left`` remain for it and those after it."""
    if task["what"] not in ("blocks", "speed"):
        return min(CHECKS, left)
    shares = sum(SHARES[x["op"]] for x in [task, *later] if x["what"] == task["what"])
    return max(0.0, left - GRACE) * SHARES[task["op"]] / shares


def measure(
    minutes: float,
    *,
    folder: pathlib.Path | None = None,
    home: pathlib.Path | None = None,
    tiny: str | None = None,
    only: tuple[str, ...] = (),
    begun: Callable[[dict[str, Any], int], None] | None = None,
    extra: Extra = TUNE,
) -> dict[str, Record]:
    """Check everything, choose blocks and record it; ended after ``minutes``, whatever is unfinished then.

    Args:
      minutes: limit of the whole.
      folder: where to record; a folder of the device's name in ``home`` by default. Operations read their
        blocks there.
      home: ``dispatch.TUNED`` by default.
      tiny: an implementation to run interpreted and tiny on a CPU, to see that all of this works.
      only: operations' folders, all by default.
      begun: called with each task as it begins and the number of tasks; without it each result is printed.
      extra: what is done besides the checks.

    Returns:
      The records, by operation.

    Raises:
      NoDeviceError: there is no GPU or TPU here.
      RuntimeError: the device there is cannot be used at all.
    """
    end = time.monotonic() + 60 * minutes
    worker = _worker(extra.module, tiny is not None)
    try:
        platform, kind = _device_of(worker, tiny is not None)
        impl = tiny or dispatch.PREFERRED[platform][0]
        base = {"impl": impl, "jax": jax.__version__, "device": kind, "interpreted": tiny is not None}
        place = folder or (home or dispatch.TUNED) / records.slug(kind)
        made = Records(place, base, begun is None, extra.targets)
        tasks = _tasks(impl, tiny is not None, only, extra)
        tasks += [] if tiny else _mosaic_gpu_tasks(platform, kind, only, extra)
        for i, task in enumerate(tasks):
            if begun is not None:
                begun(task, len(tasks))
            op, left = task.get("record", task.get("op", "")), end - time.monotonic()
            if left <= 0:
                lost: str | None = "the time was over"
            else:
                box = _box(task, left, tasks[i + 1 :])
                lost = _do(worker, {**task, "box": box}, min(left, box + GRACE), made.add)
                if lost:
                    worker.end()
                    worker = _worker(extra.module, tiny is not None)
            if op and task["what"] == "numerics":
                made.of(op)["checked"] = lost is None
            if op and lost:
                made.add(op, "problems", task["what"], {"lost": lost})
            elif op:
                made.write(op)
            elif lost:
                print(f"{task['what']}: lost: {lost}", flush=True)
        return made.by_op
    finally:
        worker.end()
