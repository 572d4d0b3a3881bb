"""How much a state holds: contexts, pages, pools and chunks, the sizes that programs are compiled for.

What a pool of so many slots allocates is ``kvjax.cache.pool``'s; what a policy lets a KV head own is decided
here.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import catalogue
from kvjax.algebra import Every, Native, Policy, PolicyError
from kvjax.cache import hosted as hosting
from kvjax.cache import pool
from kvjax.cache import ring as rings
from kvjax.cache import state as states
from kvjax.cache.pages import Pages
from kvjax.cache.state import KVState, LayerCache
from kvjax.sharding.mesh import ONE, Mesh
from kvjax.sharding.specs import DATA, TENSOR, of_state
from kvjax.types import Network

if TYPE_CHECKING:
    from jaxtyping import Int

PAGE, LONG_PAGE = 64, 256
"""Fewest and most slots of a page, unless the caller gives others."""

CHUNK = 256
"""Default tokens of a prefill chunk."""

MAX_STEPS = 64
"""Most decode steps of one program, after which the host looks at the result."""

HORIZON = 512
"""Tokens for which a pool makes room when it has to grow while decoding; each growth is a compilation."""


def bucket(tokens: int, most: int | None = None) -> int:
    """The size class of a context: the next power of two or 1.5 times one, at least 64.

    At most ``most``, the positions of the model, where they are given.
    """
    size = max(64, pool.coarse_class(tokens))
    return size if most is None else min(size, most)


def page_size(longest: int) -> int:
    """Default slots of a page for lists of up to ``longest``: 64, 128 or 256, where that leaves 64 pages."""
    page = PAGE
    while page < LONG_PAGE and longest >= 128 * page:
        page *= 2
    return page


def padded(prompts: Sequence[Sequence[int] | np.ndarray], width: int) -> np.ndarray:
    """Token ids right-padded with 0, int32 [B, width]."""
    out = np.zeros((len(prompts), width), np.int32)
    for row, prompt in enumerate(prompts):
        out[row, : len(prompt)] = np.asarray(prompt, np.int32)
    return out


# --- what a KV head can own -----------------------------------------------------------------------


def most_slots(policy: Policy, context: int, arriving: int) -> int | None:
    """The most paged slots a KV head can own while ``arriving`` tokens at a time come in.

    None where only the tokens themselves can tell (learned admission).
    """
    bounds = (_by_context(policy, context), _by_budget(policy, context, arriving))
    return min((bound for bound in bounds if bound is not None), default=None)


def _by_context(policy: Policy, context: int) -> int | None:
    """All that the admission lets in, where it does not depend on the tokens."""
    if policy.admission.rejects_all:
        return policy.sinks
    return max(context - policy.window(context), 0) if policy.admission.idle else None


def _by_budget(policy: Policy, context: int, arriving: int) -> int | None:
    """What a budget that acts while decoding leaves, and what comes before it acts again."""
    if not policy.decides_later or policy.budget.most is None:
        return None
    window = policy.window(context)
    between = policy.budget.when.k if isinstance(policy.budget.when, Every) else 1
    return max(policy.budget.most, policy.sinks + window) - window + arriving + between - 1


def slot_bounds(
    policy: Policy, context: int, arriving: int, pages: Sequence[int] = (1, 1)
) -> tuple[int | None, ...]:
    """``most_slots`` for each pool of a layer: one, or exact slots and those demoted to codes.

    What a budget bounds is rounded up to a size class of pages of so many slots (``pages``, a pool each), so
    that budgets near each other share their programs.
    """
    by_context, by_budget = _by_context(policy, context), _by_budget(policy, context, arriving)
    exact = policy.exact_slots(policy.window(context))

    def bound(less: int, page: int) -> int | None:
        bounds = []
        if by_context is not None:
            bounds.append(max(by_context - less, 0))
        if by_budget is not None:
            slots = max(by_budget - less, 0)
            bounds.append(page * pool.size_class(-(-slots // page)) if slots else 0)
        return min(bounds, default=None)

    if not exact:
        return (bound(0, pages[0]),)
    # A slot is demoted when the exact ones are as many as they may be.
    most = bound(0, pages[0])
    return exact + arriving if most is None else min(exact + arriving, most), bound(exact, pages[-1])


def is_bounded(policy: Policy, state: KVState) -> bool:
    """Does everything stay, or a number of slots that no context changes?"""
    most, wider = (slot_bounds(policy, times * state.context, state.chunk) for times in (1, 2))
    return policy.on_arrival or (None not in most and most == wider)


def prompt_pages(policy: Policy, cache: LayerCache, stored: Int[np.ndarray, "B K"]) -> tuple[int, ...]:
    """Pages that suffice for each pool of a layer, when ``stored`` tokens a KV head outlive a prompt.

    Every list may end in a page of its own; how heads share a fixed sum does not change the size.
    """
    exact = stored
    if cache.demoted is not None:
        exact = np.minimum(stored, policy.exact_slots(cache.ring.window))
    return tuple(
        int(slots.sum()) // pages.size + slots.size * pages.table.shape[2]
        for pages, slots in zip(cache.pools, (exact, stored - exact))
    )


# --- states --------------------------------------------------------------------------------------


def empty(
    network: Network,
    policy: Policy | str,
    *,
    rows: int,
    context: int,
    dtype: jnp.dtype,
    page: int | None = None,
    chunk_size: int = CHUNK,
    mesh: Mesh = ONE,
) -> KVState:
    """A state that has seen nothing.

    Args:
      network: sizes of the model.
      policy: decides what a layer has, ring, pages, summary, and what is kept with a slot.
      rows: B.
      context: most tokens a row will ever see.
      dtype: of keys and values, the model's own.
      page: slots of a page; by default ``page_size`` chooses.
      chunk_size: most tokens a row will be fed at a time.
      mesh: the devices it lies on; must divide rows and KV heads.
    """
    policy = catalogue.policy(policy)
    sizes: dict[str, Any] = {"rows": rows, "context": context, "page": page, "chunk_size": chunk_size}
    make = functools.partial(empty_layers, network, policy, **sizes, dtype=dtype, mesh=mesh)
    numbers = {
        "length": np.zeros(rows, np.int32),
        "total": np.zeros(rows, np.int32),
        "peak": np.zeros(2, np.float32),
        "confidence": np.zeros(rows, np.float32) if policy.budget.needs_logits else None,
    }
    layers = make() if mesh.grid is None else jax.jit(make)()
    storage = policy.storage
    if storage.hosted and (why := hosting.absent(codes=not storage.exact)):
        raise PolicyError(f"{storage!r}: pages cannot lie in host memory here: {why}. Leave host out.")
    return KVState(
        layers=tuple(
            states.with_host(layer, policy.near(context, at), mesh) for at, layer in enumerate(layers)
        ),
        **mesh.put(numbers),  # compiles nothing
        context=context,
        chunk=chunk_size,
        structure=policy.structure,
        mesh=mesh,
    )


def empty_layers(
    network: Network,
    policy: Policy,
    *,
    rows: int,
    context: int,
    dtype: jnp.dtype,
    page: int | None = None,
    chunk_size: int = CHUNK,
    mesh: Mesh = ONE,
) -> tuple[LayerCache, ...]:
    """The layers of ``empty``. Pure: shapes alone can be asked for, of devices that are not here too."""
    heads, dim, dtype = network.num_kv_heads // mesh.size(TENSOR), network.head_dim, jnp.dtype(dtype)
    rows = rows // mesh.size(DATA)

    def layer(window: int | None) -> LayerCache:
        w = policy.window(context) if window is None else min(window, context)
        paged = window is None and policy.paged(context)
        query_heads = heads * network.num_heads // network.num_kv_heads
        queries = {name: (query_heads, slots) for name, slots in policy.queries.items() if paged}
        ring = rings.empty(rows, heads, w, dim, dtype, policy.keeps, policy.arrays, queries)
        if not paged:
            return LayerCache(ring=ring, pages=None, summary=None)
        summary = policy.completion.empty(rows, heads, dim, context)
        exactly = slot_bounds(policy, context, chunk_size)
        lists = [context if most is None else min(most, context) for most in exactly]
        sizes = [page_size(longest) if page is None else page for longest in lists]
        bounds = slot_bounds(policy, context, chunk_size, sizes)
        pools = []
        for storage, most, size in zip((Native(), policy.storage)[-len(bounds) :], bounds, sizes):
            longest = context if most is None else min(most, context)
            pools.append(
                pool.empty(
                    pages=1,
                    size=size,
                    rows=rows,
                    heads=heads,
                    lists=2 if policy.selection.splits else 1,
                    entries=max(1, -(-longest // size)),
                    **storage.layout(size, dim, dtype),
                    meta=policy.keeps,
                    arrays=policy.arrays,
                    summary=policy.selection.summary_shapes(size, dim),
                )
            )
        return LayerCache(ring=ring, pages=None, summary=summary).with_pools(pools)

    def layers() -> tuple[LayerCache, ...]:
        return tuple(layer(window) for window in network.windows)

    if mesh.grid is None:
        return layers()
    return mesh.each(layers, [], [], of_state(jax.eval_shape(layers)))


def page_sizes(state: KVState) -> list[int]:
    """Slots of a page, of each pool of a layer."""
    return next(([pages.size for pages in layer.pools] for layer in state.layers if layer.pools), [1])


def reserve(policy: Policy, state: KVState, tokens: int, arriving: int, ahead: int = 0) -> KVState:
    """Make sure that ``tokens`` more tokens a row fit, ``arriving`` at a time, whatever is admitted.

    A pool that has to grow makes room for ``ahead`` tokens (decoding) or at least doubles (prefill). Where
    tokens lie in host memory, full pages go there first, and pools do not grow ahead.
    """
    if state.hosted:
        state, ahead = states.sent(state), 0
    most = slot_bounds(policy, state.context, arriving, page_sizes(state))
    uneven = policy.budget.voted
    return states.reserve(state, tokens, most, ahead=ahead, doubling=arriving > 1, uneven=uneven)


def roomy(policy: Policy, state: KVState, arriving: int, tokens: int | None = None) -> KVState:
    """The state with pools that need not grow, of few sizes, so that many states share one program.

    Args:
      policy: whose state it is.
      state: left as it is.
      arriving: most tokens of a row that come at a time.
      tokens: of a row, that come; None: pools hold whatever comes, one size for all.
    """
    bounds = slot_bounds(policy, state.context, arriving, page_sizes(state))

    def full(pages: Pages, most: int | None) -> int:
        local = state.mesh.local(pages)
        rows, heads, lists, entries = local.table.shape
        # What ``reserve`` asks for at most: two lists may each end in a page of their own; where nothing
        # bounds a KV head, every list is given a page that is part full and one to come.
        spare = lists * (1 + -(-arriving // pages.size)) if most is None else lists - 1
        return max(local.count, rows * heads * (entries + spare))

    paged = [layer for layer in state.layers if layer.pools]
    sizes = [max(map(full, pages, bounds)) for pages in zip(*(layer.pools for layer in paged))]
    if tokens is not None:
        held = [layer for layer in reserve(policy, state, tokens, arriving).layers if layer.pools]
        kinds = zip(*(layer.pools for layer in held))
        needed = [max(state.mesh.local(pages).count for pages in kind) for kind in kinds]
        sizes = [_halved(max(size, need), need) for size, need in zip(sizes, needed)]

    layers = [
        layer.with_pools([states.resize(pages, size, state.mesh) for pages, size in zip(layer.pools, sizes)])
        for layer in state.layers
    ]
    return dataclasses.replace(state, layers=tuple(layers))


def _halved(size: int, need: int) -> int:
    """The size, halved while it is enough."""
    while -(-size // 2) >= need and size > 1:
        size = -(-size // 2)
    return size
