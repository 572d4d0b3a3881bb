"""The error for policies that cannot be built."""

from __future__ import annotations

from kvjax.errors import UserError


class PolicyError(UserError):
    """A policy that cannot be built: a part is unknown or out of range, or two parts exclude each other."""
