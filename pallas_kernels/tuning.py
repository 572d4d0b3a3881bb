"""Sizes of blocks: a body's own, what was measured to be faster on a device, and what is just being tried.

A body calls ``pick`` for the blocks of each of its passes, with its own as the default. ``dispatch`` gives it
the "blocks" of ``tuned/<device>/<op>.json`` (``python -m benchmarks kernels --device`` writes them with the
measurements that chose them), or those of ``trying`` while that runs.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple


class Blocks(NamedTuple):
    """Sizes of one pass of a body; 0 leaves a size to the body.

    Attributes:
      q: queries of a tile.
      k: keys, slots or tokens of a tile.
      item: slots or tokens of a program that reads several tiles.
      warps, stages: for Triton's compiler.
    """

    q: int = 0
    k: int = 0
    item: int = 0
    warps: int = 0
    stages: int = 0

    def over(self, default: Blocks) -> Blocks:
        """These sizes, and those of ``default`` where one is 0."""
        return Blocks(*(size or other for size, other in zip(self, default)))

    def set_sizes(self) -> dict[str, int]:
        """The sizes that are not left to the body."""
        return {name: size for name, size in self._asdict().items() if size}


Tuned = tuple[tuple[str, Blocks], ...]
"""(key, blocks) of the passes that are not left to the body; static in jitted bodies."""

_trying: contextvars.ContextVar[Mapping[str, Tuned] | None] = contextvars.ContextVar("trying", default=None)


def key(what: str, dtype: Any, h: int) -> str:
    """The name under which a pass's blocks are recorded, such as "forward/bfloat16/128".

    Head dims are as tiles have them: the next power of two.
    """
    return f"{what}/{getattr(dtype, 'name', dtype)}/{1 << (h - 1).bit_length()}"


def pick(blocks: Tuned | tuple[int, int] | None, what: str, dtype: Any, h: int, default: Blocks) -> Blocks:
    """The blocks of a pass: its sizes in ``blocks``, the rest from ``default``.

    Args:
      blocks: from ``dispatch``; or a plain (q, k) for every pass.
      what: the pass, such as "forward".
      dtype: of keys and values (a dtype, not a scalar type).
      h: their head dim.
      default: the body's own blocks for this call.
    """
    if not blocks:
        return default
    if not isinstance(blocks[0], tuple):
        return Blocks(*blocks).over(default)
    return dict(blocks).get(key(what, dtype, h), Blocks()).over(default)


def recorded(record: Mapping[str, Any]) -> Tuned:
    """The chosen blocks of an operation's record."""
    entries = record.get("blocks", {}).items()
    return tuple((name, Blocks(**entry["chosen"])) for name, entry in sorted(entries) if entry.get("chosen"))


def chosen(folder: str, record: Mapping[str, Any]) -> Tuned:
    """Blocks for the bodies of an operation's folder: from ``trying``, else from its record."""
    trial = _trying.get()
    return recorded(record) if trial is None or folder not in trial else trial[folder]


@contextlib.contextmanager
def trying(folder: str, blocks: Tuned) -> Iterator[None]:
    """Give the bodies of a folder these blocks and no recorded ones. Callers jitted before keep theirs."""
    token = _trying.set({**(_trying.get() or {}), folder: blocks})
    try:
        yield
    finally:
        _trying.reset(token)
