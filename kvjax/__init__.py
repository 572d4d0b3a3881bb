"""kvjax: the KV cache of a language model as a managed, functional state."""

from kvjax.algebra import Policy, PolicyError
from kvjax.cache.state import KVState, fork
from kvjax.catalogue import PRESETS, methods, policy
from kvjax.decode import Generation, extend, generate, prefill, stream
from kvjax.loading import load
from kvjax.metrics import nbytes
from kvjax.weights import save_weights, weights_for

__version__ = "0.1.0"

__all__ = [
    "PRESETS",
    "Generation",
    "KVState",
    "Policy",
    "PolicyError",
    "extend",
    "fork",
    "generate",
    "load",
    "methods",
    "nbytes",
    "policy",
    "prefill",
    "save_weights",
    "stream",
    "weights_for",
]
