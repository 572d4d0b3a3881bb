"""JSON that clients send: OpenAI's fields, vLLM's where they are usual, and our own.

Unknown fields are kept aside; ``fields`` says which of them are refused: a misspelt ``kv_policy`` that is
silently ignored would be worse than an error. Fields of OpenAI that are not supported may hold the value that
means nothing.

A value of several kinds has the kind of its first element, and a list ends at its first fault: a long list of
anything else costs no more than reading it.
"""

# ruff: noqa: D101  (most fields and classes have the protocol's names)

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

from kvjax.engine import MOST_BIASES, MOST_LOGPROBS


def _integral(value: Any) -> Any:
    """JSON knows one kind of number: 5.0 is 5. Also of the numbers in a list."""
    if isinstance(value, list):
        return [_integral(number) for number in value] if float in set(map(type, value)) else value
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _only(*values: Any) -> BeforeValidator:
    """Of a field that is not supported: takes the values that mean nothing."""

    def check(value: Any) -> Any:
        if any(value == nothing and type(value) is type(nothing) for nothing in values):
            return value
        named = f"{value!r} is " if isinstance(value, str) and len(value) < 40 else ""
        instead = f"send {values[0]!r}" if values[0] else "leave it out"
        raise PydanticCustomError("not_supported", "{text}", {"text": f"{named}not supported; {instead}"})

    return BeforeValidator(check)


TEXT, TEXTS, IDS, IDS_LISTS, PARTS, NAMED = KINDS = (
    "[text]",
    "[texts]",
    "[ids]",
    "[lists of ids]",
    "[parts]",
    "[named]",
)
"""Of values of several kinds; pydantic puts them into the places of faults."""


def _kind(value: Any) -> str | None:
    """Of a prompt or of stop strings, by the first element."""
    if isinstance(value, str):
        return TEXT
    if not isinstance(value, list):
        return None
    first = value[0] if value else ""
    return TEXTS if isinstance(first, str) else IDS_LISTS if isinstance(first, list) else IDS


def _content_kind(value: Any) -> str | None:
    return TEXT if isinstance(value, str) else PARTS if isinstance(value, list) else None


def _by(kind: Callable[[Any], str | None], rule: str) -> Discriminator:
    return Discriminator(kind, custom_error_type="wrong_kind", custom_error_message=rule)


Int = Annotated[int, BeforeValidator(_integral)]
Count = Annotated[Int, Field(ge=1)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True), BeforeValidator(_integral)]
Ids = Annotated[list[TokenId], Field(min_length=1, fail_fast=True), BeforeValidator(_integral)]
Texts = Annotated[list[str], Field(fail_fast=True)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Id = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Biases = Annotated[dict[Id, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MOST_BIASES)]
NoList = Annotated[list[Any], _only([]), Field(description="not supported")]
Nothing = Annotated[None, _only(None), Field(description="not supported")]
ContextName = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
Seconds = Annotated[float, Field(gt=0, le=86400)]
Sources = dict[str, Annotated[str, Field(min_length=1)]]


class Body(BaseModel):
    """A strict body: no text for a number. Fields that it does not know are in ``model_extra``."""

    model_config = ConfigDict(extra="allow", strict=True)


# --- requests for text ---------------------------------------------------------------------------


class StreamOptions(Body):
    """What a stream carries beside the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(
        default=None, description="usage with every chunk, not only the last"
    )
    include_obfuscation: bool | None = Field(default=None, description="ignored")


class KVOptions(Body):
    """Our own fields: what the KV cache keeps."""

    kv_policy: Annotated[str, Field(min_length=1, max_length=1000)] | None = Field(
        default=None, description="what the cache keeps, as 'snapkv + uniform(0.25)'; by default the server's"
    )
    kv_draft: Annotated[str, Field(min_length=1, max_length=1000)] | None = Field(
        default=None, description="a selection that drafts, as 'quest(chunks=8)'; texts stay what they are"
    )
    kv_weights: Sources | None = Field(
        default=None, description="name of shipped learned weights by part, as {'write_gate': 'aggressive'}"
    )


Stop = Annotated[
    Annotated[str, Tag(TEXT)] | Annotated[Texts, Tag(TEXTS)], _by(_kind, "Give a text or a list of texts")
]


class JsonSchema(Body):
    name: Annotated[str, Field(max_length=64)] | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = Field(default=None, description="always true: answers keep to the schema")


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise PydanticCustomError("missing", "json_schema comes with type 'json_schema' and no other")
        return self


class StructuredOutputs(Body):
    """What an answer has to be, as vLLM takes it; one of them."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json", description="a JSON schema")
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1, fail_fast=True)] | None = None
    grammar: str | None = Field(default=None, description="in Lark's form, as llguidance reads it")

    @property
    def named(self) -> list[tuple[Literal["json", "regex", "choice", "grammar"], Any]]:
        """Those that are there, by kind."""
        kinds: list[tuple[Literal["json", "regex", "choice", "grammar"], Any]] = [
            ("json", self.json_),
            ("regex", self.regex),
            ("choice", self.choice),
            ("grammar", self.grammar),
        ]
        return [(kind, value) for kind, value in kinds if value is not None]

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if len(self.named) != 1:
            raise PydanticCustomError("missing", "give one of json, regex, choice and grammar")
        return self


class TextOptions(KVOptions):
    """What completions and chats share."""

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[Int, Field(ge=-1, lt=2**31)] | None = Field(default=None, description="0 and -1: all")
    min_p: Annotated[float, Field(ge=0, le=1)] | None = Field(
        default=None, description="least probability, as a share of the likeliest token's"
    )
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = Field(
        default=None, description="divides positive logits of tokens of prompt and answer; 1 changes nothing"
    )
    logit_bias: Biases | None = Field(default=None, description="what is added to logits, by token id")
    min_tokens: Annotated[Int, Field(ge=0, lt=2**31)] | None = Field(
        default=None, description="tokens before an end token or a stop string may end the text"
    )
    seed: Annotated[Int, Field(ge=-(2**63), lt=2**63)] | None = None
    n: Count | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    stop: Stop | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    context: ContextName | None = Field(default=None, description="a held context that the prompt continues")
    max_time: Seconds | None = Field(
        default=None,
        description="seconds after which the answer ends wherever it is; 408 where it did not begin",
    )
    kv_layers: bool | None = Field(default=None, description="usage.kv has slots by layer and KV head")
    kv_watch: bool | None = Field(
        default=None, description="GET /v1/kv/{id} shows what the cache of this request holds"
    )

    # Fields of OpenAI that have no meaning here, or that are not supported.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: Annotated[bool, _only(False)] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


Prompt = Annotated[
    Annotated[str, Tag(TEXT)]
    | Annotated[Texts, Tag(TEXTS)]
    | Annotated[Ids, Tag(IDS)]
    | Annotated[list[Ids], Field(fail_fast=True), Tag(IDS_LISTS)],
    _by(_kind, "Give a text, token ids, or a list of either"),
]


class CompletionBody(TextOptions):
    prompt: Prompt = Field(description="a text, token ids, or a list of either")
    max_tokens: Annotated[Int, Field(ge=0, lt=2**31)] | None = Field(
        default=None, description="16 by default; 0 with echo"
    )
    logprobs: Annotated[Int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: Count | None = Field(default=None, description="only the value of n")
    suffix: Annotated[str, _only("")] | None = None


class TextPart(Body):
    type: Annotated[str, _only("text")]
    text: str


Content = Annotated[
    Annotated[str, Tag(TEXT)] | Annotated[list[TextPart], Field(fail_fast=True), Tag(PARTS)],
    _by(_content_kind, "Give a text or a list of parts"),
]


class CalledFunction(Body):
    name: str
    arguments: str = Field(description="a JSON object")


class ToolCall(Body):
    id: str | None = None
    type: Annotated[str, _only("function")] = "function"
    function: CalledFunction


class Function(Body):
    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    parameters: dict[str, Any] | None = Field(default=None, description="a JSON schema")
    strict: bool | None = None


class Tool(Body):
    type: Annotated[str, _only("function")]
    function: Function


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Annotated[str, _only("function")]
    function: NamedFunction


Tools = Annotated[list[Tool], Field(max_length=128, fail_fast=True)]


class Message(Body):
    """One message of a conversation; an answer of this server can be sent back as it came."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    refusal: Nothing = None
    audio: Nothing = None
    function_call: Nothing = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    annotations: NoList | None = None

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise PydanticCustomError("missing", "content is missing; only an assistant's may be null")
        return self

    @property
    def for_template(self) -> dict[str, Any]:
        """Role, content and calls as chat templates take them.

        Raises:
          ValueError: the arguments of a call are no JSON.
        """
        role = "system" if self.role == "developer" else self.role
        parts = self.content or ""
        content = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        message: dict[str, Any] = {"role": role, "content": content}
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id or "",
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": json.loads(call.function.arguments),
                    },
                }
                for call in self.tool_calls
            ]
        if self.role == "tool":
            message |= {"name": self.name or "", "tool_call_id": self.tool_call_id or ""}
        return message


Messages = Annotated[list[Message], Field(min_length=1, fail_fast=True)]


def _choice_kind(value: Any) -> str | None:
    return TEXT if isinstance(value, str) else NAMED if isinstance(value, dict) else None


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag(TEXT)] | Annotated[NamedTool, Tag(NAMED)],
    _by(_choice_kind, "Give none, auto, required, or a function"),
]


class ChatBody(TextOptions):
    messages: Messages
    max_tokens: Annotated[Count, Field(lt=2**31)] | None = None
    max_completion_tokens: Annotated[Count, Field(lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    tools: Tools | None = Field(default=None, description="functions that the model may call")
    functions: NoList | None = None
    tool_choice: ToolChoice | None = Field(
        default=None, description='"none", "auto" (the default), "required", or a function by name'
    )
    parallel_tool_calls: bool | None = Field(default=None, description="ignored: the model decides")
    modalities: Annotated[list[str], _only(["text"])] | None = None


# --- requests about tokens and contexts ----------------------------------------------------------


class TokenizeBody(Body):
    """``POST /tokenize``: a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = Field(
        default=None, description="begin a text with the model's BOS (default: true)"
    )


class DetokenizeBody(Body):
    model: str | None = None
    tokens: TokenIds


ContextPrompt = Annotated[
    Annotated[str, Tag(TEXT)] | Annotated[Ids, Tag(IDS)], _by(_kind, "Give a text or token ids")
]


class ContextBody(KVOptions):
    """``POST /v1/contexts``: read a prompt once, keep it under a name."""

    name: ContextName
    model: str | None = None
    prompt: ContextPrompt | None = None
    messages: Messages | None = None
    max_time: Seconds | None = Field(default=None, description="seconds after which reading ends with 408")
