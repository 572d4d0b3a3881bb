"""How a policy that cannot be is refused."""

from __future__ import annotations

from kvjax.errors import UserError


class PolicyError(UserError):
    """A policy that cannot be built: unknown, out of range, or two parts that exclude each other."""
