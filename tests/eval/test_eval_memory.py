"""Programs of policies that are done are dropped; those still in use are not compiled again."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest
from eval_rows import LENGTH
from tiny import quick_compiles  # noqa: F401

from kvjax.eval.__main__ import main
from kvjax.eval.measure import runner

pytestmark = pytest.mark.usefixtures("no_pack")

MAPS = Path("/proc/self/maps")
WINDOWS = (100, 120, 140, 160)


@pytest.fixture(scope="module")
def compiled() -> list[str]:
    """One entry a program that was compiled, or read from the disk, since the module began."""
    found: list[str] = []

    def hear(event: str, seconds: float, **facts: object) -> None:
        del seconds, facts
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(hear)
    return found


@pytest.fixture
def cells(monkeypatch, compiled) -> list[tuple[str, str, int, int]]:
    """(policy, task, programs it compiled, memory maps after it) of every cell that is measured."""
    found = []
    real = runner._measured

    def spy(cell, *rest):
        before = len(compiled)
        made = real(cell, *rest)
        maps = MAPS.read_text().count("\n") if MAPS.exists() else 0
        found.append((cell.policy, cell.task, len(compiled) - before, maps))
        return made

    monkeypatch.setattr(runner, "_measured", spy)
    return found


def words(model: Path, out: Path, policies: list[str]) -> list[str]:
    given = [
        "run",
        "--task",
        "niah,ppl_books",
        "--model",
        str(model),
        "--lengths",
        str(LENGTH),
        "--samples",
        "2",
    ]
    return [*given, "--out", str(out), *(word for policy in policies for word in ("--policy", policy))]


@pytest.mark.slow
def test_memory_maps_stay_flat_over_policies(tiny_folder, tmp_path, cells):
    assert main(words(tiny_folder, tmp_path, [f"window({size})" for size in WINDOWS])) == 0
    assert [name for name, *_ in cells[2:]] == [f"window({size})" for size in WINDOWS for _ in range(2)]
    assert all(programs == 0 for _, _, programs, _ in cells[1::2]), "a second task compiled again"
    assert all(programs > 5 for _, _, programs, _ in cells[::2]), "nobody counts programs"
    if MAPS.exists():
        after = [maps for *_, maps in cells[3::2]]  # one window has hundreds
        assert max(after) - after[0] < 100


def test_budgets_of_one_method_follow_each_other_and_compile_once(tiny_folder, tmp_path, cells, monkeypatch):
    dropped = []
    monkeypatch.setattr(runner, "forget", lambda: dropped.append(len(cells)))
    policies = ["knorm + uniform(64)", "window(100)", "knorm + uniform(62)"]
    assert main(words(tiny_folder, tmp_path, policies)) == 0
    both = ["knorm + uniform(64)", "knorm + uniform(62)"]
    assert [name for name, *_ in cells] == ["full"] * 2 + both * 2 + ["window(100)"] * 2  # of two tasks
    assert dropped == [2, 6]
    first, second = (sum(programs for _, _, programs, _ in cells[at:6:2]) for at in (2, 3))
    assert first > 5
    assert second == 0, "another budget was compiled"
