"""Prefill, step, generate: pure functions over a donated state, and the host loops around them.

Nothing here knows a model family or a method: the network and the policy arrive as values. On the host
there are only loops over chunks, layers (whole-prompt prefill) and segments of up to 64 steps; page
counts are read between them, never inside.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import ageing, metrics
from kvjax import layer as layers
from kvjax.cache import pool
from kvjax.cache import ring as rings
from kvjax.cache import state as states
from kvjax.cache.ring import Entry
from kvjax.cache.state import KVState, LayerCache
from kvjax.learned import WeightsError, missing, weights_for
from kvjax.policy import AdmitAll, Native, Policy
from kvjax.sampling import Sampling, sample, sampling
from kvjax.types import EMPTY, Heads, Network, Params, Weighted, pytree

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int

PAGE, LONG_PAGE = 64, 256
"""Fewest and most slots of a page, unless told otherwise."""

CHUNK = 256
"""Default tokens of a prefill chunk."""

SEGMENT = 64
"""Most steps compiled into one program between two looks of the host."""

HORIZON = 512
"""Tokens for which a pool makes room when it has to grow while decoding; each growth is a compilation."""

Progress = Callable[[int, int], None]
"""Called with (done, all) units of prefill work: tokens, or layers."""


class RequestError(ValueError):
    """A prompt or a request that cannot be served."""


def bucket(n: int) -> int:
    """The size class of a context: the next power of two or 1.5 times one, at least 64."""
    size = 64
    while size < n:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size


def page_size(longest: int) -> int:
    """Default slots of a page for lists of up to ``longest``: 64, 128 or 256, where that leaves 64 pages."""
    page = PAGE
    while page < LONG_PAGE and longest >= 128 * page:
        page *= 2
    return page


def empty(
    network: Network,
    policy: Policy,
    *,
    rows: int,
    context: int,
    dtype: jnp.dtype,
    page: int | None = None,
    chunk_size: int = CHUNK,
) -> KVState:
    """A state that has seen nothing.

    Args:
      network: sizes of the model.
      policy: decides which rooms exist and what is kept with a slot.
      rows: B.
      context: most tokens a row will ever see.
      dtype: of keys and values, the model's own.
      page: slots of a page; by default ``page_size`` chooses.
      chunk_size: most tokens a row will be fed at a time.
    """
    dtype = jnp.dtype(dtype)
    heads, dim = network.num_kv_heads, network.head_dim

    def room(window: int | None) -> LayerCache:
        w = policy.window(context) if window is None else min(window, context)
        ring = rings.empty(rows, heads, w, dim, dtype, policy.keeps)
        if window is not None or not policy.paged(context):
            return LayerCache(ring=ring, pages=None, summary=None)
        summary = policy.completion.empty(rows, heads, dim, context)
        bounds = policy.bounds(context, chunk_size)
        held = []
        for storage, most in zip((Native(), policy.storage)[-len(bounds) :], bounds):
            longest = context if most is None else min(most, context)
            size = page_size(longest) if page is None else page
            held.append(
                pool.empty(
                    pages=1,
                    size=size,
                    rows=rows,
                    heads=heads,
                    lists=2 if policy.selection.splits else 1,
                    entries=max(1, -(-longest // size)),
                    head_dim=dim,
                    width=storage.width(dim),
                    dtype=storage.dtype(dtype),
                    scaled=storage.scaled,
                    meta=policy.keeps,
                    summary=policy.selection.summary_shapes(size, dim),
                )
            )
        return LayerCache(ring=ring, pages=None, summary=summary).with_rooms(held)

    return KVState(
        layers=tuple(room(window) for window in network.windows),
        length=jnp.zeros(rows, jnp.int32),
        total=jnp.zeros(rows, jnp.int32),
        peak=jnp.zeros(2, jnp.float32),
        context=context,
        chunk=chunk_size,
        confidence=jnp.zeros(rows, jnp.float32) if policy.budget.needs_logits else None,
    )


def _site(network: Network, policy: Policy, weights: Params, index: int, state: KVState) -> layers.Site:
    mine, window = _at_layer(policy, weights, index), network.windows[index]
    return layers.Site(policy, mine, index, network.num_layers, window, state.total, state.confidence)


def _at_layer(policy: Policy, weights: Params, index: int) -> Params:
    """What each part reads of its learned weights at a layer, by place."""
    return {p.place: p.at_layer(weights[p.place], index) for p in policy.parts if p.place in weights}


def _checked(model: Weighted, policy: Policy, weights: Params | None) -> Params:
    """The learned weights, refused where the policy needs others or none."""
    weights = weights or {}
    for part in policy.learned:
        if part.place not in weights:
            raise missing(part, model)
        if len(weights[part.place]) != model.network.num_layers:
            raise WeightsError(
                f"weights[{part.place!r}] has {len(weights[part.place])} layers, the model has "
                f"{model.network.num_layers}. Give one entry a layer."
            )
        part.check_weights(weights[part.place], model.network)
    needless = set(weights) - {part.place for part in policy.learned}
    if needless:
        raise WeightsError(
            f"weights for {', '.join(sorted(needless))} are given, where the policy {policy!r} learns "
            "nothing. Leave them out, or use the policy they were trained for."
        )
    return weights


# --- one token -----------------------------------------------------------------------------------


def step(
    network: Network,
    policy: Policy,
    params: Params,
    weights: Params,
    state: KVState,
    tokens: Int[Array, " B"],
    active: Bool[Array, " B"],
) -> tuple[KVState, Float[Array, "B V"]]:
    """Feed one token to every active row; logits of the next. Pure; jit and donate ``state``.

    Args:
      network, policy: static.
      params: the model's weights.
      weights: the policy's learned weights, ``weights[place][layer]``.
      state: with pages reserved for the step (``reserve``).
      tokens: one id a row.
      active: rows that take part; the others leave no trace.
    """

    def visit(site: layers.Site, heads: Heads, room: LayerCache) -> tuple[Array, LayerCache]:
        return layers.step(site, room, heads, state.length, active)

    x, rooms = through(network, policy, params, weights, state, tokens[:, None], visit)
    logits = network.logits(params, x[:, 0])
    length = state.length + active.astype(jnp.int32)
    return with_confidence(
        policy, dataclasses.replace(state, layers=rooms, length=length), logits, active
    ), logits


def with_confidence(
    policy: Policy, state: KVState, logits: Float[Array, "B V"], fed: Bool[Array, " B"]
) -> KVState:
    """The state with what the budget makes of the logits that rows were ``fed`` for. Pure."""
    if state.confidence is None:
        return state
    return dataclasses.replace(
        state, confidence=jnp.where(fed, policy.budget.confidence(logits), state.confidence)
    )


def through(
    network: Network,
    policy: Policy,
    params: Params,
    weights: Params,
    state: KVState,
    tokens: Int[Array, "B T"],
    visit: Callable[[layers.Site, Heads, LayerCache], tuple[Array, LayerCache]],
) -> tuple[Float[Array, "B T D"], tuple[LayerCache, ...]]:
    """Walk T new tokens a row through the model, ``visit`` standing at every layer's seam. Pure.

    ``step`` and ``chunk`` are this with ``layer.step`` and ``layer.chunk`` as the visitor; give your own to
    look at what happens at a layer while it happens.

    Args:
      network, policy, params, weights, state: as in ``step``.
      tokens: T ids a row, at positions ``state.length`` and on.
      visit: (site, heads, room) to the mixed values and the room after.

    Returns:
      The last layer's output, and every layer's room.
    """
    positions = state.length[:, None] + jnp.arange(tokens.shape[1])[None, :]
    network = network.at(state.context)
    x = network.embed(params, tokens, positions)
    rooms = []
    for index, (block, room) in enumerate(zip(params["layers"], state.layers)):
        site = _site(network, policy, weights, index, state)

        def attend(
            _: int, heads: Heads, room: LayerCache, site: layers.Site = site
        ) -> tuple[Array, LayerCache]:
            return visit(site, heads, room)

        x, room = network.layer(block, index, x, positions, attend, room)
        rooms.append(room)
    return x, tuple(rooms)


# --- a prompt in pieces --------------------------------------------------------------------------


def chunk(
    network: Network,
    policy: Policy,
    params: Params,
    weights: Params,
    state: KVState,
    tokens: Int[Array, "B T"],
    count: Int[Array, " B"],
) -> tuple[KVState, Float[Array, "B D"]]:
    """Feed ``count`` of T tokens to every row; the last real token's output. Pure."""

    def visit(site: layers.Site, heads: Heads, room: LayerCache) -> tuple[Array, LayerCache]:
        return layers.chunk(site, room, heads, state.length, count)

    given = dataclasses.replace(state, confidence=None)  # no logits produced these tokens
    x, rooms = through(network, policy, params, weights, given, tokens, visit)
    after = dataclasses.replace(state, layers=rooms, length=state.length + count)
    last = jnp.maximum(count - 1, 0)[:, None, None]
    return after, jnp.take_along_axis(x, last, axis=1)[:, 0]


_STATIC = ("network", "policy")
_chunk = jax.jit(chunk, static_argnames=_STATIC, donate_argnames="state")
step_program = jax.jit(step, static_argnames=_STATIC, donate_argnames="state")
"""``step`` compiled with its state donated, for loops of one's own; ``segment`` is what ``stream`` runs."""


@functools.partial(jax.jit, static_argnames="network")
def _logits(network: Network, params: Params, x: Float[Array, "B D"]) -> Float[Array, "B V"]:
    return network.logits(params, x)


def prefill(
    model: Weighted,
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    *,
    context: int | None = None,
    chunk_size: int = CHUNK,
    page: int | None = None,
    weights: Params | None = None,
    progress: Progress | None = None,
) -> tuple[KVState, Float[Array, "B V"]]:
    """Read the prompts; the compressed state and the logits of each row's next token.

    Policies that decide on arrival read in chunks, in bounded memory; policies that score after full
    attention read the whole prompt layer by layer, each layer compressed before the next one runs.

    Args:
      model: a network and its weights.
      policy: what to keep.
      prompts: token ids per row, any lengths of at least 1.
      context: most tokens a row will ever see (prompt and new ones); by default the prompts' size class.
      chunk_size: tokens a chunk.
      page: slots of a page; by default ``page_size`` chooses.
      weights: learned weights, for policies that have some: ``kvjax.weights_for(policy, model)``.
      progress: told how much is done.

    Raises:
      RequestError: an empty prompt, or one longer than the model or ``context`` allows.
      WeightsError: a policy that learns without its weights, or weights that do not fit.
    """
    weights = _checked(model, policy, weights)
    lengths = [len(prompt) for prompt in prompts]
    context = bucket(max(lengths, default=0)) if context is None else context
    _check_prompts(model.network, lengths, context)
    dtype = model.params["embed"].dtype
    if chunk_size < 1:
        raise RequestError(f"prefill(chunk_size={chunk_size}) reads nothing. Give 1 token or more.")
    rows = len(prompts)
    state = empty(
        model.network, policy, rows=rows, context=context, dtype=dtype, page=page, chunk_size=chunk_size
    )
    state = dataclasses.replace(state, total=jnp.asarray(lengths, jnp.int32))
    if policy.whole_prompt:
        return _prefill_whole(model, policy, state, prompts, weights, progress)
    return extend(model, policy, state, prompts, weights=weights, progress=progress)


def _check_prompts(network: Network, lengths: list[int], context: int) -> None:
    if not lengths:
        raise RequestError("prefill(prompts=[]) has no row to read. Give at least one prompt.")
    for row, n in enumerate(lengths):
        if n < 1:
            raise RequestError(f"prefill: row {row} is empty. Give every row at least one token.")
        if n > network.max_positions:
            raise RequestError(
                f"prefill: row {row} has {n} tokens, the model was trained for {network.max_positions}. "
                "Shorten the prompt, or use a model with a longer context."
            )
        if n > context:
            raise RequestError(f"prefill(context={context}): row {row} has {n} tokens. Raise context.")


def _check_room(call: str, state: KVState, more: np.ndarray) -> None:
    """Refuse tokens for which the state has no place (a ring would silently forget, a list overflow)."""
    if len(more) != state.rows or more.max(initial=0) < 1:
        raise RequestError(
            f"{call}: {len(more)} rows of up to {more.max(initial=0)} tokens for a state of {state.rows} "
            "rows. Give every row of the state a list, at least one of them not empty."
        )
    after = np.asarray(state.length) + more
    if after.max() > state.context:
        raise RequestError(
            f"{call}: row {int(after.argmax())} would reach {int(after.max())} tokens, the state was made "
            f"for context={state.context}. Pass a larger context to prefill."
        )


def padded(prompts: Sequence[Sequence[int]], width: int) -> np.ndarray:
    """Token ids right-padded with 0, int32 [B, width]."""
    out = np.zeros((len(prompts), width), np.int32)
    for row, prompt in enumerate(prompts):
        out[row, : len(prompt)] = np.asarray(prompt, np.int32)
    return out


def extend(
    model: Weighted,
    policy: Policy,
    state: KVState,
    prompts: Sequence[Sequence[int]],
    *,
    weights: Params | None = None,
    progress: Progress | None = None,
) -> tuple[KVState, Float[Array, "B V"]]:
    """Feed more tokens to a state, chunk by chunk (``state.chunk``); rows may differ in length.

    Args:
      model, policy, weights, progress: as in ``prefill``.
      state: donated.
      prompts: token ids per row; an empty row is left as it is and its logits are meaningless.

    Raises:
      RequestError: nothing to feed, another number of rows, or more tokens than ``state.context`` allows.
    """
    weights = _checked(model, policy, weights)
    lengths, chunk_size = np.asarray([len(prompt) for prompt in prompts]), state.chunk
    _check_room("extend", state, lengths)
    longest = int(lengths.max())
    tokens = padded(prompts, -(-longest // chunk_size) * chunk_size)
    last: Array | None = None
    # Where everything is admitted the need is known: all of it at once, one size, one program.
    ahead = longest if policy.admission == AdmitAll() and policy.on_arrival else chunk_size
    for start in range(0, longest, chunk_size):
        count = np.clip(lengths - start, 0, chunk_size).astype(np.int32)
        state = reserve(policy, state, min(ahead, longest - start), chunk_size)
        piece = tokens[:, start : start + chunk_size]
        state, x = _chunk(model.network, policy, model.params, weights, state, piece, count)
        ended = jnp.asarray(count > 0)[:, None]
        last = x if last is None else jnp.where(ended, x, last)
        if progress:
            jax.block_until_ready(x)  # reported is what is done, not what is asked for
            progress(min(start + chunk_size, longest), longest)
    state = metrics.with_peak(states.fit(metrics.with_peak(state)))
    assert last is not None  # noqa: S101  (at least one token was fed)
    logits = _logits(model.network, model.params, last)
    return with_confidence(policy, state, logits, jnp.asarray(lengths > 0)), logits


def reserve(policy: Policy, state: KVState, tokens: int, arriving: int, ahead: int = 0) -> KVState:
    """Make sure that ``tokens`` more tokens a row fit, ``arriving`` at a time, whatever is admitted.

    A pool that has to grow makes room for ``ahead`` tokens (decoding) or at least doubles (prefill).
    """
    most = policy.bounds(state.context, arriving)
    return states.reserve(state, tokens, most, ahead=ahead, doubling=arriving > 1)


# --- a whole prompt, layer by layer --------------------------------------------------------------


@functools.partial(jax.jit, static_argnames=("network", "policy", "window", "ring"))
def _prompt_layer(
    network: Network,
    policy: Policy,
    window: int | None,
    ring: int,
    block: Params,
    weights: Params,
    index: Int[Array, ""],
    x: Float[Array, "B T D"],
    total: Int[Array, " B"],
) -> tuple[Float[Array, "B T D"], Entry, Int[Array, "B K"]]:
    """One layer over the whole prompt; ``index`` is traced, so that all layers share one program."""
    at = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
    pos = jnp.where(at < total[:, None], at, EMPTY)
    site = layers.Site(policy, weights, index, network.num_layers, window, total)

    def attend(_: int, heads: Heads, judged: Entry | None) -> tuple[Array, Entry | None]:
        del judged
        return layers.prompt(site, heads, pos)

    # Layers of one window share this program: the first of them stands for all.
    x, judged = network.layer(block, network.windows.index(window), x, at, attend, None)
    assert judged is not None  # noqa: S101  (attend has run)
    return x, judged, layers.survivors(judged, total, ring)


@functools.partial(jax.jit, static_argnames=("policy", "layers_", "pages"))
def _pack_layer(
    policy: Policy,
    layers_: int,
    pages: tuple[int, ...],
    weights: Params,
    room: LayerCache,
    judged: Entry,
    index: Int[Array, ""],
    total: Int[Array, " B"],
) -> LayerCache:
    """Store a judged layer in pools of so many pages, one for each of its rooms."""
    site = layers.Site(policy, weights, index, layers_, None, total)
    room = room.with_rooms([pool.resize(held, count) for held, count in zip(room.rooms, pages)])
    return layers.pack(site, room, judged, total)


def _prefill_whole(
    model: Weighted,
    policy: Policy,
    state: KVState,
    prompts: Sequence[Sequence[int]],
    weights: Params,
    progress: Progress | None,
) -> tuple[KVState, Float[Array, "B V"]]:
    network, params, total = model.network.at(state.context), model.params, state.total
    width = bucket(max(len(prompt) for prompt in prompts))
    positions = jnp.broadcast_to(jnp.arange(width), (len(prompts), width))
    x = network.embed(params, jnp.asarray(padded(prompts, width)), positions)
    rooms = list(state.layers)
    for index, block in enumerate(params["layers"]):
        mine = _at_layer(policy, weights, index)
        room, window = rooms[index], network.windows[index]
        at = jnp.asarray(index)
        x, judged, kept = _prompt_layer(network, policy, window, room.ring.window, block, mine, at, x, total)
        # The one look of the host between two layers.
        need = tuple(pool.coarse_class(pages) for pages in ageing.pages_for(policy, room, np.asarray(kept)))
        whole = sum(leaf.nbytes for leaf in jax.tree.leaves(judged))
        before = metrics.allocated(tuple(rooms))
        rooms[index] = _pack_layer(policy, network.num_layers, need, mine, room, judged, at, total)
        state = metrics.raise_peak(state, whole, before + whole + metrics.allocated((rooms[index],)))
        if progress:
            progress(index + 1, network.num_layers)
    # A buffer of its own: the state is donated, and no buffer can be donated twice.
    state = dataclasses.replace(state, layers=tuple(rooms), length=jnp.copy(total))
    state = states.fit(metrics.with_peak(state))  # raises if a pool was too small
    last = jnp.take_along_axis(x, (total - 1)[:, None, None], axis=1)[:, 0]
    logits = _logits(network, params, last)
    return with_confidence(policy, state, logits, jnp.ones(len(prompts), bool)), logits


# --- generate ------------------------------------------------------------------------------------


@pytree()
@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """Rows that are being written.

    Attributes:
      token: the last token of each row, written out but not yet fed.
      done: rows that met a stop token or their limit.
      left: tokens each row may still write.
      stops: ids that end a row, EMPTY-padded.
      how: sampling parameters.
    """

    token: Int[Array, " B"]
    done: Bool[Array, " B"]
    left: Int[Array, " B"]
    stops: Int[Array, " Z"]
    how: Sampling


def _advance(run: Run, logits: Float[Array, "B V"], length: Int[Array, " B"]) -> tuple[Run, Int[Array, " B"]]:
    """Draw the token that will stand at position ``length``; EMPTY for rows that were done."""
    drawn = sample(logits, run.how, length)
    fresh = jnp.where(run.done, EMPTY, drawn)
    left = run.left - (~run.done).astype(jnp.int32)
    done = run.done | (left <= 0) | jnp.any(drawn[:, None] == run.stops[None, :], axis=-1)
    return dataclasses.replace(run, token=jnp.where(run.done, run.token, drawn), done=done, left=left), fresh


_first = jax.jit(_advance)


@functools.partial(jax.jit, static_argnames=(*_STATIC, "steps"), donate_argnames=("state",))
def segment(
    network: Network, policy: Policy, steps: int, params: Params, weights: Params, state: KVState, run: Run
) -> tuple[KVState, Run, Int[Array, "B steps"]]:
    """Up to ``steps`` tokens for every row that is not done, in one program."""
    out = jnp.full((state.rows, steps), EMPTY, jnp.int32)

    def go(carry: tuple[Array, KVState, Run, Array]) -> Array:
        i, _, run, _ = carry
        return (i < steps) & ~jnp.all(run.done)

    def one(carry: tuple[Array, KVState, Run, Array]) -> tuple[Array, KVState, Run, Array]:
        i, state, run, out = carry
        state, logits = step(network, policy, params, weights, state, run.token, ~run.done)
        run, fresh = _advance(run, logits, state.length)
        return i + 1, state, run, out.at[:, i].set(fresh)

    _, state, run, out = jax.lax.while_loop(go, one, (jnp.asarray(0), state, run, out))
    return state, run, out


@dataclasses.dataclass
class Generation:
    """What ``generate`` returns.

    Attributes:
      tokens: new token ids per row, a stop token included.
      state: the KV state after the last fed token.
    """

    tokens: list[list[int]]
    state: KVState


def stream(
    model: Weighted,
    policy: Policy,
    state: KVState,
    logits: Float[Array, "B V"],
    *,
    max_new_tokens: int | Sequence[int],
    how: Sampling | None = None,
    stops: Sequence[int] = (),
    weights: Params | None = None,
    every: int = SEGMENT,
) -> Iterator[tuple[np.ndarray, KVState]]:
    """Continue a prefilled state, yielding every few tokens.

    Args:
      model, policy, weights: as in ``prefill``.
      state: donated; use the one that comes with each piece.
      logits: of each row's next token.
      max_new_tokens: for all rows, or one number a row.
      how: sampling parameters; greedy by default.
      stops: token ids that end a row.
      every: most tokens a piece; the host looks at the device once a piece.

    Yields:
      (int32 [B, n] new tokens with EMPTY where a row had ended, the state after them).
    """
    weights, rows = _checked(model, policy, weights), state.rows
    limit = np.broadcast_to(np.asarray(max_new_tokens, np.int32), (rows,))
    if limit.min() < 1:
        raise RequestError(f"stream(max_new_tokens={max_new_tokens}) writes nothing. Give 1 or more.")
    if limit.max() > 1:  # the last new token of a row is never fed
        _check_room("stream", state, limit - 1)
    run = Run(
        token=jnp.zeros(rows, jnp.int32),
        done=jnp.zeros(rows, bool),
        left=jnp.asarray(limit),
        stops=jnp.asarray([*stops] or [EMPTY], jnp.int32),
        how=sampling(rows) if how is None else how,
    )
    run, fresh = _first(run, logits, state.length)
    # Where everything is kept the context bounds the pool: one size for all prompts of a size class.
    keeps_all = policy.admission == AdmitAll() and policy.on_arrival
    written = 1
    yield np.asarray(fresh)[:, None], state
    while not bool(np.asarray(run.done).all()):
        left = int(limit.max()) - written
        ahead = state.context if keeps_all else min(HORIZON, left)
        state = reserve(policy, state, min(every, left), 1, ahead=ahead)
        state, run, out = segment(model.network, policy, every, model.params, weights, state, run)
        found = np.asarray(out)
        written += every
        yield found[:, (found != EMPTY).any(axis=0)], state


def _tell_of_windows(network: Network, policy: Policy) -> None:
    sliding = [f"{i}: {window}" for i, window in enumerate(network.windows) if window is not None]
    if sliding and policy != Policy():
        warnings.warn(
            f"the policy has no say in layers whose own sliding window rules ({len(sliding)} of "
            f"{network.num_layers}; layer: tokens = {', '.join(sliding)}).",
            stacklevel=3,
        )


def generate(
    model: Weighted,
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 64,
    temperature: float | Sequence[float] = 0.0,
    top_k: int | Sequence[int] = 0,
    top_p: float | Sequence[float] = 1.0,
    seed: int = 0,
    stops: Sequence[int] = (),
    chunk_size: int = CHUNK,
    page: int | None = None,
    weights: Params | None = None,
) -> Generation:
    """Prompts in, new tokens out.

    Args:
      model: a network and its weights.
      policy: what the KV cache keeps.
      prompts: token ids per row.
      max_new_tokens: most new tokens a row.
      temperature, top_k, top_p, seed: see ``kvjax.sampling``.
      stops: token ids that end a row.
      chunk_size, page: as in ``prefill``.
      weights: the policy's learned weights; by default those that the model ships.

    Raises:
      RequestError: as in ``prefill``, and when prompt and new tokens exceed the model's context.
      WeightsError: a policy that learns, and no weights that fit.
    """
    weights = weights_for(policy, model) if weights is None else weights
    if max_new_tokens < 1:
        raise RequestError(f"generate(max_new_tokens={max_new_tokens}) writes nothing. Give 1 or more.")
    how = sampling(len(prompts), temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    longest = max((len(prompt) for prompt in prompts), default=0)
    if longest + max_new_tokens > model.network.max_positions:
        raise RequestError(
            f"generate(max_new_tokens={max_new_tokens}) after {longest} prompt tokens exceeds the model's "
            f"{model.network.max_positions} positions. Ask for fewer tokens, or shorten the prompt."
        )
    _tell_of_windows(model.network, policy)
    context = bucket(longest + max_new_tokens)
    state, logits = prefill(
        model, policy, prompts, context=context, chunk_size=chunk_size, page=page, weights=weights
    )
    out: list[list[int]] = [[] for _ in prompts]
    pieces = stream(
        model, policy, state, logits, max_new_tokens=max_new_tokens, how=how, stops=stops, weights=weights
    )
    for piece, after in pieces:
        state = after
        for row, tokens in enumerate(piece):
            out[row] += [int(token) for token in tokens if token != EMPTY]
    return Generation(tokens=out, state=metrics.with_peak(state))
