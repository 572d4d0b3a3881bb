"""One prompt, one answer: reads the prompt, writes text as it is made, and reports what it cost."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from kvjax import decode, metrics, timing
from kvjax.cli import InputError
from kvjax.decode import Progress
from kvjax.engine import Engine, Request
from kvjax.loading import LanguageModel
from kvjax.sampling import sampling
from kvjax.serve.arguments import Options
from kvjax.text import TextStream
from kvjax.timing import Moment
from kvjax.types import Params

DEFAULT_TOKENS = 128  # new tokens if no number is given
TOKENS_PER_PIECE = 8  # tokens that a watching user gets at a time
DRAFTED_PER_PIECE = 32  # the same with a draft: the last round of a piece is cut short
BAR_DELAY = 0.5  # seconds before a progress bar appears; short prompts show none


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """What was written, and what it cost.

    Attributes:
      text: the answer.
      tokens: its token ids, the stop token included.
      prompt_tokens: how many the prompt has.
      timings: see ``timings``.
      kv_bytes: of the cache at the end: live, allocated, and what a cache that keeps everything holds.
      cached_tokens: tokens of the prompt that were still held and not read again.
    """

    text: str
    tokens: list[int]
    prompt_tokens: int
    timings: dict[str, float | None]
    kv_bytes: dict[str, int]
    cached_tokens: int = 0

    def summary(self) -> str:
        """One line: tokens, speed, time to the first token, bytes of the KV cache."""
        speed, first, compiled = (self.timings[k] for k in ("tokens_per_second", "first_token", "compile"))
        rate = "" if speed is None else f", {speed:.0f} tokens/s"
        live, allocated, full = (format_bytes(self.kv_bytes[k]) for k in ("live", "allocated", "full"))
        cached = f" ({self.cached_tokens} read before)" if self.cached_tokens else ""
        return (
            f"[{len(self.tokens)} tokens after {self.prompt_tokens}{cached}{rate}; first token {first:.2f} s "
            f"(compiling {compiled:.2f} s in all); "
            f"KV cache {live} live, {allocated} allocated, {full} if full]"
        )

    def to_json(self, model: LanguageModel, options: Options) -> str:
        """One JSON object in one line."""
        content = {
            "text": self.text,
            "tokens": self.tokens,
            "prompt_tokens": self.prompt_tokens,
            "timings": {k: None if v is None else round(v, 4) for k, v in self.timings.items()},
            "kv_bytes": self.kv_bytes,
            "policy": repr(options.policy),
            "weights": {part: str(source) for part, source in options.weights.items()},
            "model": model.name,
        }
        return json.dumps(content, ensure_ascii=False)


def format_bytes(count: int) -> str:
    """Bytes to three digits: 512 B, 1.5 MiB."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{count} B" if unit == "B" else f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"


def timings(start: Moment, first: Moment, end: Moment, tokens: int) -> dict[str, float | None]:
    """Seconds ``first_token`` and ``total``, of which ``compile``; and ``tokens_per_second``, of the tokens
    after the first and without compilation, None if there was only one."""
    elapsed = end - start
    return {
        "first_token": (first - start).wall,
        "total": elapsed.wall,
        "compile": elapsed.compiling,
        "tokens_per_second": (tokens - 1) / (end - first).running if tokens > 1 else None,
    }


class _Output:
    """Writes tokens as text, and remembers them, the text and the times."""

    def __init__(self, model: LanguageModel, stream: TextStream, write: Callable[[str], None]) -> None:
        self._eos, self._stream, self._write = model.spec.eos, stream, write
        self._start = timing.now()
        self._first: Moment | None = None
        self._texts: list[str] = []
        self._tokens: list[int] = []

    def add(self, tokens: Sequence[int]) -> None:
        self._first = self._first or timing.now()
        self._tokens += tokens
        self._add_text("".join(self._stream.step(token) for token in tokens if token not in self._eos))

    def _add_text(self, text: str) -> None:
        if text:
            self._texts.append(text)
            self._write(text)

    def finish(self, **costs: Any) -> Answer:
        self._add_text(self._stream.finish())
        assert self._first is not None  # every answer has a token
        return Answer(
            text="".join(self._texts),
            tokens=self._tokens,
            timings=timings(self._start, self._first, timing.now(), len(self._tokens)),
            **costs,
        )


def answer(
    model: LanguageModel,
    options: Options,
    ids: Sequence[int],
    source: str,
    write: Callable[[str], None],
    *,
    turn: bool = False,
    weights: Params | None = None,
) -> Answer:
    """Continues one prompt, or answers one turn.

    Args:
      model: that continues it.
      options: policy, sampling, sizes.
      ids: the prompt, at least one token.
      source: where the prompt came from, for messages.
      write: gets the text in pieces, whole characters only.
      turn: the prompt ends where the model's turn begins, and the text begins there.
      weights: the policy's learned weights, for policies that have some.

    Raises:
      InputError: prompt and answer do not fit the model.
    """
    max_new_tokens = _max_new_tokens(model, options, len(ids), source)
    output = _Output(model, model.text.stream(after=() if turn else ids), write)
    whole = options.policy.whole_prompt
    total, unit = (model.network.num_layers, "layers") if whole else (len(ids), "tokens")
    with _progress_bar(total, unit, options.progress) as progress:
        state, logits = decode.prefill(
            model,
            options.policy,
            [list(ids)],
            context=decode.bucket(len(ids) + max_new_tokens, model.network.max_positions),
            # No wider than the prompt's size class: what is beyond it would be computed for nothing.
            chunk_size=min(options.chunk, decode.bucket(len(ids))),
            weights=weights,
            seeds=options.seed,
            progress=progress,
        )
    watched = TOKENS_PER_PIECE if options.policy.selection.drafts is None else DRAFTED_PER_PIECE
    stream = decode.stream(
        model,
        options.policy,
        state,
        logits,
        max_new_tokens=max_new_tokens,
        how=sampling(
            1, temperature=options.temperature, top_k=options.top_k, top_p=options.top_p, seed=options.seed
        ),
        weights=weights,
        every=decode.MAX_STEPS if options.json else watched,
    )
    for rows, after in stream:
        output.add(rows[0].tolist())
        state = after
    held = metrics.nbytes(state).total
    full = metrics.full_bytes(model.network, int(np.asarray(state.length)[0]), model.params["embed"].dtype)
    kv_bytes = {"live": held["live"], "allocated": held["allocated"], "full": full}
    return output.finish(prompt_tokens=len(ids), kv_bytes=kv_bytes)


def answer_with_engine(
    engine: Engine, model: LanguageModel, options: Options, ids: Sequence[int], write: Callable[[str], None]
) -> Answer:
    """Answers a conversation with an engine, which does not read again what it still holds.

    Args:
      engine: of this model and the options' policy; this is its only request.
      model, options, ids, write: as in ``answer``. If ``write`` raises, the request is cancelled.

    Raises:
      InputError: prompt and answer do not fit the model.
    """
    request = Request(
        prompt=np.asarray(ids, np.int32),
        max_new_tokens=_max_new_tokens(model, options, len(ids), "the conversation"),
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
    )
    output = _Output(model, model.text.stream(), write)
    ticket = engine.submit(request)
    try:
        for event in ticket:
            output.add([] if event.token is None else [event.token])
    finally:
        ticket.cancel()  # does nothing after the end
    usage = ticket.usage
    assert usage.kv is not None
    allocated = sum(batch.allocated for batch in engine.metrics().batches)
    kv_bytes = {"live": usage.kv.live, "allocated": allocated, "full": usage.kv.full}
    return output.finish(prompt_tokens=len(ids), kv_bytes=kv_bytes, cached_tokens=usage.cached_tokens)


def _max_new_tokens(model: LanguageModel, options: Options, prompt: int, source: str) -> int:
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
    return min(DEFAULT_TOKENS, most - prompt) if wanted is None else wanted


@contextlib.contextmanager
def _progress_bar(total: int, unit: str, wanted: bool | None) -> Iterator[Progress]:
    """A bar on standard error: True shows it at once and leaves it there, False never, None on terminals."""
    if not (sys.stderr.isatty() if wanted is None else wanted):
        yield lambda done, total: None
        return
    from tqdm import tqdm

    with tqdm(
        desc="reading",
        total=total,
        unit=f" {unit}",
        delay=0 if wanted else BAR_DELAY,
        leave=bool(wanted),
        file=sys.stderr,
    ) as bar:

        def show(done: int, total: int) -> None:
            bar.update(done - bar.n)

        yield show
