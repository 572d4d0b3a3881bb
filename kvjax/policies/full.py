"""Full: keep everything; a ring as long as the context, the dense baseline of every claim."""

from __future__ import annotations

from kvjax.algebra import Policy

PRESETS = {"full": "full"}

EXAMPLES = (Policy(),)
