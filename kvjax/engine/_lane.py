"""A lane: the running batch of one policy structure; rows come and go, its program stays."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import decode, metrics
from kvjax.algebra import Policy
from kvjax.cache import pool
from kvjax.cache import rows as rowing
from kvjax.cache.state import KVState, PoolOverflowError
from kvjax.engine import _layout as layout
from kvjax.engine._dials import stack
from kvjax.engine._loans import Beginning, Lent, lendable, marked
from kvjax.engine._reading import Program
from kvjax.engine._segment import Drawn, Lengths, Run, look, segment
from kvjax.engine._work import Job, Place, run_of
from kvjax.types import Params, Weighted

_insert = jax.jit(rowing.on_devices(rowing.insert), static_argnames="mesh", donate_argnums=0)
_release = jax.jit(rowing.on_devices(rowing.release), static_argnames="mesh", donate_argnums=0)
_cut = jax.jit(rowing.on_devices(rowing.cut), static_argnames=("mesh", "sizes"))
_with_row = jax.jit(rowing.with_row, donate_argnums=0)
_without_rows = jax.jit(rowing.without_rows, donate_argnums=0)


class Lane:
    """Rows of one structure, on one state.

    Attributes:
      policy: in the lane's layout; it made the state.
      label: of its learned weights.
      state: of all its rows; donated to every segment.
      places: who stands where.
      known: what the state held after the last change, on the host.
      sized: have its pools the size that rows need? Before, there is a page in each.
      used: when it last had a row, for choosing the lane to drop.
    """

    def __init__(
        self, model: Weighted, policy: Policy, label: str, weights: Params, row: KVState, rows: int
    ) -> None:
        """Makes a state with ``rows`` empty places and a page in each pool.

        Args:
          model, policy, weights: as in ``kvjax.prefill``.
          label: of the weights.
          row: an empty row of the lane (``layout.empty_row``), for its sizes.
          rows: places.
        """
        self.model, self.policy, self.label, self.weights = model, policy, label, weights
        self.shape = layout.shape(row)
        sizes = [size for size, _ in self.shape]
        self.state = layout.widened(row, rows)
        self.mesh, self.page_bytes = row.mesh, layout.page_bytes(row)
        self.paged_layers = sum(bool(x.pools) for x in row.layers)
        self.sizes = sizes
        self.places: list[Place | None] = [None] * rows
        self.known = look(self.state)
        self.used = time.monotonic()
        self.sized = False
        self._order = 0
        self._stacked: tuple[list[int], Policy] | None = None
        self._flight: tuple[float, Drawn, Lengths] | None = None

    # --- what there is -----------------------------------------------------------------------------

    def serves(self, policy: Policy, label: str, row: KVState) -> bool:
        """Can rows of this policy stand here? ``row`` is an empty one of its own."""
        return (
            label == self.label
            and policy.structure == self.policy.structure
            and str(jax.tree.structure(policy)) == str(jax.tree.structure(self.policy))
            and len(self.shape) == len(layout.shape(row))
            and all(
                size == mine and entries <= most
                for (size, entries), (mine, most) in zip(layout.shape(row), self.shape)
            )
        )

    @property
    def rows(self) -> list[int]:
        """Places that are taken."""
        return [at for at, place in enumerate(self.places) if place is not None]

    @property
    def free_place(self) -> int | None:
        """One that is not."""
        return next((at for at, place in enumerate(self.places) if place is None), None)

    @property
    def counts(self) -> list[int]:
        """Pages that a device has of each pool of a layer."""
        return layout.counts(self.state)

    @property
    def allocated(self) -> int:
        """Device bytes of its state."""
        return metrics.allocated(self.state.layers)

    def lists(self, row: int) -> list[np.ndarray]:
        """Live slots [K, R] of a row, of each pool of each layer in turn."""
        return [lists[row] for lists in self.known.lists]

    def spare(self) -> list[int]:
        """Pages of each pool that are free in every layer, and that no row has reserved and not taken yet.

        Of the device that has fewest.

        What rows still take they never share, so it does not matter here who shares what.
        """
        kinds, found = len(self.sizes), list(self.counts)
        for at, (lists, free) in enumerate(zip(self.known.lists, self.known.free)):
            kind, left = at % kinds, np.atleast_1d(free).astype(int)
            for row in self.rows:
                place = self.places[row]
                assert place is not None  # noqa: S101
                left = left - np.maximum(0, place.reserved[kind] - self._pages_for(lists[row], kind))
            found[kind] = min(found[kind], int(left.min()))
        return found

    @property
    def shared(self) -> bool:
        """Is its program the one that reads pages of several owners?"""
        return any(pages.shared for layer in self.state.layers for pages in layer.pools)

    def lender(self, policy: Policy, beginning: Beginning | None) -> Lent | None:
        """A row that holds the full pages of this beginning; None where there is none, or no such page."""
        if beginning is None or not lendable(policy) or not any(x.any() for x in beginning.pages):
            return None
        for at in self.rows:
            place = self.places[at]
            if place is not None and any(mine is beginning for mine in place.begins):
                return Lent(at, beginning.pages)
        return None

    # --- rows come and go ----------------------------------------------------------------------------

    def insert(
        self,
        job: Job,
        source: KVState,
        reserved: list[int],
        begins: Sequence[Beginning] = (),
        lent: Lent | None = None,
    ) -> int:
        """A row that was read takes an empty place; the place. The source is left as it is."""
        at = self.free_place
        assert at is not None  # noqa: S101  (the scheduler has looked)
        row, family = np.int32(at), self._order + 1
        if lent is not None:
            lender = self.places[lent.row]
            assert lender is not None  # noqa: S101
            family = lender.family
            if not self.shared:
                self.state = marked(self.state, True)
        layers, paged = [], 0
        for mine, theirs in zip(self.state.layers, source.layers):
            loan = None if lent is None or not mine.pools else lent.of_layer(paged, len(mine.pools))
            layers.append(_insert(mine, theirs, row, loan, mesh=self.mesh))
            paged += bool(mine.pools)
        bare = dataclasses.replace(self.state, layers=())
        counts = _with_row(bare, (), dataclasses.replace(source, layers=()), row)
        self.state = dataclasses.replace(counts, layers=tuple(layers))
        self._order += 1
        self.places[at] = Place(job, self._order, reserved, begins, family)
        self._look()
        return at

    def release(self, gone: Sequence[int]) -> None:
        """Rows give up their places; their pages are free at once."""
        if not gone:
            return
        mask = np.zeros(len(self.places), bool)
        mask[list(gone)] = True
        layers = tuple(_release(cache, mask, mesh=self.mesh) for cache in self.state.layers)
        bare = _without_rows(dataclasses.replace(self.state, layers=()), (), mask)
        self.state = dataclasses.replace(bare, layers=layers)
        for at in gone:
            self.places[at] = None
        families = [place.family for place in self.places if place is not None]
        if self.shared and len(set(families)) == len(families):
            self.state = marked(self.state, False)
        self.used = time.monotonic()
        self._look()

    def cut(self, at: int) -> KVState:
        """A row as a state of its own, copied."""
        assert not self.flying  # noqa: S101  (the writer has settled it)
        lists = self.lists(at)
        kinds = len(self.sizes)
        sizes = tuple(
            pool.coarse_class(max([1, *(int(self._pages_for(x, kind).max()) for x in lists[kind::kinds])]))
            for kind in range(kinds)
        )
        layers = tuple(
            _cut(cache, np.int32(at), sizes=sizes if cache.pools else (), mesh=self.mesh)
            for cache in self.state.layers
        )
        state, one = self.state, slice(at, at + 1)
        return dataclasses.replace(
            state,
            layers=layers,
            length=self.mesh.put(self.known.seen[one]),
            total=state.total[jnp.asarray([at])],
            peak=jnp.copy(state.peak),
            confidence=None if state.confidence is None else state.confidence[jnp.asarray([at])],
        )

    def _look(self) -> None:
        """Page counts after a change."""
        assert not self.flying  # noqa: S101  (the writer has settled it)
        self.known = look(self.state)

    # --- space ---------------------------------------------------------------------------------------

    def need(
        self, policy: Policy, lists: Sequence[np.ndarray], coming: int, lent: Lent | None = None
    ) -> list[int]:
        """Pages that a row with these lists owns after so many tokens more were stored, but those lent."""
        return layout.most_pages(policy, self.state, lists, coming, 1, None if lent is None else lent.pages)

    def bytes_of(self, counts: Sequence[int]) -> int:
        """Device bytes of pools of so many pages a device."""
        return int(sum(n * size for n, size in zip(counts, self.page_bytes)) * self.paged_layers)

    def larger(self, counts: Sequence[int]) -> list[list[int]]:
        """Page counts of at least these, the best first.

        On the coarse ladder and at least doubled, so that few sizes are ever compiled; on the fine one; as
        few as possible.
        """
        pools = next((x.pools for x in self.state.layers if x.pools), ())
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
        self.state, self.sized = layout.resized(self.state, counts), True
        self._look()

    def short_by(self, steps: int) -> list[int]:
        """Pages that each kind of pool lacks, if so many steps stored every token; [] without pools."""
        if not self.sizes:
            return []
        places, kinds = [place for place in self.places if place is not None], len(self.sizes)
        coming = np.asarray([min(steps, place.job.left) for place in places], int)
        most = np.asarray([self._most(place.job.policy) for place in places], int).reshape(len(places), kinds)
        lack = [0] * kinds
        for index, lists in enumerate(self.known.lists):
            kind, live = index % kinds, lists[self.rows]
            after = np.minimum(live + coming[:, None, None], most[:, kind, None, None])
            more = self._pages_for(np.maximum(after, live), kind) - self._pages_for(live, kind)
            lack[kind] = max(lack[kind], int((more.sum(axis=0) - self.known.free[index]).max()))
        return lack

    def _pages_for(self, live: np.ndarray, kind: int) -> np.ndarray:
        """Pages that lists [..., K, R] of rows own on each device."""
        return layout.pages_for(live, self.sizes[kind], self.mesh.pools)

    def _most(self, policy: Policy) -> list[int]:
        """Slots that a list of a row holds at most, of each kind of pool."""
        bounds = decode.slot_bounds(policy, self.state.context, 1, self.sizes)
        full = [size * entries for size, entries in self.shape]
        return [most if bound is None else min(bound, most) for most, bound in zip(full, bounds)]

    # --- steps -----------------------------------------------------------------------------------------

    def step(self, steps: int, now: int) -> None:
        """Begins up to ``now`` tokens of every row, by the program of ``steps``; ``land`` waits for them."""
        self.state, drawn, known = segment(
            self.model.network,
            self._policies(),
            steps,
            self.model.params,
            self.weights,
            self.state,
            run_of(self.places, now),
        )
        self._flight = time.monotonic(), drawn, known

    @property
    def flying(self) -> bool:
        """Is a segment under way? Then rows neither come nor go, and ``known`` is what was before it."""
        return self._flight is not None

    def land(self) -> tuple[Drawn, float]:
        """The tokens of the segment that is under way, on the host, and the seconds that it took.

        Raises:
          PoolOverflowError: a token was lost, which the reservations exclude.
        """
        assert self._flight is not None  # noqa: S101  (the writer has begun it)
        begun, *coming = self._flight
        found, self.known = jax.device_get(coming)
        if self.known.overflow:  # it stays under way: whoever lands it next is told again
            raise PoolOverflowError(
                f"a lane of '{self.policy!r}' ran out of pages: its reservations are wrong."
            )
        self._flight, self.used = None, time.monotonic()
        return found, self.used - begun

    def _policies(self) -> Policy:
        """Of all rows, stacked; empty places have the lane's own."""
        key = [0 if place is None else place.order for place in self.places]
        if self._stacked is None or self._stacked[0] != key:
            mine = [self.policy if place is None else place.job.policy for place in self.places]
            self._stacked = key, stack(mine)
        return self._stacked[1]

    def program(self, steps: int, counts: Sequence[int] | None = None, shared: bool | None = None) -> Program:
        """The lane's segment, with pools of so many pages, which rows may share or may not."""
        counts = list(self.counts if counts is None else counts)
        shared = self.shared if shared is None else shared
        state = marked(layout.with_counts(self.state, counts), shared)
        key = ("segment", id(self), steps, tuple(counts), shared)
        return key, functools.partial(
            self._compile, steps, state, self._policies(), run_of(self.places, steps)
        )

    def _compile(self, steps: int, state: KVState, policies: Policy, run: Run) -> None:
        segment.lower(
            self.model.network, policies, steps, self.model.params, self.weights, state, run
        ).compile()
