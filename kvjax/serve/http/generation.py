"""From the body of a request to requests for the engine; what cannot be served is refused here."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from kvjax import decode
from kvjax.engine import Guide, Request
from kvjax.grammar import GrammarError, Kind
from kvjax.serve.http.errors import bad_request
from kvjax.serve.http.schemas import ChatBody, CompletionBody, Message, NamedTool, TextOptions
from kvjax.serve.http.service import Service
from kvjax.serve.tools import CallForm, call_form

DEFAULT_TOKENS = 16  # new tokens of a completion that names no number, as in OpenAI's protocol
LONGEST_STOP = 1024  # characters of a stop string


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """The texts that one HTTP request asks for.

    Attributes:
      requests: for the engine, one a text: those of the first prompt, then those of the second, …
      echoes: for each text what it begins with: its prompt if the prompt is echoed, else "".
      continues: texts continue their prompts, instead of answering them.
      stops: strings that end a text.
      layers: ``usage.kv`` lists slots by layer and head.
      calls: how calls are written that are read out of the texts; None where none are.
    """

    requests: list[Request]
    echoes: list[str]
    continues: bool
    stops: tuple[str, ...]
    layers: bool
    calls: CallForm | None = None


def of_completion(service: Service, body: CompletionBody, owner: str = "") -> Generation:
    """What ``POST /v1/completions`` asks for.

    Raises:
      ApiError, PolicyError, WeightsError, ContextNotFound: what cannot be served.
    """
    if body.best_of not in (None, body.n or 1):
        message = f"best_of={body.best_of} is not supported with n={body.n or 1}. Leave it out."
        raise bad_request("best_of", message)
    if body.max_tokens == 0 and not body.echo:
        raise bad_request("max_tokens", "max_tokens=0 writes nothing. Give 1 or more, or echo=true.")
    single = isinstance(body.prompt, str) or (bool(body.prompt) and isinstance(body.prompt[0], int))
    texts_or_ids: Sequence[Any] = [body.prompt] if single else body.prompt
    _check_choices(service, len(texts_or_ids), body.n or 1)
    prompts: list[list[int]] = []
    echoes: list[str] = []
    for prompt in texts_or_ids:
        if isinstance(prompt, str):
            prompts.append(encode_text(service, prompt, bos=body.context is None))
            echoes.append(prompt)
        else:
            prompts.append(check_token_ids(service, prompt))
            echoes.append(service.model.text.decode(prompts[-1]) if body.echo else "")
    if not prompts:
        raise bad_request("prompt", "prompt=[] has no text to continue. Give a text, or token ids.")
    max_tokens = DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
    shown = echoes if body.echo else None
    return _generation(
        service, body, owner, prompts, shown, max_tokens, logprobs=body.logprobs, continues=True
    )


def of_chat(service: Service, body: ChatBody, owner: str = "") -> Generation:
    """What ``POST /v1/chat/completions`` asks for; without a number an answer may fill the context.

    Raises:
      ApiError, PolicyError, WeightsError, ContextNotFound: what cannot be served.
    """
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs", "top_logprobs needs logprobs=true. Set it, or drop top_logprobs.")
    _check_choices(service, 1, body.n or 1)
    form, offered = _tools(service, body)
    ids, bos = encode_chat(service, body.messages, offered), service.model.text.bos
    if body.context is not None and bos is not None and ids[:1] == [bos]:
        ids = ids[1:]  # BOS stands at the beginning of the context
    max_tokens = body.max_completion_tokens or body.max_tokens
    if max_tokens is None:
        held = 0 if body.context is None else service.engine.contexts.get(body.context, owner).tokens
        max_tokens = max(1, service.engine.context - len(ids) - held)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    guide = None
    if form is not None and (isinstance(body.tool_choice, NamedTool) or body.tool_choice == "required"):
        if body.response_format is not None or body.structured_outputs is not None:
            raise bad_request("tool_choice", "A call that must come leaves no other form. Drop one of them.")
        token_id = service.model.text.tokenizer.token_to_id
        calls = form.grammar([tool["function"] for tool in offered], token_id)
        guide = _guide(service, "tool_choice", "grammar", calls)
    asked = _generation(
        service, body, owner, [ids], None, max_tokens, logprobs=logprobs, continues=False, guide=guide
    )
    return dataclasses.replace(asked, calls=form)


def _tools(service: Service, body: ChatBody) -> tuple[CallForm | None, list[dict[str, Any]]]:
    """How the model writes calls, and the functions that it may call; (None, []) where it may call none.

    Raises:
      ApiError: the chat template shows no tools, or there is no function of that name.
    """
    choice, tools = body.tool_choice, body.tools or []
    if not tools and choice not in (None, "none", "auto"):
        raise bad_request("tool_choice", "There are no tools to choose from. Give tools.")
    if not tools or choice == "none":
        return None, []
    form = call_form(service.model.text.tool_template)
    if form is None:
        message = "The chat template of this model shows no tools. Leave them out, or serve another model."
        raise bad_request("tools", message)
    if isinstance(choice, NamedTool):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
        if not tools:
            message = f"There is no tool {choice.function.name!r}. Name one of tools."
            raise bad_request("tool_choice", message)
    return form, [tool.model_dump(exclude_none=True) for tool in tools]


def _guide(service: Service, param: str, kind: Kind, value: Any) -> Callable[[], Guide]:
    """Makes guides for a grammar. Raises ApiError if it is malformed."""
    try:
        return service.grammars.guide(kind, value)
    except GrammarError as error:
        raise bad_request(param, f"{str(error).rstrip('.')}.") from error


def _grammar(service: Service, body: TextOptions) -> Callable[[], Guide] | None:
    """What the answer has to be; None: anything. Raises ApiError if that is malformed."""
    form, outputs = body.response_format, body.structured_outputs
    if form is not None and form.type != "text" and outputs is not None:
        raise bad_request("structured_outputs", "response_format says what the answer is. Drop one of them.")
    if outputs is not None:
        ((kind, value),) = outputs.named
        return _guide(service, f"structured_outputs.{kind}", kind, value)
    if form is None or form.type == "text":
        return None
    schema = {"type": "object"} if form.json_schema is None else form.json_schema.schema_
    return _guide(service, "response_format", "json", schema)


def _generation(
    service: Service,
    body: TextOptions,
    owner: str,
    prompts: list[list[int]],
    echoes: list[str] | None,
    max_tokens: int,
    *,
    logprobs: int | None,
    continues: bool,
    guide: Callable[[], Guide] | None = None,
) -> Generation:
    service.check_model(body.model)
    guide = guide or _grammar(service, body)
    if guide is not None and body.min_tokens:
        raise bad_request("min_tokens", "A grammar says where the answer ends. Drop min_tokens.")
    options, n = service.options, body.n or 1
    context = None if body.context is None else service.engine.contexts.get(body.context, owner)
    for prompt in prompts:
        _check_length(service, len(prompt) + (context.tokens if context else 0), max_tokens)
    stops = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    if len(stops) > options.max_stops:
        message = f"{len(stops)} stop strings are more than the {options.max_stops} allowed. Give fewer."
        raise bad_request("stop", message)
    if any(len(stop) > LONGEST_STOP for stop in stops):
        message = f"A stop string has more than {LONGEST_STOP} characters. Give a shorter one."
        raise bad_request("stop", message)
    held = context.tokens if context else 0
    policy = service.policies.policy(
        context.policy if context and body.kv_policy is None else body.kv_policy,
        held + max(map(len, prompts), default=0),
        max_tokens,
        draft=body.kv_draft,
    )
    weights = service.policies.weights(policy, body.kv_weights)
    seed = secrets.randbits(32) if body.seed is None else body.seed % 2**32
    stop_tokens = tuple(check_token_ids(service, body.stop_token_ids or (), "stop_token_ids"))
    biases = {int(id): bias for id, bias in (body.logit_bias or {}).items()}
    check_token_ids(service, [*biases], "logit_bias")
    if (body.min_tokens or 0) > max_tokens:
        message = f"min_tokens={body.min_tokens} is more than the {max_tokens} tokens allowed. Give fewer."
        raise bad_request("min_tokens", message)
    requests = [
        Request(
            prompt=prompt,
            max_new_tokens=max_tokens,
            temperature=1.0 if body.temperature is None else body.temperature,
            top_k=max(body.top_k or 0, 0),
            top_p=1.0 if body.top_p is None else body.top_p,
            min_p=body.min_p or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            presence_penalty=body.presence_penalty or 0.0,
            repetition_penalty=body.repetition_penalty or 1.0,
            logit_bias=biases,
            min_tokens=body.min_tokens or 0,
            seed=seed,
            draw=draw,
            logprobs=logprobs,
            echo=echoes is not None,
            ignore_eos=bool(body.ignore_eos),
            stop_tokens=stop_tokens,
            policy=policy,
            weights=weights,
            deadline=deadline(service, body.max_time),
            context=body.context,
            owner=owner,
            inspect=bool(body.kv_watch),
            guide=guide,
        )
        for prompt in prompts
        for draw in range(n)
    ]
    return Generation(
        requests=requests,
        echoes=[echo for echo in echoes or [""] * len(prompts) for _ in range(n)],
        continues=continues,
        stops=stops,
        layers=bool(body.kv_layers),
    )


def _check_choices(service: Service, prompts: int, n: int) -> None:
    """Raises ApiError for more texts than one request may ever have: each takes a place in the queue."""
    limits = {
        "--max-choices": service.options.max_choices,
        "--queue": service.options.queue,
        "--client-waiting": service.clients.most_waiting,
    }
    option, most = min((x for x in limits.items() if x[1]), key=lambda limit: limit[1])
    if prompts * n > most:
        message = f"{prompts} prompts with n={n} are more than the {most} texts allowed ({option}). Ask for "
        raise bad_request("n", message + "fewer.")


def deadline(service: Service, max_time: float | None) -> float | None:
    """Seconds that a request has; None for any number."""
    limits = [seconds for seconds in (max_time, service.options.request_timeout) if seconds is not None]
    return min(limits, default=None)


def _check_length(service: Service, prompt: int, max_tokens: int) -> None:
    check_prompt_length(service, prompt)
    context = service.engine.context
    if prompt + max_tokens > context:
        message = (
            f"The prompt has {prompt} tokens and max_tokens is {max_tokens}, {prompt + max_tokens} together, "
            f"more than the context of {context}. Shorten the prompt, or ask for at most {context - prompt}."
        )
        raise bad_request("max_tokens", message, "context_length_exceeded")


# --- prompts -------------------------------------------------------------------------------------


def encode_chat(
    service: Service, messages: Sequence[Message], tools: list[dict[str, Any]] | None = None
) -> list[int]:
    """Token ids of a conversation, ready for the answer.

    Raises:
      ApiError: it is far too long, or the chat template refuses it.
    """
    try:
        shown = [message.for_template for message in messages]
        _check_characters(service, "messages", sum(len(message["content"]) for message in shown))
        return service.model.text.chat(shown, tools=tools or None)
    except ValueError as error:
        raise bad_request("messages", f"{str(error).rstrip('.')}.") from error


def encode_text(service: Service, text: str, *, bos: bool = True) -> list[int]:
    """Token ids of a text. Raises ApiError if it is far too long, or not Unicode."""
    _check_characters(service, "prompt", len(text))
    try:
        return service.model.text.encode(text, bos=bos)
    except ValueError as error:
        raise bad_request("prompt", f"{str(error).rstrip('.')}.") from error


def _check_characters(service: Service, param: str, characters: int) -> None:
    """Raises ApiError for a text that need not be tokenized to see that it is too long."""
    if characters > service.most_characters:
        message = f"The text has {characters} characters, and {service.engine.context} tokens have at most "
        message += f"{service.most_characters}. Shorten it."
        raise bad_request(param, message, "context_length_exceeded")


def check_token_ids(service: Service, ids: Sequence[int], param: str = "prompt") -> list[int]:
    """The ids. Raises ApiError if the model does not have one of them."""
    try:
        return decode.read_ids(param, service.model, ids).tolist()
    except decode.RequestError as error:
        raise bad_request(param, str(error)) from error


def check_prompt_length(service: Service, length: int) -> None:
    """Raises ApiError if a prompt is empty or too long."""
    if length < 1:
        raise bad_request("prompt", "The prompt has no token. Give some text.")
    most = min(service.engine.context - 1, service.options.max_prompt or service.engine.context)
    if length > most:
        message = f"The prompt has {length} tokens, more than the {most} allowed. Shorten it."
        raise bad_request("prompt", message, "context_length_exceeded")
