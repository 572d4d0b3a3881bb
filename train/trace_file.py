"""Traces on disk: what a model's heads saw of a corpus, in files that are read at random.

  traces.json             which model, which sequences, how stored; written first
  00000.safetensors ...   ``shard`` sequences each: for sequence i ``tokens.i`` [T], ``at.i`` [M] and
                          ``q.i`` [L, N, M, H], queries after RoPE at these positions; ``k.i`` and ``v.i``
                          [L, K, T, H]; ``k_pre.i`` where asked for. The header names their tasks.

A file appears whole or not at all, and its contents are a function of the manifest alone.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from kvjax.weights import fingerprint
from train.config import ConfigError

if TYPE_CHECKING:
    from jaxtyping import Float, Int

    from kvjax.loading import LanguageModel

FORMAT, MANIFEST = "kvjax traces 1", "traces.json"


class TraceError(ConfigError):
    """Traces that are missing, damaged, or of another model."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class About:
    """The manifest.

    Attributes:
      model, fingerprint: whose traces.
      parameters: of the model.
      layers, heads, kv_heads, head_dim, softcap: its sizes, and what bounds its scores.
      dtype, keys, queries, shard: see ``train.ranker.settings.Recording``.
      lengths: tokens of each sequence.
      train: how many of them are for training; the others are for checks.
      seed, data: where the sequences come from.
    """

    model: str
    fingerprint: str
    parameters: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    softcap: float | None
    dtype: str
    keys: tuple[str, ...]
    queries: int | None
    shard: int
    lengths: tuple[int, ...]
    train: int
    seed: int
    data: dict[str, Any]

    @property
    def shards(self) -> int:
        """Files."""
        return -(-len(self.lengths) // self.shard)

    def of_shard(self, shard: int) -> range:
        """Its sequences."""
        return range(shard * self.shard, min((shard + 1) * self.shard, len(self.lengths)))

    def asked(self, length: int) -> Int[np.ndarray, " M"]:
        """Positions whose queries are stored, the last one among them."""
        if self.queries is None or self.queries >= length:
            return np.arange(length, dtype=np.int32)
        return np.linspace(length - 1, 0, self.queries, endpoint=False).round().astype(np.int32)[::-1]

    def bytes(self, length: int) -> int:
        """Of one sequence, headers aside."""
        queries = len(self.asked(length))
        kv = self.kv_heads * length * (1 + len(self.keys))
        floats = self.layers * self.head_dim * (self.heads * queries + kv)
        return floats * np.dtype(self.dtype).itemsize + 4 * (length + queries)


def file(folder: Path, shard: int) -> Path:
    """Where a shard lies."""
    return folder / f"{shard:05d}.safetensors"


def begin(folder: Path, about: About) -> None:
    """Writes the manifest, or finds it there already.

    Raises:
      TraceError: the folder holds other traces.
    """
    text, path = json.dumps(dataclasses.asdict(about) | {"format": FORMAT}, indent=1), folder / MANIFEST
    if path.exists():
        if path.read_text() != text:
            was = json.loads(path.read_text())
            mine = json.loads(text)
            named = next((name for name in mine if was.get(name) != mine[name]), "format")
            raise TraceError(
                f"--out {folder} holds traces made with another {named}. Give an empty folder, or the config "
                "and model they were begun with."
            )
        return
    folder.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{MANIFEST}.part-{os.getpid()}")
    part.write_text(text)
    os.replace(part, path)


def write(
    folder: Path, about: About, shard: int, tasks: Sequence[str], arrays: dict[str, np.ndarray]
) -> None:
    """One shard."""
    path = file(folder, shard)
    part = path.with_name(f".{path.name}.part-{os.getpid()}")
    notes = json.dumps({"fingerprint": about.fingerprint, "tasks": list(tasks)})
    try:
        save_file(arrays, part, metadata={FORMAT: notes})  # one entry: several have no order in the file
        part.chmod(0o644)  # safetensors writes for the owner alone
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


@functools.lru_cache(maxsize=64)
def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="numpy")
    except OSError as reason:
        raise TraceError(
            f"{path} cannot be read: {reason.strerror or reason}. Run train.traces again."
        ) from reason
    except SafetensorError as reason:
        raise TraceError(
            f"{path} is cut short or damaged ({reason}). Delete it and run train.traces again."
        ) from reason


def _notes(path: Path) -> dict[str, Any]:
    """The header of a shard; empty where it is no file of traces."""
    return json.loads((_opened(path).metadata() or {}).get(FORMAT, "{}"))


@dataclasses.dataclass(frozen=True, eq=False)
class Traces:
    """A folder of traces; sequences are read when asked for.

    Attributes:
      folder: where they are.
      about: the manifest.
    """

    folder: Path
    about: About

    @classmethod
    def open(cls, folder: Path) -> Traces:
        """Reads the manifest and looks at every file.

        Raises:
          TraceError: no traces there, or not all of them, or damaged files.
        """
        try:
            tree = json.loads((folder / MANIFEST).read_text())
        except OSError as reason:
            raise TraceError(
                f"{folder} holds no traces ({MANIFEST}: {reason.strerror}). Make them: python -m "
                "train.traces."
            ) from reason
        except ValueError as reason:
            raise TraceError(f"{folder / MANIFEST} is damaged: {reason}. Make the traces again.") from reason
        if not isinstance(tree, dict) or tree.pop("format", None) != FORMAT:
            raise TraceError(f"{folder / MANIFEST} is no manifest of '{FORMAT}'. Make the traces again.")
        about = About(**tree | {name: tuple(tree[name]) for name in ("keys", "lengths")})
        there = [file(folder, shard).exists() for shard in range(about.shards)]
        if not all(there):
            raise TraceError(
                f"{folder} holds {sum(there)} of {about.shards} files: train.traces was stopped. Run it "
                "again to go on."
            )
        for shard in range(about.shards):
            if _notes(file(folder, shard)).get("fingerprint") != about.fingerprint:
                raise TraceError(f"{file(folder, shard)} is of another model than its manifest. Delete it.")
        return cls(folder, about)

    def of(self, model: LanguageModel, source: str) -> None:
        """Refuses traces of another model than the config's, which is from ``source``.

        Raises:
          TraceError: another fingerprint.
        """
        if self.about.fingerprint != fingerprint(model):
            raise TraceError(
                f"{self.folder} holds traces of {self.about.model} ({self.about.fingerprint}), the config's "
                f"model ({source}) is another one ({fingerprint(model)}). Make traces of it with "
                "train.traces."
            )

    def tasks(self) -> list[str]:
        """What each sequence is."""
        files = (file(self.folder, shard) for shard in range(self.about.shards))
        return [task for path in files for task in _notes(path)["tasks"]]

    def read(self, index: int, names: Sequence[str]) -> dict[str, Float[np.ndarray, "L X T H"]]:
        """Arrays of one sequence.

        Raises:
          TraceError: a damaged file, or values that are no numbers.
        """
        path = file(self.folder, index // self.about.shard)
        found = {}
        for name in names:
            try:
                found[name] = _opened(path).get_tensor(f"{name}.{index}")
            except SafetensorError as reason:
                raise TraceError(
                    f"{path} lacks {name}.{index} ({reason}). Make the traces again."
                ) from reason
            if not np.isfinite(found[name]).all():
                raise TraceError(
                    f"{path}: {name}.{index} holds NaN or infinity. Delete it and make it again."
                )
        return found
