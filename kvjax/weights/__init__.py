"""Learned weights of a policy's parts: their files, their model, and how a policy finds them.

``gates`` converts published WG-KV gates and makes random ones (``python -m kvjax.weights``), ``torch_file``
reads what torch saved. ``chosen`` is what ``auto(0.2)`` stands for on a model.

Why: kvjax/DESIGN.md, 13.
"""

from kvjax.weights._auto import chosen, is_auto
from kvjax.weights._file import Learned, WeightsError, read_weights, save_weights
from kvjax.weights._find import Found, find, load_weights, missing, shipped, weights_for
from kvjax.weights._fingerprint import fingerprint, sampled_signs
from kvjax.weights._sources import (
    DEFAULT,
    GATES,
    VALUES,
    Source,
    Sources,
    add_options,
    parse_sources,
    sources,
)

__all__ = [
    "DEFAULT",
    "GATES",
    "VALUES",
    "Found",
    "Learned",
    "Source",
    "Sources",
    "WeightsError",
    "add_options",
    "chosen",
    "find",
    "fingerprint",
    "is_auto",
    "load_weights",
    "missing",
    "parse_sources",
    "read_weights",
    "sampled_signs",
    "save_weights",
    "shipped",
    "sources",
    "weights_for",
]
