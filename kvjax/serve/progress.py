"""The bar while a prompt is read."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from kvjax.decode import Progress

DELAY = 0.5
"""Seconds before a bar appears; short prompts show none."""


@contextlib.contextmanager
def bar(total: int, unit: str, wanted: bool | None) -> Iterator[Progress]:
    """A bar on standard error that vanishes when done.

    Args:
      total: units of work.
      unit: what they are.
      wanted: True shows it at once and leaves it there, False never; None shows it to terminals.
    """
    if not (sys.stderr.isatty() if wanted is None else wanted):
        yield lambda done, of: None
        return
    from tqdm import tqdm

    with tqdm(
        desc="reading",
        total=total,
        unit=f" {unit}",
        delay=0 if wanted else DELAY,
        leave=bool(wanted),
        file=sys.stderr,
    ) as line:

        def show(done: int, _: int) -> None:
            line.update(done - line.n)

        yield show
