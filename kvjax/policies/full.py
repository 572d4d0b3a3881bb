"""Full: keeps every token in a ring as long as the context; the dense baseline of all comparisons."""

from __future__ import annotations

from kvjax.algebra import Policy

PRESETS = {"full": "full"}

EXAMPLES = (Policy(),)
