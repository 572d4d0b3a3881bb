"""One prompt to one answer: prefill, then tokens as they are made, and what it all cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvjax import decode, metrics, timing
from kvjax.cache.state import KVState
from kvjax.cli import InputError
from kvjax.engine import Engine, Request
from kvjax.loading import LanguageModel
from kvjax.sampling import sampling
from kvjax.serve.arguments import Options
from kvjax.serve.progress import bar
from kvjax.timing import Moment
from kvjax.types import Params

if TYPE_CHECKING:
    from jaxtyping import Array

LONGEST = 128
"""New tokens, where their number is not given."""

STREAMED = 8
"""Tokens a piece while somebody is watching."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """What was written, and what it took.

    Attributes:
      text: the answer.
      tokens: its token ids, the stop token included.
      prompt_tokens: how many were read.
      timings: see ``timings``.
      kv_bytes: of the cache at the end: live, allocated, and what a cache that keeps everything holds.
      read_before: tokens of the prompt that were still held, and not read again.
    """

    text: str
    tokens: list[int]
    prompt_tokens: int
    timings: dict[str, float | None]
    kv_bytes: dict[str, int]
    read_before: int = 0


def answer(
    model: LanguageModel,
    options: Options,
    ids: Sequence[int],
    source: str,
    write: Callable[[str], None],
    *,
    weights: Params | None = None,
    continues: bool = False,
) -> Answer:
    """Answers one prompt.

    Args:
      model: who answers.
      options: policy, sampling, sizes.
      ids: the prompt, at least one token.
      source: where the prompt came from, for messages.
      write: given the text in pieces, whole characters only.
      weights: the policy's learned weights, for policies that have some.
      continues: the answer goes on where the prompt stops, rather than being a text of its own.

    Raises:
      InputError: prompt and answer do not fit the model.
    """
    limit = _limit(model, options, len(ids), source)
    tokens: list[int] = []
    texts: list[str] = []
    show = model.text.stream(after=ids if continues else ())
    start = timing.now()
    first = None
    state = None
    for piece, after in _pieces(model, options, ids, limit, weights):
        state = after
        first = first or timing.now()
        tokens += piece
        _say("".join(show.step(token) for token in piece if token not in model.spec.eos), texts, write)
    _say(show.finish(), texts, write)
    assert first is not None  # noqa: S101  (a stream yields at least one token)
    assert state is not None  # noqa: S101
    held = metrics.nbytes(state).total
    full = metrics.full_bytes(model.network, int(np.asarray(state.length)[0]), model.params["embed"].dtype)
    return Answer(
        text="".join(texts),
        tokens=tokens,
        prompt_tokens=len(ids),
        timings=timings(start, first, timing.now(), len(tokens)),
        kv_bytes={"live": held["live"], "allocated": held["allocated"], "full": full},
    )


def reply(
    engine: Engine,
    model: LanguageModel,
    options: Options,
    ids: Sequence[int],
    source: str,
    write: Callable[[str], None],
) -> Answer:
    """``answer`` by an engine, which need not read again what it still holds.

    Args:
      engine: of this model and the options' policy; its only request is this one.
      model, options, ids, source, write: as in ``answer``. Where ``write`` raises, the request is cancelled.

    Raises:
      InputError: prompt and answer do not fit the model.
    """
    request = Request(
        prompt=np.asarray(ids, np.int32),
        max_new_tokens=_limit(model, options, len(ids), source),
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
    )
    start, first = timing.now(), None
    ticket, show = engine.submit(request), model.text.stream()
    tokens: list[int] = []
    texts: list[str] = []
    try:
        for event in ticket:
            first = first or timing.now()
            if event.token is not None:
                tokens.append(event.token)
                _say("" if event.token in model.spec.eos else show.step(event.token), texts, write)
        _say(show.finish(), texts, write)
    finally:
        ticket.cancel()  # nothing, where it has ended
    usage = ticket.usage
    assert first is not None  # noqa: S101  (a text has a token)
    assert usage.kv is not None  # noqa: S101
    allocated = sum(batch.allocated for batch in engine.metrics().batches)
    return Answer(
        text="".join(texts),
        tokens=tokens,
        prompt_tokens=len(ids),
        timings=timings(start, first, timing.now(), len(tokens)),
        kv_bytes={"live": usage.kv.live, "allocated": allocated, "full": usage.kv.full},
        read_before=usage.cached_tokens,
    )


def timings(start: Moment, first: Moment, end: Moment, tokens: int) -> dict[str, float | None]:
    """Seconds ``first_token`` and ``total``, of which ``compile``; and ``tokens_per_second``, of the tokens
    after the first and without compilation, None where there was only one."""
    whole = end - start
    return {
        "first_token": (first - start).wall,
        "total": whole.wall,
        "compile": whole.compiling,
        "tokens_per_second": (tokens - 1) / (end - first).running if tokens > 1 else None,
    }


def _say(piece: str, texts: list[str], write: Callable[[str], None]) -> None:
    if piece:
        texts.append(piece)
        write(piece)


def _limit(model: LanguageModel, options: Options, prompt: int, source: str) -> int:
    """How many tokens may be written after ``prompt`` ones."""
    most, wanted = model.network.max_positions, options.max_new_tokens
    if prompt >= most:
        raise InputError(
            f"{source} has {prompt} tokens, and the model ({model.name}) was trained for {most}, prompt and "
            "answer together. Shorten it, or choose a --model with a longer context."
        )
    if wanted is not None and prompt + wanted > most:
        raise InputError(
            f"--max-new-tokens {wanted} after {prompt} prompt tokens exceeds the {most} positions the model "
            f"({model.name}) was trained for. Ask for at most {most - prompt}."
        )
    return min(LONGEST, most - prompt) if wanted is None else wanted


def _pieces(
    model: LanguageModel, options: Options, ids: Sequence[int], limit: int, weights: Params | None
) -> Iterator[tuple[list[int], KVState]]:
    """New tokens a few at a time, and the state after them."""
    state, logits = _read(model, options, ids, limit, weights)
    how = sampling(
        1, temperature=options.temperature, top_k=options.top_k, top_p=options.top_p, seed=options.seed
    )
    every = decode.SEGMENT if options.json else STREAMED
    stream = decode.stream(
        model,
        options.policy,
        state,
        logits,
        max_new_tokens=limit,
        how=how,
        stops=model.spec.eos,
        weights=weights,
        every=every,
    )
    for piece, after in stream:
        yield piece[0].tolist(), after


def _read(
    model: LanguageModel, options: Options, ids: Sequence[int], limit: int, weights: Params | None
) -> tuple[KVState, Array]:
    """Prefill, with a bar that counts tokens or layers, whichever the policy reads by."""
    whole = options.policy.whole_prompt
    total, unit = (model.network.num_layers, "layers") if whole else (len(ids), "tokens")
    with bar(total, unit, options.progress) as progress:
        return decode.prefill(
            model,
            options.policy,
            [list(ids)],
            context=decode.bucket(len(ids) + limit, model.network.max_positions),
            # No wider than the prompt's size class: what is beyond it would be computed for nothing.
            chunk_size=min(options.chunk, decode.bucket(len(ids))),
            weights=weights,
            seeds=options.seed,
            progress=progress,
        )
