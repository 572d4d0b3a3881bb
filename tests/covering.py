"""A covering set of cases: what the default run takes of tests that have many; ``-m slow`` runs the others.

The file ``covering.json`` names, for each such test, the ids of the cases that stay. Every other case is
slow; a test without an entry runs all of its cases.
"""

from __future__ import annotations

import collections
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

COVERING: dict[str, list[str]] = json.loads(Path(__file__).with_suffix(".json").read_text())


def left_out(ids: Sequence[tuple[str, str]]) -> set[int]:
    """Indices of the collected cases, (test, id), that the default run leaves out.

    A test none of whose named cases is there (another version of JAX has others) runs all of its cases.
    """
    tests: dict[str, list[int]] = collections.defaultdict(list)
    for index, (test, _) in enumerate(ids):
        if test in COVERING:
            tests[test].append(index)
    out: set[int] = set()
    for test, cases in tests.items():
        kept = {index for index in cases if ids[index][1] in COVERING[test]}
        out |= set(cases) - kept if kept else set()
    return out


def identity(item: Any) -> tuple[str, str]:
    """(test, id of its case) of a pytest item; the test as ``engine/test_engine_rows.py::test_rows_come``."""
    test = item.nodeid.partition("[")[0].removeprefix("tests/")
    return test, item.callspec.id if hasattr(item, "callspec") else ""
