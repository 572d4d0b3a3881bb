"""ragged_decode in plain XLA (first form: the definition itself)."""
from pallas_kernels.ragged_decode.ref import ragged_decode

__all__ = ["ragged_decode"]
