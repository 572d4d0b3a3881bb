"""The discovered methods, with examples that were written as strings read."""

from __future__ import annotations

import dataclasses

from kvjax.catalogue import _discovery as discovery
from kvjax.catalogue._parse import policy


def methods() -> tuple[discovery.Method, ...]:
    """Every module that has EXAMPLES.

    Raises:
      PolicyError: a module of ``kvjax.policies`` has none, or one that cannot be read.
    """
    return tuple(
        dataclasses.replace(method, examples=tuple(map(policy, method.examples)))
        for method in discovery.methods()
    )
