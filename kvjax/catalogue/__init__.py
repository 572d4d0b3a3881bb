"""The catalogue: which parts, methods and presets there are, and policies as one string.

``policy`` reads the one-string form, ``parts`` and ``methods`` are found by discovery, ``PRESETS`` are names
for policies; ``python -m kvjax.catalogue`` prints README's table of methods.
"""

from kvjax.catalogue._discovery import Method, described, methods, parts
from kvjax.catalogue._spec import PRESETS, PROTECTIONS, policy

__all__ = ["PRESETS", "PROTECTIONS", "Method", "described", "methods", "parts", "policy"]
