"""What an answer cost: one line for people, one object for programs."""

from __future__ import annotations

import json

from kvjax.loading import LanguageModel
from kvjax.serve.answer import Answer
from kvjax.serve.arguments import Options


def line(answer: Answer) -> str:
    """One line: tokens, speed, time to the first token, bytes of the KV cache."""
    speed, first, compiled = (answer.timings[k] for k in ("tokens_per_second", "first_token", "compile"))
    rate = "" if speed is None else f", {speed:.0f} tokens/s"
    live, allocated, full = (size(answer.kv_bytes[k]) for k in ("live", "allocated", "full"))
    before = f" ({answer.read_before} read before)" if answer.read_before else ""
    return (
        f"[{len(answer.tokens)} tokens after {answer.prompt_tokens}{before}{rate}; first token {first:.2f} s "
        f"(compiling {compiled:.2f} s in all); KV cache {live} live, {allocated} allocated, {full} if full]"
    )


def size(count: int) -> str:
    """Bytes to three digits: 512 B, 1.50 MiB."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{count} B" if unit == "B" else f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"


def to_json(answer: Answer, model: LanguageModel, options: Options) -> str:
    """One object, one line."""
    return json.dumps(
        {
            "text": answer.text,
            "tokens": answer.tokens,
            "prompt_tokens": answer.prompt_tokens,
            "timings": {k: None if v is None else round(v, 4) for k, v in answer.timings.items()},
            "kv_bytes": answer.kv_bytes,
            "policy": repr(options.policy),
            "weights": {part: str(source) for part, source in options.weights.items()},
            "model": model.name,
        },
        ensure_ascii=False,
    )
