"""Together: the next chunks of several prompts, read by one program a layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from kvjax import decode
from kvjax.engine.compiler import Program
from kvjax.engine.prefill import Prefill
from kvjax.sharding.mesh import ONE
from kvjax.types import of_layer


class Together:
    """The next chunks of several prompts (``Prefill.alike``), to be read by one program a layer."""

    def __init__(self, prefills: Sequence[Prefill]) -> None:
        """Reads nothing; all have begun."""
        self.prefills = list(prefills)
        first = prefills[0]
        own, common, model = first.structure, first.common, first.model
        self._programs = decode.ChunkPrograms(common.embed, own.rows, common.after_rows)
        self._network, self._params = model.network, model.params
        pieces = [prefill.piece() for prefill in prefills]
        self._tokens = decode.padded([tokens for *_, tokens in pieces], pieces[0][1])
        self._length = np.asarray([begin for begin, *_ in pieces], np.int32)
        self._count = np.asarray([len(tokens) for *_, tokens in pieces], np.int32)

    def programs(self) -> list[Program]:
        """What it runs."""
        states = [prefill.state for prefill in self.prefills]
        within, rest = self._network.at(states[0].context), decode.outer(self._params)
        embed, layer, after = self._programs
        x = jax.ShapeDtypeStruct((*self._tokens.shape, rest["embed"].shape[1]), rest["embed"].dtype)
        programs = [embed.program(within, rest, self._length, self._tokens, ONE)]  # type: ignore[attr-defined]
        policies = tuple(prefill.request.policy.after_prompt for prefill in self.prefills)
        totals = tuple(state.total for state in states)
        seen = set[tuple[Any, ...]]()
        calls = zip(*(prefill.calls() for prefill in self.prefills))
        for index, (of_rows, caches) in enumerate(zip(calls, zip(*(state.layers for state in states)))):
            kind, block, _, number = of_rows[0]
            network = of_layer(within, index)
            like = network, kind, *(pages.count for pages in caches[0].pools)
            if like in seen:  # the layers of this program
                continue
            seen.add(like)
            own = tuple(call.own for call in of_rows)
            arguments = (network, kind, block, own, number, policies, caches, x)
            programs.append(layer.program(*arguments, self._length, self._count, totals))  # type: ignore[attr-defined]
        programs.append(after.program(x, self._length, self._count))  # type: ignore[attr-defined]
        return list({(id(program.made), program.key): program for program in programs}.values())

    def read(self, afford: Callable[[int], bool]) -> None:
        """Reads them and waits; ``afford`` as in ``Prefill.unit``."""
        after = decode.read_rows(
            self._network,
            [prefill.request.policy.after_prompt for prefill in self.prefills],
            self._params,
            [prefill.calls() for prefill in self.prefills],
            [prefill.state for prefill in self.prefills],
            self._tokens,
            self._length,
            self._count,
            self._programs,
        )
        for prefill, (state, last) in zip(self.prefills, after):
            prefill.fed(state, last, afford)
        jax.block_until_ready([prefill.state.length for prefill in self.prefills])
