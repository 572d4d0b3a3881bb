"""JSON that clients get, described for /openapi.json; the routes make it."""

# ruff: noqa: D101  (most classes have the protocol's names)

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel


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
    drafted_tokens: int | None = None
    accepted_tokens: int | None = None
    layers: list[list[int]] | None = None
    ignored_fields: list[str] | None = None


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


class FunctionReply(BaseModel):
    name: str
    arguments: str


class ToolCallReply(BaseModel):
    id: str
    type: Literal["function"]
    function: FunctionReply


class MessageReply(BaseModel):
    role: Literal["assistant"]
    content: str | None
    tool_calls: list[ToolCallReply] | None = None
    refusal: None = None


class ChatChoice(BaseModel):
    index: int
    message: MessageReply
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
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
