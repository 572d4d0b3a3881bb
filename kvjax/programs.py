"""The limit on compiled programs in a process: on Linux each takes memory maps, which are limited."""

from __future__ import annotations

from pathlib import Path


def maps_taken(of: Path = Path("/proc")) -> float:
    """Memory maps of this process over the most it may have; 0.0 where the system does not tell."""
    try:
        most = int((of / "sys/vm/max_map_count").read_text())
        with (of / "self/maps").open("rb") as maps:
            return sum(1 for _ in maps) / most
    except (OSError, ValueError):
        return 0.0
