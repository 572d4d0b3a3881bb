"""An admission that knows which needle will be asked for: what it needs.

python -m studies.wg_kv.oracle --samples 100 --out results/wg_kv

The same task, length, window and sinks as in ``configs/eval/wg_kv.yaml``; what is admitted is the sentence of
the needle that is asked for, in every KV head and then in the named ones alone. Writes DIR/oracle.json.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from kvjax import cli, decode, metrics
from kvjax.algebra import Admission, Observation, Policy
from kvjax.eval import tasks
from kvjax.eval.arguments import add_model
from kvjax.eval.commands import model_of
from kvjax.eval.measure import batch, runner
from kvjax.eval.measure.row import short
from kvjax.eval.measure.store import about, versions
from kvjax.eval.tasks.data import find
from kvjax.eval.tasks.sample import Samples
from kvjax.loading import LanguageModel
from kvjax.types import Params

if TYPE_CHECKING:
    from jaxtyping import Array, Bool

RESULTS = Path("results/wg_kv")
TASK = "niah_multikey_1"
RETRIEVING = "1.0,1.1,2.0,2.1,3.0,3.1"
"""The embedded model's (its card)."""


@dataclasses.dataclass(frozen=True, repr=False)
class Told(Admission):
    """Tokens are admitted by their place in the prompt.

    Learned weights of a layer: ``keep`` [B, K, T], is the token admitted to the KV head; none is from T on.
    """

    name = "told"
    learns = "told"
    window: int = 32  # type: ignore[assignment]

    def admit(self, params: Params | None, observed: Observation) -> Bool[Array, "B K T"]:
        """What ``keep`` says of each position."""
        assert params is not None
        keep, pos = params["keep"], observed.pos[:, None, :]
        at = jnp.clip(pos, 0, keep.shape[2] - 1)
        return jnp.take_along_axis(keep, at, axis=2) & (pos < keep.shape[2])


def kept(samples: Samples, heads: Bool[np.ndarray, "L K"]) -> Params:
    """Weights of ``Told`` that admit each sample's needed tokens to the heads that are True."""
    most = max(len(encoded.context) for _, encoded in samples)
    needed = np.zeros((len(samples), most), bool)
    for row, (_, encoded) in enumerate(samples):
        needed[row, : len(encoded.needed)] = encoded.needed
    layers = [needed[:, None, :] & layer[None, :, None] for layer in heads]
    return {"admission": [{"keep": jnp.asarray(keep)} for keep in layers]}


def measured(
    model: LanguageModel,
    samples: Samples,
    heads: Bool[np.ndarray, "L K"],
    *,
    length: int,
    window: int,
    sinks: int,
) -> dict[str, Any]:
    """``found`` (share of the needles), ``live`` and ``slots`` (of the full cache while answering, shares).

    Args:
      model: the model.
      samples: needles whose question comes after the compression.
      heads: those that admit the sentence.
      length, window, sinks: tokens.
    """
    policy = Policy(admission=Told(window=window), sinks=sinks)
    context = decode.bucket(length, model.network.max_positions)
    rows, parts = runner.batched(samples, length)
    score = tasks.tasks()[TASK].score
    assert score is not None
    right, share, slots = [], [], []
    for part in parts:
        filled = part + part[:1] * (rows - len(part))
        run = batch.run(
            model, policy, part, protocol="agnostic", context=context, rows=rows, weights=kept(filled, heads)
        )
        for (sample, encoded), outcome in zip(part, run.outcomes):
            right.append(score(outcome.output.split("\n")[0], sample))
            slots.append(outcome.mean)
            seen = len(encoded.context) + len(encoded.question) + len(encoded.prefix)
            share.append(outcome.live / metrics.full_bytes(model.network, seen, model.params["embed"].dtype))
    return {"found": float(np.mean(right)), "slots": float(np.mean(slots)), "live": float(np.mean(share))}


def main(words: Sequence[str] | None = None) -> int:
    """Measures both; the exit code."""
    return cli.run(_run, words)


def _run(words: Sequence[str]) -> None:
    parser = cli.Parser(prog="python -m studies.wg_kv.oracle", description=(__doc__ or "").splitlines()[0])
    add_model(parser)
    parser.add_argument("--length", type=cli.whole(256), default=1024, help="default: 1024")
    parser.add_argument("--window", type=cli.whole(1), default=32, help="default: 32")
    parser.add_argument("--sinks", type=cli.whole(0), default=4, help="default: 4")
    parser.add_argument("--samples", type=cli.whole(2), default=100, help="default: 100")
    parser.add_argument("--heads", default=RETRIEVING, help=f"layer.head,... (default: {RETRIEVING})")
    cli.add(parser, "--out", default=RESULTS, help=f"default: {RESULTS}")
    values = vars(parser.parse_args(words))
    model, data = model_of(values), find()
    samples = runner.draw(
        tasks.tasks()[TASK], model, data, length=values["length"], seed=0, count=values["samples"]
    )
    every = np.ones((model.network.num_layers, model.network.num_kv_heads), bool)
    some = np.zeros_like(every)
    for head in values["heads"].split(","):
        some[tuple(map(int, head.split(".")))] = True
    sizes = {name: values[name] for name in ("length", "window", "sinks")}
    results = {
        name: measured(model, samples, heads, **sizes)
        for name, heads in (("every head", every), (values["heads"], some), ("no head", np.zeros_like(every)))
    }
    for name, result in results.items():
        print(f"{name:<28} found {100 * result['found']:5.1f} %  live bytes {100 * result['live']:5.2f} %")
    facts = (
        {"task": TASK, "samples": len(samples)}
        | sizes
        | about(model, data)
        | versions()
        | {"admitted": results}
    )
    values["out"].mkdir(parents=True, exist_ok=True)
    file = values["out"] / "oracle.json"
    file.write_text(json.dumps(short(facts), indent=1) + "\n", encoding="utf-8")
    print(file)


if __name__ == "__main__":
    cli.start(main)
