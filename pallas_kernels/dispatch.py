"""Which implementation of an operation runs.

``impl=None`` takes the best one this device is known to run and logs that once per operation. An explicit
``impl`` runs or raises; nothing falls back silently.

``impl=None`` takes a Pallas body only on a kind of device where it has run and agreed with ``ref``;
``python -m kvjax.tune`` records that (``records``). Elsewhere it must be named. On a CPU a body runs
interpreted, inside ``interpreted()``.

Why: kvjax/DESIGN.md, 19.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax

from pallas_kernels import lowering, records, reverse, tuning

Offered = Mapping[str, Callable[..., Any]]
"""The implementations an operation has, by name."""

Result = TypeVar("Result")

log = logging.getLogger(__name__)

IMPLS = ("mosaic_tpu", "triton", "mosaic_gpu", "xla", "ref")
"""Every name ``impl`` may have, of which an operation offers some."""

PREFERRED = {"tpu": ("mosaic_tpu", "xla"), "gpu": ("triton", "mosaic_gpu", "xla")}
"""Platform to implementations, best first; platforms not named here run ``xla``."""

NEEDS = {"mosaic_tpu": "tpu", "triton": "gpu", "mosaic_gpu": "gpu"}
"""The platform a Pallas body is written for."""

MAIN = ("mosaic_tpu", "triton")
"""The bodies that every operation has; the others are of some, and have records of their own."""

WRITTEN_IN = {"mosaic_tpu": "Pallas for TPU", "triton": "Pallas' Triton", "mosaic_gpu": "Pallas' Mosaic GPU"}

FOLDERS = {"column_mass": "blockwise", "phi_build": "phi", "phi_subtract": "phi", "phi_evaluate": "phi"}
"""Operations that share a folder, and its record, with others; any other operation's folder has its name."""

TUNED = records.TUNED

_interpreter: contextvars.ContextVar[Mapping[str, Any] | None] = contextvars.ContextVar(
    "interpreter", default=None
)


class Unsupported(ValueError):  # noqa: N818, the word of the README
    """The implementation asked for does not exist, or cannot run this call."""


def lazily(where: str) -> Callable[..., Any]:
    """The function "package.module:name", imported when first called: Pallas is slow to import.

    It raises ``Unsupported`` where this version of jax lacks something that the module imports.
    """
    module, name = where.split(":")

    def call(*args: Any, **options: Any) -> Any:
        try:
            return getattr(importlib.import_module(module), name)(*args, **options)
        except ImportError as reason:  # of what this version of jax does not have
            raise Unsupported(
                f"{module} needs what jax {jax.__version__} does not have ({reason}). Use impl='xla' or None."
            ) from reason

    return call


def offered(
    op: str,
    name: str,
    xla: Callable[..., Any],
    ref: Callable[..., Any],
    *,
    gradient: Callable[..., Any] | None = None,
    more: tuple[str, ...] = (),
) -> Offered:
    """What an operation with Pallas bodies offers: ``name`` in ``<op>/mosaic_tpu.py`` and so on.

    The bodies borrow the reverse mode of ``gradient``, if given. ``more`` are bodies besides ``MAIN``.
    """
    bodies = {impl: lazily(f"pallas_kernels.{op}.{impl}:{name}") for impl in (*MAIN, *more)}
    if gradient is not None:
        bodies = {impl: reverse.borrowing(body, gradient) for impl, body in bodies.items()}
    return {**bodies, "xla": xla, "ref": ref}


@contextlib.contextmanager
def interpreted(*, races: bool = True) -> Iterator[None]:
    """Run Pallas bodies interpreted: each Mosaic on its own interpreter, Triton bodies as plain JAX.

    For tests. Slow, and jitted callers remember how they were traced.

    Args:
      races: look for races between copies and reads of Mosaic bodies.
    """
    compat = importlib.import_module("pallas_kernels.compat")
    kinds = {
        "mosaic_tpu": compat.tpu_interpreter(detect_races=races),
        "mosaic_gpu": compat.gpu_interpreter(detect_races=races),
        "triton": True,
    }
    token = _interpreter.set(kinds)
    try:
        yield
    finally:
        _interpreter.reset(token)


def interpreting() -> bool:
    """Whether Pallas bodies run interpreted here."""
    return _interpreter.get() is not None


@functools.cache
def record(op: str, kind: str) -> Mapping[str, Any]:
    """The record of an operation on a kind of device; empty if it never ran there.

    Keys: "impl", "agrees" (with ``ref``, within ``numerics``), "blocks" (see ``tuning``), and measurements.
    """
    return records.read(FOLDERS.get(op, op), kind, TUNED)


def filed(op: str, impl: str) -> str:
    """The name of a body's record: its operation's folder, and its own besides ``MAIN``."""
    folder = FOLDERS.get(op, op)
    return f"{folder}.{impl}" if impl in NEEDS and impl not in MAIN else folder


@functools.cache
def _log_choice(op: str, impl: str, platform: str, why: str) -> None:
    log.info("%s: impl=None runs %r on %s%s", op, impl, platform, why)


@functools.cache
def _warn_unchecked(kind: str, known: bool) -> None:
    """Once a process, on a device without a record."""
    what = (
        "has changed since its Pallas kernels were checked" if known else "has not run the Pallas kernels yet"
    )
    log.warning(
        "%s %s: attention runs on 'xla'. python -m kvjax.tune checks them here in under three minutes and "
        "switches on those that agree.",
        kind,
        what,
    )


def _unproven(op: str, impl: str) -> str:
    """Why ``impl=None`` does not take a body on this device; "" if it does."""
    kind = lowering.kind()
    known = record(filed(op, impl), kind)
    if known.get("impl") == impl:
        return "" if known.get("agrees") is True else f"{impl!r} did not agree on this device"
    old = known.get("old")
    if lowering.is_local():
        _warn_unchecked(kind, bool(old))
    return f"the record of {impl!r} on this device {old}" if old else f"no record of {impl!r} on this device"


def _candidates(op: str, offered: Offered, platform: str) -> Iterator[tuple[str, str]]:
    """Implementations for ``impl=None``, best first, each with the reason why a better one is left out."""
    why = ""
    for name in PREFERRED.get(platform, ("xla",)):
        if name not in offered or (name == "mosaic_gpu" and not lowering.is_hopper(lowering.kind())):
            continue
        if name in NEEDS and (reason := _unproven(op, name)):
            why = why or f" ({reason}: run python -m kvjax.tune, or ask for it by name)"
            continue
        yield name, why


def _bound(op: str, impl: str, offered: Offered) -> Callable[..., Any]:
    """The implementation; a Pallas body gets its interpreter and its blocks."""
    needs = NEEDS.get(impl)
    if needs is None:
        return offered[impl]
    interpreter = _interpreter.get()
    known = record(filed(op, impl), lowering.kind())
    chosen = tuning.chosen(FOLDERS.get(op, op), known if known.get("impl") == impl else {})
    more = {"blocks": chosen} if chosen else {}
    if interpreter is not None:
        if interpreter[impl] is None:
            raise Unsupported(
                f"{op}(impl={impl!r}): the interpreter of jax {jax.__version__} does not know what the body "
                "uses; that of jax 0.12 does. Use another impl."
            )
        return functools.partial(offered[impl], interpret=interpreter[impl], **more)
    platform = lowering.platform()
    if platform != needs:
        raise Unsupported(
            f"{op}(impl={impl!r}) cannot run: its body is for {needs} and this is {platform}. Use None, or "
            "enter pallas_kernels.dispatch.interpreted() to run it slowly in a test."
        )
    return functools.partial(offered[impl], interpret=False, **more)


def choose(op: str, impl: str | None, offered: Offered) -> Callable[..., Any]:
    """The function behind ``impl``, or the platform's best when it is None.

    Args:
      op: name of the operation, for messages and for its record.
      impl: None or one of ``IMPLS``.
      offered: what the operation has; always ``xla`` and ``ref``. Pallas bodies are called with one
        more keyword, ``interpret``, and with ``blocks`` where there are some for them (see ``tuning``).

    Raises:
      Unsupported: the operation does not offer ``impl``, or its body is for another platform.
      ValueError: ``impl`` is not the name of an implementation.
    """
    if impl is None:
        platform = lowering.platform()
        impl, why = next(_candidates(op, offered, platform))
        _log_choice(op, impl, platform, why)
    if impl in offered:
        return _bound(op, impl, offered)
    if impl not in IMPLS:
        raise ValueError(
            f"{op}(impl={impl!r}) names no implementation. Use one of {sorted(offered)} or None."
        )
    raise Unsupported(
        f"{op}(impl={impl!r}) cannot run: no body in {WRITTEN_IN[impl]} has been written for it. Use one of "
        f"{sorted(offered)}, or None to let the platform choose."
    )


def body(op: str, offered: Offered) -> str | None:
    """The Pallas body that ``impl=None`` would try first on this device; None where ``xla`` runs."""
    name, _ = next(_candidates(op, offered, lowering.platform()))
    return name if name in NEEDS else None


def call(op: str, impl: str | None, offered: Offered, run: Callable[[Callable[..., Any]], Result]) -> Result:
    """``run`` with the implementation ``choose`` finds.

    With ``impl=None`` the next best one runs where an implementation raises ``Unsupported`` for these
    arguments, and the log says why; with an explicit ``impl`` it raises.

    Raises:
      Unsupported: as ``choose``, and when an explicit ``impl`` cannot run these arguments.
      ValueError: as ``choose``.
    """
    if impl is not None:
        return run(choose(op, impl, offered))
    platform = lowering.platform()
    for name, why in _candidates(op, offered, platform):
        try:
            result = run(_bound(op, name, offered))
        except Unsupported as reason:
            log.warning("%s: %s", op, reason)
            continue
        _log_choice(op, name, platform, why)
        return result
    raise Unsupported(f"{op} has no implementation for these arguments on {platform}. Use impl='ref'.")
