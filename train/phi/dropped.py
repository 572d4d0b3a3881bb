"""Which tokens of each traced prompt a policy no longer holds: prefilled once each, stored as bits.

policy.txt   whose verdicts, of which prompt length and with which weights
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
    """Makes what is missing of the verdicts on these sequences.

    Raises:
      ConfigError: the folder holds those of another policy, or the policy keeps every token of a prompt.
      WeightsError: it learns, and has no weights.
    """
    policy = settings.policy
    assert policy is not None  # noqa: S101  (the caller has asked)
    learned = find(policy, model, settings.target.weights or None)
    said = (
        f"{policy!r}, prompts of {settings.prompt}, weights {learned.label or 'none'}, {traces.about.seed}\n"
    )
    folder.mkdir(parents=True, exist_ok=True)
    mark = folder / NAME
    if mark.exists() and mark.read_text() != said:
        raise ConfigError(
            f"{folder} holds the verdicts of {mark.read_text().strip()}; the config says {said.strip()}. "
            "Give another folder, or delete this one."
        )
    mark.write_text(said)
    left = [index for index in indices if not _file(folder, index).exists()]
    for index in tqdm(left, unit="prompt", mininterval=5, disable=not left):
        tokens = traces.read(index, ("tokens",))["tokens"][: settings.prompt]
        gone = of_prompt(policy, model, learned.weights, tokens)
        _write(_file(folder, index), np.packbits(gone, axis=-1))
    jax.clear_caches()  # prefill's programs are not needed any more


def of_prompt(
    policy: Policy, model: LanguageModel, weights: Params, tokens: Int[np.ndarray, " N"]
) -> Bool[np.ndarray, "L K N"]:
    """Which tokens of one prompt the policy drops.

    Raises:
      ConfigError: none.
    """
    state, _ = kvjax.prefill(model, policy, [tokens], weights=weights)
    gone = ~np.asarray(metrics.present(state))[:, 0, :, : len(tokens)]
    if not gone.any():
        raise ConfigError(
            f"target.policy: {policy!r} keeps all {len(tokens)} tokens of a prompt. Give one that drops "
            "some, or longer prompts."
        )
    return gone


def read(folder: Path, index: int) -> Bool[np.ndarray, "L K N"]:
    """What is dropped of a sequence's prompt (padded to whole bytes)."""
    return np.unpackbits(np.load(_file(folder, index)), axis=-1).astype(bool)


def _file(folder: Path, index: int) -> Path:
    return folder / f"{index:05d}.npy"


def _write(path: Path, value: np.ndarray) -> None:
    part = path.with_name(f".{path.stem}.part-{os.getpid()}.npy")
    np.save(part, value)
    os.replace(part, path)
