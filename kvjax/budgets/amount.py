"""What users write for a budget: tokens, a ratio, or bytes; and what that is for one stream."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from kvjax.algebra import Argument, Every, Frame, PolicyError
from kvjax.types import pytree

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}

Amount = int | float | str
"""Slots per stream (int), share of the tokens seen that is kept (float in (0, 1]), or bytes of a whole
row over all layers and heads ("8MiB")."""


@dataclasses.dataclass(frozen=True)
class Size(Argument):
    """The argument ``amount`` of a budget."""

    what: str = "amount"

    def check(self, call: object, name: str, value: Any) -> None:
        """Tokens, a ratio or bytes.

        Raises:
          PolicyError: none of these.
        """
        if isinstance(value, str):
            if not re.fullmatch(r"\d+(B|KiB|MiB|GiB)", value):
                raise PolicyError(f"{call}: {value!r} is no size. Write bytes as '512KiB', '8MiB' or '1GiB'.")
        elif isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise PolicyError(
                f"{call}: {value!r} is no amount. Give tokens (512), a ratio (0.25) or bytes ('8MiB')."
            )
        elif isinstance(value, float) and value > 1:
            raise PolicyError(f"{call}: a ratio is the share kept, in (0, 1]. For tokens write {int(value)}.")


@dataclasses.dataclass(frozen=True)
class Time(Argument):
    """The argument ``when`` of a budget."""

    what: str = "time"

    def accepts(self, value: Any) -> bool:
        """One of three forms."""
        return isinstance(value, Every) or value in ("after_prompt", "every_step")

    @property
    def way_out(self) -> str:
        """All three."""
        return "after_prompt, every_step or every(k)"


@pytree(static=("unit",))
@dataclasses.dataclass(frozen=True)
class Limit:
    """An amount as a program is given it: the unit is structure, the number is not.

    Attributes:
      number: tokens, share or bytes.
      unit: "tokens", "ratio" or "bytes".
    """

    number: Any
    unit: str

    def slots(self, frame: Frame, length: Int[Array, " B"]) -> Float[Array, " B"]:
        """(Fractional) slots per stream, for rows that have seen ``length`` tokens."""
        if self.unit == "tokens":
            return jnp.full(length.shape, self.number, jnp.float32)
        if self.unit == "ratio":
            return self.number * length.astype(jnp.float32)
        streams = frame.layers * frame.kv_heads
        return jnp.full(length.shape, self.number / (streams * frame.slot_bytes), jnp.float32)


def limit(amount: Amount) -> Limit:
    """The amount, its unit read."""
    if isinstance(amount, int):
        return Limit(amount, "tokens")
    if isinstance(amount, float):
        return Limit(amount, "ratio")
    number, unit = re.fullmatch(r"(\d+)(\w+)", amount).groups()  # type: ignore[union-attr]
    return Limit(float(int(number) * UNITS[unit]), "bytes")


def slots(amount: Amount, frame: Frame, length: int) -> float:
    """``Limit.slots`` of one row, in the host's double precision."""
    found = limit(amount)
    if found.unit == "tokens":
        return float(found.number)
    if found.unit == "ratio":
        return float(found.number * length)
    return float(found.number / (frame.layers * frame.kv_heads * frame.slot_bytes))


def least(amount: Amount) -> int | None:
    """The target, where it is known before a prompt is: an amount in tokens."""
    return amount if isinstance(amount, int) else None
