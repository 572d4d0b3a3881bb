"""Traces on disk: queries, keys and values of a model's heads over a corpus, read at random.

  traces.json             the manifest, written first: which model, which sequences, how stored
  00000.safetensors ...   ``shard`` sequences each: for sequence i ``tokens.i`` [T], ``at.i`` [M] and
                          ``q.i`` [L, N, M, H], queries after RoPE at these positions; ``k.i`` and ``v.i``
                          [L, K, T, H]; ``k_pre.i`` where asked for. The header names their tasks.

Files are written atomically, and their contents depend on the manifest alone.
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
class Manifest:
    """Which model and which sequences, and how they are stored.

    Attributes:
      model, fingerprint, parameters: the model's name, fingerprint and size.
      layers, heads, kv_heads, head_dim, softcap: its shapes, and the soft cap of its scores.
      dtype, keys, queries, shard: see ``train.ranker.settings.Recording``.
      lengths: tokens of each sequence.
      train: how many of them are for training; the others are for checks.
      seed, data: of the sequences.
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
        """Number of files."""
        return -(-len(self.lengths) // self.shard)

    def of_shard(self, shard: int) -> range:
        """The sequences of a file."""
        return range(shard * self.shard, min((shard + 1) * self.shard, len(self.lengths)))

    def query_positions(self, length: int) -> Int[np.ndarray, " M"]:
        """Positions whose queries are stored, the last one among them."""
        if self.queries is None or self.queries >= length:
            return np.arange(length, dtype=np.int32)
        return np.linspace(length - 1, 0, self.queries, endpoint=False).round().astype(np.int32)[::-1]

    def bytes(self, length: int) -> int:
        """Of one sequence, without headers."""
        queries = len(self.query_positions(length))
        kv = self.kv_heads * length * (1 + len(self.keys))
        floats = self.layers * self.head_dim * (self.heads * queries + kv)
        return floats * np.dtype(self.dtype).itemsize + 4 * (length + queries)


def shard_path(folder: Path, shard: int) -> Path:
    """The file of a shard."""
    return folder / f"{shard:05d}.safetensors"


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes the manifest unless the folder has it already.

    Raises:
      TraceError: the folder holds other traces.
    """
    text, path = json.dumps(dataclasses.asdict(manifest) | {"format": FORMAT}, indent=1), folder / MANIFEST
    if path.exists():
        if path.read_text() != text:
            old, new = json.loads(path.read_text()), json.loads(text)
            named = next((name for name in new if old.get(name) != new[name]), "format")
            raise TraceError(
                f"--out {folder} holds traces made with another {named}. Give an empty folder, or the config "
                "and model they were begun with."
            )
        return
    folder.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{MANIFEST}.part-{os.getpid()}")
    part.write_text(text)
    os.replace(part, path)


def write_shard(
    folder: Path, manifest: Manifest, shard: int, tasks: Sequence[str], arrays: dict[str, np.ndarray]
) -> None:
    """Writes one file of sequences, whose ``tasks`` go into the header."""
    # safetensors writes an array's memory as it lies, whatever its strides say.
    arrays = {name: np.ascontiguousarray(x) for name, x in arrays.items()}
    path = shard_path(folder, shard)
    part = path.with_name(f".{path.name}.part-{os.getpid()}")
    notes = json.dumps({"fingerprint": manifest.fingerprint, "tasks": list(tasks)})
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
    """The header of a shard; empty in a file that holds no traces."""
    return json.loads((_opened(path).metadata() or {}).get(FORMAT, "{}"))


@dataclasses.dataclass(frozen=True, eq=False)
class Traces:
    """A folder of traces; sequences are read when asked for."""

    folder: Path
    manifest: Manifest

    @classmethod
    def open(cls, folder: Path) -> Traces:
        """Reads the manifest and the header of every file.

        Raises:
          TraceError: missing or damaged files.
        """
        try:
            tree = json.loads((folder / MANIFEST).read_text())
        except OSError as reason:
            raise TraceError(
                f"{folder} has no traces ({MANIFEST}: {reason.strerror}). Make them: python -m train.traces."
            ) from reason
        except ValueError as reason:
            raise TraceError(f"{folder / MANIFEST} is damaged: {reason}. Make the traces again.") from reason
        if not isinstance(tree, dict) or tree.pop("format", None) != FORMAT:
            raise TraceError(f"{folder / MANIFEST} is not a manifest of '{FORMAT}'. Make the traces again.")
        manifest = Manifest(**tree | {name: tuple(tree[name]) for name in ("keys", "lengths")})
        files = [shard_path(folder, shard) for shard in range(manifest.shards)]
        exist = [file.exists() for file in files]
        if not all(exist):
            raise TraceError(
                f"{folder} holds {sum(exist)} of {manifest.shards} files: train.traces was stopped. Run it "
                "again to go on."
            )
        for file in files:
            if _notes(file).get("fingerprint") != manifest.fingerprint:
                raise TraceError(f"{file} is of another model than its manifest. Delete it.")
        return cls(folder, manifest)

    def check_model(self, model: LanguageModel, source: str) -> None:
        """Refuses traces of another model than the config's, which is from ``source``.

        Raises:
          TraceError: another fingerprint.
        """
        manifest = self.manifest
        if manifest.fingerprint != fingerprint(model):
            raise TraceError(
                f"{self.folder} holds traces of {manifest.model} ({manifest.fingerprint}), the config's "
                f"model ({source}) is another one ({fingerprint(model)}). Make traces of it with "
                "train.traces."
            )

    def tasks(self) -> list[str]:
        """The task of each sequence."""
        files = (shard_path(self.folder, shard) for shard in range(self.manifest.shards))
        return [task for path in files for task in _notes(path)["tasks"]]

    def read(self, index: int, names: Sequence[str]) -> dict[str, Float[np.ndarray, "L X T H"]]:
        """Arrays of one sequence.

        Raises:
          TraceError: a damaged file, values that are not finite, or other positions than the manifest's.
        """
        path = shard_path(self.folder, index // self.manifest.shard)
        arrays = {}
        for name in names:
            try:
                arrays[name] = _opened(path).get_tensor(f"{name}.{index}")
            except SafetensorError as reason:
                raise TraceError(
                    f"{path} lacks {name}.{index} ({reason}). Make the traces again."
                ) from reason
            if not np.isfinite(arrays[name]).all():
                raise TraceError(
                    f"{path}: {name}.{index} holds NaN or infinity. Delete it and make it again."
                )
        positions = self.manifest.query_positions(self.manifest.lengths[index])
        if "at" in arrays and not np.array_equal(arrays["at"], positions):
            raise TraceError(f"{path}: at.{index} holds other positions than its manifest. Make it again.")
        return arrays
