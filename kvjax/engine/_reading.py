"""A prompt on its way into a row of its own, a chunk or a layer at a time."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import decode
from kvjax.algebra import Policy
from kvjax.cache import pool
from kvjax.cache.state import KVState, LayerCache
from kvjax.engine import _layout as layout
from kvjax.engine._segment import prompt_log_probabilities
from kvjax.sharding.mesh import ONE
from kvjax.sharding.specs import ROWS
from kvjax.types import Params, Weighted

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

SHORT = 64
"""Width of a chunk that holds no more."""

Ranks = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Of the prompt's tokens but the first: their log-probability, the likeliest ids, theirs."""


class Reading:
    """One prompt that is being read.

    Attributes:
      whole: is the prompt read layer by layer?
      ranked: are the log-probabilities of its tokens looked at?
      state: after what has been read, one row; final once ``done``.
      logits: of the token after the prompt, once ``done``.
      ranks: of the prompt's tokens, where asked for, once ``done``.
      snapshots: states at the borders that were asked for, by tokens read.
    """

    def __init__(
        self,
        model: Weighted,
        policy: Policy,
        weights: Params,
        tokens: Int[np.ndarray, " T"],
        state: KVState,
        *,
        begun: int = 0,
        seed: int = 0,
        ranked: bool = False,
        borders: Sequence[int] = (),
        width: int,
    ) -> None:
        """Reads nothing yet.

        Args:
          model, policy, weights: as in ``kvjax.prefill``; the policy in its lane's layout.
          tokens: the prompt, those read already included.
          state: a row that has seen ``begun`` of them; used up.
          seed: of the request, for policies that draw.
          ranked: look at the log-probabilities of the prompt's tokens.
          borders: numbers of tokens after which the state is to be kept (chunk borders).
          width: tokens a chunk.
        """
        self.model, self.policy, self.weights, self.tokens = model, policy, weights, tokens
        self.state, self.begun, self.width = state, begun, width
        self.logits: Array | None = None
        self.ranks: Ranks | None = None
        self.snapshots: dict[int, KVState] = {}
        self.done = False
        self.ranked, self._borders = ranked, frozenset(borders)
        self._seeds = np.asarray([seed & 0xFFFFFFFF], np.uint32)
        self._found: list[tuple[Any, ...]] = []
        self.whole = policy.whole_prompt and not begun
        self._units = self._layers() if self.whole else self._chunks()

    def unit(self) -> None:
        """Reads one chunk, or takes the prompt through one layer; waits for it."""
        try:
            next(self._units)
        except StopIteration:
            self.done = True
            if self.ranked:
                logprob, best, theirs = (np.concatenate(x) for x in zip(*jax.device_get(self._found)))
                many = len(self.tokens) - 1  # nothing follows the last one; beyond are pads of the last piece
                self.ranks = logprob[:many], best[:many], theirs[:many]
        jax.block_until_ready(self.state.length)

    def through(self) -> None:
        """Reads all that is left."""
        while not self.done:
            self.unit()

    def _chunks(self) -> Iterator[None]:
        network, params = self.model.network, self.model.params
        layers = decode.layer_calls(network, self.policy, params, self.weights)
        last = self.state.mesh.put(np.zeros((1, params["embed"].shape[1]), params["embed"].dtype))
        for begin, width in pieces(self.begun, len(self.tokens), self.width):
            count = min(width, len(self.tokens) - begin)
            piece = decode.padded([self.tokens[begin : begin + count]], width)
            self.state, last, x = decode.chunk_outputs(
                network, self.policy, params, layers, self.state, piece, np.asarray([count], np.int32), last
            )
            if self.ranked:
                following = decode.padded([self.tokens[begin + 1 : begin + 1 + width]], width)[0]
                self._found.append(prompt_log_probabilities(network, params, x[0], following))
            if begin + count in self._borders:
                self.snapshots[begin + count] = layout.copied(self.state)
            if begin + count < len(self.tokens):
                yield
        self._end(last)

    def _layers(self) -> Iterator[None]:
        reading = decode.read_layers(
            self.model, self.policy, self.state, [self.tokens], self.weights, self._seeds, fitted=False
        )
        while True:
            try:
                next(reading)
            except StopIteration as end:
                self.state, last, x = end.value
                break
            yield
        if self.ranked:
            for begin in range(0, len(self.tokens), self.width):
                following = decode.padded([self.tokens[begin + 1 : begin + 1 + self.width]], self.width)[0]
                piece = _piece(x, begin, self.width)
                found = prompt_log_probabilities(self.model.network, self.model.params, piece, following)
                self._found.append(found)
        self._end(last)

    def _end(self, last: Array) -> None:
        fed = self.state.mesh.put(np.ones(1, bool))
        self.state, self.logits = decode.with_logits(self.model, self.policy, self.state, last, fed)


@functools.partial(jax.jit, static_argnums=2)
def _piece(x: Float[Array, "1 T D"], begin: Any, width: int) -> Float[Array, "W D"]:
    return jax.lax.dynamic_slice_in_dim(jnp.pad(x[0], ((0, width), (0, 0))), begin, width)


def pieces(begun: int, end: int, width: int) -> list[tuple[int, int]]:
    """(begin, width) of the chunks that tokens ``begun`` to ``end`` are read in.

    Borders are ``width`` apart; what is left at the end is read in a short chunk if it fits into one.
    """
    starts = range(begun, end, width)
    return [(at, width if end - at > SHORT else min(SHORT, width)) for at in starts]


def empty_for(policy: Policy, row: KVState, tokens: int) -> KVState:
    """An empty row with pages enough for a prompt that is read in chunks; few sizes for all prompts.

    Args:
      policy: what it keeps.
      row: of ``layout.empty_row``.
      tokens: of the prompt.
    """
    row = with_total(layout.copied(row), tokens)
    if policy.whole_prompt:
        return row  # its pools are made layer by layer
    return layout.resized(row, sizes_for(policy, row, tokens))


def sizes_for(policy: Policy, row: KVState, tokens: int) -> list[int]:
    """Pages of the pools that ``empty_for`` gives."""
    need = layout.most_pages(policy, row, layout.nothing(row), tokens, row.chunk)
    return [pool.coarse_class(max(1, pages)) for pages in need]


def continued(policy: Policy, state: KVState, tokens: int) -> KVState:
    """A copy of a row that has been read, with pages for so many tokens more (chunk by chunk)."""
    lists = [np.asarray(pages.length)[0] for layer in state.layers for pages in layer.pools]
    need = layout.most_pages(policy, state, lists, tokens, state.chunk)
    more = [pool.coarse_class(max(1, pages)) for pages in need]
    have = layout.counts(state)
    counts = [max(want, held) for want, held in zip(more, have)]
    copy = layout.copied(state)
    return copy if counts == have else layout.resized(copy, counts)


def with_total(state: KVState, tokens: int) -> KVState:
    """The row of a prompt of so many tokens."""
    return dataclasses.replace(state, total=state.mesh.put(np.asarray([tokens], np.int32)))


Program = tuple[Any, Callable[[], Any]]
"""A key, and what compiles the program of that key."""


def programs(reading: Reading) -> list[Program]:
    """The programs that a reading will run, for those who compile them beforehand.

    What reads a whole prompt depends on what is found in it. So the first prompt of a size is read where it
    would be compiled, to its end. Two threads must not run programs of several devices: there it is not.
    """
    if reading.whole:
        if reading.state.mesh != ONE:
            return []
        most = pool.coarse_class(len(reading.tokens))  # of a prompt this long pages are of few sizes
        sizes = tuple(leaf.shape for leaf in jax.tree.leaves((reading.state, reading.weights)))
        kind = str(jax.tree.structure((reading.policy, reading.state)))
        return [(("prompt", kind, sizes, most, reading.ranked), reading.through)]
    widths = {width for _, width in pieces(reading.begun, len(reading.tokens), reading.width)}
    shapes = layout.placed(jax.tree.map(_shape, reading.state))
    layers = decode.layer_calls(reading.model.network, reading.policy, reading.model.params, reading.weights)
    found = {}
    for width in sorted(widths):
        for site, cache in zip(layers, shapes.layers):
            sizes = tuple(leaf.shape for leaf in jax.tree.leaves(cache))
            key = ("chunk", str(jax.tree.structure((reading.policy, cache))), sizes, width, site.kind)
            found[key] = functools.partial(_compile_chunk, reading, shapes, site, cache, width)
    return list(found.items())


def _shape(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _compile_chunk(
    reading: Reading, state: KVState, site: decode.LayerCall, cache: LayerCache, width: int
) -> None:
    network, embed = reading.model.network.at(state.context), reading.model.params["embed"]
    mesh = state.mesh
    where = None if mesh == ONE else mesh.sharding(ROWS)
    x = jax.ShapeDtypeStruct((1, width, embed.shape[1]), embed.dtype, sharding=where)
    numbers = state.length, state.length, state.total  # a count is as a length
    decode.chunk_layer.lower(network, *site, reading.policy, cache, x, *numbers, mesh=mesh).compile()
