"""KVzip: the prompt is fed once more, and a token is worth the most attention that it receives then.

Kim et al., KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction,
https://arxiv.org/abs/2505.23416
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.algebra import (
    FIRST,
    Argument,
    Eviction,
    Observation,
    Piece,
    PolicyError,
    Replay,
    Switch,
    Tokenizer,
    Whole,
)
from kvjax.types import EMPTY, Params

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

FIRST_PIECE = "\n\nRepeat the previous context exactly."
LATER_PIECE = "\n\nRepeat the part of the previous context exactly, starting with"
LEAD = 8
"""Tokens before a later piece that follow its instruction."""

BLOCK = 64
"""Queries whose attention is in memory at a time."""


class Instruction(Argument):
    """A text, token ids as a tuple, or None."""

    what = "instruction"
    optional = True

    def accepts(self, value: Any) -> bool:
        if isinstance(value, str):
            return 0 < len(value) <= 200
        whole = lambda x: isinstance(x, int) and not isinstance(x, bool) and 0 <= x < 2**31  # noqa: E731
        return isinstance(value, tuple) and 0 < len(value) <= 200 and all(map(whole, value))

    @property
    def expected(self) -> str:
        return "a text of at most 200 characters, or token ids such as (5, 7)"


@dataclasses.dataclass(frozen=True, repr=False)
class KVzip(Eviction):
    """Score = the greatest attention received over a group's query heads and the queries of a second pass.

    The prompt is read into a full cache. Then it is fed once more, in pieces of ``size`` tokens, each behind
    an instruction to repeat it, at the positions after the prompt; nothing of that stays. A query's attention
    is shared among the first ``sinks`` tokens, the tokens that its piece repeats, and the piece itself, in
    float32. The first ``sinks`` tokens go last.

    Attributes:
      size: tokens of a piece.
      sinks: first tokens.
      output: KVzip+, a share counts times ||W_o v||_2 over ||h||, the norm of the query's hidden state.
      instruction: before each piece, instead of the paper's: a text, which the beginning of the model's turn
        follows, or token ids as they are.
    """

    name = "kvzip"
    arguments = {
        "size": Whole(1, by_positions=True),
        "sinks": Whole(most=4096),
        "output": Switch(),
        "instruction": Instruction(),
    }
    scores_prompt = True
    replays = True
    size: int = 2048
    sinks: int = 4
    output: bool = False
    instruction: str | tuple[int, ...] | None = None

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        more = {"hidden", "wo_norm"} if self.output else set()
        return frozenset({"k", "v", "replayed"} | more)

    def pieces(self, prompt: Int[np.ndarray, " T"], text: Tokenizer | None) -> list[Piece]:
        starts = range(0, len(prompt), self.size)
        ends = [min(begin + self.size, len(prompt)) for begin in starts]
        return [
            Piece(np.concatenate([self._ask(prompt[:begin], text), prompt[begin:end]]), begin, end)
            for begin, end in zip(starts, ends)
        ]

    def _ask(self, before: Int[np.ndarray, " T"], text: Tokenizer | None) -> Int[np.ndarray, " I"]:
        """The instruction of the piece that follows some of the prompt's tokens."""
        if isinstance(self.instruction, tuple):
            return np.asarray(self.instruction, np.int32)
        if text is None:
            raise PolicyError(
                f"{self!r} asks in words for the prompt once more, and this model has no tokenizer beside "
                "it. Give the instruction as token ids, as in kvzip(instruction=(5, 7))."
            )
        words, lead = self.instruction, before[:0]
        if words is None:
            words = LATER_PIECE if len(before) else FIRST_PIECE
            lead = before[max(len(before) - min(LEAD, self.size), 0) :]
        begins = [text.encode(words, bos=False), lead, text.encode(text.answer_begin, bos=False)]
        return np.concatenate([np.asarray(ids, np.int32) for ids in begins])

    def replayed(self, piece: Replay) -> Float[Array, "B K T"]:
        rows, heads, t, h = piece.prompt_k.shape
        sinks, size = min(self.sinks, t), min(self.size, t)
        # The first tokens, where the piece begins behind them, and those that it repeats.
        first = jnp.broadcast_to(jnp.arange(sinks), (rows, sinks))
        repeated = piece.begin[:, None] + jnp.arange(size)
        first = jnp.where(first < piece.begin[:, None], first, EMPTY)
        repeated = jnp.where(repeated < piece.end[:, None], repeated, EMPTY)
        at = jnp.concatenate([first, repeated], axis=1)
        some = jnp.clip(at, 0)[:, None, :, None]
        k = jnp.concatenate([jnp.take_along_axis(piece.prompt_k, some, axis=2), piece.k], axis=2)
        k_pos = jnp.concatenate([at, piece.pos], axis=1)
        worth = jnp.ones((rows, heads, 1, size), jnp.float32)
        cost = jnp.ones(piece.pos.shape, jnp.float32)
        if self.output:
            v = jnp.take_along_axis(piece.prompt_v, some[:, :, sinks:], axis=2)
            worth = piece.wo_norm(v, 2).reshape(rows, heads, -1, size)
            assert piece.hidden is not None
            norm = jnp.linalg.norm(piece.hidden.astype(jnp.float32), axis=-1)
            cost = jnp.where(piece.pos >= 0, norm, 1.0)
        best = _most(piece, k, k_pos, cost, slice(sinks, sinks + size), worth)
        # Positions of a row that are not repeated are written nowhere.
        place = jnp.where(repeated >= 0, repeated, t)[:, None, :]
        b, n = jnp.arange(rows)[:, None, None], jnp.arange(heads)[None, :, None]
        return jnp.zeros((rows, heads, t), jnp.float32).at[b, n, place].set(best, mode="drop")

    def score_prompt(self, params: Params | None, observed: Observation) -> Float[Array, "B K T"]:
        return jnp.where(observed.pos[:, None, :] < self.sinks, FIRST, observed.replayed)


def _most(
    piece: Replay,
    k: Float[Array, "B K C H"],
    k_pos: Int[Array, "B C"],
    cost: Float[Array, "B P"],
    which: slice,
    worth: Float[Array, "B K G C"],
) -> Float[Array, "B K C"]:
    """The greatest share of attention, times worth over cost, that the keys ``which`` receive; in float32."""
    rows, heads, _, h = k.shape
    p = piece.q.shape[2]
    block = min(BLOCK, p)
    q = piece.q.reshape(rows, heads, -1, p, h).astype(jnp.float32)
    k = k.astype(jnp.float32)

    def of_block(start: Int[Array, ""], best: Float[Array, "B K C"]) -> Float[Array, "B K C"]:
        cut = lambda x, axis: jax.lax.dynamic_slice_in_dim(x, start, block, axis)  # noqa: E731
        pos = cut(piece.pos, 1)
        s = jnp.einsum("bkgph,bkch->bkgpc", cut(q, 3), k, precision=jax.lax.Precision.HIGHEST) * h**-0.5
        s = s if piece.softcap is None else piece.softcap * jnp.tanh(s / piece.softcap)
        sees = (k_pos[:, None, :] >= 0) & (k_pos[:, None, :] <= pos[:, :, None])
        sees = sees[:, None, None]
        s = jnp.where(sees, s, -jnp.inf)
        e = jnp.where(sees, jnp.exp(s - jnp.maximum(s.max(axis=-1, keepdims=True), -1e30)), 0.0)
        share = e[..., which] / jnp.maximum(e.sum(axis=-1, keepdims=True), jnp.finfo(jnp.float32).tiny)
        share = share * worth[:, :, :, None, :] / cut(cost, 1)[:, None, None, :, None]
        return jnp.maximum(best, share.max(axis=(2, 3)))

    # The last block begins earlier where it would be short: a query that counts twice changes no maximum.
    starts = jnp.minimum(jnp.arange(-(-p // block)) * block, p - block)
    none = jnp.zeros((rows, heads, which.stop - which.start), jnp.float32)
    return jax.lax.fori_loop(0, len(starts), lambda i, best: of_block(starts[i], best), none)


PRESETS = {"kvzip": "kvzip + overall(0.25)", "kvzip-plus": "kvzip(output=True) + overall(0.25)"}

EXAMPLES = (
    "kvzip(16, sinks=2, instruction=(5, 7, 9)) + uniform(24)",
    "kvzip(20, sinks=2, output=True, instruction=(5, 7)) + ada(20, floor=0)",
    "kvzip(30, sinks=0, instruction=(3,)) + critical + uniform(24)",
)
