"""The one error of the benchmarks: something asked for that cannot be measured."""

from __future__ import annotations


class BenchError(ValueError):
    """Bad input; one sentence, exit code 2."""
