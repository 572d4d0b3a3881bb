"""The tables of README.md, from tests and records: what was checked of every implementation, what it costs.

Interpreted: the operation's tests run that implementation on an interpreter. Compiled for: chips whose
``tuned/<chip>/static.json`` has the operation's cases without an error; by Colab's compilers: ``builds.json``
likewise. Run on: devices whose ``tuned/<device>/<op>.json`` says that it agreed there.
"""

from __future__ import annotations

import functools
import json
import pathlib
import re
from collections.abc import Callable
from typing import Any

from benchmarks.kernels import static
from benchmarks.kernels.operations import ALL, cases, mosaic_gpu_cases
from pallas_kernels import dispatch

MARKS = {
    "checked": ("<!-- table: python -m benchmarks kernels --table -->", "<!-- end of table -->"),
    "costs": ("<!-- costs: python -m benchmarks kernels --table -->", "<!-- end of costs -->"),
}
COLAB = "0.7.2"
"""The jax of Colab's runtimes (November 2026)."""

PACKAGE = pathlib.Path(dispatch.__file__).parent
README = PACKAGE / "README.md"
TESTS = PACKAGE.parent / "tests" / "kernels"


def _with_imports(file: pathlib.Path) -> str:
    """A test's text, and that of the modules beside it that it imports."""
    text = file.read_text()
    beside = [TESTS / f"{name}.py" for name in re.findall(r"^from (\w+) import", text, re.MULTILINE)]
    return "\n".join([text, *(x.read_text() for x in beside if x.is_file())])


def _interpreted(op: str, impl: str) -> bool:
    for file in sorted([*TESTS.glob(f"test_kernel_{op.split('_')[0]}*.py"), *TESTS.glob(f"test_{impl}*.py")]):
        text = _with_imports(file)
        if f'"{impl}"' in text and ("interpreted(" in text or "tpu_interpreter(" in text):
            return True
    return False


@functools.cache
def _static(chip: str) -> dict[str, Any]:
    file = dispatch.TUNED / chip / "static.json"
    cases_of: dict[str, Any] = json.loads(file.read_text())["cases"] if file.is_file() else {}
    return cases_of


def _compiled(op: str, impl: str) -> list[str]:
    prefix, chips = f"{dispatch.filed(op, impl)}/", []
    names = [name for name in cases() | mosaic_gpu_cases() if name.startswith(prefix)]
    for chip in static.CHIPS:
        rows = [_static(chip)[name] for name in names if name in _static(chip)]
        good = [x for x in rows if x.get("impl") == impl and "error" not in x]
        if good:
            chips.append(chip if len(good) == len(names) else f"{chip} ({len(good)} of {len(names)} cases)")
    return chips


def _built(op: str, impl: str) -> list[str]:
    """Chips that Colab's compilers build it for; how many cases, where that is not all."""
    prefix, chips = f"{dispatch.filed(op, impl)}/", []
    for chip in static.CHIPS:
        file = dispatch.TUNED / chip / "builds.json"
        if (chip in static.GPUS) == (impl == "mosaic_tpu") or not file.is_file():
            continue
        known = json.loads(file.read_text()).get(COLAB, {"cases": {}})["cases"]
        cases = [why for name, why in known.items() if name.startswith(prefix)]
        if good := cases.count(""):
            chips.append(chip if good == len(cases) else f"{chip} ({good} of {len(cases)} cases)")
    return chips


def _run(op: str, impl: str) -> list[str]:
    devices = []
    for file in sorted(dispatch.TUNED.glob(f"*/{dispatch.filed(op, impl)}.json")):
        known = json.loads(file.read_text())
        if known.get("impl") == impl and known.get("agrees") and not known.get("interpreted"):
            devices.append(known.get("device", file.parent.name))
    return devices


def checked() -> list[str]:
    """What was checked, in Markdown."""
    rows = ["| operation | implementation | interpreted | compiled for | by Colab's compilers | run on |"]
    rows.append("|---" * 6 + "|")
    for op in ALL:
        for impl in dispatch.IMPLS:
            if impl in ("ref", "xla"):
                cells = ["", "", "", "CPU"]
            elif (PACKAGE / op / f"{impl}.py").is_file():
                cells = ["yes" if _interpreted(op, impl) else "no", ", ".join(_compiled(op, impl))]
                cells.append(", ".join(_built(op, impl)) or "no")
                cells.append(", ".join(_run(op, impl)) or "no device yet")
            else:
                continue
            rows.append(f"| {op} | {impl} | " + " | ".join(cells) + " |")
    return rows


def _cell(row: dict[str, Any]) -> str:
    """What is known of a case on a chip: TPU bundles, its steps and one over the roofline; GPU registers."""
    if not row:
        return ""
    if "error" in row:
        return "refused"
    if "kernels" in row:
        cells = [
            f"{x['registers']}" + (f" and {x['spilled_bytes']} B spilled" if x["spilled_bytes"] else "")
            for _, x in sorted(row["kernels"].items())
        ]
        return ", ".join(cells)
    steps = ["+".join(map(str, x)) for _, x in sorted(row.get("steps", {}).items())]
    steps = [str(row["item"])] if "item" in row else steps
    beside = steps + [f"{row['step_to_roofline']}x"] * ("step_to_roofline" in row)
    bundles = ", ".join(str(x) for _, x in sorted(row["bundles"].items()))
    return f"{bundles} ({', '.join(beside)})" if beside else bundles


def costs() -> list[str]:
    """Bytes, products and what compilers say of every case at a served model's sizes, in Markdown."""
    chips = list(static.CHIPS)
    heads = [f"{chip} registers" if chip in static.GPUS else f"{chip} bundles (step)" for chip in chips]
    rows = ["| case | MB | GFLOP | " + " | ".join(heads) + " |", "|---|---|---|" + "---|" * len(chips)]
    for name, case in (cases() | mosaic_gpu_cases()).items():
        if "odd" in name:
            continue
        cells = [_cell(_static(chip).get(name, {})) for chip in chips]
        numbers = f"{case.moves / 1e6:.1f} | {case.flops / 1e9:.1f}"
        rows.append(f"| {name} | {numbers} | " + " | ".join(cells) + " |")
    return rows


TABLES: dict[str, Callable[[], list[str]]] = {"checked": checked, "costs": costs}


def _parts() -> list[str]:
    _static.cache_clear()
    return ["\n".join([MARKS[name][0], *lines(), MARKS[name][1]]) for name, lines in TABLES.items()]


def write() -> None:
    """Put the tables between their marks in README.md, where there is one (a checkout)."""
    if not README.is_file():
        return
    text = README.read_text()
    for part, (begin, end) in zip(_parts(), MARKS.values()):
        before, rest = text.split(begin)
        text = before + part + rest.split(end)[1]
    README.write_text(text)


def current() -> bool:
    """Whether README.md has the tables that ``write`` would put there."""
    return all(part in README.read_text() for part in _parts())
