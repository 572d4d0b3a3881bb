"""Learned weights of a policy's parts: files, whose they are, and where a policy finds them.

``gates`` converts published WG-KV gates and makes random ones (``python -m kvjax.weights``), ``torch_file``
reads what torch saved.
"""

from kvjax.weights._file import Learned, WeightsError, read_weights, save_weights
from kvjax.weights._find import SHIPPED, load_gates, missing, shipped, weights_and_remarks, weights_for
from kvjax.weights._fingerprint import fingerprint

__all__ = [
    "SHIPPED",
    "Learned",
    "WeightsError",
    "fingerprint",
    "load_gates",
    "missing",
    "read_weights",
    "save_weights",
    "shipped",
    "weights_and_remarks",
    "weights_for",
]
