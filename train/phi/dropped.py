"""Which tokens of each traced prompt a policy drops, found by a prefill and stored as bits.

policy.txt   the policy, the prompt length and the policy's weights
00000.npy    packed bits [L, K, N] of sequence 0
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import numpy as np
from tqdm import tqdm

import kvjax
from kvjax import metrics
from kvjax.types import Params
from kvjax.weights import find
from train.config import ConfigError
from train.phi.settings import Settings
from train.trace_file import Traces

if TYPE_CHECKING:
    from jaxtyping import Bool, Int

    from kvjax.algebra import Policy
    from kvjax.loading import LanguageModel

FOLDER, NAME = "dropped", "policy.txt"


def prepare(
    settings: Settings, traces: Traces, model: LanguageModel, folder: Path, indices: Iterable[int]
) -> None:
    """Writes the missing files of these sequences.

    Raises:
      ConfigError: the folder holds those of another policy, or the policy keeps every token of a prompt.
      WeightsError: the policy has learned parts without weights.
    """
    policy = settings.policy
    assert policy is not None  # the caller has checked
    learned = find(policy, model, settings.target.weights or None)
    weights, seed = learned.label or "none", traces.manifest.seed
    origin = f"{policy!r}, prompts of {settings.prompt}, weights {weights}, {seed}\n"
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / NAME
    if file.exists() and file.read_text() != origin:
        raise ConfigError(
            f"{folder} holds the verdicts of {file.read_text().strip()}; the config says {origin.strip()}. "
            "Give another folder, or delete this one."
        )
    file.write_text(origin)
    missing = [index for index in indices if not _file(folder, index).exists()]
    for index in tqdm(missing, unit="prompt", mininterval=5, disable=not missing):
        tokens = traces.read(index, ("tokens",))["tokens"][: settings.prompt]
        lost = of_prompt(policy, model, learned.weights, tokens)
        path = _file(folder, index)
        part = path.with_name(f".{path.stem}.part-{os.getpid()}.npy")
        np.save(part, np.packbits(lost, axis=-1))
        os.replace(part, path)
    jax.clear_caches()  # the programs of prefill are not needed any more


def of_prompt(
    policy: Policy, model: LanguageModel, weights: Params, tokens: Int[np.ndarray, " N"]
) -> Bool[np.ndarray, "L K N"]:
    """Which tokens of one prompt the policy drops.

    Raises:
      ConfigError: it drops none.
    """
    state, _ = kvjax.prefill(model, policy, [tokens], weights=weights)
    lost = ~np.asarray(metrics.present(state))[:, 0, :, : len(tokens)]
    if not lost.any():
        raise ConfigError(
            f"target.policy: {policy!r} keeps all {len(tokens)} tokens of a prompt. Give one that drops "
            "some, or longer prompts."
        )
    return lost


def read(folder: Path, index: int) -> Bool[np.ndarray, "L K N"]:
    """The dropped tokens of a sequence's prompt (padded to whole bytes)."""
    return np.unpackbits(np.load(_file(folder, index)), axis=-1).astype(bool)


def _file(folder: Path, index: int) -> Path:
    return folder / f"{index:05d}.npy"
