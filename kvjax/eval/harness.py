"""Our models in EleutherAI's evaluation harness (https://github.com/EleutherAI/lm-evaluation-harness).

python -m kvjax.eval.harness --model kvjax \\
    --model_args "pretrained=embedded,policy=snapkv + ada(0.25)" --tasks niah_single_1 --limit 20

is ``lm_eval`` with one more model. From Python, pass ``KVJax(policy=...)`` to
``lm_eval.simple_evaluate(model=...)``; then a policy may contain commas. The harness gives a prompt as one
text, question included, so policies that score prompts see the question (``compress_at prompt``). Decoding is
greedy.

RULER at any length of the model, by the harness's own generators and scores (its texts come from the hub, and
it needs ``pip install 'lm_eval[ruler]' transformers``); LongBench is ``--tasks longbench``:

python -m kvjax.eval.harness --model kvjax --tasks ruler \\
    --model_args "pretrained=Qwen/Qwen3-8B,policy=snapkv + ada(0.25)" \\
    --metadata '{"max_seq_lengths": [4096, 32768, 131072]}' --use_cache qwen3-8b-snapkv

With ``--use_cache`` every batch is kept as it comes, and the same command goes on where it was stopped. The
harness files answers by the question alone: name another file for another model or policy.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from kvjax import decode
from kvjax.catalogue import policy as parse_policy
from kvjax.eval.errors import EvalError
from kvjax.eval.measure import forced
from kvjax.loading import EMBEDDED, load
from kvjax.weights import Sources, parse_sources, weights_for

try:
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
except ModuleNotFoundError as error:
    raise ImportError("kvjax.eval.harness needs lm_eval. Run: pip install 'kvjax[eval]'") from error

A = TypeVar("A")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt and the tokens after it: a reference to feed (``forced``), or zeros to be replaced."""

    prompt: list[int]
    target: list[int]
    forced: bool


@register_model("kvjax")
class KVJax(LM):
    """A kvjax model with a policy, as the harness takes models.

    Attributes:
      model: in memory, with its tokenizer.
      policy, weights: of the KV cache, and learned weights of the policy; {} where it learns nothing.
      max_length: most tokens of a request, answer included; longer prompts lose their beginning.
      batch: requests a batch.
    """

    def __init__(
        self,
        pretrained: str = EMBEDDED,
        policy: str = "full",
        weights: Sources | str = None,
        dtype: str | None = None,
        max_length: int | None = None,
        batch_size: int | str = 8,
        device: str | None = None,
        max_batch_size: int | None = None,
        weight_dtype: str | None = None,
    ) -> None:
        """Loads the model.

        Args:
          pretrained: embedded, a folder or a hub id.
          policy: one-string form.
          weights: of the policy's learned parts, by part; in ``model_args`` one of them, ``part=source``.
          dtype: of weights and cache; as stored by default.
          max_length: fewer positions than the model has.
          batch_size: requests a batch; "auto" is 8.
          weight_dtype: "int8" or "int4" to quantise weights to.
          device, max_batch_size: the harness passes them; JAX places arrays itself.
        """
        super().__init__()
        self.model = load(
            None if pretrained == EMBEDDED else pretrained, dtype=dtype, weight_dtype=weight_dtype
        )
        self.policy = parse_policy(policy)
        sources = parse_sources(weights) if isinstance(weights, str) else weights
        self.weights = weights_for(self.policy, self.model, sources)
        most = self.model.network.max_positions
        self.max_length = most if max_length is None else min(int(max_length), most)
        self.batch = int(batch_size) if str(batch_size).isdecimal() else 8

    @property
    def tokenizer_name(self) -> str:
        """The model's folder, for tasks that count tokens.

        Raises:
          EvalError: a model from a GGUF file or a Flax module, whose tokenizer these tasks cannot open.
        """
        if self.model.folder is None:
            raise EvalError(
                f"{self.model.name} is a Flax module, and this task opens the tokenizer of a folder. Save "
                "the model in Hugging Face's format and name that folder."
            )
        if self.model.folder.is_file():
            raise EvalError(
                f"{self.model.folder} is a GGUF file, and this task opens the tokenizer of a folder itself. "
                "Write one with kvjax.models.hf.save(..., tokenizer=model.folder) and name it as the model."
            )
        return str(self.model.folder.resolve())

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(log-probability of the continuation, whether greedy decoding would write it) of each request."""
        wanted = []
        for context, continuation in (request.args for request in requests):
            whole = self.model.text.encode(context + continuation)
            # As in the harness: the continuation's tokens are those behind the context's, and blanks between
            # the two belong to the continuation.
            context = context.rstrip()
            cut = min(max(1, len(self.model.text.encode(context))), len(whole) - 1)
            prompt, target = self._shortened(whole[:cut], whole[cut:])
            wanted.append(Request(prompt=prompt, target=target, forced=True))

        def answer(index: int, nll: np.ndarray, best: list[int]) -> tuple[float, bool]:
            return -float(nll.sum()), best == wanted[index].target

        return self._kept(requests, wanted, "loglikelihood", answer, disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of each whole text, in windows of ``max_length``, the cache managed all along."""
        wanted, owner = [], []
        step = self.max_length - 1
        for index, (text,) in enumerate(request.args for request in requests):
            ids = self.model.text.encode(text)
            for start in range(0, len(ids) - 1, step):
                target = ids[start + 1 : start + 1 + step]
                wanted.append(Request(prompt=ids[start : start + 1], target=target, forced=True))
                owner.append(index)
        totals = np.zeros(len(requests))
        for at, nll, _ in self._all(wanted, "loglikelihood_rolling", disable_tqdm):
            totals[owner[at]] -= float(nll.sum())
        return totals.tolist()

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Greedy text of each request, up to its first stop string.

        Raises:
          EvalError: a request for sampling.
        """
        wanted = []
        for context, how in (request.args for request in requests):
            if how.get("do_sample") and float(how.get("temperature", 1.0)) > 0:
                raise EvalError(
                    "kvjax in the harness decodes greedily. Set do_sample=false in generation_kwargs."
                )
            most = int(how.get("max_gen_toks", how.get("max_new_tokens", 256)))
            target = [0] * min(most, self.max_length // 2)
            prompt, _ = self._shortened(self.model.text.encode(context), target)
            wanted.append(Request(prompt=prompt, target=target, forced=False))

        def answer(index: int, nll: np.ndarray, best: list[int]) -> str:
            return self._text(best, requests[index].args[1].get("until"))

        return self._kept(requests, wanted, "generate_until", answer, disable_tqdm)

    def _kept(
        self,
        asked: list[Any],
        wanted: list[Request],
        what: str,
        answer: Callable[[int, np.ndarray, list[int]], A],
        quiet: bool,
    ) -> list[A]:
        """The answers in order, each given to the harness's cache as soon as its batch is done."""
        answers: dict[int, A] = {}
        for index, nll, best in self._all(wanted, what, quiet):
            answers[index] = answer(index, nll, best)
            self.cache_hook.add_partial(what, asked[index].args, answers[index])
        return [answers[index] for index in range(len(wanted))]

    def _text(self, best: list[int], until: str | Sequence[str] | None) -> str:
        end = next((i for i, token in enumerate(best) if token in self.model.spec.eos), len(best))
        text = self.model.text.decode(best[:end])
        for stop in [until] if isinstance(until, str) else until or []:
            text = text.split(stop)[0] if stop else text
        return text

    def _shortened(self, prompt: list[int], target: list[int]) -> tuple[list[int], list[int]]:
        """A prompt that leaves space for its target; BOS stays, the tokens behind it go first."""
        space = self.max_length - len(target)
        if space < 1:
            return prompt[:1], target[: self.max_length - 1]
        return (prompt[:1] + prompt[len(prompt) - space + 1 :] if len(prompt) > space else prompt), target

    def _all(
        self, requests: list[Request], what: str, quiet: bool
    ) -> Iterator[tuple[int, np.ndarray, list[int]]]:
        """(index, nll, best) of every request, batch by batch; batches are of like lengths."""
        from tqdm import tqdm

        order = sorted(range(len(requests)), key=lambda i: (len(requests[i].prompt), len(requests[i].target)))
        alone = sum(len(one.prompt) == 1 for one in requests)  # nothing to read before the first step
        starts = [*range(0, alone, self.batch), *range(alone, len(order), self.batch), len(order)]
        with tqdm(total=len(requests), desc=what, disable=quiet, file=sys.stderr) as bar:
            for first, end in zip(starts, starts[1:]):
                part = order[first : min(end, alone) if first < alone else end]
                for index, (nll, best) in zip(part, self._batch([requests[i] for i in part])):
                    yield index, nll, best
                bar.update(len(part))

    def _batch(self, requests: list[Request]) -> list[tuple[np.ndarray, list[int]]]:
        """One batch, filled up with copies of its first request so that all batches share programs."""
        model, policy, weights = self.model, self.policy, self.weights
        filled = requests + requests[:1] * (self.batch - len(requests))
        longest = max(len(one.prompt) + len(one.target) for one in filled)
        context = decode.bucket(longest, model.network.max_positions)
        # A step feeds the last prompt token: selection acts on the first answer token, too.
        if len(requests[0].prompt) == 1:
            dtype = model.params["embed"].dtype
            state = decode.empty(model.network, policy, rows=len(filled), context=context, dtype=dtype)
        else:
            prompts = [one.prompt[:-1] for one in filled]
            state, _ = decode.prefill(model, policy, prompts, context=context, weights=weights)
        state = decode.roomy(policy, state, 1)
        feed = [[one.prompt[-1], *(one.target[:-1] if one.forced else [])] for one in filled]
        targets, reference = [one.target for one in filled], requests[0].forced
        _, steps = forced.steps(model, policy, state, feed, targets, forced=reference, weights=weights)
        counts = [len(one.target) for one in requests]
        return [(np.asarray(steps.nll[i, :n]), steps.best[i, :n].tolist()) for i, n in enumerate(counts)]


def main() -> None:
    """``lm_eval`` with this model known to it."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
