"""What users write for a budget: tokens, a ratio, or bytes; and what that is for one stream."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from kvjax.algebra import Every, Frame, PolicyError, When

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}

Amount = int | float | str
"""Slots per stream (int), share of the tokens seen that is kept (float in (0, 1]), or bytes of a whole
row over all layers and heads ("8MiB")."""


def check(call: str, amount: Amount, when: When) -> None:
    """Refuse what is neither tokens, ratio nor bytes, and a time that is none.

    Raises:
      PolicyError: naming ``call``.
    """
    if not isinstance(when, Every) and when not in ("after_prompt", "every_step"):
        raise PolicyError(f"{call}: when={when!r} is no time. Use after_prompt, every_step or every(k).")
    if isinstance(amount, str):
        if not re.fullmatch(r"\d+(B|KiB|MiB|GiB)", amount):
            raise PolicyError(f"{call}: {amount!r} is no size. Write bytes as '512KiB', '8MiB' or '1GiB'.")
    elif isinstance(amount, bool) or not isinstance(amount, int | float) or amount <= 0:
        raise PolicyError(
            f"{call}: {amount!r} is no amount. Give tokens (512), a ratio (0.25) or bytes ('8MiB')."
        )
    elif isinstance(amount, float) and amount > 1:
        raise PolicyError(f"{call}: a ratio is the share kept, in (0, 1]. For tokens write {int(amount)}.")


def least(amount: Amount) -> int | None:
    """The target, where it is known before a prompt is: an amount in tokens."""
    return amount if isinstance(amount, int) else None


def measured(amount: Any) -> dict[str, int | float | str] | None:
    """The amount as number and unit: "slots" a stream, "share" of the tokens seen, "bytes" of a row.

    None for what is no amount.
    """
    if isinstance(amount, str) and (written := re.fullmatch(r"(\d+)(B|KiB|MiB|GiB)", amount)):
        return {"number": int(written[1]) * UNITS[written[2]], "unit": "bytes"}
    if isinstance(amount, bool) or not isinstance(amount, int | float):
        return None
    return {"number": amount, "unit": "slots" if isinstance(amount, int) else "share"}


def slots(amount: Amount, frame: Frame, length: Int[Array, " B"]) -> Float[Array, " B"]:
    """The amount as (fractional) slots per stream, for rows that have seen ``length`` tokens."""
    if isinstance(amount, int):
        return jnp.full(length.shape, amount, jnp.float32)
    if isinstance(amount, float):
        return amount * length.astype(jnp.float32)
    number, unit = re.fullmatch(r"(\d+)(\w+)", amount).groups()  # type: ignore[union-attr]
    streams = frame.layers * frame.kv_heads
    return jnp.full(length.shape, int(number) * UNITS[unit] / (streams * frame.slot_bytes), jnp.float32)
