"""Kernels on the device at hand: do they agree with the definition, which blocks suit it, how fast are they.

Ceilings are measured first, then agreement of every operation, then, operation by operation in the order
of ``OPERATIONS``, blocks are chosen and times taken beside others' attention. Each operation's
record is written whenever something is added to it. The device is used by a process of its own
(``on_device``): if that dies or hangs, its task is reported lost and the next one gets a new process.
"""

from __future__ import annotations

import json
import pathlib
import time
from typing import Any

import jax

from pallas_kernels import dispatch
from pallas_kernels.measure.child import Child, LostError
from pallas_kernels.measure.work import OPERATIONS, work

SHARES = {"ragged_decode": 30, "blockwise": 25, "vertical_slash": 20, "gated": 15, "phi": 10}
"""Of the time that is left after agreement, for blocks and timings."""

CHECKS = 45.0
"""Most seconds for the agreement of one operation; most of them compile."""

GRACE = 20.0
"""A task may outlast its box by this, to finish what it is at."""


def _worker(tiny: bool) -> Child:
    # Others' libraries need memory too.
    flags = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_TRACEBACK_FILTERING": "off"}
    return Child("pallas_kernels.measure.on_device", env=flags | ({"JAX_PLATFORMS": "cpu"} if tiny else {}))


def _do(worker: Child, task: dict[str, Any], limit: float, record: Any) -> str | None:
    """Give it a task and pass on what it says; why it did not finish, or None."""
    end = time.monotonic() + limit
    try:
        worker.tell(task)
        while (result := worker.hear(end - time.monotonic())) != "done":
            record(*result)
    except LostError as reason:
        return f"no end after {limit:.0f} s" if time.monotonic() >= end else str(reason)
    return None


class Records:
    """What was found, in the files of a folder."""

    def __init__(self, folder: pathlib.Path, base: dict[str, Any]) -> None:
        self.folder, self.base = folder, base
        self.found: dict[str, dict[str, Any]] = {}

    def of(self, op: str) -> dict[str, Any]:
        """The record of an operation, begun anew; one of an earlier run lasts until it is first written."""
        if op not in self.found:
            parts: dict[str, Any] = {x: {} for x in ("checks", "blocks", "cases", "compared", "problems")}
            self.found[op] = {**self.base, "agrees": False, "checked": False, **parts, "targets": {}}
        return self.found[op]

    def add(self, op: str, part: str, name: str, value: dict[str, Any]) -> None:
        """Add a result, print it and write the operation's file."""
        if part in ("hello", "limits"):
            self.base.update(value)
            print(f"{part}: {json.dumps(value)}", flush=True)
            return
        record = self.of(op)
        if "refused" in value:
            for entry in record["blocks"].values():
                entry |= {"chosen": {}, **value}
        else:
            record[part][name] = value
        print(f"{op:14} {part:9} {name:36} {json.dumps(value)}", flush=True)
        self.write(op)

    def write(self, op: str) -> None:
        """Put an operation's record in its file, whole or not at all."""
        record = self.of(op)
        checks = [x["agrees"] for name, x in record["checks"].items() if not name.endswith("_tuned")]
        record["agrees"] = record["checked"] and bool(checks) and all(checks)
        if "copy_gb_s" in self.base:
            timed = {**record, "cases": {name: x for name, x in record["cases"].items() if "ms" in x}}
            record["targets"] = {x.name: x.said() for x in work(op).targets(timed, self.base)}
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / f"{op}.json"
        part = file.with_suffix(".part")
        part.write_text(json.dumps(record, indent=1) + "\n")
        part.replace(file)


def _hello(worker: Child, tiny: bool) -> tuple[str, str]:
    """Platform and kind of the child's device."""
    found: dict[str, Any] = {}
    lost = _do(worker, {"what": "hello", "tiny": tiny}, 120.0, lambda op, part, name, x: found.update(x))
    if lost:
        raise RuntimeError(f"bench --device: no device could be used: {lost}")
    if not tiny and found["platform"] not in dispatch.PREFERRED:
        raise ValueError(
            f"bench --device needs a GPU or TPU; this is {found['platform']}. Use bench --static here, or "
            "--tiny to see the program run on interpreted bodies."
        )
    return found["platform"], found["kind"]


def _tasks(impl: str, tiny: bool, only: tuple[str, ...]) -> list[dict[str, Any]]:
    common = {"impl": impl, "tiny": tiny}
    ops = [op for op in OPERATIONS if not only or op in only]
    return [
        {"what": "ceilings", **common},
        *({"what": "numerics", "op": op, **common} for op in ops),
        *({"what": "speed", "op": op, **common} for op in ops),
    ]


def _box(task: dict[str, Any], left: float, later: list[dict[str, Any]]) -> float:
    """Seconds for a task when ``left`` remain for it and those after it."""
    if task["what"] != "speed":
        return min(CHECKS, left)
    shares = sum(SHARES[x["op"]] for x in [task, *later] if x["what"] == "speed")
    return max(0.0, left - GRACE) * SHARES[task["op"]] / shares


def measure(
    minutes: float,
    *,
    folder: pathlib.Path | None = None,
    tiny: str | None = None,
    only: tuple[str, ...] = (),
) -> dict[str, dict[str, Any]]:
    """Measure everything, print and record it; ended after ``minutes``, whatever is unfinished then.

    Args:
      minutes: limit of the whole.
      folder: where to record; ``dispatch.TUNED / <device>`` by default. Operations read their blocks there.
      tiny: an implementation to run interpreted and tiny on a CPU, to see that all of this works.
      only: operations' folders, all by default.

    Returns:
      The records, by operation.

    Raises:
      ValueError: there is no GPU or TPU here.
      RuntimeError: the device there is cannot be used at all.
    """
    end = time.monotonic() + 60 * minutes
    worker = _worker(tiny is not None)
    try:
        platform, kind = _hello(worker, tiny is not None)
        impl = tiny or dispatch.PREFERRED[platform][0]
        base = {"impl": impl, "jax": jax.__version__, "device": kind, "interpreted": tiny is not None}
        records = Records(folder or dispatch.TUNED / dispatch.slug(kind), base)
        tasks = _tasks(impl, tiny is not None, only)
        for i, task in enumerate(tasks):
            op, left = task.get("op", ""), end - time.monotonic()
            if left <= 0:
                lost: str | None = "the time was over"
            else:
                box = _box(task, left, tasks[i + 1 :])
                lost = _do(worker, {**task, "box": box}, min(left, box + GRACE), records.add)
                if lost:
                    worker.end()
                    worker = _worker(tiny is not None)
            if op and task["what"] == "numerics":
                records.of(op)["checked"] = lost is None
            if op and lost:
                records.add(op, "problems", task["what"], {"lost": lost})
            elif op:
                records.write(op)
            elif lost:
                print(f"{task['what']}: lost: {lost}", flush=True)
        return records.found
    finally:
        worker.end()
