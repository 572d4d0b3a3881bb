"""Prefill, step, generate: pure functions over a donated state, and the host loops around them.

Nothing here knows a model family or a method: the network and the policy arrive as values. On the host
there are only loops over chunks, layers (whole-prompt prefill) and segments of up to 64 steps; page
counts are read between them, never inside.

  generation   generate, stream        prompts in, new tokens out
  prompts      prefill                 chunks or layerwise, as the policy needs it
  chunks       extend                  loop over chunks
  layerwise                            loop over layers, a whole prompt at once
  segments     segment                 up to 64 steps in one program
  walk         step, chunk, through    new tokens through the model; pure
  rooms        empty, reserve          what a state has room for
  weights                              learned weights of the policy, checked and by layer
  sizes        bucket, page_size       what programs are compiled for
  requests     RequestError, Progress  what a caller is told

Everybody else imports from here.
"""

from kvjax.decode.chunks import extend
from kvjax.decode.generation import Generation, generate, stream
from kvjax.decode.prompts import prefill
from kvjax.decode.requests import Progress, RequestError
from kvjax.decode.rooms import empty, reserve
from kvjax.decode.segments import Run, segment
from kvjax.decode.sizes import CHUNK, HORIZON, LONG_PAGE, PAGE, SEGMENT, bucket, padded, page_size
from kvjax.decode.walk import chunk, step, step_program, through, with_confidence

__all__ = [
    "CHUNK",
    "HORIZON",
    "LONG_PAGE",
    "PAGE",
    "SEGMENT",
    "Generation",
    "Progress",
    "RequestError",
    "Run",
    "bucket",
    "chunk",
    "empty",
    "extend",
    "generate",
    "padded",
    "page_size",
    "prefill",
    "reserve",
    "segment",
    "step",
    "step_program",
    "stream",
    "through",
    "with_confidence",
]
