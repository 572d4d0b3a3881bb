"""How many compiled programs a process can hold: on Linux each takes memory maps, which are counted."""

from __future__ import annotations

from pathlib import Path


def maps_taken(of: Path = Path("/proc")) -> float:
    """Share of the memory maps a process may have that this one has; 0.0 where the system does not say."""
    try:
        most = int((of / "sys/vm/max_map_count").read_text())
        with (of / "self/maps").open("rb") as maps:
            return sum(1 for _ in maps) / most
    except (OSError, ValueError):
        return 0.0
