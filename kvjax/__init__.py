"""kvjax: the KV cache of a language model as a managed, functional state."""

from kvjax.algebra import Policy, PolicyError
from kvjax.cache.state import KVState, fork
from kvjax.catalogue import PRESETS, methods, policy
from kvjax.decode import Generation, extend, generate, prefill, stream
from kvjax.errors import UserError
from kvjax.laws import check
from kvjax.loading import load
from kvjax.metrics import nbytes
from kvjax.saving import Saved, StateError, open, save
from kvjax.sharding.mesh import Mesh, MeshError, mesh
from kvjax.types import Heads, Network
from kvjax.version import __version__ as __version__
from kvjax.weights import save_weights, weights_for

__all__ = [
    "PRESETS",
    "Generation",
    "Heads",
    "KVState",
    "Mesh",
    "MeshError",
    "Network",
    "Policy",
    "PolicyError",
    "Saved",
    "StateError",
    "UserError",
    "check",
    "extend",
    "fork",
    "generate",
    "load",
    "mesh",
    "methods",
    "nbytes",
    "open",
    "policy",
    "prefill",
    "save",
    "save_weights",
    "stream",
    "weights_for",
]
