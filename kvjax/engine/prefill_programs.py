"""What reading a prompt will run, to be compiled before it is read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from kvjax import decode
from kvjax.engine import pages as paging
from kvjax.engine.compiler import Program
from kvjax.engine.pages import Shorter
from kvjax.sharding.mesh import ONE
from kvjax.sharding.specs import ROWS
from kvjax.types import of_layer

if TYPE_CHECKING:
    from kvjax.engine.prefill import Prefill


def needed(prefill: Prefill) -> list[Program]:
    """What reading will run, to be compiled beforehand; of a whole prompt all that can be known."""
    own, common, request, shapes = prefill.structure, prefill.common, prefill.request, prefill.shapes
    policy, weights, mesh = request.policy, request.learned.weights, shapes.mesh
    if not prefill.whole:
        weights, policy = request.learned.after_prompt(policy).weights, policy.after_prompt
    network, params = prefill.model.network, prefill.model.params
    programs, within, rest = _beginning(prefill), network.at(shapes.context), decode.outer(params)
    dtype, dim, placed = params["embed"].dtype, params["embed"].shape[1], shapes.length.sharding
    last = jax.ShapeDtypeStruct((1, dim), dtype, sharding=placed)
    fed = jax.ShapeDtypeStruct((1,), bool, sharding=placed)
    ending = (network, policy.after_prompt, rest, last, shapes.confidence, fed, mesh)
    logits = own.logits.shapes(*ending)[0] if prefill.logits is None else prefill.logits
    first = (logits, request.sampling, np.zeros(1, bool), np.zeros(1, np.int32))
    if request.guide is None:
        programs.append(common.first.program(*first))
    else:
        programs.append(own.guided_draw.program(*first, np.ones(1, bool), request.guide.allowed()[None]))
    if prefill.done:
        return programs
    programs.append(own.logits.program(*ending))
    if prefill.borders:
        programs.append(own.copied.program(shapes))
    if weights:
        programs.append(own.by_layer.program(policy, weights, network.num_layers))
    by_layer = own.by_layer.shapes if mesh == ONE else own.by_layer
    layers = decode.layer_calls(network, policy, params, weights, by_layer)
    narrow, whole = decode.widths_behind(len(prefill.tokens), prefill.seen)
    widths = {narrow} if prefill.whole else {width for _, width in prefill.pieces()}
    for width in sorted(widths):
        by_row = None if mesh == ONE else mesh.sharding(ROWS)
        x = jax.ShapeDtypeStruct((1, width, dim), dtype, sharding=by_row)
        tokens, length, total = np.zeros((1, width), np.int32), shapes.length, shapes.total
        programs.append(common.embed.program(within, rest, length, tokens, mesh))
        programs.append(common.after.program(x, length, total, last, mesh))  # a count is as a total
        for index, (call, cache) in enumerate(zip(layers, shapes.layers)):
            if prefill.whole:
                where = (
                    of_layer(within, index),
                    policy,
                    network.windows[index],
                    cache.ring.window,
                    *call[1:],
                )
                seeds = jax.ShapeDtypeStruct((1,), np.uint32, sharding=placed)
                if prefill.held is not None:
                    assert prefill.held.keys is not None
                    known = (*prefill.held.keys[index], np.int32(0))
                    programs.append(own.behind.program(*where, x, *known, total, seeds, whole))
                elif policy.holds_prompt:
                    programs += _held_whole(prefill, within, where, x, total, seeds)
                else:
                    programs.append(own.prompt.program(*where, x, total, seeds, mesh, None))
            else:
                numbers = (length, length, total)
                programs.append(
                    own.chunk.program(of_layer(within, index), *call, policy, cache, x, *numbers, mesh=mesh)
                )
        if prefill.ranked:
            part = min(width, prefill.width)
            programs.append(common.piece.program(x, np.int32(0), part))
            outputs = jax.ShapeDtypeStruct((part, dim), dtype)
            programs.append(common.ranks.program(network, params, outputs, np.zeros(part, np.int32)))
    return programs


def _held_whole(
    prefill: Prefill, within: Any, where: tuple[Any, ...], x: Any, total: Any, seeds: Any
) -> list[Program]:
    """What a layer runs of a prompt that is held whole; over several devices calls find most of it."""
    own, mesh = prefill.structure, prefill.shapes.mesh
    network, policy, window, _, block, weights, index = where
    again = policy.eviction.replays
    hold: tuple[Any, ...] = (network, window, block, x, total, mesh, False)
    if not again:
        hold = (network, policy, window, block, weights, index, x, total, seeds, mesh, None)
    programs = [(own.hold if again else own.rank).program(*hold)]
    if mesh != ONE:
        return programs
    held, target = (own.hold if again else own.rank).shapes(*hold)[1], None
    if again:
        rest, dim = decode.outer(prefill.model.params), x.shape[2]
        tokens = prefill.pieces_again()[0][0]
        y = jax.ShapeDtypeStruct((*tokens.shape, dim), x.dtype)
        replay = (network, policy, window, block, index, y, *held, total, total, total, total, mesh)
        programs.append(prefill.common.embed.program(within, rest, total, tokens, mesh))
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


def _beginning(prefill: Prefill) -> list[Program]:
    """What ``begin`` runs."""
    own, start, counts = prefill.structure, prefill.start, prefill.counts
    if start is None:
        return [own.make.program(1, tuple(counts))]
    state = start.row
    if isinstance(start, Shorter):
        return [own.shortened.program(state, np.int32(0), tuple(counts))]
    programs = [own.copied.program(state)]
    if counts != paging.page_counts(state):
        pools = [pages for layer in state.layers for pages in layer.pools]
        sizes = counts * (len(pools) // max(1, len(counts)))
        programs += [own.resize.program(x, n, state.mesh) for x, n in zip(pools, sizes)]
    return programs
