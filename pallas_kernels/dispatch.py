"""Which implementation of an operation runs.

``impl=None`` takes the best one this platform has and says so once per operation in the log. An
explicit ``impl`` runs or raises; nothing falls back silently.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import jax

Offered = Mapping[str, Callable[..., Any]]
"""The implementations an operation has, by name."""

log = logging.getLogger(__name__)

IMPLS = ("mosaic_tpu", "triton", "xla", "ref")
"""Every name ``impl`` may have, of which an operation offers some."""

PREFERRED = {"tpu": ("mosaic_tpu", "xla"), "gpu": ("triton", "xla")}
"""Platform to implementations, best first; platforms not named here run ``xla``."""

REASONS = {
    "mosaic_tpu": "no Pallas body for TPU has been written for it yet",
    "triton": "no Pallas body for GPU has been written for it yet",
}


class Unsupported(ValueError):  # noqa: N818, the word of the README
    """The implementation asked for does not exist, or cannot run this call."""


@functools.cache
def _announce(op: str, impl: str, platform: str) -> None:
    log.info("%s: impl=None runs %r on %s", op, impl, platform)


def choose(op: str, impl: str | None, offered: Offered) -> Callable[..., Any]:
    """The function behind ``impl``, or the platform's best when it is None.

    Args:
      op: name of the operation, for messages.
      impl: None or one of ``IMPLS``.
      offered: what the operation has; always ``xla`` and ``ref``.

    Raises:
      Unsupported: the operation does not offer ``impl``.
      ValueError: ``impl`` is no implementation's name.
    """
    if impl is None:
        platform = jax.default_backend()
        impl = next(name for name in PREFERRED.get(platform, ("xla",)) if name in offered)
        _announce(op, impl, platform)
    if impl in offered:
        return offered[impl]
    if impl not in IMPLS:
        raise ValueError(
            f"{op}(impl={impl!r}) names no implementation. Use one of {sorted(offered)} or None."
        )
    raise Unsupported(
        f"{op}(impl={impl!r}) cannot run: {REASONS[impl]}. Use one of {sorted(offered)}, or None to let the "
        "platform choose."
    )
