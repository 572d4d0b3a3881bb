"""The command line of ``python -m kvjax.serve``: what can be said, and what is refused before any work."""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import NoReturn

from kvjax import catalogue
from kvjax.algebra import Policy
from kvjax.models.hf_config import DTYPES

RESERVED = "http"
"""The first word that will start the HTTP server."""

_EXAMPLES = """\
examples:
  python -m kvjax.serve --prompt "Once upon a time"
  python -m kvjax.serve --prompt-file book.txt --policy "snapkv + uniform(512)"
  cat notes.txt | python -m kvjax.serve --policy "window(256) + sinks(4) + int8" --json
  python -m kvjax.serve --prompt-file book.txt --policy wg-kv --gates aggressive
  python -m kvjax.serve --model Qwen/Qwen2.5-0.5B-Instruct       (a chat; Ctrl-D leaves)
"""


class InputError(ValueError):
    """Something on the command line, in a file or in a pipe that cannot be used."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The command line, checked.

    Attributes:
      prompt, prompt_file: where the prompt is, at most one of them.
      model: folder or hub id; None is the embedded model.
      dtype: of weights and cache; None as stored.
      policy: what the KV cache keeps.
      gates: learned weights of the policy, a file or a name the model ships; None takes what it ships.
      max_new_tokens: None writes up to 128, as far as the model's context reaches.
      temperature, top_k, top_p, seed: see ``kvjax.sampling``.
      chunk: prompt tokens read at a time.
      json: one object instead of streamed text.
      progress: True and False force or forbid the bar; None shows it to terminals.
    """

    prompt: str | None = None
    prompt_file: str | None = None
    model: str | None = None
    dtype: str | None = None
    policy: Policy = Policy()
    gates: str | None = None
    max_new_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    chunk: int = 256
    json: bool = False
    progress: bool | None = None


def parse(argv: Sequence[str]) -> Options:
    """The options in ``argv``.

    Raises:
      InputError: an unknown word, a number out of range, gates for a policy that has none.
      PolicyError: a policy that cannot be built.
    """
    if list(argv[:1]) == [RESERVED]:
        raise InputError(
            "python -m kvjax.serve http is reserved for an HTTP server, which does not exist yet. Leave out "
            "'http' to answer a prompt or to chat here."
        )
    said = vars(_parser().parse_args(argv))
    policy = catalogue.policy(said["policy"])
    if said["gates"] is not None and not policy.learned:
        raise InputError(
            f"--gates {said['gates']} is given, but nothing in --policy '{policy!r}' is learned. Leave it "
            "out, or use a policy such as wg-kv."
        )
    return Options(**said | {"policy": policy})


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # Our own checks already name the option; argparse would name it twice.
        message = re.sub(r"^argument (\S+: )?(?=--)", "", message)
        known = message.endswith(".")
        raise InputError(message if known else f"{message}. See python -m kvjax.serve --help.")


def _parser() -> _Parser:
    parser = _Parser(
        prog="python -m kvjax.serve",
        description="Answer a prompt with a language model whose KV cache follows a policy. Without a "
        "prompt: reads standard input if it is a pipe or a file, else starts a chat.",
        epilog=_EXAMPLES + "\n" + _policies(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_input(parser)
    _add_model(parser)
    _add_sampling(parser)
    _add_output(parser)
    return parser


def _add_input(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what to read").add_mutually_exclusive_group()
    group.add_argument("--prompt", metavar="TEXT", help="the prompt itself")
    group.add_argument("--prompt-file", metavar="FILE", help="a UTF-8 file that holds the prompt")


def _add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model and cache")
    group.add_argument(
        "--model",
        metavar="DIR|HUB_ID",
        help="a folder in Hugging Face's format or a hub id (default: the small model in the package)",
    )
    group.add_argument(
        "--policy", metavar="SPEC", default="full", help="what the KV cache keeps (default: full; see below)"
    )
    group.add_argument(
        "--gates",
        metavar="FILE|NAME",
        help="learned weights of the policy: a file, or one of the model's own, such as 'conservative' "
        "(default: those it ships for the policy)",
    )
    group.add_argument(
        "--dtype",
        choices=DTYPES,
        help="of weights and cache (default: as stored; the package's model float32)",
    )
    at_least_1 = _number("--chunk", int, lambda n: n >= 1, "a whole number of tokens, 1 or more")
    group.add_argument(
        "--chunk",
        metavar="N",
        type=at_least_1,
        default=256,
        help="prompt tokens read at a time (default: 256)",
    )


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    def add(
        flag: str, kind: type, legal: Callable[[float], bool], rule: str, default: float | None, help: str
    ) -> None:
        group.add_argument(
            flag, metavar="X", type=_number(flag, kind, legal, rule), default=default, help=help
        )

    group = parser.add_argument_group("how to write")
    count = "a whole number of tokens, 1 or more"
    limit = "stop after so many tokens (default: 128, or what is left of the model's context)"
    heat = "0 is greedy (default), 1 the model's own distribution"
    add("--max-new-tokens", int, lambda n: n >= 1, count, None, limit)
    add("--temperature", float, lambda t: 0 <= t < math.inf, "0 (greedy) or more", 0.0, heat)
    add("--top-k", int, lambda k: k >= 0, "0 (all) or more", 0, "draw among the K likeliest tokens (0: all)")
    nucleus = "draw among the likeliest tokens that together have this probability (default: 1)"
    add("--top-p", float, lambda p: 0 < p <= 1, "a number above 0, at most 1", 1.0, nucleus)
    add("--seed", int, lambda s: 0 <= s < 2**32, "a whole number from 0 to 2**32 - 1", 0, "of the draws")


def _add_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what to print")
    group.add_argument(
        "--json",
        action="store_true",
        help="one object on standard output: text, tokens, timings, kv_bytes, policy, model",
    )
    group.add_argument(
        "--progress",
        action=argparse.BooleanOptionalAction,
        help="the bar while a long prompt is read (default: on terminals, after half a second)",
    )


def _number(flag: str, kind: type, legal: Callable[[float], bool], rule: str) -> Callable[[str], int | float]:
    """An argparse type that names the option, the rule and the way out."""

    def read(text: str) -> int | float:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not legal(value):
            raise argparse.ArgumentTypeError(f"{flag} {text} is out of range. Give {rule}.")
        return value

    return read


def _policies() -> str:
    """The part of --help about policies: presets, then every part by its place."""
    width = max(map(len, catalogue.PRESETS))
    lines = ['policies: a sum of presets and parts, such as "snapkv + ada(0.25) + int8 + sinks(4)"', ""]
    lines += [f"  {name:<{width}}  {spec}" for name, spec in catalogue.PRESETS.items()]
    lines += [""]
    places: dict[str, list[str]] = {}
    for name, kind in catalogue.parts().items():
        places.setdefault(kind.place, []).append(name)
    places["protect"] = [f"{name}(n)" for name in catalogue.PROTECTIONS]
    for place, names in places.items():
        words = textwrap.fill(", ".join(sorted(names)), 76, subsequent_indent=" " * 15)
        lines.append(f"  {place + ':':<12} {words}")
    return "\n".join(lines)
