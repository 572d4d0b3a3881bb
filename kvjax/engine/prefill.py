"""Prefill: a prompt that is read, a chunk or a layer at a time, in a state of its own.

``Prefill`` is a request meanwhile, with others that ask for the same prompt. Which prompt is read, and when,
is ``turns``'s; pieces of several in one program are ``together``'s.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from kvjax import decode, metrics
from kvjax.cache import pool
from kvjax.cache.state import KVState
from kvjax.engine import pages as paging
from kvjax.engine.batch import RunningBatch
from kvjax.engine.compiler import Owned, Program
from kvjax.engine.held_context import HeldContext
from kvjax.engine.pages import Shorter, StoredState
from kvjax.engine.prefix import HeldKeys
from kvjax.engine.programs import CommonPrograms
from kvjax.engine.structure import Structure
from kvjax.engine.ticket import EngineRequest
from kvjax.sharding.mesh import ONE

if TYPE_CHECKING:
    from jaxtyping import Array, Float

SHORT = 64
"""Width of the last chunk where no more tokens than these are left."""


def widths(chunk: int) -> tuple[int, ...]:
    """Lengths of prompts: one that a short chunk holds, one that a chunk holds, one of several."""
    return min(SHORT, chunk), chunk, 2 * chunk + min(SHORT, chunk)


@dataclasses.dataclass(frozen=True)
class _Next:
    """A layer of a whole prompt that is to be stored: by which program, and its bytes."""

    program: Program
    size: int


class Prefill:
    """Requests whose prompt is read, a chunk or a layer at a time, and which then wait for pages."""

    def __init__(
        self,
        structure: Structure,
        common: CommonPrograms,
        request: EngineRequest,
        batch: RunningBatch | None,
        start: StoredState | Shorter | None,
        *,
        ranked: bool,
        borders: Sequence[int],
        width: int,
        came: float = 0.0,
        behind: tuple[HeldKeys, int] | None = None,
        keeps: bool = False,
    ) -> None:
        """Reads nothing yet, and allocates nothing.

        Args:
          structure: what reads.
          common: programs of all structures.
          request: what is read.
          batch: where the row will stand; None where the prompt alone is kept.
          start: the prefix or the context that the prompt begins with; None for an empty row.
          ranked: find the log-probabilities of the prompt's tokens.
          borders: numbers of tokens after which the state is to be kept (chunk borders).
          width: tokens a chunk.
          came: tokens that the engine had read of all prompts by then.
          behind: of a whole prompt: what is held of its beginning, and the tokens of that.
          keeps: keep keys and values of a whole prompt.
        """
        self.structure, self.common, self.model = structure, common, structure.model
        self.requests, self.batch, self.start = [request], batch, start  # all of them ask for this prompt
        self.tokens, self.total = request.text, len(request.tokens)
        self.held: HeldKeys | None  # keys and values
        self.held, self.seen = behind or (None, 0)  # and tokens that are not read again
        if start is not None:
            self.seen = len(start.tokens)
        elif self.held is not None:
            self.held.readers += 1
        self.keys: list[tuple[Array, Array]] | None = [] if keeps else None
        self.ranked, self.width, self.borders = ranked, width, frozenset(borders)
        self.whole = request.policy.whole_prompt and start is None  # read layer by layer?
        # Is all of the prompt read? And are its first tokens drawn? A context may have nothing added to it.
        self.done = self.ready = self.seen == len(self.tokens)
        self.logits: Array | None = start.logits if isinstance(start, HeldContext) else None
        # Of the prompt's tokens but the first: their log-probability, the likeliest ids there, theirs.
        self.ranks: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None
        self._ranks: list[tuple[Any, ...]] = []  # the same by pieces
        self.snapshots: dict[int, KVState] = {}  # states at the borders, by tokens read
        # What others may begin with, or lend pages of.
        self.begins: list[StoredState | Shorter] = [] if start is None else [start]
        self.fork: StoredState | None = None  # the row that was read, where several rows begin with it
        self.since = time.monotonic()  # when it began to wait
        self.came, self.read = came, 0.0  # tokens of it that were read
        self.beside: list[Program] = []  # of several prompts, which it does not wait for
        self.growth: list[int] | None = None  # page counts that its batch is to have for it
        self._left = [] if self.whole else self.pieces()  # (begin, width) of chunks that are to be read
        self._layers_done = 0.0  # share of a whole prompt's layers
        self.counts = self._first_counts()
        self.shapes = paging.shapes_with(structure.row if start is None else start.row, self.counts)
        self._reserved, self._stored = self._whole_bytes() if self.whole else 0, 0  # bytes of layers
        self.need = metrics.size(self.shapes.layers) + self._reserved  # bytes that reading takes
        self.programs: list[Program] = []  # that it waits for
        self._state: KVState | None = None
        self._last: Array | None = None  # the output of the last token that was read
        self._calls: list[decode.LayerCall] = []
        self._units = self._layers() if self.whole else iter(())

    # --- its state ---------------------------------------------------------------------------------

    @property
    def request(self) -> EngineRequest:
        """The first that asked for the prompt."""
        return self.requests[0]

    @property
    def remaining(self) -> float:
        """Tokens that are still to be read; of a whole prompt as if each layer took its share of them."""
        if self.whole:
            return (len(self.tokens) - self.seen) * (1.0 - self._layers_done)
        return len(self.tokens) - self.seen - self.read

    @property
    def cost(self) -> float:
        """Tokens that its next unit counts as."""
        if self.whole:
            return (len(self.tokens) - self.seen) / self.model.network.num_layers
        return self._left[0][1]

    @property
    def wanted(self) -> list[Program]:
        """That are compiled for it."""
        return [*self.programs, *self.beside]

    def reads_from(self, start: StoredState | Shorter | None) -> bool:
        """Does it begin with that context? Prefixes are as good as each other."""
        return not self.request.context or self.start is start

    def forget(self) -> None:
        """It is done: rows that began with it only compare it with what others begin with."""
        if self.fork is not None:
            self.fork.state = None
        if self.held is not None:
            self.held.readers -= 1
            self.held = None

    def _first_counts(self) -> list[int]:
        """Pages of the state that it begins with, and of what a prompt that is read in chunks adds.

        Few sizes for all prompts. A prompt that is read as a whole makes its own pools, layer by layer.
        """
        start, tokens = self.start, len(self.tokens)
        policy, state, lists = self.request.policy, self.structure.row, None
        if start is None and policy.whole_prompt:
            return paging.page_counts(state)
        if start is not None:
            state, tokens = start.row, tokens - len(start.tokens)
            lists = start.lists
        need, have = paging.most_pages(policy, state, tokens, state.chunk, lists), paging.page_counts(state)
        if isinstance(start, Shorter):
            have = [0] * len(need)
        return [max(pool.coarse_class(max(1, pages)), held) for pages, held in zip(need, have)]

    def _whole_bytes(self) -> int:
        """Bytes of a layer that is not compressed yet; of all and a piece where the prompt is held whole."""
        cache, tokens = self.structure.row.layers[0], decode.bucket(len(self.tokens))
        _, heads, _, dim = cache.ring.k.shape
        slot = heads * (2 * dim * cache.ring.k.dtype.itemsize + 16)
        if self.request.policy.holds_prompt:
            tokens *= 1 + self.model.network.num_layers
        if self.request.policy.eviction.replays:
            tokens += self.pieces_again()[0][0].size
        return int(tokens * slot)

    def pieces_again(self) -> list[tuple[np.ndarray, ...]]:
        """What is fed behind the prompt."""
        policy = self.request.policy
        return decode.padded_pieces(
            decode.prompt_pieces("Request(prompt=...)", self.model, policy, [self.tokens])
        )  # type: ignore[return-value]

    @property
    def begun(self) -> bool:
        """Is there a state?"""
        return self._state is not None

    @property
    def state(self) -> KVState:
        assert self._state is not None
        return self._state

    @property
    def bytes(self) -> int:
        """Device bytes that it takes now, or is to take while a prompt is read as a whole."""
        states = [] if self._state is None else [self._state, *self.snapshots.values()]
        held = sum(metrics.size(state.layers) for state in states)
        held += sum(x.nbytes for pair in self.keys or () for x in pair)
        return held + (self._reserved + self._stored if self.begun and not self.done else 0)

    def begin(self) -> None:
        """Makes the state: an empty one, or a copy of what the prompt begins with."""
        structure, counts = self.structure, self.counts
        if self.start is None:
            state = structure.make(1, tuple(counts))
        elif isinstance(self.start, Shorter):
            state = structure.shortened(self.start.row, np.int32(self.seen), tuple(counts))
        else:
            state = structure.copied(self.start.row)
            if counts != paging.page_counts(state):
                state = paging.resized(state, counts, structure.resize)
        if not self.request.context:
            state = dataclasses.replace(state, total=state.mesh.put(np.asarray([self.total], np.int32)))
        self._state = state

    # --- reading -----------------------------------------------------------------------------------

    def unit(self, afford: Callable[[int], bool], room: Callable[[int], bool]) -> bool:
        """Reads one chunk, or takes the prompt through one layer, and waits for it.

        Where a program is missing, it stands in ``programs`` and nothing is read.

        Args:
          afford: is there memory for a snapshot of so many bytes?
          room: makes room for a layer of so many bytes; False while there is none.

        Returns:
          False where it waits for room.
        """
        self._afford, self._room = afford, room
        if self.whole:
            step = next(self._units, StopIteration)
            if isinstance(step, Program):
                self.compile([step])
            if step is not None and step is not StopIteration:
                return isinstance(step, Program)
            self.done = step is StopIteration
        else:
            self._chunk(afford)
        if self.done and self.ranked:
            logprob, best, theirs = (np.concatenate(x) for x in zip(*jax.device_get(self._ranks)))
            many = len(self.tokens) - 1  # nothing follows the last token; beyond it are pads
            self.ranks = logprob[:many], best[:many], theirs[:many]
        jax.block_until_ready(self.state.length)
        return True

    def pieces(self) -> list[tuple[int, int]]:
        """(begin, width) of the chunks that are read; a short one at the end where that suffices."""
        end, width = len(self.tokens), self.width
        starts = range(self.seen, end, width)
        return [(at, width if end - at > SHORT else min(SHORT, width)) for at in starts]

    def _chunk(self, afford: Callable[[int], bool]) -> None:
        own, common, params = self.structure, self.common, self.model.params
        begin, width, tokens = self.piece()
        programs = decode.ChunkPrograms(common.embed, own.chunk, common.after)
        if self._last is None:
            no_output = np.zeros((1, params["embed"].shape[1]), params["embed"].dtype)
            self._last = self.state.mesh.put(no_output)
        self._state, last, x = decode.read_chunk(
            self.model.network,
            self.request.policy.after_prompt,
            params,
            self.calls(),
            self.state,
            decode.padded([tokens], width),
            np.asarray([len(tokens)], np.int32),
            self._last,
            programs,
        )
        if self.ranked:
            self._rank(common.piece(x, np.int32(0), width), begin, width)
        self.fed(self._state, last, afford)

    def piece(self) -> tuple[int, int, np.ndarray]:
        """Where the next chunk begins, its width, and its tokens."""
        begin, width = self._left[0]
        return begin, width, self.tokens[begin : begin + width]

    def calls(self) -> list[decode.LayerCall]:
        """Of the model's layers."""
        if not self._calls:
            own, policy = self.structure, self.request.policy
            weights = self.request.learned.after_prompt(policy).weights
            self._calls = decode.layer_calls(
                self.model.network, policy.after_prompt, self.model.params, weights, own.by_layer
            )
        return self._calls

    def fed(self, state: KVState, last: Array, afford: Callable[[int], bool]) -> None:
        """Takes the state after the next chunk, and the output of the chunk's last token."""
        begin, _, tokens = self.piece()
        self._state, self._last, self._left = state, last, self._left[1:]
        self.read += len(tokens)
        border = begin + len(tokens)
        if border in self.borders and afford(metrics.size(state.layers)):
            self.snapshots[border] = self.structure.copied(state)
        if not self._left:
            self._end(last)
            self.done = True

    def alike(self) -> Hashable:
        """Prompts that agree in this may be read by one program; None where this one is read alone."""
        if self.whole or self.ranked or self.request.apart or self.shapes.mesh != ONE:
            return None
        sizes = [x.shape for x in jax.tree.leaves(self.shapes.layers)]
        return id(self.structure), self._left[0][1], str(jax.tree.structure(self.shapes.layers)), *sizes

    def _layers(self) -> Iterator[Program | int | None]:
        """Yields a program that is missing, bytes that are, and None after each layer."""
        request, seed, own, common = self.request, self.request.options.seed, self.structure, self.common
        weights, seeds = request.learned.weights, np.asarray([seed & 0xFFFFFFFF], np.uint32)

        def missing(store: Owned, arguments: tuple[Any, ...]) -> _Next:
            pages, cache = arguments[2], arguments[4]
            stored = paging.sized(cache, [n * own.row.mesh.pools for n in pages])
            return _Next(store.program(*arguments), metrics.size(stored))

        known: decode.Behind | None = None
        if self.held is not None:
            assert self.held.keys is not None
            known = decode.Behind(self.seen, self.held.keys)

        def keep(k: Array, v: Array) -> None:
            if self.keys is not None and self._afford(k.nbytes + v.nbytes):
                self.keys.append((k, v))
            else:
                self.keys = None

        reading = decode.read_layers(
            self.model,
            request.policy,
            self.state,
            [self.tokens],
            weights,
            seeds,
            fitted=False,
            programs=decode.PromptPrograms(
                common.embed,
                own.prompt,
                own.store,
                common.after,
                own.by_layer,
                own.hold,
                own.replay,
                own.cut,
                own.rank,
                own.score,
                own.share,
                own.behind,
            ),
            missing=missing,
            behind=known,
            keep=keep,
        )
        while True:
            try:
                step = next(reading)
            except StopIteration as end:
                self._state, last, x = end.value
                break
            if isinstance(step, tuple):  # a layer is done
                self._layers_done = step[0] / step[1]
                yield None
                continue
            size, program = step.size, step.program
            while not self._room(size):
                yield size
            self._stored += size
            if not program.ready:
                yield program
        if self.ranked:
            for begin in range(0, len(self.tokens), self.width):
                self._rank(common.piece(x, np.int32(begin), self.width), begin, self.width)
        self._end(last)

    def _rank(self, x: Float[Array, "W D"], begin: int, width: int) -> None:
        following = decode.padded([self.tokens[begin + 1 : begin + 1 + width]], width)[0]
        self._ranks.append(self.common.ranks(self.model.network, self.model.params, x, following))

    def _end(self, last: Array) -> None:
        fed, run = self.state.mesh.put(np.ones(1, bool)), self.structure.logits
        policy = self.request.policy
        self._state, self.logits = decode.with_logits(self.model, policy, self.state, last, fed, run)

    def compile(self, programs: list[Program]) -> None:
        """Has it wait for these."""
        self.programs, self.since = programs, time.monotonic()
