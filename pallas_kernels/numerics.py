"""How far a result may be from the truth, and why. Tests take their tolerances from here.

* float32: rounding errors of a sum of n terms behave like a random walk, eps * sqrt(n); 2e-6 is
  about 17 eps (eps = 1.2e-7), room for the exp, the division and a few rescalings on the way.
* 16-bit: judged against the plain implementation in the same dtype, not against a constant: an
  implementation may be at most half as wrong again as the obvious one is.
* int8: the oracle dequantises the same integers, so what remains is float32 rounding, plus that of
  folding the scale into the query instead of the key: the float32 rule holds.
* The same call twice: equal to the bit.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

FLOAT32 = 2e-6
WORSE_THAN_PLAIN = 1.5


def float32(terms: int, scale: float = 1.0) -> float:
    """Absolute tolerance of a float32 result: a sum of ``terms`` terms of size about ``scale``."""
    return FLOAT32 * terms**0.5 * scale


def assert_close(actual: ArrayLike, expected: ArrayLike, terms: int, scale: float = 1.0) -> None:
    """Within ``float32(terms, scale)`` absolutely and as relative error; infinities must coincide.

    Raises:
      AssertionError: they differ, or ``actual`` holds a NaN.
    """
    tolerance = float32(terms, scale)
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
    bound = max(WORSE_THAN_PLAIN * theirs, float32(terms))
    assert ours <= bound, f"error {ours:.3g}, the plain implementation's {theirs:.3g}, allowed {bound:.3g}"
