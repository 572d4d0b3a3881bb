"""The one error of the evaluation: something asked for that cannot be evaluated."""

from __future__ import annotations


class EvalError(ValueError):
    """Bad input; one sentence, exit code 2."""


class TooLongError(EvalError):
    """A sample that does not fit into its length, however little stands around it."""
