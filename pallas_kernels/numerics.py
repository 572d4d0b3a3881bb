"""How far a result may be from the truth, and why. Tests and ``kvjax.tune`` take their tolerances from here.

* float32: rounding errors of a sum of n terms behave like a random walk, eps * sqrt(n); 2e-6 is
  about 17 eps (eps = 1.2e-7), room for the exp, the division and a few rescalings on the way.
* 16-bit: judged against the plain implementation in the same dtype, not against a constant: an
  implementation may be at most half as wrong again as the obvious one is.
* int8: the oracle dequantises the same integers, so what remains is float32 rounding, plus that of
  folding the scale into the query instead of the key: the float32 rule holds.
* The same call twice: equal to the bit.
"""

from __future__ import annotations

FLOAT32 = 2e-6


def float32(terms: int, scale: float = 1.0) -> float:
    """Absolute tolerance of a float32 result: a sum of ``terms`` terms of size about ``scale``."""
    return FLOAT32 * terms**0.5 * scale
