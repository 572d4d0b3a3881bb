"""Learned weights of the policies of a run, and the name under which a row records them."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

from kvjax.algebra import Policy
from kvjax.loading import LanguageModel
from kvjax.types import Params
from kvjax.weights import SHIPPED, weights_and_remarks


@dataclasses.dataclass(frozen=True, eq=False)
class Gates:
    """What a learned policy is measured with.

    Attributes:
      weights: as the decode loop takes them.
      said: ``name@digest`` of each file, the digest sixteen hex digits of its SHA-256; comma-separated.
      remarks: sentences about weights that were trained for other arguments than the policy's.
    """

    weights: Params
    said: str
    remarks: tuple[str, ...] = ()


def chosen(policy: Policy, model: LanguageModel, source: str | None) -> Gates | None:
    """The learned weights of a policy; None where nothing in it is learned.

    Args:
      policy, model: whose.
      source: a file, the name of one that the model ships, or None for the model's own.

    Raises:
      WeightsError: weights that are nowhere, or do not fit.
    """
    if not policy.learned:
        return None
    weights, remarks = weights_and_remarks(policy, model, source)
    names = dict.fromkeys(part.shipped if source is None else source for part in policy.learned)
    said = ",".join(f"{Path(name).stem}@{_digest(name, model)}" for name in names)
    return Gates(weights, said, tuple(remarks))


def _digest(name: str, model: LanguageModel) -> str:
    """Of the file that ``weights_for`` has just read: a path, or the name of a shipped one."""
    file = Path(name) if Path(name).is_file() else model.folder / SHIPPED / f"{name}.safetensors"
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]
