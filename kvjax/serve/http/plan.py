"""From what a request's body says to what the engine is asked; refusals before anything begins."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Sequence

from kvjax import decode
from kvjax.engine import Request
from kvjax.serve.http.bodies import ChatBody, CompletionBody, Message, TextOptions
from kvjax.serve.http.errors import ApiError
from kvjax.serve.http.service import Service

WRITTEN = 16
"""New tokens of a completion that names no number, as OpenAI has it."""

LONGEST_STOP = 1024
"""Characters of a stop string."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Texts to be written.

    Attributes:
      requests: one a text: those of the first prompt, then those of the second, …
      echoes: of each text, what it begins with where the prompt is echoed.
      continues: texts go on where their prompts stop, rather than being texts of their own.
      stops: strings that end a text.
      logprobs: None for none, else how many alternatives.
      layers: ``usage.kv`` says slots by layer and head.
    """

    requests: list[Request]
    echoes: list[str]
    continues: bool
    stops: tuple[str, ...]
    logprobs: int | None
    layers: bool


def completion(service: Service, body: CompletionBody) -> Plan:
    """A plan for ``POST /v1/completions``.

    Raises:
      ApiError, PolicyError, WeightsError, ContextNotFound: what cannot be served.
    """
    if body.best_of not in (None, body.n or 1):
        raise refused(
            "best_of", f"best_of={body.best_of} is not supported beside n={body.n or 1}. Leave it out"
        )
    if body.max_tokens == 0 and not body.echo:
        raise refused("max_tokens", "max_tokens=0 writes nothing. Give 1 or more, or echo=true")
    prompts, texts = _prompts(service, body)
    written = WRITTEN if body.max_tokens is None else body.max_tokens
    return _plan(
        service,
        body,
        prompts,
        written=[written] * len(prompts),
        logprobs=body.logprobs,
        echoes=texts if body.echo else None,
        continues=True,
    )


def chat(service: Service, body: ChatBody) -> Plan:
    """A plan for ``POST /v1/chat/completions``; without a number an answer may fill the context.

    Raises:
      ApiError, PolicyError, WeightsError, ContextNotFound: what cannot be served.
    """
    if body.top_logprobs is not None and not body.logprobs:
        raise refused("top_logprobs", "top_logprobs needs logprobs=true. Set it, or leave top_logprobs out")
    ids = conversation(service, body.messages)
    if body.context is not None:
        ids = _behind(service, ids)
    written = body.max_completion_tokens or body.max_tokens
    if written is None:
        written = max(1, service.engine.context - len(ids) - _held(service, body.context))
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return _plan(service, body, [ids], written=[written], logprobs=logprobs, echoes=None, continues=False)


def conversation(service: Service, messages: Sequence[Message]) -> list[int]:
    """Token ids of a chat, ready for the answer.

    Raises:
      ApiError: 400 where the chat template refuses them.
    """
    try:
        return service.model.text.chat([message.plain for message in messages])
    except (ImportError, ValueError) as error:
        raise refused("messages", str(error).rstrip(".")) from error


def encoded(service: Service, text: str, *, begins: bool = True) -> list[int]:
    """Token ids of a text.

    Raises:
      ApiError: 400 for what is no text.
    """
    try:
        return service.model.text.encode(text, bos=begins)
    except ValueError as error:
        raise refused("prompt", str(error).rstrip(".")) from error


def checked(service: Service, ids: Sequence[int], param: str = "prompt") -> list[int]:
    """Ids that the model has.

    Raises:
      ApiError: 400.
    """
    try:
        return decode.read_ids(param, service.model, ids).tolist()
    except decode.RequestError as error:
        raise refused(param, str(error).rstrip(".")) from error


def check_prompt(service: Service, length: int) -> None:
    """Refuses a prompt that is empty or too long.

    Raises:
      ApiError: 400 with the numbers.
    """
    if length < 1:
        raise refused("prompt", "the prompt holds no token. Give some text")
    most = min(service.engine.context - 1, service.options.max_prompt or service.engine.context)
    if length > most:
        raise refused(
            "prompt",
            f"the prompt has {length} tokens, more than the {most} allowed. Shorten it",
            "context_length_exceeded",
        )


def refused(param: str, message: str, code: str = "invalid_request") -> ApiError:
    """400 for a field."""
    return ApiError(400, f"{message}.", code=code, param=param)


# --- the parts of a plan -------------------------------------------------------------------------


def _prompts(service: Service, body: CompletionBody) -> tuple[list[list[int]], list[str]]:
    """Token ids of each prompt, and its text."""
    given = body.prompt
    several = isinstance(given, list) and not (given and isinstance(given[0], int))
    rows = given if several else [given]
    if not rows:
        raise refused("prompt", "prompt=[] has no text to continue. Give a text, or token ids")
    ids, texts = [], []
    for row in rows:
        if isinstance(row, str):
            ids.append(encoded(service, row, begins=body.context is None))
            texts.append(row)
        else:
            ids.append(checked(service, row))  # type: ignore[arg-type]
            texts.append(service.model.text.decode(row) if body.echo else "")  # type: ignore[arg-type]
    return ids, texts


def _behind(service: Service, ids: list[int]) -> list[int]:
    """Ids that follow a held context: a text in the middle has no BOS."""
    bos = service.model.text.bos
    return ids[1:] if bos is not None and ids[:1] == [bos] else ids


def _held(service: Service, context: str | None) -> int:
    return 0 if context is None else service.engine.contexts.get(context).tokens


def _plan(
    service: Service,
    body: TextOptions,
    prompts: list[list[int]],
    *,
    written: list[int],
    logprobs: int | None,
    echoes: list[str] | None,
    continues: bool,
) -> Plan:
    service.check_model(body.model)
    n = body.n or 1
    _check_sizes(service, body, prompts, written, n)
    stops = _stops(service, body)
    asked = body.kv_policy
    if asked is None and body.context is not None:
        asked = service.engine.contexts.get(body.context).policy
    policy = service.policies.policy(asked)
    weights = service.policies.weights(policy, body.kv_weights)
    seed = secrets.randbits(32) if body.seed is None else body.seed % 2**32
    checked(service, body.stop_token_ids or (), "stop_token_ids")
    limits = [s for s in (body.max_time, service.options.request_timeout) if s is not None]
    requests = [
        Request(
            prompt=prompt,
            max_new_tokens=most,
            temperature=1.0 if body.temperature is None else body.temperature,
            top_k=max(body.top_k or 0, 0),
            top_p=1.0 if body.top_p is None else body.top_p,
            seed=seed,
            draw=draw,
            logprobs=logprobs,
            echo=echoes is not None,
            ignore_eos=bool(body.ignore_eos),
            stop_tokens=tuple(body.stop_token_ids or ()),
            policy=policy,
            weights=weights,
            deadline=min(limits) if limits else None,
            context=body.context,
            inspect=bool(body.kv_watch),
        )
        for prompt, most in zip(prompts, written)
        for draw in range(n)
    ]
    return Plan(
        requests=requests,
        echoes=[text for text in echoes or [""] * len(prompts) for _ in range(n)],
        continues=continues,
        stops=stops,
        logprobs=logprobs,
        layers=bool(body.kv_layers),
    )


def _stops(service: Service, body: TextOptions) -> tuple[str, ...]:
    stops = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    if len(stops) > service.options.max_stops:
        raise refused(
            "stop", f"{len(stops)} stop strings are more than the {service.options.max_stops} allowed"
        )
    if any(len(stop) > LONGEST_STOP for stop in stops):
        raise refused("stop", f"a stop string has more than {LONGEST_STOP} characters. Give a shorter one")
    return stops


def _check_sizes(
    service: Service, body: TextOptions, prompts: list[list[int]], written: list[int], n: int
) -> None:
    """Refuses more texts than are allowed, and texts that are longer than a row."""
    options, context = service.options, service.engine.context
    if len(prompts) * n > options.max_choices:
        raise refused(
            "n",
            f"{len(prompts)} prompts with n={n} are more than the {options.max_choices} texts allowed. "
            "Ask for fewer",
        )
    before = _held(service, body.context)
    for prompt, more in zip(prompts, written):
        length = before + len(prompt)
        check_prompt(service, length)
        if length + more > context:
            raise refused(
                "max_tokens",
                f"the prompt has {length} tokens and {more} are asked for, {length + more} in all; a row has "
                f"{context} positions. Shorten the prompt, or ask for at most {max(context - length, 0)}",
                "context_length_exceeded",
            )
