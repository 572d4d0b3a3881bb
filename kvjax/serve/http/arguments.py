"""The command line of ``python -m kvjax.serve http``: what can be said, what is refused before any work."""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from kvjax import catalogue, cli, weights
from kvjax.algebra import Policy
from kvjax.budgets.amount import UNITS
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The command line, checked.

    Attributes:
      model, dtype, mesh, policy, weights: as for one prompt; the policy is for requests that name none, and
        text where it is ``auto(...)``, until the model is known (``settled``).
      name: of the model, as clients say it; by default the last part of where it is from.
      host, port: where to listen; port 0 takes one that is free.
      api_key_file, without_key: who is let in.
      allow_policies: what requests may ask for beside the default; None is all.
      kv_memory: bytes that caches may have; None is what the device has left.
      max_rows, max_lanes, context, queue, chunk, segment, share, share_pages: of the engine.
      max_body: bytes of a body. max_prompt: tokens; None as many as fit. max_choices: texts of one request.
      max_stops: stop strings.
      request_timeout, drain: seconds.
      save_contexts: folder that held contexts are written to, and loaded from at the start.
      log: "json" or "off".
    """

    model: str | None = None
    dtype: str | None = None
    mesh: str | None = None
    policy: str | Policy = Policy()
    weights: dict[str, Source] = dataclasses.field(default_factory=dict)
    name: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    api_key_file: Path | None = None
    without_key: bool = False
    allow_policies: tuple[str | Policy, ...] | None = None
    kv_memory: int | None = None
    max_rows: int = 16
    max_lanes: int = 8
    context: int | None = None
    queue: int = 64
    chunk: int = 256
    segment: int = 8
    share: float | None = None
    share_pages: bool | None = None
    max_body: int = 8 * 2**20
    max_prompt: int | None = None
    max_choices: int = 64
    max_stops: int = 16
    request_timeout: float | None = None
    drain: float = 30.0
    save_contexts: Path | None = None
    log: str = "json"


def parse(argv: Sequence[str]) -> Options:
    """The options in ``argv``.

    Raises:
      InputError: an unknown word, a number out of range.
      PolicyError: a policy that cannot be built, weights for a part that it has not.
    """
    said = vars(_parser().parse_args(argv))
    allowed = said["allow_policies"]
    found = Options(
        **said
        | {
            "policy": _policy(said["policy"]),
            "weights": said["weights"] or {},
            "allow_policies": None if allowed is None else tuple(_policy(x) for x in allowed),
        }
    )
    return found if isinstance(found.policy, str) else settled(found, found.policy)


def settled(options: Options, policy: Policy) -> Options:
    """The options with the policy that theirs stands for.

    Raises:
      WeightsError: weights for a part that it has not.
    """
    return dataclasses.replace(options, policy=policy, weights=weights.sources(policy, options.weights))


def _policy(text: str) -> str | Policy:
    """As it is said; ``auto(...)`` is known when the model is."""
    return text if weights.is_auto(text) else catalogue.policy(text)


def size(flag: str) -> Callable[[str], int]:
    """An argparse type: bytes, as 512KiB or 8GiB."""

    def read(text: str) -> int:
        match = re.fullmatch(r"(\d+)\s*(B|KiB|MiB|GiB)", text.strip())
        if match is None or not int(match[1]):
            raise argparse.ArgumentTypeError(f"{flag} {text} is no size. Write it as 512KiB, 8MiB or 1GiB.")
        return int(match[1]) * UNITS[match[2]]

    return read


def _several(text: str) -> list[str] | None:
    """Policies between semicolons; their arguments have commas."""
    said = [word.strip() for word in text.split(";") if word.strip()]
    return None if said == ["all"] else said


def _parser() -> cli.Parser:
    parser = cli.Parser(
        prog="python -m kvjax.serve http",
        description="Serve a language model over HTTP as OpenAI does: completions, chats, streams. Every "
        "request may bring a KV cache policy of its own, and requests run in one batch.",
        ending=lambda: _EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_model(parser)
    _add_who(parser)
    _add_engine(parser)
    _add_limits(parser)
    _add_process(parser)
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what is served")
    cli.add(group, "--model")
    group.add_argument("--name", metavar="NAME", help="the model's name for clients (default: its folder's)")
    cli.add(group, "--dtype")
    cli.add(
        group, "--mesh", help="devices, along tensor and context: tensor=8 (default: one)", metavar="tensor=8"
    )
    cli.add(group, "--policy", default="full", help="for requests that name none (default: full)")
    weights.add_options(group)
    group.add_argument(
        "--allow-policies",
        metavar="'P; Q'",
        type=_several,
        help="what kv_policy may ask for beside --policy, at any budget (default: all)",
    )


def _add_who(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("who is served")
    group.add_argument("--host", metavar="ADDRESS", default="127.0.0.1", help="(default: 127.0.0.1)")
    port = cli.number("--port", int, lambda p: 0 <= p < 2**16, "0 (any that is free) to 65535")
    group.add_argument("--port", metavar="N", type=port, default=8000, help="(default: 8000; 0: a free one)")
    group.add_argument(
        "--api-key-file",
        metavar="FILE",
        type=Path,
        help="keys that are let in, one a line; KVJAX_API_KEY may hold some, too",
    )
    group.add_argument(
        "--without-key",
        action="store_true",
        help="listen on other addresses than this machine's without a key",
    )


def _add_engine(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sizes")
    group.add_argument(
        "--kv-memory", metavar="SIZE", type=size("--kv-memory"), help="of all caches (default: what is left)"
    )
    for flag, default, what in (
        ("--max-rows", 16, "texts of one policy structure that run at once"),
        ("--max-lanes", 8, "policy structures that run at once"),
        ("--queue", 64, "texts that wait; more are answered 429"),
        ("--chunk", 256, "prompt tokens read at a time: the longest pause of running texts"),
        ("--segment", 8, "steps between two looks: a text that is left is gone after so many"),
        ("--max-choices", 64, "texts of one request: prompts times n"),
        ("--max-stops", 16, "stop strings of one request"),
    ):
        group.add_argument(
            flag, metavar="N", type=cli.whole(flag), default=default, help=f"{what} (default: {default})"
        )
    group.add_argument(
        "--share",
        metavar="X",
        type=cli.number("--share", float, lambda x: 0 <= x <= 1, "a share from 0 to 1"),
        help="of the tokens still to come, how many a text is counted to store when it begins (default: what "
        "its policy bounds, or the share its prompt kept); less runs more texts and puts some back to wait",
    )
    group.add_argument(
        "--share-pages",
        action=argparse.BooleanOptionalAction,
        help="texts that begin alike share pages: less memory, on a CPU slower reads (default: but on a CPU)",
    )
    group.add_argument(
        "--context",
        metavar="N",
        type=cli.whole("--context", 2),
        help="tokens of a text, prompt and answer (default: the model's)",
    )


def _add_limits(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("limits of a request")
    group.add_argument(
        "--max-body", metavar="SIZE", type=size("--max-body"), default=8 * 2**20, help="(default: 8MiB)"
    )
    group.add_argument(
        "--max-prompt",
        metavar="N",
        type=cli.whole("--max-prompt"),
        help="tokens of a prompt (default: as many as fit)",
    )
    group.add_argument(
        "--request-timeout",
        metavar="SECONDS",
        type=_seconds("--request-timeout"),
        help="an answer ends then, wherever it is (default: never)",
    )


def _add_process(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the process")
    group.add_argument(
        "--drain",
        metavar="SECONDS",
        type=_seconds("--drain"),
        default=30.0,
        help="after SIGTERM what runs may end within so many seconds (default: 30)",
    )
    group.add_argument(
        "--save-contexts",
        metavar="DIR",
        type=Path,
        help="keep held contexts there too; a later server goes on with them",
    )
    group.add_argument(
        "--log",
        choices=("json", "off"),
        default="json",
        help="a line a request on standard error (default: json)",
    )


def _seconds(flag: str) -> Callable[[str], float]:
    return cli.number(flag, float, lambda s: 0 < s < math.inf, "seconds, more than 0")
