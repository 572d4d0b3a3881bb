"""Shared prefixes: states at chunk borders of texts that were read before, by what they were read under.

**The rule.** A state may stand for the beginning of another prompt where nothing in it depends on what came
after (``shareable``): the policy reads in chunks, deciding from each chunk and what came before it, and no
part asks how long the prompt is, as a selection that splits does. It was read in the same chunks, so at a
border it is the state that the other prompt would reach. Generated tokens count as a prompt's
(``generated_too``) where a step leaves what a chunk would: what reads see must not differ between the two,
so nothing is selected, approximated or held in codes. A cache that keeps everything may begin with any part
of another (``kvjax.engine.pages.can_shorten``), wherever that ends.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from kvjax import decode
from kvjax.algebra import Policy
from kvjax.cache.state import KVState
from kvjax.engine.pages import Shorter, StoredState, layer_pools

if TYPE_CHECKING:
    from jaxtyping import Int

Key = tuple[str, str, str]
"""Of the policy with its hyperparameters, of its weights, and of who may see it."""

LEAST = 64
"""Fewest tokens of a beginning whose keys and values are kept, or taken, for prompts that are read whole."""

MOST = 64
"""Most states that are kept."""

SEEN = 64
"""Prompts that are remembered, to see where the next ones leave them."""


def shareable(policy: Policy) -> bool:
    """Is a state at a chunk border the same whatever follows?"""
    return not policy.whole_prompt and not policy.selection.splits


def generated_too(policy: Policy) -> bool:
    """Is the state after generated tokens the one they would leave when read as a prompt?"""
    exact = policy.selection.idle and policy.completion.idle and policy.storage.exact
    return shareable(policy) and policy.on_arrival and exact


@dataclasses.dataclass(eq=False, kw_only=True)
class Prefix(StoredState):
    """The state at a border of a text."""

    key: Key
    used: float = dataclasses.field(default_factory=time.monotonic)  # when it was last asked for


@dataclasses.dataclass(eq=False, kw_only=True)
class HeldKeys:
    """Keys and values of a prompt that was read whole, for others that begin like it (``decode.Behind``).

    Attributes:
      tokens: of the prompt.
      owner: who may see it.
      keys: layer by layer; None once they were dropped.
      used: when they were last asked for.
      readers: prompts that are being read behind them.
    """

    tokens: Int[np.ndarray, " T"]
    owner: str
    keys: decode.Keys | None
    used: float = dataclasses.field(default_factory=time.monotonic)
    readers: int = 0

    def __post_init__(self) -> None:
        self.bytes = sum(x.nbytes for pair in self.keys or () for x in pair)


class Prefixes:
    """What is kept of prompts, up to ``memory`` bytes; the longest unused goes first."""

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._held: list[Prefix] = []
        self._keys: list[HeldKeys] = []
        self._seen: collections.deque[tuple[Key, np.ndarray]] = collections.deque(maxlen=SEEN)

    @property
    def allocated(self) -> int:
        """Device bytes of all that is kept."""
        return sum(kept.bytes for kept in self._held) + sum(keys.bytes for keys in self._keys)

    def find(
        self,
        key: Key,
        tokens: Int[np.ndarray, " T"],
        can_shorten: Callable[[KVState], bool] = lambda state: False,
    ) -> Prefix | Shorter | None:
        """The longest beginning of the prompt that is held, at least a token shorter than it.

        Args:
          key: of the states that may be it.
          tokens: of the prompt.
          can_shorten: may any beginning of the state be taken? Of fewer tokens than a page none is.
        """
        longest, most = None, 0
        for prefix in self._held:
            common = _common(prefix.tokens, tokens[:-1]) if prefix.key == key else 0
            page = max((pages.size for pages in layer_pools(prefix.row)), default=0)
            part = common >= max(page, 1) and can_shorten(prefix.row)
            if common > most and (common == len(prefix.tokens) or part):
                longest, most = prefix, common
        if longest is None:
            return None
        longest.used = time.monotonic()
        return longest if most == len(longest.tokens) else Shorter(longest, tokens[:most])

    def borders(self, key: Key, tokens: Int[np.ndarray, " T"], chunk: int) -> list[int]:
        """Borders of the prompt after which its state is worth keeping.

        The last one, and the last one before each token at which it leaves an earlier prompt.
        """
        borders = {(len(tokens) - 1) // chunk * chunk}
        borders |= {_common(seen, tokens) // chunk * chunk for other, seen in self._seen if other == key}
        self._seen.append((key, tokens))
        have = {
            len(p.tokens) for p in self._held if p.key == key and _common(p.tokens, tokens) == len(p.tokens)
        }
        return sorted(borders - {0} - have)

    def keep(self, new: Prefix) -> None:
        """Keeps one; drops others where there is no room."""
        for old in [p for p in self._held if p.key == new.key and np.array_equal(p.tokens, new.tokens)]:
            self._drop(old)
        if self._room(new.bytes):
            self._held.append(new)

    def _room(self, size: int) -> bool:
        """Drops others until there is room for so many bytes; False where there is none."""
        while len(self._held) + len(self._keys) >= MOST or self.allocated + size > self._memory:
            if not self.drop():
                return False
        return True

    def drop(self) -> bool:
        """Forgets what was not used for longest; False where there is nothing that nobody reads."""
        idle = [keys for keys in self._keys if not keys.readers]
        if not self._held and not idle:
            return False
        kept: list[Prefix | HeldKeys] = [*self._held, *idle]
        oldest = min(kept, key=lambda one: one.used)
        if isinstance(oldest, HeldKeys):
            self._keys.remove(oldest)
            oldest.keys = None
        else:
            self._drop(oldest)
        return True

    # --- keys and values of whole prompts ------------------------------------------------------------

    def find_keys(
        self, owner: str, tokens: Int[np.ndarray, " T"], queries: int
    ) -> tuple[HeldKeys, int] | None:
        """What is held of the prompt's longest beginning, and its tokens; so many stay to be read."""
        found, most = None, LEAST - 1
        for held in self._keys:
            common = _common(held.tokens, tokens[: len(tokens) - queries]) if held.owner == owner else 0
            if common > most:
                found, most = held, common
        if found is None:
            return None
        found.used = time.monotonic()
        return found, most

    def worth_keys(self, owner: str, tokens: Int[np.ndarray, " T"]) -> bool:
        """Did an earlier prompt begin like this one? The first is only remembered."""
        key = ("", "", owner)
        worth = any(other == key and _common(seen, tokens) >= LEAST for other, seen in self._seen)
        self._seen.append((key, tokens))
        return worth

    def can_keep(self, size: int) -> bool:
        """May so many bytes be kept at all?"""
        return size <= self._memory

    def keep_keys(self, new: HeldKeys) -> None:
        """Keeps them in place of others; not where all of theirs is held."""
        longest = max((_common(x.tokens, new.tokens) for x in self._keys if x.owner == new.owner), default=0)
        if longest < len(new.tokens) and self._room(new.bytes):
            self._keys.append(new)

    def _drop(self, prefix: Prefix) -> None:
        self._held.remove(prefix)
        prefix.state = None  # rows that began with it only compare it with what others begin with


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Tokens at the beginning that two texts have in common."""
    many = min(len(a), len(b))
    other = np.flatnonzero(a[:many] != b[:many])
    return int(other[0]) if len(other) else many
