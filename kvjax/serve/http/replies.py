"""What is answered, for the schema at /openapi.json; the answers themselves are made where they arise."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel


class KVReply(BaseModel):
    """What the cache of a request held at its end, rows added up."""

    policy: str
    tokens_seen: int
    tokens_kept: float
    bytes_live: int
    bytes_full: int
    layers: list[list[int]] | None = None


class PromptDetails(BaseModel):
    """Of the prompt's tokens, those that were not read anew."""

    cached_tokens: int


class UsageReply(BaseModel):
    """What a request took."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    kv: KVReply | None


class CompletionLogprobs(BaseModel):
    """Lists with an entry a token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """One text."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: int | str | None


class CompletionReply(BaseModel):
    """``text_completion``."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageReply


class TopLogprob(BaseModel):
    """One token and what the model gave it."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token that was written, and the likeliest ones there."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """An entry a token."""

    content: list[TokenLogprob]
    refusal: None = None


class MessageReply(BaseModel):
    """The answer."""

    role: Literal["assistant"]
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: MessageReply
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None


class ChatReply(BaseModel):
    """``chat.completion``."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageReply


class ModelReply(BaseModel):
    """The model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    kv_policy: str


class ModelsReply(BaseModel):
    """A list of one."""

    object: Literal["list"]
    data: list[ModelReply]


class TokenizeReply(BaseModel):
    """Token ids of a text."""

    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeReply(BaseModel):
    """The text of token ids."""

    prompt: str


class ContextReply(BaseModel):
    """A held context."""

    id: str
    object: Literal["context"]
    tokens: int
    kv_policy: str
    bytes_live: int
    bytes_allocated: int


class ContextsReply(BaseModel):
    """All of them."""

    object: Literal["list"]
    data: list[ContextReply]


class DeletedReply(BaseModel):
    """A context that is gone."""

    id: str
    object: Literal["context"]
    deleted: Literal[True]


class HealthReply(BaseModel):
    """``ok``."""

    status: Literal["ok"]


class VersionReply(BaseModel):
    """What is running."""

    version: str
    jax: str


STREAM: dict[str, Any] = {"text/event-stream": {"schema": {"type": "string"}}}
"""What a stream is, for the schema."""
