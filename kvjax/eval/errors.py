"""The errors of the evaluation."""

from __future__ import annotations

from kvjax.cli import InputError


class EvalError(InputError):
    """A cell, task or file that cannot be evaluated; a command's exit code is 2."""


class TooLongError(EvalError):
    """A sample that does not fit into its length even without any filling."""
