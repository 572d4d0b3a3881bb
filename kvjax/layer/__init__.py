"""What happens to a token at one layer: in through the window, past the door, read, gone.

Three callbacks for the model's seam share the same few verbs, a file each:

  step    one token a row: door (the oldest token out), write, evict, demote, read
  chunk   C tokens a row, for policies that decide on arrival: read, door, write, evict, demote
  prompt  the whole prompt: attend, rank, and only then ``store`` what the budget retains

Arrays are heads major inside ([B, K, T, H]); the seam's layout is turned once on the way in and out.
"""

from kvjax.layer._admit import admit, admit_or_replace
from kvjax.layer._evict import evict, ranked, victims
from kvjax.layer._info import LayerInfo, OfRows, arriving, observe
from kvjax.layer._mass import accumulate_mass
from kvjax.layer._prompt import attend_prompt, count_stored, judge, prompt, retained, store
from kvjax.layer._read import Loaded, Partial, Read, read_pages
from kvjax.layer._seam import READ, at_seam, of_learned
from kvjax.layer._step import chunk, step

__all__ = [
    "READ",
    "LayerInfo",
    "Loaded",
    "OfRows",
    "Partial",
    "Read",
    "admit",
    "admit_or_replace",
    "arriving",
    "at_seam",
    "attend_prompt",
    "chunk",
    "count_stored",
    "evict",
    "judge",
    "observe",
    "of_learned",
    "prompt",
    "ranked",
    "read_pages",
    "accumulate_mass",
    "retained",
    "step",
    "store",
    "victims",
]
