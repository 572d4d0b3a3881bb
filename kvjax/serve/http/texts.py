"""``POST /tokenize`` and ``POST /detokenize``."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request

from kvjax.serve.http import plan
from kvjax.serve.http.bodies import DetokenizeBody, TokenizeBody
from kvjax.serve.http.replies import DetokenizeReply, TokenizeReply
from kvjax.serve.http.service import of

router = APIRouter()


@router.post("/tokenize")
async def tokenize(request: Request, body: TokenizeBody) -> TokenizeReply:
    """Token ids of a text or of a conversation, as the model would read them."""
    service = of(request)
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise plan.refused("prompt", "Give either prompt or messages")
    if body.messages is not None:
        ids = await asyncio.to_thread(plan.conversation, service, body.messages)
    else:
        begins = body.add_special_tokens is not False
        ids = await asyncio.to_thread(plan.encoded, service, body.prompt or "", begins=begins)
    return TokenizeReply(count=len(ids), max_model_len=service.engine.context, tokens=ids)


@router.post("/detokenize")
async def detokenize(request: Request, body: DetokenizeBody) -> DetokenizeReply:
    """The text of token ids, special tokens left out."""
    service = of(request)
    service.check_model(body.model)
    ids = plan.checked(service, body.tokens, "tokens")
    return DetokenizeReply(prompt=await asyncio.to_thread(service.model.text.decode, ids))
