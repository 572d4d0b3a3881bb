"""The engine: many requests on one device, each with its own policy, in batches whose rows come and go.

  engine = Engine(kvjax.load(), policy="full", max_rows=16)
  ticket = engine.submit(Request(prompt=[1, 2, 3], max_new_tokens=20, policy="snapkv + uniform(0.25)"))
  for event in ticket:                    # or: async for event in ticket
      print(event.token, event.finish_reason)
  ticket.usage.kv.live, ticket.usage.kv.full
  engine.drain(deadline=30.0); engine.close()          # or: with Engine(...) as engine

One thread owns the device; every method may be called from any other. What a call refuses, it raises before
anything is begun:

  submit      RequestError (ids, numbers, space), PolicyError, WeightsError, ContextNotFound,
              ContextMismatch, QueueFull (``retry_after`` seconds), Draining, EngineDead
  a ticket    iterates over ``Event``s: one a token; the last has ``finish_reason``. An end token is one of
              the tokens (its event says "stop"). Raises where the request fails alone, or the engine
              (EngineDead)
  cancel      from any thread; the row is free within one segment, the last event says "cancelled"
  usage       at any time; ``usage.kv`` is None until the prompt is read
  inspect     what a row holds, position by position, from the device; None while it waits or is done
  metrics     one consistent snapshot; its counters only grow
  health      "loading" (nothing compiled yet: ``warm_up``), "ready", "draining", "dead"
  contexts    ``create`` a prompt under a name, ``Request(context=name)`` continues a fork of it; ``list``,
              ``get``, ``delete``, ``save`` to and ``load`` from a folder
  drain       nothing new; True where all ended before the deadline, else the rest is cancelled

The engine knows tokens and no text: stop strings, chat templates and keys are the interface's. Only tokens
in ``model.spec.eos`` end a text by themselves.
"""

from kvjax.engine._contexts import ContextInfo, Contexts
from kvjax.engine._engine import Engine, Health
from kvjax.engine._errors import (
    ContextExists,
    ContextMismatch,
    ContextNotFound,
    Draining,
    EngineDead,
    EngineError,
    QueueFull,
)
from kvjax.engine._metrics import BUCKETS, LaneMetrics, Metrics, Seconds
from kvjax.engine._request import (
    FINISHES,
    MOST_LOGPROBS,
    Event,
    Held,
    Inspection,
    KVUsage,
    Request,
    Usage,
)
from kvjax.engine._settings import check_mesh
from kvjax.engine._space import lane_bytes
from kvjax.engine._ticket import Ticket

__all__ = [
    "BUCKETS",
    "FINISHES",
    "MOST_LOGPROBS",
    "ContextExists",
    "ContextInfo",
    "ContextMismatch",
    "ContextNotFound",
    "Contexts",
    "Draining",
    "Engine",
    "EngineDead",
    "EngineError",
    "Event",
    "Health",
    "Held",
    "Inspection",
    "KVUsage",
    "LaneMetrics",
    "Metrics",
    "QueueFull",
    "Request",
    "Seconds",
    "Ticket",
    "Usage",
    "check_mesh",
    "lane_bytes",
]
