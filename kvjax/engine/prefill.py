"""Prefill: a request on its way from the queue into a row of a running batch.

``Prefiller`` picks a request, has its programs compiled, reads its prompt, draws its first token and inserts
its row; ``Prefill`` is the request meanwhile.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from kvjax import decode, metrics
from kvjax.cache import pool
from kvjax.cache.state import KVState, PoolOverflowError
from kvjax.decode import RequestError
from kvjax.engine import pages as paging
from kvjax.engine.batch import CommonPrograms, RunningBatch, Structure
from kvjax.engine.compiler import PATIENCE, Compiler, Owned, Program
from kvjax.engine.contexts import HeldContext
from kvjax.engine.decoding import snapshot
from kvjax.engine.errors import ContextMismatch, ContextNotFound, MemoryFull
from kvjax.engine.memory import Memory
from kvjax.engine.metrics import Counters, usages
from kvjax.engine.pages import StoredState
from kvjax.engine.prefix import shareable
from kvjax.engine.request import Event
from kvjax.engine.settings import NOTE_AFTER
from kvjax.engine.ticket import EngineRequest, likeliest
from kvjax.sharding.mesh import ONE
from kvjax.sharding.specs import ROWS

if TYPE_CHECKING:
    from jaxtyping import Array, Float

SHORT = 64
"""Width of the last chunk where no more tokens than these are left."""


@dataclasses.dataclass(frozen=True)
class _Next:
    """A layer of a whole prompt that is to be stored: by which program, and its bytes."""

    program: Program
    size: int


class Prefill:
    """A request whose prompt is read, a chunk or a layer at a time, and which then waits for pages."""

    def __init__(
        self,
        structure: Structure,
        common: CommonPrograms,
        request: EngineRequest,
        batch: RunningBatch | None,
        start: StoredState | None,
        *,
        ranked: bool,
        borders: Sequence[int],
        width: int,
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
        """
        self.structure, self.common, self.model = structure, common, structure.model
        self.request, self.batch, self.start = request, batch, start
        self.seen = 0 if start is None else len(start.tokens)  # tokens that are not read again
        self.ranked, self.width, self._borders = ranked, width, frozenset(borders)
        self.whole = request.policy.whole_prompt and not self.seen  # read layer by layer?
        # Is all of the prompt read? And is its first token drawn? A context may have nothing added to it.
        self.done = self.ready = self.seen == len(request.tokens)
        self.logits: Array | None = start.logits if isinstance(start, HeldContext) else None
        # Of the prompt's tokens but the first: their log-probability, the likeliest ids there, theirs.
        self.ranks: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None
        self._ranks: list[tuple[Any, ...]] = []  # the same by pieces
        self.snapshots: dict[int, KVState] = {}  # states at the borders, by tokens read
        self.begins = [] if start is None else [start]  # what others may begin with, or lend pages of
        self.since = time.monotonic()  # when it began to wait
        self.growth: list[int] | None = None  # page counts that its batch is to have for it
        self._counts = self._first_counts()
        self.shapes = paging.shapes_with(structure.row if start is None else _state(start), self._counts)
        self._reserved, self._stored = self._whole_bytes() if self.whole else 0, 0  # bytes of layers
        self.need = metrics.size(self.shapes.layers) + self._reserved  # bytes that reading takes
        self.programs: list[Program] = self._programs()  # that it waits for
        self._state: KVState | None = None
        self._units = self._layers() if self.whole else self._chunks()

    # --- its state ---------------------------------------------------------------------------------

    def _first_counts(self) -> list[int]:
        """Pages of the state that it begins with, and of what a prompt that is read in chunks adds.

        Few sizes for all prompts. A prompt that is read as a whole makes its own pools, layer by layer.
        """
        request, start = self.request, self.start
        policy, tokens = request.policy, len(request.tokens)
        state, lists = self.structure.row, None
        if start is None and policy.whole_prompt:
            return paging.page_counts(state)
        if start is not None:
            state, tokens = _state(start), tokens - len(start.tokens)
            lists = [np.asarray(pages.length)[0] for layer in state.layers for pages in layer.pools]
        need, have = paging.most_pages(policy, state, tokens, state.chunk, lists), paging.page_counts(state)
        return [max(pool.coarse_class(max(1, pages)), held) for pages, held in zip(need, have)]

    def _whole_bytes(self) -> int:
        """Bytes of a layer that is not compressed yet; of all and a piece where the prompt is held whole."""
        cache, tokens = self.structure.row.layers[0], decode.bucket(len(self.request.tokens))
        _, heads, _, dim = cache.ring.k.shape
        slot = heads * (2 * dim * cache.ring.k.dtype.itemsize + 16)
        if self.request.policy.holds_prompt:
            tokens *= 1 + self.model.network.num_layers
        if self.request.policy.eviction.replays:
            tokens += self._pieces_again()[0][0].size
        return int(tokens * slot)

    def _pieces_again(self) -> list[tuple[np.ndarray, ...]]:
        """What is fed behind the prompt."""
        policy, tokens = self.request.policy, self.request.tokens
        return decode.padded_pieces(decode.prompt_pieces("Request(prompt=...)", self.model, policy, [tokens]))  # type: ignore[return-value]

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
        return held + (self._reserved + self._stored if self.begun and not self.done else 0)

    def begin(self) -> None:
        """Makes the state: an empty one, or a copy of what the prompt begins with."""
        structure, counts = self.structure, self._counts
        if self.start is None:
            state = structure.make(1, tuple(counts))
        else:
            state = structure.copied(_state(self.start))
            if counts != paging.page_counts(state):
                state = paging.resized(state, counts, structure.resize)
        if not self.request.context:
            tokens = len(self.request.tokens)
            state = dataclasses.replace(state, total=state.mesh.put(np.asarray([tokens], np.int32)))
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
        try:
            step = next(self._units)
        except StopIteration:
            self.done = True
            if self.ranked:
                logprob, best, theirs = (np.concatenate(x) for x in zip(*jax.device_get(self._ranks)))
                many = len(self.request.tokens) - 1  # nothing follows the last token; beyond it are pads
                self.ranks = logprob[:many], best[:many], theirs[:many]
        else:
            if isinstance(step, Program):
                self.compile([step])
            if step is not None:
                return isinstance(step, Program)
        jax.block_until_ready(self.state.length)
        return True

    def _pieces(self) -> list[tuple[int, int]]:
        """(begin, width) of the chunks that are read; a short one at the end where that suffices."""
        end, width = len(self.request.tokens), self.width
        starts = range(self.seen, end, width)
        return [(at, width if end - at > SHORT else min(SHORT, width)) for at in starts]

    def _chunks(self) -> Iterator[None]:
        network, params, own, common = self.model.network, self.model.params, self.structure, self.common
        policy, tokens = self.request.policy, self.request.tokens
        layers = decode.layer_calls(network, policy, params, self.request.learned.weights, own.by_layer)
        programs = decode.ChunkPrograms(common.embed, own.chunk, common.after)
        last = self.state.mesh.put(np.zeros((1, params["embed"].shape[1]), params["embed"].dtype))
        for begin, width in self._pieces():
            count = min(width, len(tokens) - begin)
            piece = decode.padded([tokens[begin : begin + count]], width)
            counts = np.asarray([count], np.int32)
            self._state, last, x = decode.read_chunk(
                network, policy, params, layers, self.state, piece, counts, last, programs
            )
            if self.ranked:
                self._rank(common.piece(x, np.int32(0), width), begin, width)
            if begin + count in self._borders and self._afford(metrics.size(self.state.layers)):
                self.snapshots[begin + count] = own.copied(self.state)
            if begin + count < len(tokens):
                yield None
        self._end(last)

    def _layers(self) -> Iterator[Program | int | None]:
        """Yields a program that is missing, bytes that are, and None after each layer."""
        request, seed, own, common = self.request, self.request.options.seed, self.structure, self.common
        weights, seeds = request.learned.weights, np.asarray([seed & 0xFFFFFFFF], np.uint32)

        def missing(store: Owned, arguments: tuple[Any, ...]) -> _Next:
            pages, cache = arguments[2], arguments[4]
            stored = paging.sized(cache, [n * own.row.mesh.pools for n in pages])
            return _Next(store.program(*arguments), metrics.size(stored))

        reading = decode.read_layers(
            self.model,
            request.policy,
            self.state,
            [request.tokens],
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
            ),
            missing=missing,
        )
        while True:
            try:
                step = next(reading)
            except StopIteration as end:
                self._state, last, x = end.value
                break
            if isinstance(step, tuple):  # a layer is done
                yield None
                continue
            size, program = step.size, step.program
            while not self._room(size):
                yield size
            self._stored += size
            if not program.ready:
                yield program
        if self.ranked:
            for begin in range(0, len(request.tokens), self.width):
                self._rank(common.piece(x, np.int32(begin), self.width), begin, self.width)
        self._end(last)

    def _rank(self, x: Float[Array, "W D"], begin: int, width: int) -> None:
        following = decode.padded([self.request.tokens[begin + 1 : begin + 1 + width]], width)[0]
        self._ranks.append(self.common.ranks(self.model.network, self.model.params, x, following))

    def _end(self, last: Array) -> None:
        fed, run = self.state.mesh.put(np.ones(1, bool)), self.structure.logits
        policy = self.request.policy
        self._state, self.logits = decode.with_logits(self.model, policy, self.state, last, fed, run)

    # --- programs ----------------------------------------------------------------------------------

    def _programs(self) -> list[Program]:
        """What reading will run, to be compiled beforehand; of a whole prompt all that can be known."""
        own, common, request, shapes = self.structure, self.common, self.request, self.shapes
        policy, weights, mesh = request.policy, request.learned.weights, shapes.mesh
        network, params = self.model.network, self.model.params
        programs, within, rest = self._beginning(), network.at(shapes.context), decode.outer(params)
        dtype, dim, placed = params["embed"].dtype, params["embed"].shape[1], shapes.length.sharding
        last = jax.ShapeDtypeStruct((1, dim), dtype, sharding=placed)
        fed = jax.ShapeDtypeStruct((1,), bool, sharding=placed)
        ending = (network, policy, rest, last, shapes.confidence, fed, mesh)
        logits = own.logits.shapes(*ending)[0] if self.logits is None else self.logits
        programs.append(
            common.first.program(logits, request.sampling, np.zeros(1, bool), np.zeros(1, np.int32))
        )
        if self.done:
            return programs
        programs.append(own.logits.program(*ending))
        if self._borders:
            programs.append(own.copied.program(shapes))
        if weights:
            programs.append(own.by_layer.program(policy, weights, network.num_layers))
        by_layer = own.by_layer.shapes if mesh == ONE else own.by_layer
        layers = decode.layer_calls(network, policy, params, weights, by_layer)
        widths = (
            {decode.bucket(len(request.tokens))} if self.whole else {width for _, width in self._pieces()}
        )
        for width in sorted(widths):
            by_row = None if mesh == ONE else mesh.sharding(ROWS)
            x = jax.ShapeDtypeStruct((1, width, dim), dtype, sharding=by_row)
            tokens, length, total = np.zeros((1, width), np.int32), shapes.length, shapes.total
            programs.append(common.embed.program(within, rest, length, tokens, mesh))
            programs.append(common.after.program(x, length, total, last, mesh))  # a count is as a total
            for index, (call, cache) in enumerate(zip(layers, shapes.layers)):
                if self.whole:
                    where = (within, policy, network.windows[index], cache.ring.window, *call[1:])
                    seeds = jax.ShapeDtypeStruct((1,), np.uint32, sharding=placed)
                    if policy.holds_prompt:
                        programs += self._held_whole(within, where, x, total, seeds)
                    else:
                        programs.append(own.prompt.program(*where, x, total, seeds, mesh, None))
                else:
                    numbers = (length, length, total)
                    programs.append(own.chunk.program(within, *call, policy, cache, x, *numbers, mesh=mesh))
            if self.ranked:
                part = min(width, self.width)
                programs.append(common.piece.program(x, np.int32(0), part))
                outputs = jax.ShapeDtypeStruct((part, dim), dtype)
                programs.append(common.ranks.program(network, params, outputs, np.zeros(part, np.int32)))
        return programs

    def _held_whole(
        self, network: Any, where: tuple[Any, ...], x: Any, total: Any, seeds: Any
    ) -> list[Program]:
        """What a layer runs of a prompt that is held whole; over several devices calls find most of it."""
        own, mesh = self.structure, self.shapes.mesh
        _, policy, window, _, block, weights, index = where
        again = policy.eviction.replays
        hold: tuple[Any, ...] = (network, window, block, x, total, mesh, False)
        if not again:
            hold = (network, policy, window, block, weights, index, x, total, seeds, mesh, None)
        programs = [(own.hold if again else own.rank).program(*hold)]
        if mesh != ONE:
            return programs
        held, target = (own.hold if again else own.rank).shapes(*hold)[1], None
        if again:
            rest, dim = decode.outer(self.model.params), x.shape[2]
            tokens = self._pieces_again()[0][0]
            y = jax.ShapeDtypeStruct((*tokens.shape, dim), x.dtype)
            replay = (network, policy, window, block, index, y, *held, total, total, total, total, mesh)
            programs.append(self.common.embed.program(network, rest, total, tokens, mesh))
            programs.append(own.replay.program(*replay))
        if policy.budget.over_layers and window is None:
            if again:
                found = (network, policy, block, weights, index, x, held, total, seeds, mesh)
                programs.append(own.score.program(*found))
            every = [held[2]] * network.windows.count(None)
            share = (policy, network.num_layers, held[0], every, total, mesh)
            programs.append(own.share.program(*share))
            target = own.share.shapes(*share)[0]
        programs.append(own.cut.program(*where, x, held, total, seeds, mesh, target))
        return programs

    def _beginning(self) -> list[Program]:
        """What ``begin`` runs."""
        own, start, counts = self.structure, self.start, self._counts
        if start is None:
            return [own.make.program(1, tuple(counts))]
        state = _state(start)
        programs = [own.copied.program(state)]
        if counts != paging.page_counts(state):
            pools = [pages for layer in state.layers for pages in layer.pools]
            sizes = counts * (len(pools) // max(1, len(counts)))
            programs += [own.resize.program(x, n, state.mesh) for x, n in zip(pools, sizes)]
        return programs

    def compile(self, programs: list[Program]) -> None:
        """Has it wait for these."""
        self.programs, self.since = programs, time.monotonic()


def _state(start: StoredState) -> KVState:
    assert start.state is not None
    return start.state


class Prefiller:
    """Reads one prompt at a time; the engine's thread only."""

    def __init__(
        self, memory: Memory, compiler: Compiler, counters: Counters, note: Callable[[str], None]
    ) -> None:
        self._settings, self._contexts = memory.settings, memory.contexts
        self._memory, self._compiler, self._counters, self._note = memory, compiler, counters, note
        self.current: Prefill | None = None  # is read, or waits for pages
        # Wait for programs or memory, the oldest first. Others pass them; rows in their batches stay free.
        self.compiling: list[Prefill] = []
        self.returned: list[EngineRequest] = []  # are to wait again, the oldest first
        self.units = 0  # chunks and layers that were read
        self.warm = False  # has any row entered a batch?
        memory.reading = lambda: sum(prefill.bytes for prefill in self.pending)
        memory.coming = lambda: max((x.need for x in self.pending if not x.begun), default=0)

    @property
    def reads(self) -> bool:
        """Is there a prompt to be read between two programs of batches?"""
        return self.current is not None and not self.current.ready

    @property
    def pending(self) -> list[Prefill]:
        """Requests that are neither in the queue nor in a row."""
        return [prefill for prefill in (self.current, *self.compiling) if prefill is not None]

    def wait(self) -> bool:
        """Where programs are being compiled, waits a little; False where none are."""
        if not self.compiling:
            return False
        self._next(PATIENCE)
        return True

    def cancel(self, number: int, reason: str) -> None:
        """Ends the request of that number, if it is one of these."""
        for prefill in self.pending:
            if prefill.request.ticket.id == number:
                self._leave(prefill)
                prefill.request.finish(reason)

    def put_back(self, request: int) -> bool:
        """Has the newest row that was read wait again, if it is newer than that request; was there one?"""
        held = [x for x in self.pending if x.begun and x.request.ticket.id > request]
        if not held:
            return False
        newest = max(held, key=lambda prefill: prefill.request.ticket.id)
        self._leave(newest)
        newest.request.restart()
        self.returned.insert(0, newest.request)
        return True

    def _leave(self, prefill: Prefill) -> None:
        """It is none of these any more; what only it waited for is not compiled."""
        self.compiling = [other for other in self.compiling if other is not prefill]
        if self.current is prefill:
            self.current = None
        self._promise()
        self._compiler.keep(program for other in self.pending for program in other.programs)

    def _promise(self) -> None:
        """Batches and structures of these are not dropped."""
        self._memory.promised = [prefill.batch for prefill in self.pending if prefill.batch is not None]
        self._memory.wanted = [prefill.structure for prefill in self.pending]

    # --- a beginning -------------------------------------------------------------------------------

    def begin(self, queue: Iterable[EngineRequest]) -> list[EngineRequest]:
        """Begins the first of these requests that has a free row and its programs; those that wait no more.

        A request whose programs are missing waits while they are compiled, and others pass it. A request with
        a free row passes those without one; but one that has no batch is passed ``max_rows`` times at most.
        """
        taken: list[EngineRequest] = []
        passed: list[EngineRequest] = []  # have no batch yet
        self._next()
        for request in queue:
            if self.current is not None or self.returned:
                break
            try:
                prefill = self._start(request)
            except Exception as error:  # of this request alone
                request.fail(error)
                taken.append(request)
                continue
            if prefill is not None:
                taken.append(request)
                self.compiling.append(prefill)
                self._next()
                for other in passed:
                    other.overtaken += 1
            elif request.without_batch:
                if request.overtaken >= self._settings.max_rows:
                    break  # batches run empty until one can be dropped
                passed.append(request)
        return taken

    def _next(self, seconds: float = 0.0) -> None:
        """Takes the oldest request whose programs are there, and memory, where none is being read."""
        for prefill in list(self.compiling):
            if prefill not in self.compiling:  # was put back for one before it
                continue
            if self.current is None and self._compiled(prefill, seconds) and self._begun(prefill):
                self.compiling.remove(prefill)
                self.current = prefill
        self._promise()

    def _begun(self, prefill: Prefill) -> bool:
        """Has it a state? Made now, if there is memory for it; False where there is none yet."""
        if prefill.begun:
            return True
        request, memory = prefill.request, self._memory
        if prefill.start is not None and prefill.start.state is None:  # the prefix was dropped meanwhile
            self._leave(prefill)
            self.returned.append(request)
            return False
        try:
            if memory.room(prefill.need, besides=prefill.batch):
                prefill.begin()
                if not request.begun:
                    self._counters.queue.add(time.monotonic() - request.ticket.submitted)
                    request.begun = True
                return True
            if memory.running or memory.reading():
                return False
            if request.alone:
                raise self._too_large(prefill)
        except Exception as error:  # of this request alone
            self._leave(prefill)
            request.fail(error)
            return False
        self._clear(prefill)
        return False

    def _clear(self, prefill: Prefill) -> None:
        """It begins again, and batches without rows are made again, smaller: they are in its way."""
        pending = [prefill, *(other for other in self.pending if other is not prefill)]
        for other in pending:
            if other.begun:
                other.request.restart()
        prefill.request.alone = True
        self.current, self.compiling = None, []
        self._promise()
        self._memory.batches.clear()
        self.returned += [other.request for other in pending]

    def _too_large(self, prefill: Prefill) -> MemoryFull | RequestError:
        return self._memory.refusal(
            prefill.need,
            f"reading the prompt takes {prefill.need} bytes beside {self._memory.allocated()} that are held, "
            f"and kv_memory is {self._settings.kv_memory}. Raise it, or ask for fewer tokens.",
        )

    def _start(self, request: EngineRequest) -> Prefill | None:
        """The request with the batch it is for; None while there is no free row."""
        memory, options, policy = self._memory, request.options, request.policy
        structure = memory.structure(request)
        ranked = options.echo and options.logprobs is not None and not request.echoed
        start = self._stored_state(request, memory.row(policy), ranked)
        batch = (
            None if request.keep_as else memory.batch(request, structure, self._reading(request, structure))
        )
        request.without_batch = batch is None and not request.keep_as
        waiting = sum(prefill.batch is batch for prefill in self.compiling)
        # The first row of a batch decides its size alone.
        full = waiting > 0 if batch is None or not batch.sized else batch.rows.count(None) <= waiting
        if request.without_batch or full:
            return None
        request.cached = 0 if start is None else len(start.tokens)
        borders: list[int] = []
        if shareable(policy) and not request.context:
            borders = memory.prefixes.borders(request.prefix_key, request.tokens, self._settings.chunk)
        prefill = Prefill(
            structure,
            memory.common,
            request,
            batch,
            start,
            ranked=ranked,
            borders=borders,
            width=self._settings.chunk,
        )
        if prefill.need > self._settings.kv_memory:
            raise self._too_large(prefill)
        if batch is not None and batch.sized:
            source = None if prefill.whole else prefill.shapes
            prefill.programs += batch.programs(self._settings.segment, source, shaped=request.shaped)
        return prefill

    def _reading(self, request: EngineRequest, structure: Structure) -> int:
        """Device bytes of the row that is read."""
        row = structure.row
        if request.policy.whole_prompt:
            return metrics.size(row.layers)
        need = paging.most_pages(request.policy, row, len(request.tokens), row.chunk)
        counts = [pool.coarse_class(max(1, pages)) for pages in need]
        return metrics.size(row.layers) + structure.bytes_of(counts)

    def _stored_state(self, request: EngineRequest, empty: KVState, ranked: bool) -> StoredState | None:
        """What the prompt begins with: its context or a prefix; None where all of it is read.

        Raises:
          ContextNotFound, ContextMismatch: the context was deleted meanwhile, or its lists are too short.
        """
        if not request.context:
            return None if ranked else self._memory.prefixes.find(request.prefix_key, request.tokens)
        context = self._contexts.held(request.context, request.options.owner)
        if context is None:
            raise ContextNotFound(f"context {request.context!r} was gone before the request began.")
        shapes = zip(paging.list_shapes(empty), paging.list_shapes(_state(context)))
        if any(entries > held for (_, entries), (_, held) in shapes):
            raise ContextMismatch(
                f"context {request.context!r} was read with page lists too short for '{request.policy!r}'. "
                "Go on with its own budget or a smaller one."
            )
        return context

    def _compiled(self, prefill: Prefill, seconds: float) -> bool:
        """Are the programs compiled that a request waits for? If they cannot be, it fails alone."""
        client = prefill.request.options.client or id(prefill.structure)
        try:
            ready = self._compiler.ready(prefill.programs, seconds, client=client)
        except Exception as error:  # of this request alone: another policy compiles
            self._leave(prefill)
            prefill.request.fail(error)
            return False
        waited = time.monotonic() - prefill.since
        if ready and prefill.programs:
            if waited > NOTE_AFTER:
                policy = prefill.request.policy
                self._note(f"programs of '{policy!r}' took {waited:.1f} s to compile, beside the others")
            prefill.programs = []
        return ready

    # --- a prompt ----------------------------------------------------------------------------------

    def read(self) -> bool:
        """Reads one unit of the prompt, or inserts its row; False while that waits for pages."""
        prefill = self.current
        assert prefill is not None
        try:
            if not prefill.ready:
                if not self._unit(prefill):
                    return False
                if self.current is None or not prefill.ready:
                    return True
            return self._insert(prefill)
        except Exception as error:  # of this request alone
            self._leave(prefill)
            prefill.request.fail(error)
            return True

    def _unit(self, prefill: Prefill) -> bool:
        """Reads one; False where that waits for memory."""
        request = prefill.request
        if not prefill.done:
            if not prefill.unit(self._affordable, self._has_room):
                return False
            if prefill.programs:
                self._wait(prefill)
                return True
            self.units += 1
        if not prefill.done:
            return True
        for border, state in prefill.snapshots.items():
            prefix = self._memory.remember(request.prefix_key, request.tokens[:border], state)
            prefill.begins.append(prefix)
        prefill.snapshots = {}
        prefill.ready = True
        self._counters.prompt_tokens += len(request.tokens) - prefill.seen
        self._counters.cached_tokens += prefill.seen
        if request.keep_as:
            self._keep(prefill)
            return True
        if request.options.echo and not request.echoed:
            self._echo(prefill)
        self._first_token(prefill)
        return True

    def _has_room(self, size: int) -> bool:
        """For a layer; where nobody writes there is nothing to wait for."""
        return self._memory.room(size) or not self._memory.running

    def _affordable(self, size: int) -> bool:
        return self._memory.allocated() + size <= self._settings.kv_memory

    def _wait(self, prefill: Prefill) -> None:
        """Others may be read while programs are compiled for it."""
        self.compiling.insert(0, prefill)
        self.current = None

    def _keep(self, prefill: Prefill) -> None:
        """Keeps the row as a context."""
        request, memory = prefill.request, self._memory
        context = HeldContext(
            name=request.keep_as,
            owner=request.options.owner,
            tokens=request.tokens,
            policy=request.policy,
            learned=request.learned,
            state=prefill.state,
            logits=prefill.logits,
        )
        going = sum(other.bytes for other in self._contexts.leaving(context))
        if not memory.room(-going):  # the row that was read is counted already
            raise MemoryFull(
                f"context {context.name!r} takes {context.bytes} bytes beside "
                f"{memory.allocated() - context.bytes} that are held, and kv_memory is "
                f"{self._settings.kv_memory}. Ask again later."
            )
        self._contexts.keep(context)
        self._leave(prefill)
        request.finish("length")

    def _echo(self, prefill: Prefill) -> None:
        """Hands the prompt out."""
        request = prefill.request
        request.echoed = True
        events = [Event(int(request.tokens[0]), prompt=True)]
        for at, token in enumerate(request.tokens[1:].tolist()):
            if prefill.ranks is None:
                events.append(Event(token, prompt=True))
                continue
            logprob, best, theirs = (x[at] for x in prefill.ranks)
            top = likeliest(best, theirs, request.options.logprobs or 0)
            events.append(Event(token, float(logprob), top, prompt=True))
        request.deliver(events, None)

    def _first_token(self, prefill: Prefill) -> None:
        """Draws the token after the prompt."""
        request, options, state = prefill.request, prefill.request.options, prefill.state
        known = snapshot(state)
        if known.overflow:
            raise PoolOverflowError("a prompt ran out of pages: it was given too few.")
        kv = usages(prefill.model.network, state, known)[0]
        if options.max_new_tokens == 0:
            request.deliver([Event(None, finish_reason="length")], kv)
            self._leave(prefill)
            self._counters.ended("length")
            return
        assert prefill.logits is not None
        ranked, position = [options.logprobs is not None], np.asarray([len(request.tokens)], np.int32)
        drawn = jax.device_get(
            prefill.common.first(prefill.logits, request.sampling, np.asarray(ranked), position)
        )
        request.deliver(request.record(drawn, 0), kv)
        if request.ticket.done:
            request.keep_inspection(state, 0, kv, metrics.allocated(state.layers))
            self._leave(prefill)
            self._counters.ended(request.ticket.finish_reason or "error", kv)

    # --- a row -------------------------------------------------------------------------------------

    def _insert(self, prefill: Prefill) -> bool:
        """The row that was read enters its batch, once there are pages for it; False while there are none."""
        request, batch, state = prefill.request, prefill.batch, prefill.state
        assert batch is not None
        if not request.written:  # a context that nothing is added to
            self._first_token(prefill)
            return True
        known = snapshot(state)
        coming = self._memory.to_store(request, state, known)
        start, lender = prefill.start, None
        if self._settings.share_pages and start is not None:
            lender = batch.lender(request.policy, start)
        lists = [x[0] for x in known.lists]
        reserved = need = paging.most_pages(request.policy, batch.state, coming, 1, lists)
        if start is not None and lender is not None:
            need = paging.most_pages(request.policy, batch.state, coming, 1, lists, start.pages)
        if not batch.sized or not all(n <= have for n, have in zip(need, batch.spare())):
            return self._grow(prefill, batch, need)
        shared = batch.shared or lender is not None
        programs = batch.programs(self._settings.segment, state, shared=shared, shaped=request.shaped)
        if not all(program.ready for program in programs):
            prefill.compile(programs)
            self._wait(prefill)
            return True
        batch.make()
        batch.insert(request, state, reserved, prefill.begins, lender)
        self._leave(prefill)
        self.warm = True
        return True

    def _grow(self, prefill: Prefill, batch: RunningBatch, need: list[int]) -> bool:
        """Larger pools for the row that waits; False while that cannot be."""
        memory, settings = self._memory, self._settings
        if prefill.growth is None and batch.sized:
            spare = zip(batch.counts, need, batch.spare())
            prefill.growth = memory.affordable(batch, [have + max(0, n - free) for have, n, free in spare])
        elif prefill.growth is None:
            prefill.growth = memory.first_counts(batch, need, memory.coming())
        if prefill.growth is None:
            if memory.running:
                return False
            if memory.reading() > prefill.bytes:  # rows that came later hold what it needs
                return self.put_back(prefill.request.ticket.id)
            if not prefill.request.alone:
                self._clear(prefill)
                return True
            raise memory.refusal(
                batch.allocated + batch.bytes_of(need),
                f"the row needs {batch.bytes_of(need)} bytes of pages beside {memory.allocated()} that "
                f"are held, and kv_memory is {settings.kv_memory}. Raise it, or ask for fewer tokens.",
            )
        programs = batch.programs(
            settings.segment, prefill.state, prefill.growth, shaped=prefill.request.shaped
        )
        if not all(program.ready for program in programs):
            prefill.compile(programs)
            self._wait(prefill)
            return True
        growth, prefill.growth = prefill.growth, None
        larger = all(have <= n for have, n in zip(batch.counts, growth))  # rows may have grown it meanwhile
        if larger and memory.affordable(batch, growth, exactly=True) is not None:
            batch.resize(growth)
        return True
