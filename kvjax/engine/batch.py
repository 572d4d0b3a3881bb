"""A running batch: the rows of one policy structure, which come and go while its program stays."""

from __future__ import annotations

import dataclasses
import operator
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from kvjax import decode, metrics
from kvjax.algebra import Policy
from kvjax.cache import pool
from kvjax.cache import rows as row_ops
from kvjax.cache.state import KVState, PoolOverflowError
from kvjax.engine import pages as paging
from kvjax.engine.compiler import Program
from kvjax.engine.decoding import (
    BatchInputs,
    SampledTokens,
    Snapshot,
    nothing_held,
    snapshot,
)
from kvjax.engine.metrics import BatchMetrics, live, usages
from kvjax.engine.pages import Shorter, StoredState
from kvjax.engine.programs import SizedPrograms
from kvjax.engine.request import MOST_BIASES, MOST_STOPS, KVUsage
from kvjax.engine.structure import Structure
from kvjax.engine.ticket import EngineRequest
from kvjax.layer import stack_policies
from kvjax.sampling import Sampling, no_shaping
from kvjax.sharding.mesh import ONE
from kvjax.types import EMPTY

_greedy: dict[str, Any] = {"temperature": np.zeros(1, np.float32), "top_k": np.zeros(1, np.int32)}
_greedy |= {"top_p": np.ones(1, np.float32), "key": np.zeros((1, 2), np.uint32)}
GREEDY = Sampling(**_greedy)
"""Of a free row, whose draws are not read."""


@dataclasses.dataclass(eq=False)
class BatchRow:
    """A row that is being written."""

    request: EngineRequest
    order: int  # rows that came later have higher ones
    reserved: list[int]  # pages of each pool (of a layer, the fullest) that it may own, shared ones included
    begins: Sequence[StoredState | Shorter]  # stored states that it begins with, or left while it was read
    family: int  # rows that share pages have the same


class RunningBatch:
    """Rows of one policy structure, on one state."""

    guided = False  # are its rows those whose tokens a guide allows?

    def __init__(self, structure: Structure, rows: int) -> None:
        """So many free rows, and a page in each pool; shapes alone, until ``make``."""
        self.structure = structure
        self.model, self.policy = structure.model, structure.policy
        self.list_shapes, self.mesh = structure.list_shapes, structure.row.mesh
        self.paged_layers = structure.paged_layers
        self.page_sizes = [size for size, _ in self.list_shapes]
        # Donated to every program.
        self.state: KVState = paging.widened(structure.row, rows)
        self.made = False
        self.rows: list[BatchRow | None] = [None] * rows  # None where one is free
        self.known = nothing_held(self.state)  # what the state held after the last change, on the host
        self.used = time.monotonic()  # when it last had a row; the batch to drop is chosen by it
        self.sized = False  # have its pools the size that rows need? Before, there is a page in each
        self._order = 0
        self._stacked: tuple[list[int], Policy] | None = None
        self._sized: dict[tuple[int, ...], SizedPrograms] = {}  # by pages of each pool
        self._steps: Callable[..., Any] | None = None  # the program of the next steps, once it was found
        self._steps_shape = False  # is it one that shapes draws?
        self._flight: tuple[float, SampledTokens, Snapshot] | None = None

    # --- what there is -----------------------------------------------------------------------------

    @property
    def taken(self) -> dict[int, BatchRow]:
        """Rows that are being written, by number."""
        return {number: row for number, row in enumerate(self.rows) if row is not None}

    @property
    def counts(self) -> list[int]:
        """Pages that a device has of each pool of a layer."""
        return paging.page_counts(self.state)

    def sized_programs(self, counts: Sequence[int]) -> SizedPrograms:
        """For pools of so many pages."""
        ahead = self.mesh == ONE
        return self._sized.setdefault(tuple(counts), SizedPrograms(ahead))

    def forget(self) -> None:
        """Drops what was compiled; it is compiled again when it is needed."""
        self._sized, self._steps = {}, None

    @property
    def allocated(self) -> int:
        """Device bytes of its state."""
        return metrics.allocated(self.state.layers)

    @property
    def shared(self) -> bool:
        """Is its program the one that reads pages of several owners?"""
        return any(pages.shared for layer in self.state.layers for pages in layer.pools)

    @property
    def shaped(self) -> bool:
        """Does any row shape its draws (``kvjax.sampling.Shaping``)?"""
        return any(row.request.shaped for row in self.taken.values())

    def spare(self) -> list[int]:
        """Pages of each pool that are free in every layer and not reserved, on the device that has fewest.

        Rows share no page that they still have to take, so sharing can be ignored here.
        """
        kinds, spare = len(self.page_sizes), list(self.counts)
        for index, (lists, free) in enumerate(zip(self.known.lists, self.known.free)):
            kind, left = index % kinds, np.atleast_1d(free).astype(int)
            for number, row in self.taken.items():
                left = left - np.maximum(0, row.reserved[kind] - self._pages_for(lists[number], kind))
            spare[kind] = min(spare[kind], int(left.min()))
        return spare

    def lender(self, policy: Policy, start: StoredState | Shorter) -> int | None:
        """A row that holds the full pages of this stored state; None where there is none, or no such page."""
        if not paging.can_lend(policy) or not any(x.any() for x in start.pages):
            return None
        lenders = (number for number, row in self.taken.items() if any(x is start.whole for x in row.begins))
        return next(lenders, None)

    def usages(self) -> list[KVUsage]:
        """What each row holds."""
        return usages(self.model.network, self.state, self.known)

    def metrics(self) -> BatchMetrics:
        free = sum(int(np.sum(n)) for n in self.known.free)
        pages = sum(self.counts) * self.paged_layers * self.mesh.pools
        taken, (slots, size) = list(self.taken), live(self.state, self.known)
        return BatchMetrics(
            policy=repr(self.structure.first),
            weights=self.structure.learned.label,
            rows=len(taken),
            max_rows=len(self.rows),
            live=int(size[taken].sum()),
            allocated=self.allocated,
            pages=pages,
            pages_used=pages - free,
            slots=int(slots[:, taken].sum()),
        )

    # --- rows come and go ----------------------------------------------------------------------------

    def insert(
        self,
        request: EngineRequest,
        source: KVState,
        reserved: list[int],
        begins: Sequence[StoredState | Shorter],
        lender: int | None = None,
    ) -> None:
        """A row that was read takes a free row; the source is left as it is.

        Where there is a ``lender`` the row borrows the full pages of the first state in ``begins`` from it.
        """
        number = self.rows.index(None)
        row, family = np.int32(number), self._order + 1
        borrowed: Iterator[np.ndarray] = iter(())
        if lender is not None:
            family, borrowed = self.taken[lender].family, iter(begins[0].pages)
            if not self.shared:
                self.state, self._steps = paging.marked_shared(self.state, True), None
        layers, insert = [], self.sized_programs(self.counts).insert
        for own, new in zip(self.state.layers, source.layers):
            loan = None
            if lender is not None and own.pools:
                pages = tuple(np.asarray(next(borrowed), np.int32) for _ in own.pools)
                loan = row_ops.Loan(row=np.int32(lender), pages=pages)  # type: ignore[arg-type]
            layers.append(insert(own, new, row, loan, mesh=self.mesh))
        counts = self.structure.with_row(_bare(self.state), (), _bare(source), row)
        self.state = dataclasses.replace(counts, layers=tuple(layers))
        self._order += 1
        self.rows[number] = BatchRow(request, self._order, reserved, begins, family)
        self._refresh()

    def release(self, gone: Sequence[int]) -> None:
        """Frees rows; their pages are free at once."""
        if not gone:
            return
        mask = np.zeros(len(self.rows), bool)
        mask[list(gone)] = True
        free, mesh = self.sized_programs(self.counts).release, self.mesh
        layers = tuple(free(cache, mask, mesh=mesh) for cache in self.state.layers)
        bare = self.structure.without_rows(_bare(self.state), (), mask)
        self.state = dataclasses.replace(bare, layers=layers)
        for number in gone:
            self.rows[number] = None
        families = [row.family for row in self.taken.values()]
        if self.shared and len(set(families)) == len(families):
            self.state, self._steps = paging.marked_shared(self.state, False), None
        self.used = time.monotonic()
        self._refresh()

    def cut(self, number: int) -> KVState:
        """A row as a state of its own, copied."""
        assert not self.flying
        sizes, cut = self._cut_sizes(number), self.sized_programs(self.counts).cut
        layers = tuple(
            cut(cache, np.int32(number), sizes=sizes if cache.pools else (), mesh=self.mesh)
            for cache in self.state.layers
        )
        state, row = self.state, slice(number, number + 1)
        total, confidence, peak = jax.device_get((state.total, state.confidence, state.peak))
        own = {"length": self.known.seen[row], "total": total[row], "peak": peak}
        own |= {"confidence": None if confidence is None else confidence[row]}
        return dataclasses.replace(state, layers=layers, **self.mesh.put(own))

    def cut_programs(self, number: int) -> list[Program]:
        """What ``cut`` runs."""
        sizes, cut = self._cut_sizes(number), self.sized_programs(self.counts).cut.program
        return [
            cut(cache, np.int32(number), sizes=sizes if cache.pools else (), mesh=self.mesh)
            for cache in paging.shapes_with(self.state).layers
        ]

    def _cut_sizes(self, number: int) -> tuple[int, ...]:
        lists, kinds = [lists[number] for lists in self.known.lists], len(self.page_sizes)
        return tuple(
            pool.coarse_class(max([1, *(int(self._pages_for(x, kind).max()) for x in lists[kind::kinds])]))
            for kind in range(kinds)
        )

    def _refresh(self) -> None:
        """Page counts after a change."""
        assert not self.flying
        self.known = snapshot(self.state)

    # --- pages ---------------------------------------------------------------------------------------

    def bytes_of(self, counts: Sequence[float]) -> int:
        """Device bytes of pools of so many pages a device."""
        return self.structure.bytes_of(counts)

    def growing(self, counts: Sequence[int]) -> int:
        """Bytes that growing to so many pages takes: those that are new, and the old ones of one layer."""
        more = self.bytes_of([new - old for new, old in zip(counts, self.counts)])
        held = self.bytes_of(self.counts) // max(1, self.paged_layers) if self.made else 0
        return more + held if more > 0 else more

    def larger(self, counts: Sequence[int]) -> list[list[int]]:
        """Page counts of at least these, the best first.

        On the coarse ladder and at least doubled, so that few sizes are ever compiled; on the fine one; as
        few as possible.
        """
        pools = paging.layer_pools(self.state)
        tops = [pages.table.size // self.mesh.pools for pages in pools]  # every list of every row full

        def of(ladder: Callable[[int, int], int]) -> list[int]:
            return [
                old if new <= old else max(new, min(ladder(new, old), top))
                for new, old, top in zip(counts, self.counts, tops)
            ]

        coarse = of(lambda new, old: pool.coarse_class(max(new, 2 * old)))
        return [coarse, of(lambda new, old: pool.size_class(new)), of(lambda new, old: new)]

    def resize(self, counts: Sequence[int]) -> None:
        """Pools of so many pages a device."""
        self.sized, self._steps = True, None
        # Pools never shrink: programs for smaller ones are not called again.
        self._sized = {n: x for n, x in self._sized.items() if all(map(operator.ge, n, counts))}
        if self.made:
            self.state = paging.resized(self.state, counts, self.structure.resize)
            self._refresh()
        else:
            self.state = paging.shapes_with(self.state, counts)
            self.known = nothing_held(self.state)

    def make(self) -> None:
        """Allocates it."""
        if not self.made:
            self.state, self.made = self.structure.make(len(self.rows), tuple(self.counts)), True

    def short_by(self, steps: int) -> list[int]:
        """Pages that each kind of pool lacks, if so many steps stored every token; [] without pools."""
        if not self.page_sizes:
            return []
        rows, kinds = self.taken, len(self.page_sizes)
        coming = np.asarray([min(steps, row.request.left) for row in rows.values()], int)
        full, limits = [size * entries for size, entries in self.list_shapes], []
        for row in rows.values():
            bounds = decode.slot_bounds(row.request.policy, self.state.context, 1, self.page_sizes)
            limits.append([most if bound is None else min(bound, most) for most, bound in zip(full, bounds)])
        most = np.asarray(limits, int).reshape(len(rows), kinds)
        lack = [0] * kinds
        for index, lists in enumerate(self.known.lists):
            kind, live = index % kinds, lists[list(rows)]
            after = np.minimum(live + coming[:, None, None], most[:, kind, None, None])
            more = self._pages_for(np.maximum(after, live), kind) - self._pages_for(live, kind)
            lack[kind] = max(lack[kind], int((more.sum(axis=0) - self.known.free[index]).max()))
        return lack

    def _pages_for(self, live: np.ndarray, kind: int) -> np.ndarray:
        """Pages that lists [..., K, R] of rows own on each device."""
        return paging.pages_for(live, self.page_sizes[kind], self.mesh.pools)

    # --- steps -----------------------------------------------------------------------------------------

    def step(self, steps: int, now: int) -> None:
        """Begins up to ``now`` tokens of every row, by the program of ``steps``; ``land`` waits for them."""
        network, params, learned = self.model.network, self.model.params, self.structure.learned.weights
        known_inputs = (network, self._policies(), steps, params, learned, self.state)
        if self._steps is None:
            found, self._steps_shape = self.sized_programs(self.counts).steps, self.shaped
            # The last row that shaped its draws has gone: rather its program than a pause for another.
            if not self.shaped and not found.program(*known_inputs, self._inputs(now, False)).ready:
                self._steps_shape = found.program(*known_inputs, self._inputs(now, True)).ready
            self._steps = found.find(*known_inputs, self._inputs(now, self._steps_shape))
        self.state, drawn, known = self._steps(*known_inputs, self._inputs(now, self._steps_shape))
        self._flight = time.monotonic(), drawn, known

    @property
    def flying(self) -> bool:
        """Is a program under way? Then rows neither come nor go, and ``known`` is what was before it."""
        return self._flight is not None

    def land(self) -> tuple[SampledTokens, float]:
        """The tokens of the program that is under way, on the host, and the seconds that it took.

        Raises:
          PoolOverflowError: a token was lost, which the reservations exclude.
        """
        assert self._flight is not None
        begun, *coming = self._flight
        drawn, self.known = jax.device_get(coming)
        if self.known.overflow:  # it stays under way, so that the next call raises again
            raise PoolOverflowError(
                f"a running batch of '{self.structure.first!r}' ran out of pages: its reservations are wrong."
            )
        self._flight, self.used = None, time.monotonic()
        return drawn, self.used - begun

    def drafts(self, number: int) -> tuple[int, int]:
        """Tokens that were drafted for a row in the program that landed last, and of these accepted."""
        return 0, 0

    def programs(
        self,
        steps: int,
        source: KVState | None = None,
        counts: Sequence[int] | None = None,
        shared: bool | None = None,
        shaped: bool = False,
    ) -> list[Program]:
        """All that it runs with pools of so many pages, which rows may share or may not.

        Args:
          steps: of its program.
          source: a row that is to enter, or its shapes.
          counts: pages of each pool; those it has by default.
          shared: may rows share pages? By default as now.
          shaped: does the row that is to enter shape its draws?
        """
        grows = counts is not None and list(counts) != self.counts
        counts = list(self.counts if counts is None else counts)
        shared = self.shared if shared is None else shared
        own, sized, mesh = self.structure, self.sized_programs(counts), self.mesh
        state = paging.marked_shared(paging.shapes_with(self.state, counts), shared)
        numbers, mask = _bare(state), np.zeros(len(self.rows), bool)
        programs = self._step_programs(sized, state, steps, shaped or self.shaped)
        programs.append(own.without_rows.program(numbers, (), mask))
        if not self.made:
            programs.append(own.make.program(len(self.rows), tuple(counts)))
        elif grows:
            old = [layer.pools for layer in paging.shapes_with(self.state).layers]
            programs += [own.resize.program(x, n, mesh) for pools in old for x, n in zip(pools, counts)]
        for cache in state.layers:
            programs.append(sized.release.program(cache, mask, mesh=mesh))
        if source is not None:
            source = paging.shapes_with(source)
            programs.append(own.with_row.program(numbers, (), _bare(source), np.int32(0)))
            for cache, new in zip(state.layers, source.layers):
                programs.append(sized.insert.program(cache, new, np.int32(0), None, mesh=mesh))
                if shared and cache.pools:
                    lists = tuple(np.zeros(x.length.shape[1:], np.int32) for x in cache.pools)
                    loan = row_ops.Loan(row=np.int32(0), pages=lists)  # type: ignore[arg-type]
                    programs.append(sized.insert.program(cache, new, np.int32(0), loan, mesh=mesh))
        return list({(id(program.made), program.key): program for program in programs}.values())

    def _step_programs(self, sized: SizedPrograms, state: KVState, steps: int, shaped: bool) -> list[Program]:
        """What ``step`` runs on a state of such shapes."""
        inputs = (self.model.network, self._policies(), steps, self.model.params)
        learned = self.structure.learned.weights
        return [sized.steps.program(*inputs, learned, state, self._inputs(steps, shaped))]

    def _policies(self) -> Policy:
        """Of all rows, stacked; free rows have the batch's own."""
        key = [0 if row is None else row.order for row in self.rows]
        if self._stacked is None or self._stacked[0] != key:
            policies = [self.policy if row is None else row.request.policy.after_prompt for row in self.rows]
            self._stacked, self._steps = (key, stack_policies(policies)), None
        return self._stacked[1]

    def _inputs(self, steps: int, shaped: bool) -> BatchInputs:
        """What a program of so many steps takes of the rows; free rows take no part."""
        rows = len(self.rows)
        token, left = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
        active, ranked = np.zeros(rows, bool), np.zeros(rows, bool)
        stops = np.full((rows, MOST_STOPS), EMPTY, np.int32)
        for number, row in self.taken.items():
            request = row.request
            token[number], left[number], active[number] = request.written[-1], request.left, True
            stops[number, : len(request.stops)] = request.stops
            ranked[number] = request.options.logprobs is not None
        samplings = [GREEDY if row is None else row.request.how for row in self.rows]
        if shaped:
            plain = no_shaping(1, self.state.context, MOST_BIASES, MOST_STOPS)
            samplings = [dataclasses.replace(x, shaping=x.shaping or plain) for x in samplings]
        return BatchInputs(
            token=token,
            active=active,
            left=left,
            stops=stops,
            ranked=ranked,
            how=jax.tree.map(lambda *of_rows: np.concatenate(of_rows), *samplings),
            steps=np.int32(steps),
        )


def _bare(state: KVState) -> KVState:
    """The state without its layers."""
    return dataclasses.replace(state, layers=())
