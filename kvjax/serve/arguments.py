"""The command line of ``python -m kvjax.serve``: its options, and what is refused before any work."""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Sequence
from typing import Any

from kvjax import catalogue, cli, weights
from kvjax.algebra import Policy, Wrapper
from kvjax.cli import option, shared, whole
from kvjax.decode import with_draft
from kvjax.loading import LanguageModel
from kvjax.weights import Source

_EXAMPLES = """\
examples:
  python -m kvjax.serve --prompt "Once upon a time"
  python -m kvjax.serve --prompt-file book.txt --policy "snapkv + uniform(512)"
  python -m kvjax.serve --prompt-file book.txt --draft "quest(chunks=8)"
  cat notes.txt | python -m kvjax.serve --policy "window(256) + sinks(4) + int8" --json
  python -m kvjax.serve --prompt-file book.txt --policy wg-kv --weights write_gate=aggressive
  python -m kvjax.serve --model Qwen/Qwen2.5-0.5B-Instruct       (a chat; Ctrl-D leaves)
  python -m kvjax.serve --model DIR --prompt "Three large cities in France?" --system "Be terse."
  python -m kvjax.serve http                                     (OpenAI's protocol; see http --help)
"""

_JSON = "one object on standard output: text, tokens, timings, kv_bytes, policy, model"

_TOKENS = whole(1, "a whole number of tokens")
_TEMPERATURE = cli.Rule(float, lambda t: 0 <= t < math.inf, "0 (greedy) or more")
_TOP_K = cli.Rule(int, lambda k: k >= 0, "0 (all) or more")
_TOP_P = cli.Rule(float, lambda p: 0 < p <= 1, "a number above 0, at most 1")
_SEED = cli.Rule(int, lambda s: 0 <= s < 2**32, "a whole number from 0 to 2**32 - 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The command line. ``auto`` is the policy where it says ``auto(...)`` and the model chooses, else ""."""

    prompt: str | None = option(None, "the prompt itself", "TEXT", group="what to read", alone="prompt")
    prompt_file: str | None = option(None, "a UTF-8 file that holds the prompt", "FILE", alone="prompt")
    system: str | None = option(
        None, "the system's message before the prompt or the chat; needs a chat template", "TEXT"
    )
    raw: bool = option(False, "send the bare words of the prompt to a model that has a chat template")
    model: str | None = shared("--model", group="model and cache")
    policy: Policy = shared("--policy", "full", "what the KV cache keeps (default: full; see below)")
    auto: str = ""
    draft: str | None = option(
        None, "a selection that writes ahead, such as quest(chunks=8); full reads verify it", "SPEC"
    )
    weights: dict[str, Source] = option(add=weights.add_options)
    dtype: str | None = shared("--dtype")
    weight_dtype: str | None = shared("--weight-dtype")
    mesh: str | None = shared("--mesh")
    chunk: int = option(256, "prompt tokens read at a time", type=_TOKENS)
    max_new_tokens: int | None = option(
        None,
        "stop after so many tokens (default: 128, or what is left of the model's context)",
        type=_TOKENS,
        group="how to write",
    )
    temperature: float = option(
        0.0, "0 is greedy (default), 1 the model's own distribution", type=_TEMPERATURE
    )
    top_k: int = option(0, "draw among the K most likely tokens (default: 0, all)", "K", type=_TOP_K)
    top_p: float = option(
        1.0, "draw among the most likely tokens that together have this probability (default: 1)", type=_TOP_P
    )
    seed: int = option(0, "of the draws", type=_SEED)
    json: bool = shared("--json", False, _JSON, group="what to print")
    progress: bool | None = shared(
        "--progress",
        help="the bar while a long prompt is read (default: on terminals, after half a second)",
    )


def parse(argv: Sequence[str]) -> Options:
    """The options in ``argv``.

    Raises:
      InputError: an unknown word, a number out of range.
      PolicyError: a policy that cannot be built, weights for a part that it does not have.
    """
    options = cli.parse(
        Options,
        argv,
        prog="python -m kvjax.serve",
        description="Answer a prompt with a language model whose KV cache follows a policy. Without a "
        "prompt: reads standard input if it is a pipe or a file, else starts a chat. Where the model has a "
        "chat template, the prompt is a user's turn and the model answers it; without one, or with --raw, "
        "the model continues the prompt.",
        examples=lambda: _EXAMPLES + "\n" + _policies(),
    )
    if options.raw and options.system is not None:
        raise cli.InputError(
            "--system needs the chat template, and --raw goes without it. Leave one of the two out."
        )
    text = str(options.policy)
    if weights.is_auto(text):  # known when the model is (``settled``)
        return dataclasses.replace(options, policy=Policy(), auto=text)
    return _with_policy(options, catalogue.policy(text))


def settled(options: Options, model: LanguageModel, **tokens: Any) -> tuple[Options, str]:
    """The options with the policy that ``auto(...)`` stands for on this model, and the reason for it.

    Args:
      options: whose policy is ``auto``.
      model: that answers.
      tokens: as in ``kvjax.weights.chosen``.

    Raises:
      PolicyError: nothing to choose by, or weights for a part that was not chosen.
    """
    policy, reason = weights.chosen(options.auto, model, **tokens)
    return _with_policy(options, policy), reason


def _with_policy(options: Options, policy: Policy) -> Options:
    policy = with_draft(policy, options.draft)
    sources = weights.sources(policy, options.weights)
    return dataclasses.replace(options, policy=policy, weights=sources, auto="")


def _policies() -> str:
    """The part of --help about policies: presets, then every part by its place."""
    width = max(map(len, catalogue.PRESETS))
    lines = ['policies: a sum of presets and parts, such as "snapkv + ada(0.25) + int8 + sinks(4)"', ""]
    lines += [f"  {name:<{width}}  {spec}" for name, spec in catalogue.PRESETS.items()]
    lines += [""]
    places: dict[str, list[str]] = {}
    for kind in catalogue.parts().values():
        place = "wrapper" if issubclass(kind, Wrapper) else kind.place
        places.setdefault(place, []).append(kind.name)
    places["protect"] = [f"{name}(n)" for name in catalogue.PROTECTIONS]
    for place, names in places.items():
        words = textwrap.fill(", ".join(sorted(names)), 76, subsequent_indent=" " * 15)
        lines.append(f"  {place + ':':<12} {words}")
    return "\n".join(lines)
