"""Prefill, step, generate: pure functions over a donated state, and the host loops around them.

Nothing here knows a model family or a method: the network and the policy arrive as values. On the host
there are only loops over chunks, layers (whole-prompt prefill) and programs of up to 64 decode steps; page
counts are read between them, never inside.

  generate, stream    prompts in, new tokens out; ``decode_steps``: up to 64 steps in one program
  decode_loop         the loop in it, with your own step and your own record of it
  prefill, extend     chunks, or a whole prompt layer by layer
  read_full, cut      one reading of whole prompts for many policies that cut afterwards
  read_layers         ``prefill`` of whole prompts, a layer at a time
  step                one token a row through the model; pure; ``run_layers``: your own function at each layer
  piece               T tokens a row, a piece of a prompt; pure
  read_chunk          many tokens a row, through one program per layer
  drafted_steps       ``decode_steps`` by drafts of a selection (``with_draft``), which full reads verify
  round_of            one draft, and its verification
  empty, reserve      what a state has space for, and the sizes programs are compiled for
  read_ids            token ids, checked against the model's vocabulary; ``read_prompts``: of each row
  read_policy         the policy that a text means on a model; ``check_...``: what calls of these refuse
  RequestError        a request that is refused; ``Remark`` warns of one that is served with a difference
"""

from kvjax.decode._activations import PromptActivations, read_full
from kvjax.decode._behind import Behind, Keys, prompt_layer_behind, queries_behind
from kvjax.decode._by_layer import (
    ChunkPrograms,
    LayerCall,
    after_chunk,
    after_rows,
    chunk_layer,
    chunk_layer_of_rows,
    embed,
    last_logits,
    layer_calls,
    outer,
    read_chunk,
    read_rows,
    weights_by_layer,
)
from kvjax.decode._capacity import (
    CHUNK,
    HORIZON,
    LONG_PAGE,
    MAX_STEPS,
    PAGE,
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
from kvjax.decode._checks import (
    Progress,
    Remark,
    RequestError,
    check_continues,
    check_space,
    check_weights,
    read_ids,
    read_policy,
    read_prompts,
    with_draft,
)
from kvjax.decode._draft import Tally, drafted_steps, round_of
from kvjax.decode._draft_length import DraftLength, best_length, draft_lengths, gain
from kvjax.decode._generate import Generation, generate, stream
from kvjax.decode._loop import DecodeRows, decode_loop, decode_steps
from kvjax.decode._placement import on_mesh
from kvjax.decode._prefill import (
    cut,
    cuts_after,
    extend,
    prefill,
    with_logits,
)
from kvjax.decode._replay import (
    cut_layer,
    hold_layer,
    padded_pieces,
    prompt_pieces,
    rank_layer,
    replay_layer,
    score_layer,
    share_slots,
)
from kvjax.decode._step import after_prompt, piece, run_layers, step, step_program
from kvjax.decode._whole_prompt import (
    PromptPrograms,
    prompt_layer,
    read_layers,
    store_layer,
    widths_behind,
)

__all__ = [
    "CHUNK",
    "HORIZON",
    "LONG_PAGE",
    "MAX_STEPS",
    "PAGE",
    "Behind",
    "ChunkPrograms",
    "DecodeRows",
    "DraftLength",
    "Generation",
    "Keys",
    "LayerCall",
    "Progress",
    "PromptActivations",
    "PromptPrograms",
    "Remark",
    "RequestError",
    "Tally",
    "after_chunk",
    "after_prompt",
    "after_rows",
    "best_length",
    "bucket",
    "check_continues",
    "check_space",
    "check_weights",
    "chunk_layer",
    "chunk_layer_of_rows",
    "cut",
    "cut_layer",
    "cuts_after",
    "decode_loop",
    "decode_steps",
    "draft_lengths",
    "drafted_steps",
    "embed",
    "empty",
    "empty_layers",
    "extend",
    "hold_layer",
    "gain",
    "generate",
    "last_logits",
    "layer_calls",
    "most_slots",
    "on_mesh",
    "outer",
    "padded",
    "padded_pieces",
    "page_size",
    "piece",
    "prefill",
    "prompt_layer",
    "prompt_layer_behind",
    "prompt_pages",
    "prompt_pieces",
    "queries_behind",
    "rank_layer",
    "read_chunk",
    "read_full",
    "read_ids",
    "read_layers",
    "read_policy",
    "read_prompts",
    "read_rows",
    "replay_layer",
    "reserve",
    "roomy",
    "round_of",
    "run_layers",
    "score_layer",
    "share_slots",
    "slot_bounds",
    "step",
    "step_program",
    "store_layer",
    "stream",
    "weights_by_layer",
    "widths_behind",
    "with_draft",
    "with_logits",
]
