"""The head of a saved state: its format, and the checks that it fits the model and the policy."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvjax import catalogue
from kvjax.algebra import Policy, PolicyError
from kvjax.errors import UserError
from kvjax.types import Weighted
from kvjax.weights import fingerprint

FORMAT = "kvjax-state"
VERSION = 5
"""The version that is written, and the newest that can be read. 1 was a whole state, 2 a part of one; their
digest leaves out the head. Up to 3 what a selection keeps for a page is float32; up to 4 all arrays have one
digest."""


class StateError(UserError):
    """A file that is not a state, or a state of another model, policy or format."""


class DamagedError(StateError):
    """A file that is not what was written."""

    def __init__(self, call: str, what: str) -> None:
        super().__init__(f"{call} was cut off or damaged: {what}. Save the state again.")


def check(
    path: str, head: dict[str, Any], model: Weighted, policy: Policy | None, label: str | None
) -> Policy:
    """The policy a state was made under; raises StateError where model, policy or weights do not fit."""
    call, dtype = f"open({path!r})", str(model.params["embed"].dtype)
    if head["model"] != fingerprint(model):
        raise StateError(
            f"{call} is a state of another model (fingerprint {head['model']}, this one has "
            f"{fingerprint(model)}). Load the model that made it."
        )
    if head["dtype"] != dtype:
        raise StateError(
            f"{call} holds {head['dtype']}, the model was loaded as {dtype}. Load it as {head['dtype']}."
        )
    try:
        made = catalogue.policy(head["policy"])
    except PolicyError as error:
        raise StateError(
            f"{call} was made under '{head['policy']}', which is unknown here: {error}"
        ) from None
    if made.structure != head["structure"]:
        raise StateError(
            f"{call} was made under '{head['policy']}', and its structure, '{head['structure']}', is that of "
            "another policy. Give a file that save wrote."
        )
    if policy is not None and policy.structure != head["structure"]:
        raise StateError(
            f"{call} was made under '{head['policy']}', and '{policy!r}' cannot continue it. Continue with a "
            "policy that differs from it in traced hyperparameters alone."
        )
    if label is not None and label != head["weights"]:
        raise StateError(
            f"{call} was made with weights {head['weights'] or 'of nothing'}, not with {label or 'none'}. "
            "Give the weights that made it."
        )
    return made


def named_scales(scales: Any) -> dict[str, Any]:
    """The arrays of a pool's scales, by name: none, "scales", or one for each field."""
    if hasattr(scales, "_asdict"):
        return {f"scales.{name}": x for name, x in scales._asdict().items()}
    return {} if scales is None else {"scales": scales}


def places(length: np.ndarray, table: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Page and slot of every live slot, one per-head cache after the other."""
    lists = [(table[at][np.arange(n) // size], np.arange(n) % size) for at, n in np.ndenumerate(length) if n]
    if not lists:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    return np.concatenate([page for page, _ in lists]), np.concatenate([slot for _, slot in lists])
