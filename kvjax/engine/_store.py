"""Contexts as the engine holds them: a row that was read, under a name."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvjax import metrics
from kvjax.algebra import Policy
from kvjax.cache.state import KVState
from kvjax.engine._check import Learned
from kvjax.engine._loans import full_pages

if TYPE_CHECKING:
    from jaxtyping import Array, Int


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Kept:
    """A row that was read, and what it was read under.

    Attributes:
      tokens: it has seen.
      policy: in its lane's layout.
      learned: weights of the policy.
      state: one row; whoever goes on with it copies it.
      logits: of the next token, float32 [1, V].
      pages: full ones, as rows that continue it may share them (``_loans``).
    """

    tokens: np.ndarray
    policy: Policy
    learned: Learned
    state: KVState
    logits: Any
    pages: Sequence[Int[np.ndarray, "K R"]]


class Store:
    """By name; any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[str, Kept] = {}

    def put(
        self,
        name: str,
        tokens: np.ndarray,
        policy: Policy,
        learned: Learned,
        state: KVState,
        logits: Array | None,
    ) -> None:
        """Keeps a row."""
        kept = Kept(
            tokens=tokens,
            policy=policy,
            learned=learned,
            state=state,
            logits=logits,
            pages=full_pages(state),
        )
        with self._lock:
            self._kept[name] = kept

    def get(self, name: str) -> Kept | None:
        """The row of that name."""
        with self._lock:
            return self._kept.get(name)

    def drop(self, name: str) -> bool:
        """Forgets it; False where there was none."""
        with self._lock:
            return self._kept.pop(name, None) is not None

    def names(self) -> list[str]:
        """Of all."""
        with self._lock:
            return sorted(self._kept)

    @property
    def allocated(self) -> int:
        """Device bytes of all of them."""
        with self._lock:
            return sum(metrics.allocated(kept.state.layers) for kept in self._kept.values())
