"""Kernels on the device at hand: do they agree with the definition, which blocks suit it, how fast are they.

Ceilings are measured first, then agreement of every operation, then, operation by operation in the order
of ``OPERATIONS``, blocks are chosen and times taken beside others' attention; a short run only checks and
chooses blocks. Each operation's record is written whenever something is added to it. The device is used by
a process of its own (``on_device``): if that dies or hangs, its task is reported lost and the next one gets
a new process.
"""

from __future__ import annotations

import json
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels import dispatch, lowering, records
from pallas_kernels.measure.child import Child, LostError
from pallas_kernels.measure.work import OPERATIONS, work

SHARES = {
    "ragged_decode": 30,
    "blockwise": 20,
    "decode_step": 10,
    "vertical_slash": 15,
    "gated": 15,
    "phi": 10,
}
"""Of the time that is left after agreement, for blocks and timings."""

CHECKS = 45.0
"""Most seconds for the agreement of one operation; most of them compile."""

LONG = ("blocks", "speed")
"""Tasks that take what time they are given."""

GRACE = 20.0
"""A task may outlast its box by this, to finish what it is at."""


BESIDE = {"mosaic_gpu": ("ragged_decode", "blockwise", "vertical_slash")}
"""Bodies besides the platform's main one, here of Hopper GPUs, and the operations that have them."""


class NoDeviceError(ValueError):
    """There is no GPU or TPU here."""


def _worker(tiny: bool) -> Child:
    # Others' libraries need memory too.
    flags = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_TRACEBACK_FILTERING": "off"}
    return Child.running(
        "pallas_kernels.measure.on_device", env=flags | ({"JAX_PLATFORMS": "cpu"} if tiny else {})
    )


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

    def __init__(self, folder: pathlib.Path, base: dict[str, Any], show: bool = True) -> None:
        self.folder, self.base, self.show = folder, base, show
        self.found: dict[str, dict[str, Any]] = {}

    def of(self, op: str) -> dict[str, Any]:
        """The record of an operation, begun anew; one of an earlier run lasts until it is first written."""
        if op not in self.found:
            parts: dict[str, Any] = {x: {} for x in ("checks", "blocks", "cases", "compared", "problems")}
            made = {**self.base, "sources": records.sources(op)}
            made |= {"impl": op.partition(".")[2]} if "." in op else {}
            self.found[op] = {**made, "agrees": False, "checked": False, **parts, "targets": {}}
        return self.found[op]

    def add(self, op: str, part: str, name: str, value: dict[str, Any]) -> None:
        """Add a result, print it and write the operation's file."""
        if part in ("hello", "limits"):
            self.base.update(value)
            self._say(f"{part}: {json.dumps(value)}")
            return
        record = self.of(op)
        if "refused" in value:
            for entry in record["blocks"].values():
                entry |= {"chosen": {}, **value}
        else:
            record[part][name] = value
        self._say(f"{op:14} {part:9} {name:36} {json.dumps(value)}")
        self.write(op)

    def _say(self, line: str) -> None:
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
        if "copy_gb_s" in self.base:
            timed = {**record, "cases": {name: x for name, x in record["cases"].items() if "ms" in x}}
            record["targets"] = {
                x.name: x.said() for x in work(op.partition(".")[0]).targets(timed, self.base)
            }
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
        raise NoDeviceError(
            f"bench --device needs a GPU or TPU; this is {found['platform']}. Use bench --static here, or "
            "--tiny to see the program run on interpreted bodies."
        )
    return found["platform"], found["kind"]


def _tasks(impl: str, tiny: bool, only: tuple[str, ...], short: bool = False) -> list[dict[str, Any]]:
    common = {"impl": impl, "tiny": tiny}
    ops = [op for op in OPERATIONS if not only or op in only]
    return [
        *([] if short else [{"what": "ceilings", **common}]),
        *({"what": "numerics", "op": op, **common} for op in ops),
        *({"what": "blocks" if short else "speed", "op": op, **common} for op in ops),
    ]


def _beside(platform: str, kind: str, only: tuple[str, ...], short: bool) -> list[dict[str, Any]]:
    """Tasks of bodies besides the main one, last: what is known of that must not wait for them."""
    found = []
    for impl, ops in BESIDE.items() if platform == "gpu" and lowering.is_hopper(kind) else ():
        for op in ops if not only else [op for op in ops if op in only]:
            common = {"op": op, "impl": impl, "tiny": False, "record": dispatch.filed(op, impl)}
            found += [{"what": "numerics", **common}, {"what": "blocks" if short else "speed", **common}]
    return found


def _box(task: dict[str, Any], left: float, later: list[dict[str, Any]]) -> float:
    """Seconds for a task when ``left`` remain for it and those after it."""
    if task["what"] not in LONG:
        return min(CHECKS, left)
    shares = sum(SHARES[x["op"]] for x in [task, *later] if x["what"] in LONG)
    return max(0.0, left - GRACE) * SHARES[task["op"]] / shares


Begun = Callable[[dict[str, Any], int], None]
"""Told of each task as it begins, and how many there are."""


def measure(
    minutes: float,
    *,
    folder: pathlib.Path | None = None,
    home: pathlib.Path | None = None,
    tiny: str | None = None,
    only: tuple[str, ...] = (),
    short: bool = False,
    begun: Begun | None = None,
) -> dict[str, dict[str, Any]]:
    """Measure everything and record it; ended after ``minutes``, whatever is unfinished then.

    Args:
      minutes: limit of the whole.
      folder: where to record; a folder of the device's name in ``home`` by default. Operations read their
        blocks there.
      home: ``dispatch.TUNED`` by default.
      tiny: an implementation to run interpreted and tiny on a CPU, to see that all of this works.
      only: operations' folders, all by default.
      short: only checks and blocks, no ceilings and no timings.
      begun: what to tell of the progress; without it each result is printed.

    Returns:
      The records, by operation.

    Raises:
      NoDeviceError: there is no GPU or TPU here.
      RuntimeError: the device there is cannot be used at all.
    """
    end = time.monotonic() + 60 * minutes
    worker = _worker(tiny is not None)
    try:
        platform, kind = _hello(worker, tiny is not None)
        impl = tiny or dispatch.PREFERRED[platform][0]
        base = {"impl": impl, "jax": jax.__version__, "device": kind, "interpreted": tiny is not None}
        place = folder or (home or dispatch.TUNED) / records.slug(kind)
        made = Records(place, base, show=begun is None)
        tasks = _tasks(impl, tiny is not None, only, short)
        tasks += [] if tiny else _beside(platform, kind, only, short)
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
                    worker = _worker(tiny is not None)
            if op and task["what"] == "numerics":
                made.of(op)["checked"] = lost is None
            if op and lost:
                made.add(op, "problems", task["what"], {"lost": lost})
            elif op:
                made.write(op)
            elif lost:
                print(f"{task['what']}: lost: {lost}", flush=True)
        return made.found
    finally:
        worker.end()
