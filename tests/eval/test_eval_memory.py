"""Programs of policies that are done are dropped; those still in use are not compiled again."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest
from eval_rows import LENGTH

from kvjax.eval.__main__ import main
from kvjax.eval.measure import runner
from kvjax.programs import maps_taken

pytestmark = pytest.mark.usefixtures("no_pack")

MAPS = Path("/proc/self/maps")
WINDOWS = (100, 120, 140, 160)


@pytest.fixture(scope="module")
def compiled() -> list[str]:
    """One entry a program that was compiled, or read from the disk, since the module began."""
    events: list[str] = []

    def hear(event: str, seconds: float, **facts: object) -> None:
        del seconds, facts
        if event == "/jax/core/compile/backend_compile_duration":
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(hear)
    return events


@pytest.fixture
def cells(monkeypatch, compiled) -> list[tuple[str, str, int, int]]:
    """(policy, task, programs it compiled, memory maps after it) of every cell that is measured."""
    measured = []
    real = runner._measured

    def spy(cell, *rest):
        before = len(compiled)
        batches = real(cell, *rest)
        maps = MAPS.read_text().count("\n") if MAPS.exists() else 0
        measured.append((cell.policy, cell.task, len(compiled) - before, maps))
        return batches

    monkeypatch.setattr(runner, "_measured", spy)
    return measured


def words(model: Path, out: Path, policies: list[str]) -> list[str]:
    command = [
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
    return [*command, "--out", str(out), *(word for policy in policies for word in ("--policy", policy))]


@pytest.mark.slow
@pytest.mark.skipif(not MAPS.exists(), reason="the system does not count memory maps")
def test_memory_maps_stay_bounded_over_policies(tiny_folder, tmp_path, cells, monkeypatch):
    limit, dropped, forget = maps_taken() + 0.02, [], runner.forget
    monkeypatch.setattr(runner, "CROWDED", limit)
    monkeypatch.setattr(runner, "forget", lambda: (dropped.append(len(cells)), forget()))
    assert main(words(tiny_folder, tmp_path, [f"window({size})" for size in WINDOWS])) == 0
    assert [name for name, *_ in cells[2:]] == [f"window({size})" for size in WINDOWS for _ in range(2)]
    assert all(programs > 5 for _, _, programs, _ in cells[::2]), "nobody counts programs"
    assert dropped
    most = int(Path("/proc/sys/vm/max_map_count").read_text())
    assert max(maps for *_, maps in cells) < (limit + 0.04) * most  # what one policy takes goes beyond it


@pytest.mark.slow
def test_policies_that_cut_come_prompt_by_prompt_and_budgets_compile_once(tiny_folder, tmp_path, cells):
    policies = ["knorm + uniform(64)", "window(100)", "knorm + uniform(62)", "keydiff + uniform(64)"]
    assert main(words(tiny_folder, tmp_path, policies)) == 0
    cut = ["knorm + uniform(64)", "knorm + uniform(62)", "keydiff + uniform(64)"]
    assert [name for name, *_ in cells] == ["full"] * 2 + cut * 2 + ["window(100)"] * 2  # of two tasks
    counts = [programs for _, _, programs, _ in cells]
    assert counts[2] > 5
    assert counts[3] == 0, "another budget was compiled"
    assert counts[6] == 0, "another budget was compiled"


@pytest.mark.slow
def test_programs_are_dropped_where_there_are_too_many(tiny_folder, tmp_path, cells, monkeypatch):
    dropped = []
    monkeypatch.setattr(runner, "forget", lambda: dropped.append(len(cells)))
    monkeypatch.setattr(runner, "maps_taken", lambda: 0.6 if len(cells) == 3 else 0.4)
    assert main(words(tiny_folder, tmp_path, ["window(100)"])) == 0
    assert dropped == [3]
