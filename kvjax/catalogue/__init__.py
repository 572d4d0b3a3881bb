"""The catalogue: which parts, methods and presets there are, and policies as one string or described.

``policy`` reads the one-string form, ``parts`` and ``methods`` are found by discovery, ``PRESETS`` are names
for policies; ``describe`` gives a policy as JSON, ``family`` what it shares with itself at other budgets.
``python -m kvjax.catalogue`` prints README's table of methods.
"""

from kvjax.catalogue._discovery import Method, described, methods, parts
from kvjax.catalogue._family import describe, family, opened
from kvjax.catalogue._spec import PRESETS, PROTECTIONS, policy

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
]
