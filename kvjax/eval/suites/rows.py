"""A suite's rows, from the hub or from files at hand, with their columns checked."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kvjax.eval.errors import EvalError
from kvjax.eval.suites.suite import Row, Suite


def read(suite: Suite, place: Path | None = None, revision: str | None = None) -> tuple[list[Row], str]:
    """All rows of a suite, in the data set's order.

    Args:
      suite: which.
      place: a folder with the data set's files, or one .jsonl or .parquet file; None fetches them from the
        hub, through its cache.
      revision: of the data set; None is the newest.

    Returns:
      (rows, where they came from: "owner/name@commit", or the name of the folder or file).

    Raises:
      EvalError: no network, no such file, no reader of parquet files, or other columns than the suite knows.
    """
    if place is None:
        place, source = _fetched(suite, revision)
    else:
        source = place.name
    files = [place] if place.is_file() else _files(suite, place)
    rows = [row for file in files for row in _lines(file)]
    if suite.task is not None:
        rows = [row | {"task": suite.task} if isinstance(row, dict) else row for row in rows]
    _check(suite, source, rows)
    return rows, source


def _fetched(suite: Suite, revision: str | None) -> tuple[Path, str]:
    """The folder in the hub's cache, and which commit it is of."""
    from huggingface_hub import snapshot_download

    wanted = [f"{folder}/test-*.parquet" for folder in suite.folders]
    try:
        folder = Path(
            snapshot_download(suite.dataset, repo_type="dataset", revision=revision, allow_patterns=wanted)
        )
    except Exception as error:
        # The hub client raises its own, its HTTP library's and the system's errors, and they change.
        reason = str(error).strip().split("\n")[0]
        raise EvalError(
            f"--suite {suite.name} reads the data set {suite.dataset} of the hub, which could not be fetched "
            f"({type(error).__name__}: {reason}). Where there is a network run 'hf download {suite.dataset} "
            "--repo-type dataset --local-dir DIR', and give --rows DIR here."
        ) from error
    return folder, f"{suite.dataset}@{folder.name[:12]}"


def _files(suite: Suite, place: Path) -> list[Path]:
    files = [
        file
        for folder in suite.folders
        for file in sorted((place / folder).glob("test-*.parquet")) or sorted(place.glob(f"{folder}.jsonl"))
    ]
    if not files:
        raise EvalError(
            f"{place} has no {suite.folders[0]}/test-*.parquet of {suite.dataset}, and no "
            f"{suite.folders[0]}.jsonl. Give the folder that 'hf download' wrote, or a file."
        )
    return files


def _lines(file: Path) -> Iterator[Row]:
    """The rows of a file."""
    if file.suffix == ".parquet":
        try:
            from pyarrow import parquet
        except ModuleNotFoundError as error:
            raise EvalError(
                f"{file.name} is a parquet file, which pyarrow reads. Run: pip install 'kvjax[suites]' (in a "
                "checkout pip install -e '.[suites]')."
            ) from error
        yield from parquet.read_table(file).to_pylist()
        return
    try:
        yield from (
            json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()
        )
    except (OSError, ValueError) as error:
        raise EvalError(
            f"--rows {file} cannot be read ({error}). Give a .parquet file, or JSON objects, one a line."
        ) from error


def _check(suite: Suite, source: str, rows: Sequence[Any]) -> None:
    """Refuses rows that the suite was not written for."""
    if not rows or not isinstance(rows[0], dict):
        raise EvalError(f"{source} has no rows. Give the files of {suite.dataset}.")
    for name, kinds in suite.columns.items():
        wrong = next((row for row in rows if type(row.get(name)) not in kinds), None)
        if wrong is not None:
            is_there = (
                f"its {name!r} is {wrong[name]!r:.40}" if name in wrong else f"it has no column {name!r}"
            )
            wanted = " or ".join("nothing" if kind is type(None) else kind.__name__ for kind in kinds)
            raise EvalError(
                f"{source} is not the data set that --suite {suite.name} was written for: {is_there}, where "
                f"{wanted} is expected; its columns are {', '.join(map(str, wrong))}. Give an older one with "
                "--revision, or --rows FILE."
            )
