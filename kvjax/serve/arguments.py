"""The command line of ``python -m kvjax.serve``: what can be said, and what is refused before any work."""

from __future__ import annotations

import argparse
import dataclasses
import math
import textwrap
from collections.abc import Sequence

from kvjax import catalogue, cli, weights
from kvjax.algebra import Policy
from kvjax.loading import LanguageModel
from kvjax.weights import Source

_TOKENS = "a whole number of tokens"

_EXAMPLES = """\
examples:
  python -m kvjax.serve --prompt "Once upon a time"
  python -m kvjax.serve --prompt-file book.txt --policy "snapkv + uniform(512)"
  cat notes.txt | python -m kvjax.serve --policy "window(256) + sinks(4) + int8" --json
  python -m kvjax.serve --prompt-file book.txt --policy wg-kv --weights write_gate=aggressive
  python -m kvjax.serve --model Qwen/Qwen2.5-0.5B-Instruct       (a chat; Ctrl-D leaves)
  python -m kvjax.serve http                                     (OpenAI's protocol; http --help says more)
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The command line, checked.

    Attributes:
      prompt, prompt_file: where the prompt is, at most one of them.
      model: folder or hub id; None is the embedded model.
      dtype: of weights and cache; None as stored.
      mesh: devices; None is one.
      policy: what the KV cache keeps.
      auto: ``auto(...)``, where the model is to choose it; else "".
      weights: where the learned parts of the policy have their weights from, by part.
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
    mesh: str | None = None
    policy: Policy = Policy()
    auto: str = ""
    weights: dict[str, Source] = dataclasses.field(default_factory=dict)
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
      InputError: an unknown word, a number out of range.
      PolicyError: a policy that cannot be built, weights for a part that it has not.
    """
    said = vars(_parser().parse_args(argv))
    if weights.is_auto(said["policy"]):  # known when the model is (``settled``)
        return Options(**said | {"policy": Policy(), "auto": said["policy"]})
    policy = catalogue.policy(said["policy"])
    return Options(**said | {"policy": policy, "weights": weights.sources(policy, said["weights"])})


def settled(options: Options, model: LanguageModel) -> tuple[Options, str]:
    """The options with the policy that ``auto(...)`` stands for on this model, and what that rests on.

    Raises:
      PolicyError: nothing to choose by, or weights for a part that was not chosen.
    """
    policy, said = weights.chosen(options.auto, model)
    given = weights.sources(policy, options.weights)
    return dataclasses.replace(options, policy=policy, weights=given, auto=""), said


def _parser() -> cli.Parser:
    parser = cli.Parser(
        prog="python -m kvjax.serve",
        description="Answer a prompt with a language model whose KV cache follows a policy. Without a "
        "prompt: reads standard input if it is a pipe or a file, else starts a chat.",
        ending=lambda: _EXAMPLES + "\n" + _policies(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
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
    cli.add(group, "--model")
    cli.add(group, "--policy", default="full", help="what the KV cache keeps (default: full; see below)")
    weights.add_options(group)
    cli.add(group, "--dtype", "--mesh")
    group.add_argument(
        "--chunk",
        metavar="N",
        type=cli.whole("--chunk", 1, _TOKENS),
        default=256,
        help="prompt tokens read at a time (default: 256)",
    )


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how to write")
    group.add_argument(
        "--max-new-tokens",
        metavar="X",
        type=cli.whole("--max-new-tokens", 1, _TOKENS),
        help="stop after so many tokens (default: 128, or what is left of the model's context)",
    )
    group.add_argument(
        "--temperature",
        metavar="X",
        type=cli.number("--temperature", float, lambda t: 0 <= t < math.inf, "0 (greedy) or more"),
        default=0.0,
        help="0 is greedy (default), 1 the model's own distribution",
    )
    group.add_argument(
        "--top-k",
        metavar="X",
        type=cli.number("--top-k", int, lambda k: k >= 0, "0 (all) or more"),
        default=0,
        help="draw among the K likeliest tokens (0: all)",
    )
    group.add_argument(
        "--top-p",
        metavar="X",
        type=cli.number("--top-p", float, lambda p: 0 < p <= 1, "a number above 0, at most 1"),
        default=1.0,
        help="draw among the likeliest tokens that together have this probability (default: 1)",
    )
    whole_seed = cli.number("--seed", int, lambda s: 0 <= s < 2**32, "a whole number from 0 to 2**32 - 1")
    group.add_argument("--seed", metavar="X", type=whole_seed, default=0, help="of the draws")


def _add_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what to print")
    cli.add(
        group,
        "--json",
        help="one object on standard output: text, tokens, timings, kv_bytes, policy, model",
    )
    cli.add(
        group,
        "--progress",
        help="the bar while a long prompt is read (default: on terminals, after half a second)",
    )


def _policies() -> str:
    """The part of --help about policies: presets, then every part by its place."""
    width = max(map(len, catalogue.PRESETS))
    lines = ['policies: a sum of presets and parts, such as "snapkv + ada(0.25) + int8 + sinks(4)"', ""]
    lines += [f"  {name:<{width}}  {spec}" for name, spec in catalogue.PRESETS.items()]
    lines += [""]
    places: dict[str, list[str]] = {}
    for kind in catalogue.parts().values():
        places.setdefault(kind.place, []).append(kind.name)
    places["protect"] = [f"{name}(n)" for name in catalogue.PROTECTIONS]
    for place, names in places.items():
        words = textwrap.fill(", ".join(sorted(names)), 76, subsequent_indent=" " * 15)
        lines.append(f"  {place + ':':<12} {words}")
    return "\n".join(lines)
