"""A second pass: the prompt is fed once more, in pieces, and its queries judge the cached tokens.

Why: kvjax/DESIGN.md, 28.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from kvjax.algebra._observation import output_norm
from kvjax.types import pytree

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Array, Float, Int


class Tokenizer(Protocol):
    """What a part needs of ``kvjax.text.Text`` to write an instruction."""

    def encode(self, text: str, *, bos: bool = True) -> list[int]: ...

    @property
    def answer_begin(self) -> str: ...


@dataclasses.dataclass(frozen=True)
class Piece:
    """What is fed behind a prompt, at the positions that follow it.

    Attributes:
      tokens: an instruction, and the prompt's tokens ``begin`` to ``end``.
      begin, end: which of the prompt's tokens are fed once more.
    """

    tokens: Int[np.ndarray, " P"] | Sequence[int]
    begin: int
    end: int


@pytree(static=("softcap",))
@dataclasses.dataclass(frozen=True, kw_only=True)
class Replay:
    """A piece at one layer, and the prompt's cache that it sees.

    Attributes:
      q, k: queries and keys of the piece, after RoPE.
      pos: their positions, behind the prompt; EMPTY for padding.
      prompt_k, prompt_v: keys and values of the whole prompt, by position.
      begin, end: which tokens of each row's prompt the piece repeats; none where they are equal.
      hidden: the piece's input of the attention block, where the part declares it.
      softcap, wo: see ``Heads``; ``wo`` where the part declares ``wo_norm``.
    """

    q: Float[Array, "B N P H"]
    k: Float[Array, "B K P H"]
    pos: Int[Array, "B P"]
    prompt_k: Float[Array, "B K T H"]
    prompt_v: Float[Array, "B K T H"]
    begin: Int[Array, " B"]
    end: Int[Array, " B"]
    hidden: Float[Array, "B P D"] | None = None
    softcap: float | None = None
    wo: Float[Array, "D N H"] | None = None

    def wo_norm(self, v: Float[Array, "B K C H"], order: int = 2) -> Float[Array, "B N C"]:
        """``Observation.wo_norm`` of some of the prompt's values."""
        return output_norm(self.wo, v, order)
