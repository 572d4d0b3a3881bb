"""Test files with slow tests of what changed: ``python tests/changed.py BASE`` prints them, one a line.

A file counts when it changed itself, or when it imports a package (``kvjax.engine``, ``pallas_kernels.phi``,
``train``) of which a file changed since the commit BASE. A notebook is a line, the test that runs it.
It counts likewise, and when a method whose word it writes changed.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

from covering import COVERING

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from notebooks import _execute  # noqa: E402

NOTEBOOKS, RUNS = "tests/test_notebooks.py", "test_the_executed_file_shows_what_the_source_prints"
METHOD = re.compile(r"kvjax/(policies|budgets|storage)/[a-z]\w*\.py")
"""Their words stand in policies, which are strings."""

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


def uses(source: str, exports: dict[str, str]) -> set[str]:
    """Modules of a notebook: what it imports, and of ``kvjax.load`` where ``exports`` says it comes from."""
    names = imports(source) - {"kvjax"}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "kvjax":
            names.add(exports.get(node.attr, f"kvjax.{node.attr}"))
    return names


def exported(source: str) -> dict[str, str]:
    """Name to module, of what a package's ``__init__`` imports."""
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in found for alias in node.names}


def touched(names: set[str], packages: set[str]) -> bool:
    """Whether one of the modules is a package or lies in one."""
    return any(f"{name}.".startswith(f"{one}.") for name in names for one in packages)


def notebooks(changed: list[str], sources: dict[str, str], exports: dict[str, str]) -> list[str]:
    """The tests that run those of ``sources`` (path to text) that the changed files touch."""
    methods = {Path(file).stem for file in changed if METHOD.fullmatch(file)}
    packages = {name for file in changed if not METHOD.fullmatch(file) and (name := package(file))}

    def counts(path: str, text: str) -> bool:
        written = bool(methods & set(re.findall(r"\w+", text)))
        return (
            path in changed
            or "notebooks/_execute.py" in changed
            or written
            or touched(uses(text, exports), packages)
        )

    return [
        f"{NOTEBOOKS}::{RUNS}[{Path(path).stem}]"
        for path, text in sorted(sources.items())
        if counts(path, text)
    ]


def slow_files(changed: list[str], tests: dict[str, str]) -> list[str]:
    """Of ``tests`` (path to source), those with slow tests that the changed files touch."""
    packages = {name for file in changed if (name := package(file))}

    def has_slow(path: str, source: str) -> bool:
        return "mark.slow" in source or any(test.startswith(f"{path[6:]}::") for test in COVERING)

    def counts(path: str, source: str) -> bool:
        return path in changed or touched(imports(source), packages)

    return sorted(path for path, source in tests.items() if has_slow(path, source) and counts(path, source))


def main(base: str) -> None:
    command = ["git", "diff", "--name-only", base]
    changed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    tests = {str(file.relative_to(ROOT)): file.read_text() for file in (ROOT / "tests").rglob("test_*.py")}
    del tests[NOTEBOOKS]
    sources = {str(path.relative_to(ROOT)): path.read_text() for path in _execute.sources()}
    exports = exported((ROOT / "kvjax/__init__.py").read_text())
    print("\n".join([*slow_files(changed, tests), *notebooks(changed, sources, exports)]))


if __name__ == "__main__":
    main(sys.argv[1])
