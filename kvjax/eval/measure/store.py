"""Results on disk: one JSON line a cell in ``results.jsonl``; ``about.json`` names model, version and data.

A line is written in one go and flushed. Opening a folder cuts off a line that a killed run left half written.
Measured batches of a cell without a row are files in ``unfinished``: a run loses at most its current batch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
from pathlib import Path
from typing import Any

import numpy as np

import kvjax
from kvjax.algebra import PolicyError
from kvjax.eval.errors import EvalError
from kvjax.eval.measure.batch import Batch, Outcome
from kvjax.eval.measure.row import Cell, Row, as_json, from_json
from kvjax.eval.tasks.data import Data
from kvjax.loading import LanguageModel
from kvjax.weights import fingerprint

SCHEMA = 2
"""Of rows and of samples; raised when older results can no longer be compared with new ones."""

RESULTS, ABOUT, UNFINISHED = "results.jsonl", "about.json", "unfinished"


def about(model: LanguageModel, data: Data) -> dict[str, Any]:
    """Facts that must be equal for results to share a folder.

    Older results have ``weights``: sixteen hex digits of the SHA-256 of the weight files, which differed
    between files of one model in two dtypes.
    """
    weights = {"weight_dtype": model.weight_dtype} if model.weight_dtype else {}
    return {
        "schema": SCHEMA,
        "kvjax": kvjax.__version__,
        "model": named(model),
        "fingerprint": fingerprint(model),
        "dtype": str(model.params["embed"].dtype),
        **weights,
        "data": data.source,
    }


def named(model: LanguageModel) -> str:
    """The model's name: a local folder's own, without the path to it."""
    return Path(model.name).resolve().name if Path(model.name).is_dir() else model.name


def versions() -> dict[str, str]:
    """Versions of the software that computes."""
    import jax

    return {"kvjax": kvjax.__version__, "jax": jax.__version__, "python": platform.python_version()}


@dataclasses.dataclass(frozen=True)
class Store:
    """A folder of results, open for more."""

    folder: Path

    @classmethod
    def open(cls, folder: Path, facts: dict[str, Any]) -> Store:
        """The folder, made if need be; a torn last line is cut off.

        Args:
          folder: of the results.
          facts: what ``about`` gives for this run.

        Raises:
          EvalError: it holds results of another version, model or kind of data.
        """
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / ABOUT
        if file.exists():
            _check_same(folder, _object(file), facts)
        elif (folder / RESULTS).exists():
            raise EvalError(
                f"{folder} has results but no {ABOUT}: this program did not write them. Give another --out."
            )
        else:
            part = file.with_suffix(f".part-{os.getpid()}")
            part.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
            os.replace(part, file)
        _mend(folder / RESULTS)
        return cls(folder)

    def done(self) -> dict[Cell, Row]:
        """Every finished cell."""
        return {row.cell: row for row in read(self.folder)} if (self.folder / RESULTS).exists() else {}

    def append(self, row: Row) -> None:
        """One more line, on disk when this returns."""
        with (self.folder / RESULTS).open("ab") as stream:
            stream.write((json.dumps(as_json(row), ensure_ascii=False) + "\n").encode())
            stream.flush()
            os.fsync(stream.fileno())
        for file in (self.folder / UNFINISHED).glob(f"{_name(row.cell)}-*"):
            file.unlink()

    def keep(self, cell: Cell, rows: int, at: int, measured: Batch) -> None:
        """A measured batch of a cell that has more of them: the ``at``-th, of so many rows."""
        file = self._file(cell, rows, at)
        file.parent.mkdir(exist_ok=True)
        part = file.with_suffix(f".part-{os.getpid()}")
        part.write_text(json.dumps(_as_tree(measured)), encoding="utf-8")
        os.replace(part, file)

    def unfinished(self, cell: Cell, rows: int, at: int) -> Batch | None:
        """The same batch from the disk, to the last bit; None if it is not there."""
        file = self._file(cell, rows, at)
        return _from_tree(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else None

    def _file(self, cell: Cell, rows: int, at: int) -> Path:
        return self.folder / UNFINISHED / f"{_name(cell)}-{rows}-{at}.json"


def _name(cell: Cell) -> str:
    """A file's name for a cell."""
    return hashlib.sha256(json.dumps(dataclasses.asdict(cell)).encode()).hexdigest()[:16]


def _as_tree(value: Any) -> Any:
    """Outcomes as JSON; arrays keep their dtype, since means are taken in it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _as_tree(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, list):
        return [_as_tree(each) for each in value]
    return {"dtype": str(value.dtype), "values": value.tolist()} if isinstance(value, np.ndarray) else value


def _from_tree(tree: dict[str, Any]) -> Batch:
    def read(value: Any) -> Any:
        return np.asarray(value["values"], value["dtype"]) if isinstance(value, dict) else value

    outcomes = [
        Outcome(**{name: read(value) for name, value in outcome.items()}) for outcome in tree["outcomes"]
    ]
    return Batch(**tree | {"outcomes": outcomes})


def read(folder: Path) -> list[Row]:
    """The rows of a folder.

    Raises:
      EvalError: there are none, they cannot be read, or they are of another schema.
    """
    file = folder / RESULTS
    if not file.is_file():
        raise EvalError(f"{folder} has no {RESULTS}. Run the evaluation with --out {folder} first.")
    schema = _object(folder / ABOUT).get("schema")
    if schema != SCHEMA:
        raise EvalError(
            f"{folder} holds results of schema {schema}, this version reads {SCHEMA}. Run the evaluation "
            "again, into another folder."
        )
    try:
        lines = file.read_bytes().split(b"\n")
        return [from_json(json.loads(line)) for line in lines[:-1]]
    except PolicyError:  # also a ValueError; it says what is wrong with the policy
        raise
    except (ValueError, TypeError, KeyError):
        raise EvalError(
            f"{file} holds a line that is no row. Name a folder that this program wrote."
        ) from None


def _object(file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        raise EvalError(f"{file} cannot be read. Name a folder that this program wrote.") from None


def _check_same(folder: Path, known: dict[str, Any], facts: dict[str, Any]) -> None:
    for name, value in facts.items():
        if known.get(name) != value:
            raise EvalError(
                f"{folder} holds results of another version ({name} {known.get(name)!r}, now {value!r}). "
                "Give another --out, or move the old results away."
            )


def _mend(file: Path) -> None:
    """Cuts off what follows the last line break."""
    if not file.exists():
        return
    content = file.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        with file.open("r+b") as stream:
            stream.truncate(whole)
