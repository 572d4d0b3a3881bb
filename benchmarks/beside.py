"""The engine beside the continuous batching of ``transformers serve``: the same weights and prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks import peers
from benchmarks.child import Child
from benchmarks.serving import Serving, other, prompts, rate
from kvjax.loading import LanguageModel

Row = dict[str, Any]


def beside(model: LanguageModel, settings: Serving, ours: Sequence[Row]) -> list[Row]:
    """Rows of ``beside``, one for each of ``ours`` (rows of ``price`` under ``full``)."""
    assert settings.peers is not None  # noqa: S101  (the caller has looked)
    found = []
    with Child(peers.command(settings.peers), settings.threads) as child:
        loaded = child.ask("load", folder=str(model.folder), dtype=str(model.params["embed"].dtype))
        for mine in ours:
            asked = prompts(model, settings, mine["rows"])
            theirs = child.ask("serve", warm=other(asked), tokens=asked, new=settings.new)
            stamps = theirs["stamps"]
            found.append(
                {
                    "part": "beside",
                    "system": "transformers, continuous batching",
                    "versions": loaded["versions"],
                    "rows": mine["rows"],
                    "prompt": settings.prompt,
                    "new": settings.new,
                    "tokens_per_s": rate(stamps, 1),
                    "seconds": round(theirs["seconds"], 3),
                    "cpu_seconds": round(theirs["cpu_seconds"], 3),
                    "first_token_s": round(float(np.median([times[0] for times in stamps])), 3),
                    "engine_tokens_per_s": mine["engine_tokens_per_s"],
                    "engine_seconds": mine["engine_seconds"],
                    "engine_cpu_seconds": mine["engine_cpu_seconds"],
                    "engine_first_token_s": mine["engine_first_token_s"],
                    "times_as_fast": round(theirs["seconds"] / mine["engine_seconds"], 2),
                }
            )
    return found
