"""``GET /v1/kv/{id}``: the cache of a request as it is, positions of live slots read from the device."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from kvjax.engine import Inspection
from kvjax.serve.http.errors import ApiError
from kvjax.serve.http.service import Service, of

router = APIRouter()


@router.get("/v1/kv/{id}")
async def look(request: Request, id: str, choice: int = 0) -> JSONResponse:
    """What the row of a request with ``kv_watch`` holds now; after its end, what it held then."""
    service = of(request)
    tickets = service.watched.get(id)
    if tickets is None or not 0 <= choice < len(tickets):
        raise ApiError(
            404,
            f"No request {id!r} with choice {choice} is watched. Send kv_watch=true with the request; the "
            "newest of those are kept.",
            code="not_watched",
        )
    ticket = tickets[choice]
    done = ticket.done  # asked first: a cache that is shown as the last one is the last one
    seen = await asyncio.to_thread(service.engine.inspect, ticket)
    cache = None if seen is None else described(service, seen)
    return JSONResponse({"id": id, "choice": choice, "done": done, "cache": cache})


def described(service: Service, seen: Inspection) -> dict[str, Any]:
    """An inspection as JSON; positions as runs ``[first, count, first, count, …]``."""
    return {
        "seen": seen.seen,
        "tokens": [service.spell(int(token)) for token in seen.tokens],
        "streams": [
            [{"ring": runs(h.ring), "pages": runs(h.pages), "codes": runs(h.codes)} for h in layer]
            for layer in seen.heads
        ],
        "completed": list(seen.completed),
        "bytes": {"live": seen.live, "allocated": seen.allocated, "full": seen.full},
    }


def runs(positions: np.ndarray) -> list[int]:
    """Ascending positions as (first, count) of each run of neighbours, one after the other."""
    positions = np.asarray(positions, np.int64)
    if not len(positions):
        return []
    starts = np.flatnonzero(np.diff(positions, prepend=positions[0] - 2) != 1)
    counts = np.diff([*starts, len(positions)])
    return np.stack([positions[starts], counts], axis=1).ravel().tolist()
