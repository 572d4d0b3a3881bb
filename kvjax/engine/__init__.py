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
              ContextMismatch, QueueFull and TooManyStructures (``retry_after`` seconds), Draining,
              EngineDead; ``submit_all`` takes all of several or none
  a ticket    iterates over ``Event``s: one a token; the last has ``finish_reason``. An end token is one of
              the tokens (its event says "stop"). Raises where the request fails alone (MemoryFull: others
              hold the memory it needs), or the engine (EngineDead)
  cancel      from any thread; its row is free within ``segment`` steps, the last event says "cancelled"
  usage       at any time; ``usage.kv`` is None until the prompt is read
  inspect     what a row holds, position by position, from the device; None while it waits or is done
  progress    whether a request waits, compiles, is read or written
  metrics     one consistent snapshot, or at once without waiting for the engine; its counters only grow
  health      "loading" (nothing compiled yet: ``warm_up``), "ready", "draining", "dead"
  contexts    ``create`` a prompt under a name (``begin`` gives a ticket), ``Request(context=name)`` continues
              a fork of it; ``list``, ``get``, ``delete``, ``save`` to and ``load`` from a folder. A number, a
              share of the memory and a time to live bound them; the longest unused makes room
  drain       nothing new; True where all ended before the deadline, else the rest is cancelled

The engine knows tokens and no text: stop strings, chat templates and keys are the interface's. Only tokens
in ``model.spec.eos`` end a text by themselves.

A request's way from ``submit`` to its tokens; arrows cross threads:

  caller's thread               engine's thread                                     compiler's threads

  engine.py   submit
  request.py  checks, weights
  ticket.py   a ticket
       └─ inbox ──────────────> scheduler.py  queue; one turn after another
                                memory.py     a running batch for its policy
                                prefiller.py  a row to begin with: empty (pages.py),
                                              a prefix (prefix.py) or a context
                                              (contexts.py); programs ────────────> compiler.py
                                turns.py      whose prompt is read next
                                prefill.py    reads the prompt <─────────────────────────┘
                                together.py   or pieces of several in one program
                                insertion.py  draws the first token
                                batch.py      the row enters the batch
                                decoding.py   some steps of all rows, again and again
                                batch.py      the tokens on the host
                                ticket.py     events, counted in metrics.py
  for event in ticket <──────────────┘
  async for: the event loop is woken by ``call_soon_threadsafe``

Why: kvjax/DESIGN.md, 16.
"""

from kvjax.engine.contexts import Contexts
from kvjax.engine.engine import Engine, Health
from kvjax.engine.errors import (
    ContextExists,
    ContextMismatch,
    ContextNotFound,
    Draining,
    EngineDead,
    EngineError,
    MemoryFull,
    QueueFull,
    TooManyStructures,
)
from kvjax.engine.held_context import ContextInfo
from kvjax.engine.memory import batch_bytes
from kvjax.engine.metrics import BUCKETS, LENGTHS, BatchMetrics, Lengths, Metrics, Seconds
from kvjax.engine.request import (
    FINISHES,
    MOST_BIASES,
    MOST_LOGPROBS,
    STAGES,
    Event,
    Guide,
    HeldPositions,
    Inspection,
    KVUsage,
    Progress,
    Request,
    Usage,
)
from kvjax.engine.settings import check_mesh
from kvjax.engine.ticket import Ticket

__all__ = [
    "BUCKETS",
    "LENGTHS",
    "FINISHES",
    "MOST_BIASES",
    "MOST_LOGPROBS",
    "BatchMetrics",
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
    "Guide",
    "Health",
    "HeldPositions",
    "Inspection",
    "KVUsage",
    "Lengths",
    "MemoryFull",
    "Metrics",
    "Progress",
    "QueueFull",
    "Request",
    "STAGES",
    "Seconds",
    "Ticket",
    "TooManyStructures",
    "Usage",
    "batch_bytes",
    "check_mesh",
]
