"""Prefill, step, generate: pure functions over a donated state, and the host loops around them.

Nothing here knows a model family or a method: the network and the policy arrive as values. On the host
there are only loops over chunks, layers (whole-prompt prefill) and segments of up to 64 steps; page
counts are read between them, never inside.

  generate, stream    prompts in, new tokens out; ``segment``: up to 64 steps in one program
  prefill, extend     chunks, or a whole prompt layer by layer
  read_full, cut      one reading of whole prompts for many policies that cut afterwards
  read_layers         ``prefill`` of whole prompts, a layer at a time
  step, chunk         new tokens through the model, ``run_layers`` with your own visitor at the seam; pure
  empty, reserve      what a state has space for, and the sizes programs are compiled for
  read_ids            token ids, checked against the model's vocabulary
  read_policy         the policy that a text means on a model
  RequestError        what a caller is told; ``Remark`` what is served, but otherwise than it reads
"""

from kvjax.decode._by_layer import Site, chunk_layer, chunk_outputs, sites
from kvjax.decode._capacity import (
    CHUNK,
    HORIZON,
    PAGE,
    SEGMENT,
    bucket,
    empty,
    empty_layers,
    most_slots,
    padded,
    page_size,
    prompt_pages,
    reserve,
    roomy,
    slot_bounds,
)
from kvjax.decode._checks import Progress, Remark, RequestError, read_ids, read_policy
from kvjax.decode._devices import on_mesh
from kvjax.decode._generate import Generation, Run, generate, segment, stream
from kvjax.decode._prefill import (
    answered,
    cut,
    cuts_after,
    extend,
    prefill,
    prompt_layer,
    read_layers,
)
from kvjax.decode._reading import Reading, read_full
from kvjax.decode._step import chunk, run_layers, step, step_program, with_confidence

__all__ = [
    "CHUNK",
    "HORIZON",
    "PAGE",
    "SEGMENT",
    "Generation",
    "Progress",
    "Reading",
    "Remark",
    "RequestError",
    "Run",
    "Site",
    "answered",
    "bucket",
    "chunk",
    "chunk_layer",
    "chunk_outputs",
    "cut",
    "cuts_after",
    "empty",
    "empty_layers",
    "extend",
    "generate",
    "most_slots",
    "on_mesh",
    "padded",
    "page_size",
    "prefill",
    "prompt_layer",
    "prompt_pages",
    "read_full",
    "read_ids",
    "read_layers",
    "read_policy",
    "reserve",
    "roomy",
    "run_layers",
    "segment",
    "sites",
    "slot_bounds",
    "step",
    "step_program",
    "stream",
    "with_confidence",
]
