"""Beginnings: what a prompt need not read, since it was read before."""

from __future__ import annotations

import functools

from kvjax import decode, metrics
from kvjax.cache import pool
from kvjax.cache.state import KVState
from kvjax.engine import pages as paging
from kvjax.engine.errors import ContextMismatch, ContextNotFound
from kvjax.engine.memory import Memory
from kvjax.engine.pages import Shorter, StoredState
from kvjax.engine.prefix import HeldKeys
from kvjax.engine.structure import Structure
from kvjax.engine.ticket import EngineRequest
from kvjax.sharding.mesh import ONE


class Beginnings:
    """Finds them in contexts and prefixes; the engine's thread only."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def bytes(self, request: EngineRequest, structure: Structure) -> int:
        """Device bytes of the row that is read."""
        row = structure.row
        if request.policy.whole_prompt:
            return metrics.size(row.layers)
        need = paging.most_pages(request.policy, row, len(request.text), row.chunk)
        counts = [pool.coarse_class(max(1, pages)) for pages in need]
        return metrics.size(row.layers) + structure.bytes_of(counts)

    def stored(self, request: EngineRequest, empty: KVState, ranked: bool) -> StoredState | Shorter | None:
        """What the prompt begins with: its context or a prefix; None where all of it is read.

        Raises:
          ContextNotFound, ContextMismatch: the context was deleted meanwhile, or its lists are too short.
        """
        if not request.context:
            return (
                None
                if ranked
                else self._memory.prefixes.find(
                    request.prefix_key, request.text, functools.partial(paging.can_shorten, request.policy)
                )
            )
        context = self._memory.contexts.held(request.context, request.options.owner)
        if context is None:
            raise ContextNotFound(f"context {request.context!r} was gone before the request began.")
        shapes = zip(paging.list_shapes(empty), paging.list_shapes(context.row))
        if any(entries > held for (_, entries), (_, held) in shapes):
            raise ContextMismatch(
                f"context {request.context!r} was read with page lists too short for '{request.policy!r}'. "
                "Go on with its own budget or a smaller one."
            )
        self._memory.contexts.wake(context, self._memory.room)
        return context

    def keys(
        self, request: EngineRequest, structure: Structure, start: StoredState | Shorter | None, ranked: bool
    ) -> tuple[tuple[HeldKeys, int] | None, bool]:
        """Of a prompt that is read whole: what is held of its beginning; are its own keys and values kept?"""
        queries = decode.queries_behind(request.policy)
        if queries is None or start is not None or ranked or structure.row.mesh != ONE:
            return None, False
        prefixes, owner, tokens = self._memory.prefixes, request.options.owner, request.tokens
        known = prefixes.find_keys(owner, tokens, queries)
        ring = structure.row.layers[0].ring.k
        size = 2 * ring.shape[1] * ring.shape[3] * ring.dtype.itemsize * decode.bucket(len(tokens))
        worth = prefixes.worth_keys(owner, tokens) and prefixes.can_keep(size * len(structure.row.layers))
        return known, worth
