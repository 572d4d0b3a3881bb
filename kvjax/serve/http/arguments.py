"""The command line of ``python -m kvjax.serve http``: its options, and what is refused before any work."""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvjax import catalogue, cli, weights
from kvjax.algebra import Policy
from kvjax.budgets.amount import UNITS
from kvjax.cli import option, shared, whole
from kvjax.weights import Source

_EXAMPLES = """\
examples:
  python -m kvjax.serve http                                     (then open http://127.0.0.1:8000)
  python -m kvjax.serve http --model Qwen/Qwen2.5-0.5B-Instruct --policy "snapkv + uniform(0.25)"
  python -m kvjax.serve http --kv-memory 8GiB --allow-policies "snapkv; wg-kv; window(256) + sinks(4)"
  KVJAX_API_KEY=... python -m kvjax.serve http --host 0.0.0.0

  curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
       -d '{"prompt": "Once upon a time", "max_tokens": 20, "kv_policy": "snapkv + uniform(0.25)"}'
"""

_DRAIN = "after SIGTERM what runs may end within so many seconds (default: 30)"

_PORT = cli.Rule(int, lambda port: 0 <= port < 2**16, "0 (any that is free) to 65535")
_ROOT = cli.Rule(str, lambda path: bool(re.fullmatch(r"(/[A-Za-z0-9._~-]+)+", path)), "a path as /llm")
_SHARE = cli.Rule(float, lambda share: 0 <= share <= 1, "a share from 0 to 1")
_SECONDS = cli.Rule(float, lambda seconds: 0 < seconds < math.inf, "seconds, more than 0")


def size(text: str) -> int:
    """An argparse type: bytes, as 512KiB or 8GiB."""
    match = re.fullmatch(r"(\d+)\s*(B|KiB|MiB|GiB)", text.strip())
    if match is None or not int(match[1]):
        raise argparse.ArgumentTypeError(f"{text} is no size. Write it as 512KiB, 8MiB or 1GiB.")
    return int(match[1]) * UNITS[match[2]]


def _some(text: str) -> list[str]:
    """An argparse type: policies between semicolons, since their arguments have commas."""
    return [word.strip() for word in text.split(";") if word.strip()]


def _specs(text: str) -> list[str] | None:
    """An argparse type: policies between semicolons; None for all."""
    specs = _some(text)
    return None if specs == ["all"] else specs


def _origins(text: str) -> tuple[str, ...]:
    """An argparse type: origins between semicolons."""
    origins = tuple(word.strip() for word in text.split(";") if word.strip())
    for origin in origins:
        if origin != "*" and not re.fullmatch(r"https?://[^/\s]+", origin):
            raise argparse.ArgumentTypeError(
                f"{origin} is not an origin. Write scheme and host, as https://a.example, or *."
            )
    return origins


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The command line. A policy that says ``auto(...)`` is text until the model is known (``settled``)."""

    model: str | None = shared("--model", group="what is served")
    name: str | None = option(None, "the model's name for clients (default: its folder's)", "NAME")
    dtype: str | None = shared("--dtype")
    weight_dtype: str | None = shared("--weight-dtype")
    mesh: str | None = shared(
        "--mesh", help="devices, along tensor and context: tensor=8 (default: one)", metavar="tensor=8"
    )
    policy: str | Policy = shared("--policy", "full", "for requests that name none")
    weights: dict[str, Source] = option(add=weights.add_options)
    allow_policies: tuple[str | Policy, ...] | None = option(
        None,
        "what kv_policy may ask for beside --policy, at any budget (default: all)",
        "'P; Q'",
        type=_specs,
    )

    host: str = option("127.0.0.1", None, "ADDRESS", group="who is served")
    port: int = option(8000, "(default: 8000; 0: a free one)", type=_PORT)
    api_key_file: Path | None = option(
        None, "keys that are let in, one a line; KVJAX_API_KEY may hold more", "FILE"
    )
    without_key: bool = option(False, "listen on other addresses than this machine's without a key")

    warm_up: tuple[str | Policy, ...] = option(
        (),
        "policies that are compiled before the server is ready, for prompts of one token to a few chunks, "
        "alone and together; --policy always is, for a short prompt",
        "'P; Q'",
        type=_some,
    )

    root_path: str = option("", "the path under which a proxy serves this, as /llm", "PATH", type=_ROOT)
    cors: tuple[str, ...] = option(
        (), "origins whose pages may ask, as 'https://a.example'; '*' for all", "'O; O'", type=_origins
    )
    ssl_certfile: Path | None = option(None, "answer https with this certificate (PEM)", "FILE")
    ssl_keyfile: Path | None = option(None, "its key, where that is another file", "FILE")

    kv_memory: int | None = option(
        None, "of all caches (default: what is left)", "SIZE", type=size, group="sizes"
    )
    max_rows: int = option(16, "texts of one policy structure that run at once")
    max_lanes: int = option(8, "running batches, one for each policy structure")
    queue: int = option(64, "texts that wait, each of the n of a request; more are answered 429")
    chunk: int = option(256, "prompt tokens of a text that are read at a time")
    prefill_tokens: int | None = option(
        None,
        "prompt tokens read between two decodes, of one text or several in one program: the longest pause of "
        "running texts (default: --chunk)",
    )
    segment: int = option(
        8, "decode steps between two looks of the host: a text that is left ends within so many"
    )
    max_choices: int = option(64, "texts of one request: prompts times n")
    max_stops: int = option(16, "stop strings of one request")
    share: float | None = option(
        None,
        "of the tokens still to come, how many a text is expected to store when it begins (default: what its "
        "policy bounds, or the share its prompt kept); less runs more texts and puts some back to wait",
        type=_SHARE,
    )
    share_pages: bool | None = option(
        None, "texts that begin alike share pages: less memory, on a CPU slower reads (default: not on a CPU)"
    )
    context: int | None = option(
        None, "tokens of a text, prompt and answer (default: the model's)", type=whole(2)
    )

    max_contexts: int = option(64, "held contexts; the longest unused makes room")
    contexts_share: float = option(0.5, "of --kv-memory, how much held contexts may take", type=_SHARE)
    host_memory: int | None = option(
        None, "of the host, for contexts beyond that share (default: none)", "SIZE", type=size
    )
    contexts_ttl: float = option(
        86400.0, "an unused context goes after so long (default: a day)", "SECONDS", type=_SECONDS
    )

    max_body: int | None = option(
        None,
        "(default: 64 bytes a token of --context, at least 256KiB)",
        "SIZE",
        type=size,
        group="limits of a request",
    )
    body_timeout: float = option(
        30.0, "within which a body has to arrive (default: 30)", "SECONDS", type=_SECONDS
    )
    max_prompt: int | None = option(None, "tokens of a prompt (default: as many as fit)")
    strict: bool = option(
        False, "refuse every field that is not known; else those that are not ours are noted"
    )
    request_timeout: float | None = option(
        None,
        "an answer ends then, wherever it is; 504 before its first token (default: never)",
        "SECONDS",
        type=_SECONDS,
    )

    client_requests: int | None = option(
        None,
        "requests a minute (default: 600)",
        type=whole(0),
        group="limits of a client, which is a key, or an address (0: none, as on this machine alone)",
    )
    client_waiting: int | None = option(None, "texts that wait (default: half of --queue)", type=whole(0))
    client_tokens: int | None = option(
        None, "tokens a minute, read and written (default: 1000000)", type=whole(0)
    )
    client_structures: int | None = option(
        None,
        "policies of other structures that are compiled for it in a minute (default: 6)",
        type=whole(0),
    )

    max_connections: int | None = option(
        None,
        "connections at a time; those that wait for a request make room for others (default: half of the "
        "files that the process may open, at most 1024)",
        group="the process",
    )
    drain: float = option(30.0, _DRAIN, "SECONDS", type=_SECONDS)
    save_contexts: Path | None = option(
        None, "keep held contexts there too; a later server goes on with them", "DIR"
    )
    log: str = option("json", "a line a request on standard error", choices=("json", "off"))


def parse(argv: Sequence[str]) -> Options:
    """The options in ``argv``.

    Raises:
      InputError: an unknown word, a number out of range.
      PolicyError: a policy that cannot be built, weights for a part that it does not have.
    """
    options = cli.parse(
        Options,
        argv,
        prog="python -m kvjax.serve http",
        description="Serve a language model over HTTP as OpenAI does: completions, chats, streams. Every "
        "request may bring a KV cache policy of its own, and requests run in one batch.",
        examples=_EXAMPLES,
    )
    changes: dict[str, Any] = {"policy": _policy(options.policy), "weights": options.weights or {}}
    if options.allow_policies is not None:
        changes["allow_policies"] = tuple(map(_policy, options.allow_policies))
    changes["warm_up"] = tuple(map(_policy, options.warm_up))
    options = dataclasses.replace(options, **changes)
    return options if isinstance(options.policy, str) else settled(options, options.policy)


def settled(options: Options, policy: Policy) -> Options:
    """The options with the policy that theirs stands for.

    Raises:
      WeightsError: weights for a part that it does not have.
    """
    return dataclasses.replace(options, policy=policy, weights=weights.sources(policy, options.weights))


def _policy(spec: str | Policy) -> str | Policy:
    """The policy, or ``auto(...)`` as it is."""
    return spec if isinstance(spec, str) and weights.is_auto(spec) else catalogue.policy(spec)
