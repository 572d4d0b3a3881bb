"""Programs that no structure owns: the whole engine's, and those of a batch at one size of its pools."""

from __future__ import annotations

import functools

from kvjax import decode
from kvjax.cache import rows as row_ops
from kvjax.engine.compiler import Owned
from kvjax.engine.decoding import (
    decode_steps,
    drafted_steps,
    first_token,
    guided_step,
    piece,
    prompt_log_probabilities,
)


class CommonPrograms:
    """What rows of every structure run, compiled; a few sizes for the whole engine."""

    def __init__(self, ahead: bool) -> None:
        own = functools.partial(Owned, ahead=ahead)
        self.embed = own(decode.embed, static=("network", "mesh"), most=32)
        self.after = own(decode.after_chunk, static=("mesh",), donate=("length", "last"), most=32)
        self.after_rows = own(decode.after_rows, most=32)
        self.first = own(first_token)
        self.ranks = own(prompt_log_probabilities, static=("network",))
        self.piece = own(piece, static=("width",))


class SizedPrograms:
    """What a batch runs while its pools have one size, compiled."""

    def __init__(self, ahead: bool) -> None:
        own = functools.partial(Owned, ahead=ahead)
        self.steps = own(decode_steps, static=("network", "steps"), donate=("state",))
        self.drafted = own(drafted_steps, static=("network", "steps", "length"), donate=("state",))
        self.guided_step = own(guided_step, static=("network",), donate=("state",))
        self.insert = own(row_ops.on_devices(row_ops.insert), static=("mesh",), donate=("cache",))
        self.release = own(row_ops.on_devices(row_ops.release), static=("mesh",), donate=("cache",))
        self.cut = own(row_ops.on_devices(row_ops.cut), static=("mesh", "sizes"))
