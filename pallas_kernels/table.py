"""The table of README.md: what was checked of every implementation, from tests and records.

Interpreted: the operation's tests run that implementation on an interpreter. Compiled for: chips whose
``tuned/<chip>/static.json`` has the operation's cases without an error. Run on: devices whose
``tuned/<device>/<op>.json`` says that it agreed there.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

from pallas_kernels import dispatch, static
from pallas_kernels.cases import cases, operations

BEGIN, END = "<!-- table: python -m pallas_kernels.bench --table -->", "<!-- end of table -->"
README = pathlib.Path(__file__).parent / "README.md"
TESTS = pathlib.Path(__file__).parents[1] / "tests" / "kernels"


def _interpreted(op: str, impl: str) -> bool:
    for file in sorted(TESTS.glob(f"test_kernel_{op.split('_')[0]}*.py")):
        text = file.read_text()
        if f'"{impl}"' in text and ("interpreted(" in text or "tpu_interpreter(" in text):
            return True
    return False


def _compiled(op: str, impl: str) -> list[str]:
    found, wanted = [], [name for name in cases() if name.startswith(f"{op}/")]
    for chip in static.CHIPS:
        file = dispatch.TUNED / chip / "static.json"
        known: dict[str, Any] = json.loads(file.read_text())["cases"] if file.is_file() else {}
        mine = [known[name] for name in wanted if name in known]
        good = [x for x in mine if x.get("impl") == impl and "error" not in x]
        if good:
            found.append(chip if len(good) == len(wanted) else f"{chip} ({len(good)} of {len(wanted)} cases)")
    return found


def _run(op: str, impl: str) -> list[str]:
    found = []
    for file in sorted(dispatch.TUNED.glob(f"*/{op}.json")):
        known = json.loads(file.read_text())
        if known.get("impl") == impl and known.get("agrees"):
            found.append(known.get("device", file.parent.name))
    return found


def lines() -> list[str]:
    """The table in Markdown."""
    rows = ["| operation | implementation | interpreted | compiled for | run on |", "|---|---|---|---|---|"]
    for op in operations():
        for impl in dispatch.IMPLS:
            if impl in ("ref", "xla"):
                cells = ["", "", "CPU"]
            elif (pathlib.Path(__file__).parent / op / f"{impl}.py").is_file():
                cells = ["yes" if _interpreted(op, impl) else "no", ", ".join(_compiled(op, impl)), ""]
                cells[2] = ", ".join(_run(op, impl)) or "no device yet"
            else:
                continue
            rows.append(f"| {op} | {impl} | " + " | ".join(cells) + " |")
    return rows


def write() -> None:
    """Put the table between the marks of README.md, where there is one (a checkout)."""
    if not README.is_file():
        return
    text = README.read_text()
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    README.write_text("\n".join([before + BEGIN, *lines(), END]) + after)


def current() -> bool:
    """Whether README.md has the table that ``write`` would put there."""
    return "\n".join([BEGIN, *lines(), END]) in README.read_text()
