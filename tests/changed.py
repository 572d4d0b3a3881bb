"""Test files with slow tests of what changed: ``python tests/changed.py BASE`` prints them, one a line.

A file counts when it changed itself, or when it imports a package (``kvjax.engine``, ``pallas_kernels.phi``,
``train``) of which a file changed since the commit BASE.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

from covering import COVERING

ROOT = Path(__file__).parents[1]
TOPS = ("kvjax", "pallas_kernels", "train", "studies", "benchmarks")


def package(file: str) -> str | None:
    """The package of a source file: its first two folders; ``kvjax.cli`` for ``kvjax/cli.py``."""
    parts = Path(file).with_suffix("").parts
    return ".".join(parts[:2]) if file.endswith(".py") and parts[0] in TOPS else None


def imports(source: str) -> set[str]:
    """Modules that a file names, ``from kvjax import engine`` as ``kvjax.engine``."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def slow_files(changed: list[str], tests: dict[str, str]) -> list[str]:
    """Of ``tests`` (path to source), those with slow tests that the changed files touch."""
    packages = {name for file in changed if (name := package(file))}

    def touched(path: str, source: str) -> bool:
        return path in changed or any(
            f"{name}.".startswith(f"{one}.") for name in imports(source) for one in packages
        )

    def has_slow(path: str, source: str) -> bool:
        return "mark.slow" in source or any(test.startswith(f"{path[6:]}::") for test in COVERING)

    return sorted(path for path, source in tests.items() if has_slow(path, source) and touched(path, source))


def main(base: str) -> None:
    command = ["git", "diff", "--name-only", base]
    changed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    tests = {str(file.relative_to(ROOT)): file.read_text() for file in (ROOT / "tests").rglob("test_*.py")}
    print("\n".join(slow_files(changed, tests)))


if __name__ == "__main__":
    main(sys.argv[1])
