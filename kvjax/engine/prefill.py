"""Prefill: a request on its way from the queue into a row of a running batch.

``Prefiller`` picks a request, has its programs compiled, reads its prompt, draws its first token and inserts
its row; ``Prefill`` is the request meanwhile.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import decode, metrics
from kvjax.cache import pool
from kvjax.cache.state import KVState, LayerCache, PoolOverflowError
from kvjax.engine import pages as paging
from kvjax.engine.batch import RunningBatch
from kvjax.engine.compiler import PATIENCE, Compiler, Program
from kvjax.engine.contexts import HeldContext
from kvjax.engine.decoding import first_token, prompt_log_probabilities, snapshot
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
from kvjax.types import Weighted

if TYPE_CHECKING:
    from jaxtyping import Array, Float

SHORT = 64
"""Width of the last chunk where no more tokens than these are left."""


class Prefill:
    """A request whose prompt is read, a chunk or a layer at a time, and which then waits for pages."""

    def __init__(
        self,
        model: Weighted,
        request: EngineRequest,
        batch: RunningBatch | None,
        state: KVState,
        start: StoredState | None,
        *,
        ranked: bool,
        borders: Sequence[int],
        width: int,
    ) -> None:
        """Reads nothing yet.

        Args:
          model, request: what reads, and what is read.
          batch: where the row will stand; None where the prompt alone is kept.
          state: a row that has seen what ``start`` has; used up.
          start: the prefix or the context that the prompt begins with; None for an empty row.
          ranked: find the log-probabilities of the prompt's tokens.
          borders: numbers of tokens after which the state is to be kept (chunk borders).
          width: tokens a chunk.
        """
        self.model, self.request, self.batch, self.state, self.start = model, request, batch, state, start
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
        self.programs: list[Program] = []  # that it waits for
        self.since = time.monotonic()  # when it began to wait
        self.growth: list[int] | None = None  # page counts that its batch is to have for it
        self._units = self._layers() if self.whole else self._chunks()

    def unit(self) -> None:
        """Reads one chunk, or takes the prompt through one layer; waits for it."""
        try:
            next(self._units)
        except StopIteration:
            self.done = True
            if self.ranked:
                logprob, best, theirs = (np.concatenate(x) for x in zip(*jax.device_get(self._ranks)))
                many = len(self.request.tokens) - 1  # nothing follows the last token; beyond it are pads
                self.ranks = logprob[:many], best[:many], theirs[:many]
        jax.block_until_ready(self.state.length)

    def read_all(self) -> None:
        while not self.done:
            self.unit()

    def _pieces(self) -> list[tuple[int, int]]:
        """(begin, width) of the chunks that are read; a short one at the end where that suffices."""
        end, width = len(self.request.tokens), self.width
        starts = range(self.seen, end, width)
        return [(at, width if end - at > SHORT else min(SHORT, width)) for at in starts]

    def _chunks(self) -> Iterator[None]:
        network, params = self.model.network, self.model.params
        policy, tokens = self.request.policy, self.request.tokens
        layers = decode.layer_calls(network, policy, params, self.request.learned.weights)
        last = self.state.mesh.put(np.zeros((1, params["embed"].shape[1]), params["embed"].dtype))
        for begin, width in self._pieces():
            count = min(width, len(tokens) - begin)
            piece = decode.padded([tokens[begin : begin + count]], width)
            self.state, last, x = decode.read_chunk(
                network, policy, params, layers, self.state, piece, np.asarray([count], np.int32), last
            )
            if self.ranked:
                self._rank(x[0], begin, width)
            if begin + count in self._borders:
                self.snapshots[begin + count] = paging.copied(self.state)
            if begin + count < len(tokens):
                yield
        self._end(last)

    def _layers(self) -> Iterator[None]:
        request, seed = self.request, self.request.options.seed
        weights, seeds = request.learned.weights, np.asarray([seed & 0xFFFFFFFF], np.uint32)
        reading = decode.read_layers(
            self.model, request.policy, self.state, [request.tokens], weights, seeds, fitted=False
        )
        while True:
            try:
                next(reading)
            except StopIteration as end:
                self.state, last, x = end.value
                break
            yield
        if self.ranked:
            for begin in range(0, len(request.tokens), self.width):
                self._rank(_piece(x, begin, self.width), begin, self.width)
        self._end(last)

    def _rank(self, x: Float[Array, "W D"], begin: int, width: int) -> None:
        following = decode.padded([self.request.tokens[begin + 1 : begin + 1 + width]], width)[0]
        self._ranks.append(prompt_log_probabilities(self.model.network, self.model.params, x, following))

    def _end(self, last: Array) -> None:
        fed = self.state.mesh.put(np.ones(1, bool))
        self.state, self.logits = decode.with_logits(self.model, self.request.policy, self.state, last, fed)

    def prompt_programs(self) -> list[Program]:
        """The programs that reading will run, to be compiled beforehand.

        What reads a whole prompt depends on what is found in it. So the first prompt of a size is read to its
        end where it would be compiled. Two threads must not run programs of several devices: there it is not.
        """
        policy, weights = self.request.policy, self.request.learned.weights
        if self.whole:
            if self.state.mesh != ONE:
                return []
            most = pool.coarse_class(len(self.request.tokens))  # of such prompts pages are of few sizes
            sizes = tuple(leaf.shape for leaf in jax.tree.leaves((self.state, weights)))
            kind = str(jax.tree.structure((policy, self.state)))
            return [(("prompt", kind, sizes, most, self.ranked), self.read_all)]
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self.state)
        shapes = paging.sharded_shapes(shapes)
        layers = decode.layer_calls(self.model.network, policy, self.model.params, weights)
        programs = {}
        for width in sorted({width for _, width in self._pieces()}):
            for site, cache in zip(layers, shapes.layers):
                sizes = tuple(leaf.shape for leaf in jax.tree.leaves(cache))
                key = ("chunk", str(jax.tree.structure((policy, cache))), sizes, width, site.kind)
                programs[key] = functools.partial(self._compile_chunk, shapes, site, cache, width)
        return list(programs.items())

    def _compile_chunk(self, state: KVState, site: decode.LayerCall, cache: LayerCache, width: int) -> None:
        network, embed, mesh = self.model.network.at(state.context), self.model.params["embed"], state.mesh
        sharding = None if mesh == ONE else mesh.sharding(ROWS)
        x = jax.ShapeDtypeStruct((1, width, embed.shape[1]), embed.dtype, sharding=sharding)
        numbers = state.length, state.length, state.total  # a count is as a length
        policy = self.request.policy
        decode.chunk_layer.lower(network, *site, policy, cache, x, *numbers, mesh=mesh).compile()


@functools.partial(jax.jit, static_argnums=2)
def _piece(x: Float[Array, "1 T D"], begin: Any, width: int) -> Float[Array, "W D"]:
    return jax.lax.dynamic_slice_in_dim(jnp.pad(x[0], ((0, width), (0, 0))), begin, width)


class Prefiller:
    """Reads one prompt at a time; the engine's thread only."""

    def __init__(
        self, memory: Memory, compiler: Compiler, counters: Counters, note: Callable[[str], None]
    ) -> None:
        self._model, self._settings, self._contexts = memory.model, memory.settings, memory.contexts
        self._memory, self._compiler, self._counters, self._note = memory, compiler, counters, note
        self.current: Prefill | None = None  # is read, or waits for pages
        # Wait for programs, the oldest first. Others pass them; rows in their batches stay free for them.
        self.compiling: list[Prefill] = []
        self.units = 0  # chunks and layers that were read
        self.warm = False  # has any row entered a batch?

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
                self.compiling = [other for other in self.compiling if other is not prefill]
                if self.current is prefill:
                    self.current = None
                prefill.request.finish(reason)

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
            if self.current is not None:
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
        """Takes the oldest request whose programs are there, where none is being read."""
        for prefill in list(self.compiling):
            if self.current is None and self._compiled(prefill, seconds):
                self.compiling.remove(prefill)
                self.current = prefill
        self._memory.promised = [prefill.batch for prefill in self.pending if prefill.batch is not None]

    def _start(self, request: EngineRequest) -> Prefill | None:
        """The request with the batch it is for; None while there is no free row."""
        memory, options, policy = self._memory, request.options, request.policy
        empty = memory.empty_row(policy)
        batch = None if request.keep_as else memory.batch(request, empty)
        request.without_batch = batch is None and not request.keep_as
        waiting = sum(prefill.batch is batch for prefill in self.compiling)
        # The first row of a batch decides its size alone.
        full = waiting > 0 if batch is None or not batch.sized else batch.rows.count(None) <= waiting
        if request.without_batch or full:
            return None
        ranked = options.echo and options.logprobs is not None and not request.echoed
        start = self._stored_state(request, empty, ranked)
        request.cached = 0 if start is None else len(start.tokens)
        borders: list[int] = []
        if shareable(policy) and not request.context:
            borders = memory.prefixes.borders(request.prefix_key, request.tokens, self._settings.chunk)
        prefill = Prefill(
            self._model,
            request,
            batch,
            self._first_state(request, empty, start),
            start,
            ranked=ranked,
            borders=borders,
            width=self._settings.chunk,
        )
        if not prefill.done:
            prefill.programs = prefill.prompt_programs()
            if batch is not None and batch.sized:
                prefill.programs.append(batch.program(self._settings.segment))
        return prefill

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
        shapes = zip(paging.list_shapes(empty), paging.list_shapes(context.state))
        if any(entries > held for (_, entries), (_, held) in shapes):
            raise ContextMismatch(
                f"context {request.context!r} was read with page lists too short for '{request.policy!r}'. "
                "Go on with its own budget or a smaller one."
            )
        return context

    def _first_state(self, request: EngineRequest, empty: KVState, start: StoredState | None) -> KVState:
        """A copy of what the row begins with, with pages for what a prompt that is read in chunks adds.

        Few sizes for all prompts. A prompt that is read as a whole makes its own pools, layer by layer.
        """
        policy, tokens = request.policy, len(request.tokens)
        state = paging.copied(empty if start is None else start.state)
        if not request.context:
            state = dataclasses.replace(state, total=state.mesh.put(np.asarray([tokens], np.int32)))
        if start is None and policy.whole_prompt:
            return state
        lists = None
        if start is not None:
            tokens -= len(start.tokens)
            lists = [np.asarray(pages.length)[0] for layer in state.layers for pages in layer.pools]
        need, have = paging.most_pages(policy, state, tokens, state.chunk, lists), paging.page_counts(state)
        counts = [max(pool.coarse_class(max(1, pages)), held) for pages, held in zip(need, have)]
        return state if counts == have else paging.resized(state, counts)

    def _compiled(self, prefill: Prefill, seconds: float) -> bool:
        """Are the programs compiled that a request waits for? If they cannot be, it fails alone."""
        try:
            ready = self._compiler.ready(prefill.programs, seconds)
        except Exception as error:  # of this request alone: another policy compiles
            self.compiling.remove(prefill)
            prefill.request.fail(error)
            return False
        waited = time.monotonic() - prefill.since
        if ready and prefill.programs and waited > NOTE_AFTER:
            policy = prefill.request.policy
            self._note(f"programs of '{policy!r}' took {waited:.1f} s to compile, beside the others")
        return ready

    # --- a prompt ----------------------------------------------------------------------------------

    def read(self) -> bool:
        """Reads one unit of the prompt, or inserts its row; False while that waits for pages."""
        prefill = self.current
        assert prefill is not None
        try:
            if not prefill.ready:
                self._unit(prefill)
                if self.current is None or not prefill.ready:
                    return True
            return self._insert(prefill)
        except Exception as error:  # of this request alone
            self.current = None
            prefill.request.fail(error)
            return True

    def _unit(self, prefill: Prefill) -> None:
        request = prefill.request
        if not prefill.done:  # the first of its kind was read where its programs were made
            prefill.unit()
            self.units += 1
        if not prefill.done:
            return
        for border, state in prefill.snapshots.items():
            prefix = self._memory.remember(request.prefix_key, request.tokens[:border], state)
            prefill.begins.append(prefix)
        prefill.ready = True
        self._counters.prompt_tokens += len(request.tokens) - prefill.seen
        self._counters.cached_tokens += prefill.seen
        if request.keep_as:
            self._keep(prefill)
            return
        if request.options.echo and not request.echoed:
            self._echo(prefill)
        self._first_token(prefill)

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
        if not memory.room(context.bytes - going):
            raise MemoryFull(
                f"context {context.name!r} takes {context.bytes} bytes beside {memory.allocated()} that are "
                f"held, and kv_memory is {self._settings.kv_memory}. Ask again later."
            )
        self._contexts.keep(context)
        self.current = None
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
        kv = usages(self._model.network, state, known)[0]
        if options.max_new_tokens == 0:
            request.deliver([Event(None, finish_reason="length")], kv)
            self.current = None
            self._counters.ended("length")
            return
        assert prefill.logits is not None
        ranked, position = [options.logprobs is not None], np.asarray([len(request.tokens)], np.int32)
        drawn = jax.device_get(first_token(prefill.logits, request.sampling, np.asarray(ranked), position))
        request.deliver(request.record(drawn, 0), kv)
        if request.ticket.done:
            request.keep_inspection(state, 0, kv, metrics.allocated(state.layers))
            self.current = None
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
        coming = self._memory.coming(request, state, known)
        start, lender = prefill.start, None
        if self._settings.share_pages and start is not None:
            lender = batch.lender(request.policy, start)
        lists = [x[0] for x in known.lists]
        reserved = need = paging.most_pages(request.policy, batch.state, coming, 1, lists)
        if start is not None and lender is not None:
            need = paging.most_pages(request.policy, batch.state, coming, 1, lists, start.pages)
        if not batch.sized or not all(n <= have for n, have in zip(need, batch.spare())):
            return self._grow(prefill, batch, need)
        if lender is not None and not batch.shared:
            sharing = batch.program(self._settings.segment, shared=True)
            if not self._compiler.ready([sharing]):  # the lender runs, so the others go on meanwhile
                return False
        batch.insert(request, state, reserved, prefill.begins, lender)
        self.current = None
        self.warm = True
        return True

    def _grow(self, prefill: Prefill, batch: RunningBatch, need: list[int]) -> bool:
        """Larger pools for the row that waits; False while that cannot be."""
        memory, settings = self._memory, self._settings
        if prefill.growth is None and batch.sized:
            spare = zip(batch.counts, need, batch.spare())
            prefill.growth = memory.affordable(batch, [have + max(0, n - free) for have, n, free in spare])
        elif prefill.growth is None:
            prefill.growth = memory.first_counts(batch, need)
        if prefill.growth is None:
            if not memory.running:
                raise memory.refusal(
                    batch.allocated + batch.bytes_of(need),
                    f"the row needs {batch.bytes_of(need)} bytes of pages beside {memory.allocated()} that "
                    f"are held, and kv_memory is {settings.kv_memory}. Raise it, or ask for fewer tokens.",
                )
            return False
        programs = [batch.program(settings.segment, prefill.growth)]
        if not self._compiler.ready(programs):
            prefill.programs, prefill.since = programs, time.monotonic()
            self.compiling.insert(0, prefill)
            self.current = None
            return True
        growth, prefill.growth = prefill.growth, None
        larger = all(have <= n for have, n in zip(batch.counts, growth))  # rows may have grown it meanwhile
        if larger and memory.affordable(batch, growth, exactly=True) is not None:
            batch.resize(growth)
        return True
