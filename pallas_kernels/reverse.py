"""A gradient for implementations that have none of their own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax


def borrowing(run: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """``run`` with the reverse mode of ``plain``, another implementation of the same function.

    Both take arrays by position and static options by keyword; ``interpret`` and ``blocks`` are for a Pallas
    body and do not reach ``plain``. Backward computes ``plain`` again; integers and booleans get no gradient.
    """

    def call(*arrays: Any, **options: Any) -> Any:
        forward = functools.partial(run, **options)
        options = {name: x for name, x in options.items() if name not in ("interpret", "blocks")}
        reference = functools.partial(plain, **options)
        borrowed = jax.custom_vjp(forward)
        borrowed.defvjp(
            lambda *arrays: (forward(*arrays), arrays), lambda arrays, up: jax.vjp(reference, *arrays)[1](up)
        )
        return borrowed(*arrays)

    return call
