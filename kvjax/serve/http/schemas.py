"""JSON that clients send and get: OpenAI's fields, vLLM's where they are usual, and our own.

An unknown field is refused: a misspelt ``kv_policy`` that is silently ignored would be worse than an error.
Fields of OpenAI that are not supported may hold the value that means nothing. Replies are described here for
/openapi.json; the routes make them.
"""

# ruff: noqa: D101  (most fields and classes have the protocol's names)

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from kvjax.engine import MOST_LOGPROBS


def _integral(value: Any) -> Any:
    """JSON knows one kind of number: 5.0 is 5."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Int = Annotated[int, BeforeValidator(_integral)]
Count = Annotated[Int, Field(ge=1)]
TokenId = Annotated[Int, Field(ge=0, lt=2**31)]
Ids = Annotated[list[TokenId], Field(min_length=1)]
Zero = Annotated[float, Field(ge=0, le=0, description="not supported: only 0 is taken")]
Empty = Annotated[dict[str, Any], Field(max_length=0, description="not supported")]
NoList = Annotated[list[Any], Field(max_length=0, description="not supported")]
ContextName = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
Sources = dict[str, Annotated[str, Field(min_length=1)]]


class Body(BaseModel):
    """A strict body: no unknown fields, no text for a number."""

    model_config = ConfigDict(extra="forbid", strict=True)


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
    kv_weights: Sources | None = Field(
        default=None, description="name of shipped learned weights by part, as {'write_gate': 'aggressive'}"
    )


class TextOptions(KVOptions):
    """What completions and chats share."""

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[Int, Field(ge=-1, lt=2**31)] | None = Field(default=None, description="0 and -1: all")
    seed: Annotated[Int, Field(ge=-(2**63), lt=2**63)] | None = None
    n: Count | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    context: ContextName | None = Field(default=None, description="a held context that the prompt continues")
    max_time: Annotated[float, Field(gt=0, le=86400)] | None = Field(
        default=None, description="seconds after which the answer ends wherever it is"
    )
    kv_layers: bool | None = Field(default=None, description="usage.kv has slots by layer and KV head")
    kv_watch: bool | None = Field(
        default=None, description="GET /v1/kv/{id} shows what the cache of this request holds"
    )

    # Fields of OpenAI that have no meaning here, or that are not supported.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: Literal[False] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    frequency_penalty: Zero | None = None
    presence_penalty: Zero | None = None
    logit_bias: Empty | None = None


Prompt = str | list[str] | Ids | list[Ids]


class CompletionBody(TextOptions):
    prompt: Prompt = Field(description="a text, token ids, or a list of either")
    max_tokens: Annotated[Int, Field(ge=0, lt=2**31)] | None = Field(
        default=None, description="16 by default; 0 with echo"
    )
    logprobs: Annotated[Int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: Count | None = Field(default=None, description="only the value of n")
    suffix: Literal[""] | None = None


class TextPart(Body):
    type: Literal["text"]
    text: str


class Message(Body):
    """One message of a conversation; an answer of this server can be sent back as it came."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart]
    name: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    tool_calls: NoList | None = None
    tool_call_id: str | None = None
    annotations: NoList | None = None

    @property
    def for_template(self) -> dict[str, str]:
        """Role and content as chat templates take them."""
        role = "system" if self.role == "developer" else self.role
        content = self.content if isinstance(self.content, str) else "".join(x.text for x in self.content)
        return {"role": role, "content": content}


Messages = Annotated[list[Message], Field(min_length=1)]


class ResponseFormat(Body):
    type: Literal["text"]


class ChatBody(TextOptions):
    messages: Messages
    max_tokens: Annotated[Count, Field(lt=2**31)] | None = None
    max_completion_tokens: Annotated[Count, Field(lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    tools: NoList | None = None
    functions: NoList | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    modalities: list[Literal["text"]] | None = None


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
    tokens: list[TokenId]


class ContextBody(KVOptions):
    """``POST /v1/contexts``: read a prompt once, keep it under a name."""

    name: ContextName
    model: str | None = None
    prompt: str | Ids | None = None
    messages: Messages | None = None


# --- replies -------------------------------------------------------------------------------------


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    error: ErrorDetail


class KVReply(BaseModel):
    """What the caches of a request held at its end, summed over its texts."""

    policy: str
    tokens_seen: int
    tokens_kept: float
    bytes_live: int
    bytes_full: int
    layers: list[list[int]] | None = None


class PromptDetails(BaseModel):
    cached_tokens: int


class UsageReply(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    kv: KVReply | None


class CompletionLogprobs(BaseModel):
    """Lists with one entry a token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: int | str | None


class CompletionReply(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageReply


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A written token, and the likeliest tokens at its position."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """One entry a token."""

    content: list[TokenLogprob]
    refusal: None = None


class MessageReply(BaseModel):
    role: Literal["assistant"]
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    index: int
    message: MessageReply
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None


class ChatReply(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageReply


class ModelReply(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    kv_policy: str
    chat_template: bool


class ModelsReply(BaseModel):
    object: Literal["list"]
    data: list[ModelReply]


class TokenizeReply(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeReply(BaseModel):
    prompt: str


class ContextReply(BaseModel):
    id: str
    object: Literal["context"]
    tokens: int
    kv_policy: str
    bytes_live: int
    bytes_allocated: int


class ContextsReply(BaseModel):
    object: Literal["list"]
    data: list[ContextReply]


class DeletedReply(BaseModel):
    id: str
    object: Literal["context"]
    deleted: Literal[True]


class HealthReply(BaseModel):
    status: Literal["ok"]


class VersionReply(BaseModel):
    version: str
    jax: str


EVENT_STREAM: dict[str, Any] = {"text/event-stream": {"schema": {"type": "string"}}}
"""Content of a streamed response, for the schema."""
