"""What can be seen of rows and lanes while they run."""

from __future__ import annotations

import numpy as np

from kvjax.cache.state import KVState
from kvjax.engine._lane import Lane
from kvjax.engine._metrics import LaneMetrics
from kvjax.engine._request import Inspection, KVUsage
from kvjax.engine._usage import held, live_bytes, live_slots
from kvjax.engine._work import Job


def inspection(job: Job, state: KVState, at: int, kv: KVUsage, allocated: int) -> Inspection:
    """What a row holds, position by position.

    Args:
      job: whose row it is.
      state: that has it.
      at: which row.
      kv: what it holds in bytes.
      allocated: device bytes of the lane.
    """
    tokens = np.concatenate([job.tokens, np.asarray(job.written, np.int32)])
    return Inspection(
        seen=kv.seen,
        tokens=tokens[: kv.seen],
        streams=held(state, at),
        completed=tuple(cache.summary is not None for cache in state.layers),
        live=kv.live,
        full=kv.full,
        allocated=allocated,
    )


def of_lane(lane: Lane) -> LaneMetrics:
    """What a lane holds."""
    free = sum(int(np.sum(n)) for n in lane.known.free)
    pages = sum(lane.counts) * lane.paged_layers * lane.state.mesh.pools
    taken = lane.rows
    return LaneMetrics(
        policy=repr(lane.policy),
        rows=len(taken),
        places=len(lane.places),
        live=int(live_bytes(lane.state, lane.known)[taken].sum()),
        allocated=lane.allocated,
        pages=pages,
        pages_used=pages - free,
        slots=int(live_slots(lane.state, lane.known)[:, taken].sum()),
    )
