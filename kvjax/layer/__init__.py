"""What happens to a token at one layer: in through the window, past the door, read, gone.

Three callbacks for the model's seam share the same few verbs:

  step    one token a row: door (the oldest token out), write, evict, age, read
  chunk   C tokens a row, for policies that decide on arrival: read, door, write, evict, age
  prompt  the whole prompt: attend, score, and only then keep what the budget allows (``pack``)

Arrays are heads major inside ([B, K, T, H]); the seam's layout is turned once on the way in and out.
"""

from kvjax.layer.door import exchange, through_door
from kvjax.layer.eviction import evict, ranked, victims
from kvjax.layer.mass import told
from kvjax.layer.prompts import pack, prompt, survivors, verdict
from kvjax.layer.reading import Partial, read_pages
from kvjax.layer.site import Site, arriving, observe
from kvjax.layer.visits import chunk, step

__all__ = [
    "Partial",
    "Site",
    "arriving",
    "chunk",
    "evict",
    "exchange",
    "observe",
    "pack",
    "prompt",
    "ranked",
    "read_pages",
    "step",
    "survivors",
    "through_door",
    "told",
    "verdict",
    "victims",
]
