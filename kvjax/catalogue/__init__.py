"""The catalogue: all parts, methods and presets, and policies as a string or as JSON.

``policy`` reads the one-string form. Discovery finds ``parts``, ``methods`` and ``PRESETS``. ``describe``
returns a policy as JSON, ``family`` what it has in common with itself at other budgets. ``python -m
kvjax.catalogue`` prints README's table of methods.
"""

from kvjax.catalogue._describe import describe, family, opened
from kvjax.catalogue._discovery import Method, described, parts, summaries
from kvjax.catalogue._methods import methods
from kvjax.catalogue._parse import PRESETS, PROTECTIONS, policy

__all__ = [
    "PRESETS",
    "PROTECTIONS",
    "Method",
    "describe",
    "described",
    "family",
    "methods",
    "opened",
    "parts",
    "policy",
    "summaries",
]
