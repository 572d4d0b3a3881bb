"""A policy structure with its learned weights, and what is compiled for its batch and its prompts."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from typing import Any

from kvjax import decode
from kvjax.algebra import Policy
from kvjax.cache import rows as row_ops
from kvjax.cache import state as states
from kvjax.cache.state import KVState
from kvjax.engine import pages as paging
from kvjax.engine.compiler import Owned
from kvjax.engine.decoding import guided_draw
from kvjax.engine.request import LearnedWeights
from kvjax.sharding.mesh import ONE
from kvjax.types import Weighted

READS = 64
"""Most policies whose prompts one structure remembers, and programs of each function that reads them."""


class Structure:
    """A policy structure with its learned weights: the shapes of its rows, and what is compiled for them.

    Its batch and the prompts that are read for it share it; the programs leave with it. Policies that cut the
    prompt and then rest differ in what reads a prompt alone: one structure serves them all.

    Attributes:
      name: of the structure and the weights; sizes of lists come beside it.
      first: the policy that it was made for.
      policy: what is left of it after the prompt.
      learned: what steps read of its learned weights.
      row: shapes of an empty row, with a page in each pool.
      reads: the learned weights of all that it reads prompts for, by ``EngineRequest.reading``.
    """

    def __init__(
        self,
        model: Weighted,
        policy: Policy,
        learned: LearnedWeights,
        row: KVState,
        page: int | None,
        name: Hashable = (),
    ) -> None:
        """Makes no array and compiles nothing."""
        self.model, self.first, self.policy = model, policy, policy.after_prompt  # in the layout of batches
        self.name, self.learned, self.row = name, learned.after_prompt(policy), row
        self.reads: dict[Hashable, LearnedWeights] = {}
        self.list_shapes, self.page_bytes = paging.list_shapes(row), paging.page_bytes(row)
        self.paged_layers = sum(bool(x.pools) for x in row.layers)
        sizes: dict[str, Any] = {"context": row.context, "chunk": row.chunk, "page": page}
        own = functools.partial(Owned, ahead=row.mesh == ONE)
        read_by = functools.partial(own, most=READS)  # of several policies

        def make(rows: int, counts: tuple[int, ...]) -> KVState:
            return paging.empty(model, self.policy, rows=rows, counts=counts, **sizes)

        self.make = own(make, static=("rows", "counts"))
        self.shortened = own(paging.shortened, static=("counts",))
        self.copied, self.resize = own(paging.copied), own(states.resize, static=("count", "mesh"))
        self.by_layer = read_by(decode.weights_by_layer, static=("layers",))
        self.chunk = own(decode.chunk_layer, static=("network", "kind", "mesh"), donate=("cache",))
        self.rows = own(decode.chunk_layer_of_rows, static=("network", "kind"), donate=("caches",))
        self.prompt = read_by(decode.prompt_layer, static=("network", "window", "ring", "mesh"))
        self.behind = read_by(decode.prompt_layer_behind, static=("network", "window", "ring", "width"))
        self.hold = read_by(decode.hold_layer, static=("network", "window", "mesh", "known"))
        self.replay = read_by(decode.replay_layer, static=("network", "window", "mesh"), donate=("scores",))
        self.rank = read_by(decode.rank_layer, static=("network", "window", "mesh"))
        self.score = read_by(decode.score_layer, static=("network", "mesh"))
        self.share = read_by(decode.share_slots, static=("layers", "mesh"))
        self.cut = read_by(decode.cut_layer, static=("network", "window", "ring", "mesh"))
        self.store = own(decode.store_layer, static=("num_layers", "pages", "mesh"))
        self.guided_draw = own(guided_draw)
        self.logits = own(decode.last_logits, static=("network", "mesh"))
        self.with_row = own(row_ops.with_row, donate=("state",))
        self.without_rows = own(row_ops.without_rows, donate=("state",))

    def serves(self, name: Hashable, row: KVState) -> bool:
        """Can rows of this name join? ``row``: the shapes of an empty one of its own."""
        shapes = paging.list_shapes(row)
        return (
            name == self.name
            and len(self.list_shapes) == len(shapes)
            and all(
                size == own and entries <= most
                for (size, entries), (own, most) in zip(shapes, self.list_shapes)
            )
        )

    def bytes_of(self, counts: Sequence[float]) -> int:
        """Device bytes of pools of so many pages a device."""
        return int(sum(n * size for n, size in zip(counts, self.page_bytes)) * self.paged_layers)

    def forget(self) -> None:
        """Drops what was compiled; it is compiled again when it is needed."""
        for owned in vars(self).values():
            if isinstance(owned, Owned):
                owned.made.clear()
