"""A gradient for implementations that have none of their own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def borrowed(run: Callable[..., Any], plain: Callable[..., Any], arrays: tuple[Any, ...]) -> Any:
    """``run(*arrays)`` whose reverse mode is that of ``plain``, another implementation of the same.

    Backward computes ``plain`` again from ``arrays``; integers and booleans among them get no gradient.
    """
    del plain
    return run(*arrays)


def _forward(run: Callable[..., Any], plain: Callable[..., Any], arrays: tuple[Any, ...]) -> Any:
    del plain
    return run(*arrays), arrays


def _backward(run: Callable[..., Any], plain: Callable[..., Any], arrays: tuple[Any, ...], up: Any) -> Any:
    del run
    return (jax.vjp(plain, *arrays)[1](up),)


borrowed.defvjp(_forward, _backward)


def borrowing(run: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """``run`` with the reverse mode of ``plain``: arrays by place, what is static by keyword.

    ``interpret`` and ``blocks`` are a Pallas body's own matter and do not reach ``plain``.
    """

    def call(*arrays: Any, **options: Any) -> Any:
        ours = functools.partial(run, **options)
        options = {name: x for name, x in options.items() if name not in ("interpret", "blocks")}
        return borrowed(ours, functools.partial(plain, **options), arrays)

    return call
