"""A running batch: the rows of one policy structure, which come and go while its program stays."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import decode, metrics
from kvjax.algebra import Policy
from kvjax.cache import pool
from kvjax.cache import rows as row_ops
from kvjax.cache.state import KVState, PoolOverflowError
from kvjax.engine import pages as paging
from kvjax.engine.compiler import Program
from kvjax.engine.decoding import BatchInputs, SampledTokens, Snapshot, decode_steps, snapshot
from kvjax.engine.metrics import BatchMetrics, live, usages
from kvjax.engine.pages import StoredState
from kvjax.engine.request import MOST_STOPS, KVUsage
from kvjax.engine.ticket import EngineRequest
from kvjax.layer import stack_policies
from kvjax.sampling import Sampling
from kvjax.types import EMPTY, Params, Weighted

_insert = jax.jit(row_ops.on_devices(row_ops.insert), static_argnames="mesh", donate_argnums=0)
_release = jax.jit(row_ops.on_devices(row_ops.release), static_argnames="mesh", donate_argnums=0)
_cut = jax.jit(row_ops.on_devices(row_ops.cut), static_argnames=("mesh", "sizes"))
_with_row = jax.jit(row_ops.with_row, donate_argnums=0)
_without_rows = jax.jit(row_ops.without_rows, donate_argnums=0)

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
    begins: Sequence[StoredState]  # stored states that it begins with, or left while it was read
    family: int  # rows that share pages have the same


class RunningBatch:
    """Rows of one policy structure, on one state."""

    def __init__(
        self, model: Weighted, policy: Policy, label: str, weights: Params, row: KVState, rows: int
    ) -> None:
        """Makes a state with ``rows`` free rows and a page in each pool; ``row`` is empty, for its sizes."""
        self.model, self.policy = model, policy  # in the layout of batches
        self.weights, self.label = weights, label  # which weights these are
        self.list_shapes = paging.list_shapes(row)
        self.state = paging.widened(row, rows)  # donated to every program
        self.mesh, self.page_bytes = row.mesh, paging.page_bytes(row)
        self.paged_layers = sum(bool(x.pools) for x in row.layers)
        self.page_sizes = [size for size, _ in self.list_shapes]
        self.rows: list[BatchRow | None] = [None] * rows  # None where one is free
        self.known = snapshot(self.state)  # what the state held after the last change, on the host
        self.used = time.monotonic()  # when it last had a row; the batch to drop is chosen by it
        self.sized = False  # have its pools the size that rows need? Before, there is a page in each
        self._order = 0
        self._stacked: tuple[list[int], Policy] | None = None
        self._flight: tuple[float, SampledTokens, Snapshot] | None = None

    # --- what there is -----------------------------------------------------------------------------

    def serves(self, policy: Policy, label: str, row: KVState) -> bool:
        """Can rows of this policy and these weights join? ``row`` is an empty one of its own."""
        shapes = paging.list_shapes(row)
        return (
            label == self.label
            and policy.structure == self.policy.structure
            and str(jax.tree.structure(policy)) == str(jax.tree.structure(self.policy))
            and len(self.list_shapes) == len(shapes)
            and all(
                size == own and entries <= most
                for (size, entries), (own, most) in zip(shapes, self.list_shapes)
            )
        )

    @property
    def taken(self) -> dict[int, BatchRow]:
        """Rows that are being written, by number."""
        return {number: row for number, row in enumerate(self.rows) if row is not None}

    @property
    def counts(self) -> list[int]:
        """Pages that a device has of each pool of a layer."""
        return paging.page_counts(self.state)

    @property
    def allocated(self) -> int:
        """Device bytes of its state."""
        return metrics.allocated(self.state.layers)

    @property
    def shared(self) -> bool:
        """Is its program the one that reads pages of several owners?"""
        return any(pages.shared for layer in self.state.layers for pages in layer.pools)

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

    def lender(self, policy: Policy, start: StoredState) -> int | None:
        """A row that holds the full pages of this stored state; None where there is none, or no such page."""
        if not paging.can_lend(policy) or not any(x.any() for x in start.pages):
            return None
        lenders = (number for number, row in self.taken.items() if any(x is start for x in row.begins))
        return next(lenders, None)

    def usages(self) -> list[KVUsage]:
        """What each row holds."""
        return usages(self.model.network, self.state, self.known)

    def metrics(self) -> BatchMetrics:
        free = sum(int(np.sum(n)) for n in self.known.free)
        pages = sum(self.counts) * self.paged_layers * self.mesh.pools
        taken, (slots, size) = list(self.taken), live(self.state, self.known)
        return BatchMetrics(
            policy=repr(self.policy),
            weights=self.label,
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
        begins: Sequence[StoredState],
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
                self.state = paging.marked_shared(self.state, True)
        layers = []
        for own, new in zip(self.state.layers, source.layers):
            loan = None
            if lender is not None and own.pools:
                pages = tuple(np.asarray(next(borrowed), np.int32) for _ in own.pools)
                loan = row_ops.Loan(row=np.int32(lender), pages=pages)  # type: ignore[arg-type]
            layers.append(_insert(own, new, row, loan, mesh=self.mesh))
        bare = dataclasses.replace(self.state, layers=())
        counts = _with_row(bare, (), dataclasses.replace(source, layers=()), row)
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
        layers = tuple(_release(cache, mask, mesh=self.mesh) for cache in self.state.layers)
        bare = _without_rows(dataclasses.replace(self.state, layers=()), (), mask)
        self.state = dataclasses.replace(bare, layers=layers)
        for number in gone:
            self.rows[number] = None
        families = [row.family for row in self.taken.values()]
        if self.shared and len(set(families)) == len(families):
            self.state = paging.marked_shared(self.state, False)
        self.used = time.monotonic()
        self._refresh()

    def cut(self, number: int) -> KVState:
        """A row as a state of its own, copied."""
        assert not self.flying
        lists, kinds = [lists[number] for lists in self.known.lists], len(self.page_sizes)
        sizes = tuple(
            pool.coarse_class(max([1, *(int(self._pages_for(x, kind).max()) for x in lists[kind::kinds])]))
            for kind in range(kinds)
        )
        layers = tuple(
            _cut(cache, np.int32(number), sizes=sizes if cache.pools else (), mesh=self.mesh)
            for cache in self.state.layers
        )
        state = self.state
        return dataclasses.replace(
            state,
            layers=layers,
            length=self.mesh.put(self.known.seen[number : number + 1]),
            total=state.total[jnp.asarray([number])],
            peak=jnp.copy(state.peak),
            confidence=None if state.confidence is None else state.confidence[jnp.asarray([number])],
        )

    def _refresh(self) -> None:
        """Page counts after a change."""
        assert not self.flying
        self.known = snapshot(self.state)

    # --- pages ---------------------------------------------------------------------------------------

    def bytes_of(self, counts: Sequence[int]) -> int:
        """Device bytes of pools of so many pages a device."""
        return int(sum(n * size for n, size in zip(counts, self.page_bytes)) * self.paged_layers)

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
        self.state, self.sized = paging.resized(self.state, counts), True
        self._refresh()

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
        self.state, drawn, known = decode_steps(
            self.model.network,
            self._policies(),
            steps,
            self.model.params,
            self.weights,
            self.state,
            self._inputs(now),
        )
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
                f"a running batch of '{self.policy!r}' ran out of pages: its reservations are wrong."
            )
        self._flight, self.used = None, time.monotonic()
        return drawn, self.used - begun

    def program(self, steps: int, counts: Sequence[int] | None = None, shared: bool | None = None) -> Program:
        """The batch's program, with pools of so many pages, which rows may share or may not."""
        counts = list(self.counts if counts is None else counts)
        shared = self.shared if shared is None else shared
        state = paging.marked_shared(paging.shapes_with(self.state, counts), shared)
        policies, run = self._policies(), self._inputs(steps)  # as they are now: another thread compiles

        def compile_program() -> None:
            decode_steps.lower(
                self.model.network, policies, steps, self.model.params, self.weights, state, run
            ).compile()

        return ("segment", id(self), steps, tuple(counts), shared), compile_program

    def _policies(self) -> Policy:
        """Of all rows, stacked; free rows have the batch's own."""
        key = [0 if row is None else row.order for row in self.rows]
        if self._stacked is None or self._stacked[0] != key:
            policies = [self.policy if row is None else row.request.policy for row in self.rows]
            self._stacked = key, stack_policies(policies)
        return self._stacked[1]

    def _inputs(self, steps: int) -> BatchInputs:
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
        samplings = [GREEDY if row is None else row.request.sampling for row in self.rows]
        return BatchInputs(
            token=token,
            active=active,
            left=left,
            stops=stops,
            ranked=ranked,
            how=jax.tree.map(lambda *of_rows: np.concatenate(of_rows), *samplings),
            steps=np.int32(steps),
        )
