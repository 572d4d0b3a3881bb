"""What happens to a token at one layer: into the window, admission when it leaves it, read, evicted.

Four functions share the same verbs, a file each; ``attention`` makes one of them what the model calls:

  step    one token per row: window exit (admission of the oldest token), write, evict, demote, read
  chunk   T tokens per row, for policies that decide on arrival: read, window exit, write, evict, demote
  draft   one token a row that is not written; ``verify`` reads several such tokens, ``write`` writes some
  prompt  the whole prompt: attend, rank, and only then ``store`` what the budget retains

Arrays are heads first inside ([B, K, T, H]); the model's layout is turned once on the way in and out.

Why: kvjax/DESIGN.md, 1.
"""

from kvjax.layer._admit import admit, admit_or_replace
from kvjax.layer._attend import READ, LayerFn, attention, of_learned, on_devices
from kvjax.layer._draft import draft, empty_block, verify, write
from kvjax.layer._evict import evict, ranked, victims
from kvjax.layer._info import LayerInfo, OfRows, arriving, observe
from kvjax.layer._mass import accumulate_mass
from kvjax.layer._prompt import attend_prompt, count_stored, judge, prompt, prompt_behind, retained, store
from kvjax.layer._read import Loaded, Partial, Read, read_pages
from kvjax.layer._replay import Held, hold, hold_scored, judge_held, replay, scores_of_pieces
from kvjax.layer._rows import by_rows, stack_policies
from kvjax.layer._step import chunk, step

__all__ = [
    "READ",
    "Held",
    "LayerFn",
    "LayerInfo",
    "Loaded",
    "OfRows",
    "Partial",
    "Read",
    "admit",
    "admit_or_replace",
    "arriving",
    "attend_prompt",
    "attention",
    "by_rows",
    "chunk",
    "count_stored",
    "draft",
    "empty_block",
    "evict",
    "hold",
    "hold_scored",
    "judge",
    "judge_held",
    "observe",
    "on_devices",
    "of_learned",
    "prompt",
    "prompt_behind",
    "ranked",
    "read_pages",
    "replay",
    "accumulate_mass",
    "retained",
    "scores_of_pieces",
    "stack_policies",
    "step",
    "store",
    "verify",
    "victims",
    "write",
]
