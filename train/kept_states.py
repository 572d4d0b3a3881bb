"""The teacher's outputs of every batch, made once and kept on disk for all lambdas of a config.

FOLDER/teacher/about.json   which model, rows and text they are of
FOLDER/teacher/00000.npy    float32 [B, T, D], the teacher's states of batch 0
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import grain.python as grain
import jax
import numpy as np

from kvjax.types import Params
from train import distill, gate_rows
from train.gate_settings import ConfigError, Settings

TEACHER = "teacher"
"""The key of a batch, and the folder beside those of the lambdas."""


class WithTeacher:
    """Random-access batches with the teacher's outputs (a grain source)."""

    def __init__(self, batches: grain.MapDataset, folder: Path, states: Any):
        self.batches, self.folder, self.states = batches, folder, states

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        batch, file = self.batches[index], self.folder / f"{index:05d}.npy"
        if file.is_file():
            return batch | {TEACHER: np.load(file)}
        states = np.asarray(self.states(batch["tokens"]))
        part = file.with_suffix(f".part-{os.getpid()}")
        with part.open("wb") as stream:
            np.save(stream, states)
        os.replace(part, file)
        return batch | {TEACHER: states}


def with_teacher(
    batches: grain.MapDataset, settings: Settings, model: distill.GatedModel, frozen: Params
) -> grain.MapDataset:
    """The batches with the teacher's outputs under ``TEACHER``.

    Raises:
      ConfigError: the folder holds those of another model, other rows or another text.
    """
    folder = settings.folder.parent / TEACHER
    network = repr(getattr(model.network, "spec", model.network))
    facts = {"model": settings.source, "spec": network, "seed": settings.seed, "data": settings.data}
    facts["text"] = gate_rows.recorded_text(settings)
    about = json.dumps(facts, indent=1)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "about.json"
    if file.is_file() and file.read_text(encoding="utf-8") != about:
        raise ConfigError(
            f"{folder} holds the teacher's outputs for another model, other data or another seed. Remove it, "
            "or give the config another folder."
        )
    file.write_text(about, encoding="utf-8")

    @jax.jit
    def states(frozen: Params, tokens: jax.Array) -> jax.Array:
        return distill.teacher_states(model, frozen, tokens)

    source = WithTeacher(batches, folder, lambda tokens: states(frozen, tokens))
    return grain.MapDataset.source(source)
