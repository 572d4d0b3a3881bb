"""Amounts as users write them for a budget (tokens, a ratio, or bytes), and the slots that they mean."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from kvjax.algebra import MOST, Argument, Budget, Every, Frame, PolicyError
from kvjax.types import pytree

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int, UInt32

UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}

Amount = int | float | str
"""Slots per KV head (int), the share of the tokens seen that is kept (float in (0, 1]), or bytes of a row
over all layers and heads ("8MiB")."""


@dataclasses.dataclass(frozen=True)
class Size(Argument):
    """The argument ``amount`` of a budget."""

    what: str = "amount"
    expected = "tokens (512), a ratio (0.25) or bytes ('8MiB')"

    def check(self, call: object, name: str, value: Any) -> None:
        """Accepts tokens, a ratio or bytes.

        Raises:
          PolicyError: the value is none of these.
        """
        if isinstance(value, str):
            if not re.fullmatch(r"\d{1,15}(B|KiB|MiB|GiB)", value):
                raise PolicyError(
                    f"{call}: {value!r} is not a valid size. Write bytes as '512KiB', '8MiB' or '1GiB'."
                )
        elif isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MOST:
            raise PolicyError(
                f"{call}: {value!r} is not a valid amount. Give tokens (512, at most {MOST}), a ratio (0.25) "
                "or bytes ('8MiB')."
            )
        elif isinstance(value, float) and value > 1:
            raise PolicyError(f"{call}: a ratio is the share kept, in (0, 1]. For tokens write {int(value)}.")


@dataclasses.dataclass(frozen=True)
class Time(Argument):
    """The argument ``when`` of a budget."""

    what: str = "time"

    def accepts(self, value: Any) -> bool:
        return isinstance(value, Every) or value in ("after_prompt", "every_step")

    @property
    def expected(self) -> str:
        return "after_prompt, every_step or every(k)"


@dataclasses.dataclass(frozen=True)
class OfPrompt(Argument):
    """What a budget that acts while decoding does to the prompt."""

    what: str = "treatment"

    def accepts(self, value: Any) -> bool:
        return value in ("cut", "keep")

    @property
    def expected(self) -> str:
        return "cut or keep"


@pytree(static=("unit",))
@dataclasses.dataclass(frozen=True)
class Limit:
    """An amount as a program receives it: the unit is structure, the number is traced.

    Attributes:
      number: tokens, share or bytes.
      unit: "tokens", "ratio" or "bytes".
    """

    number: Any
    unit: str

    def slots(self, frame: Frame, length: Int[Array, " B"]) -> Float[Array, " B"]:
        """(Fractional) slots per KV head, for rows that have seen ``length`` tokens."""
        if self.unit == "tokens":
            return jnp.full(length.shape, self.number, jnp.float32)
        if self.unit == "ratio":
            return self.number * length.astype(jnp.float32)
        heads = frame.layers * frame.kv_heads
        return jnp.full(length.shape, self.number / (heads * frame.slot_bytes), jnp.float32)

    def slots_on_host(self, frame: Frame, length: int) -> float:
        """``slots`` of one row, in the host's double precision."""
        if self.unit == "tokens":
            return float(self.number)
        if self.unit == "ratio":
            return float(self.number * length)
        return float(self.number / (frame.layers * frame.kv_heads * frame.slot_bytes))


def limit(amount: Amount) -> Limit:
    """An amount as number and unit."""
    if isinstance(amount, int):
        return Limit(amount, "tokens")
    if isinstance(amount, float):
        return Limit(amount, "ratio")
    number, unit = re.fullmatch(r"(\d+)(\w+)", amount).groups()  # type: ignore[union-attr]
    return Limit(float(int(number) * UNITS[unit]), "bytes")


class Sized(Budget):
    """A budget whose field ``amount`` says how much is kept.

    With ``prompt=keep`` the prompt stays, and the amount is that of the tokens after it, as where methods for
    long answers are compared (TriAttention, https://arxiv.org/abs/2604.04921).

    Raises:
      PolicyError: a prompt that is kept, and a budget that acts on nothing else.
    """

    sizes = ("amount",)
    amount: Amount
    prompt: str = "cut"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.spares_prompt and self.when == "after_prompt":
            raise PolicyError(
                f"{self!r} acts after the prompt alone and keeps all of it. Give when=every(64), or leave "
                "prompt out."
            )

    @property
    def spares_prompt(self) -> bool:  # type: ignore[override]
        return self.prompt == "keep"

    def spared(self, frame: Frame, length: Int[Array, " B"]) -> Int[Array, " B"]:
        """Tokens of each row that stay because they are of the prompt."""
        if not self.spares_prompt:
            return jnp.zeros_like(length)
        assert frame.prompt is not None
        return jnp.minimum(frame.prompt, length)

    @functools.cached_property
    def limit(self) -> Limit:
        """The amount as number and unit; a leaf."""
        return limit(self.amount)

    @property
    def tokens(self) -> int | None:
        """The amount if it is in tokens and of all; another one means a number of slots only for a prompt."""
        return self.amount if isinstance(self.amount, int) and not self.spares_prompt else None


class Shared(Sized):
    """A budget whose ``amount`` is a mean over KV heads, which share the slots by their scores.

    Its field ``floor`` is the share of the mean that every head keeps whatever its scores.
    """

    floor: float

    def leaves(self) -> dict[str, Any]:
        return {"limit": self.limit, "floor": self.floor}

    @property
    def least(self) -> int | None:
        """The mean, if it is in tokens: protected tokens count towards every head first."""
        return self.tokens

    def smallest(self, frame: Frame, length: int) -> int:
        return length if self.spares_prompt else int(self.limit.slots_on_host(frame, length) + 0.5)

    def layer_mean(self, frame: Frame, length: Int[Array, " B"]) -> Int[Array, " B"]:
        """What is spared, and the amount, rounded to the nearest slot (halves up)."""
        kept = self.spared(frame, length)
        return kept + jnp.floor(self.limit.slots(frame, length - kept) + 0.5).astype(jnp.int32)

    def guaranteed(self, frame: Frame, length: Int[Array, " B"]) -> Int[Array, " B"]:
        """Slots that every head keeps, if it has as many tokens."""
        kept = self.spared(frame, length)
        mean = self.layer_mean(frame, length) - kept
        return kept + jnp.floor(mean * self.floor).astype(jnp.int32)

    def secured(
        self, frame: Frame, length: Int[Array, " B"], scores: Float[Array, "B K T"]
    ) -> Float[Array, "B K T"]:
        """A head's guaranteed tokens come first in the layer's order, whatever the scores of the others."""
        sure = self.guaranteed(frame, length)[:, None, None]
        return jnp.where((rank(scores) < sure) & (scores > -jnp.inf), jnp.inf, scores)


def rank(scores: Float[Array, "... T"]) -> Int[Array, "... T"]:
    """Rank of each score, 0 for the best; ties go to the lowest index."""
    return jnp.argsort(jnp.argsort(-scores, axis=-1, stable=True), axis=-1)


def in_order(scores: Float[Array, ...]) -> UInt32[Array, ...]:
    """Whole numbers in the order of the scores, 0 for -inf alone: a level among them is found bit by bit."""
    scores = scores.astype(jnp.float32)
    # -0 equals 0; XLA takes a sum with 0 out.
    bits = jax.lax.bitcast_convert_type(jnp.where(scores == 0, 0.0, scores), jnp.uint32)
    top = jnp.uint32(1 << 31)
    return jnp.where(scores > -jnp.inf, jnp.where(bits >= top, ~bits, bits | top), 0)
