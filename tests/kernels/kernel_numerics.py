"""Asserts with the tolerances of ``pallas_kernels.numerics``."""

import numpy as np
from numpy.typing import ArrayLike

from pallas_kernels import numerics

WORSE_THAN_PLAIN = 1.5


def assert_close(actual: ArrayLike, expected: ArrayLike, terms: int, scale: float = 1.0) -> None:
    """Within ``numerics.float32(terms, scale)`` absolutely and as relative error; infinities must coincide.

    Raises:
      AssertionError: they differ, or ``actual`` holds a NaN.
    """
    tolerance = numerics.float32(terms, scale)
    np.testing.assert_allclose(
        np.asarray(actual, np.float64), np.asarray(expected), rtol=tolerance, atol=tolerance, equal_nan=False
    )


def error(actual: ArrayLike, exact: ArrayLike) -> float:
    """Root mean square of the difference, over the places where ``exact`` is finite."""
    exact = np.asarray(exact, np.float64)
    finite = np.isfinite(exact)
    return float(np.sqrt(np.mean((np.asarray(actual, np.float64)[finite] - exact[finite]) ** 2)))


def assert_as_good_as_plain(actual: ArrayLike, plain: ArrayLike, exact: ArrayLike, terms: int) -> None:
    """At most ``WORSE_THAN_PLAIN`` times the plain implementation's own error (or float32 rounding).

    Raises:
      AssertionError: it is worse, or ``actual`` holds a NaN.
    """
    ours, theirs = error(actual, exact), error(plain, exact)
    bound = max(WORSE_THAN_PLAIN * theirs, numerics.float32(terms))
    assert ours <= bound, f"error {ours:.3g}, the plain implementation's {theirs:.3g}, allowed {bound:.3g}"
