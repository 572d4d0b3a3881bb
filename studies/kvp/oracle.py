"""The ranking that rankers are trained towards, on answers and perplexity: the future attention itself.

python -m studies.kvp.oracle --task niah_multikey_1,dialogue_ppl --samples 25 --out results/kvp/oracle

What a prompt's tokens receive of the question and reference answer that follow it, the maximum over a group's
heads, summed: the importance that ``train.ranker`` ranks by. Cells and samples are those of
``configs/eval/kvp.yaml``. They are rows like others; the policy reads the future and is not a method.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import cli, decode
from kvjax.algebra import Eviction, Observation, Policy
from kvjax.budgets.uniform import Uniform
from kvjax.eval import tasks
from kvjax.eval.arguments import add_model
from kvjax.eval.commands import model_of, takes_turns
from kvjax.eval.measure import batch, grid, runner
from kvjax.eval.measure.protocol import PROTOCOLS
from kvjax.eval.measure.row import CHAT, RAW, Cell
from kvjax.eval.measure.store import Store, about
from kvjax.eval.measure.tally import row
from kvjax.eval.tasks.data import find
from kvjax.eval.tasks.sample import Samples
from kvjax.loading import LanguageModel
from kvjax.types import EMPTY, Heads, Network, Params
from train.ranker.objective import importance

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

SINKS, RECENT = 4, 16
"""As KVP protects them."""


@dataclasses.dataclass(frozen=True, repr=False)
class Oracle(Eviction):
    """Score = what each position will receive.

    Weights of a layer: ``future`` [B, K, T]; it is 0 from T on.
    """

    name = "kvp_oracle"
    learns = "kvp_oracle"
    needs = frozenset({"k"})
    scores_prompt = True

    def score_prompt(self, params: Params | None, observed: Observation) -> Float[Array, "B K T"]:
        assert params is not None
        future, t = params["future"], observed.k.shape[2]
        return jnp.pad(future, ((0, 0), (0, 0), (0, max(t - future.shape[2], 0))))[:, :, :t]


def policy_of(slots: int) -> Policy:
    """The oracle at so many slots of each KV head."""
    return Policy(eviction=Oracle(), budget=Uniform(slots), sinks=SINKS, recent=RECENT)


def future(model: LanguageModel, samples: Samples, protocol: str, rows: int) -> Params:
    """Weights of ``Oracle`` for a batch of ``rows``; copies of the first sample fill it.

    Args:
      model: the model, which reads each sample whole.
      samples: with their reference answers.
      protocol: where a sample is cut into prompt and future.
      rows: B.
    """
    prompts = batch.prompts(samples, protocol, rows)
    every = samples + samples[:1] * (rows - len(samples))
    longest = max(map(len, prompts))
    layers: list[list[np.ndarray]] = [[] for _ in range(model.network.num_layers)]
    known: dict[int, list[np.ndarray]] = {}
    for prompt, (_, e) in zip(prompts, every):
        if id(e) not in known:
            whole = [*e.context, *e.question, *e.prefix, *e.answer[:-1]]  # the last token asks for nothing
            known[id(e)] = received(model, whole, len(prompt))
        for layer, worth in zip(layers, known[id(e)]):
            layer.append(np.pad(worth, ((0, 0), (0, longest - len(prompt)))))
    return {"eviction": [{"future": jnp.asarray(np.stack(layer))} for layer in layers]}


def received(model: LanguageModel, ids: Sequence[int], prompt: int) -> list[Float[np.ndarray, "K N"]]:
    """Of each layer, what the first ``prompt`` of the tokens receive of the others."""
    reading = decode.read_full(model, [list(ids)])
    network, cut = model.network.at(reading.context), (jnp.asarray(prompt), jnp.asarray(len(ids)))
    return [
        np.asarray(_received(network, block, x, *cut))[0, :, :prompt]
        for block, x in zip(model.params["layers"], reading.inputs)
    ]


@functools.partial(jax.jit, static_argnames="network")
def _received(
    network: Network, block: Params, x: Float[Array, "1 T D"], prompt: Int[Array, ""], length: Int[Array, ""]
) -> Float[Array, "1 K T"]:
    at = jnp.arange(x.shape[1])[None]

    def attend(_: int, heads: Heads, worth: Array | None) -> tuple[Array, Array | None]:
        q, k = (jnp.swapaxes(y, 1, 2) for y in (heads.q, heads.k))
        q = q.reshape(*k.shape[:2], -1, *q.shape[2:])
        asks = jnp.where((at >= prompt) & (at < length), at, EMPTY)
        return jnp.zeros_like(heads.q), importance({"q": q, "k": k, "at": asks}, heads.softcap)

    _, worth = network.layer(block, 0, x, at, attend, None)
    assert worth is not None
    return worth


def measure(model: LanguageModel, store: Store, cells: Sequence[tuple[Cell, Policy]], data: Any) -> None:
    """Adds the cells that the store lacks; the full cache on the same samples comes first."""
    done = store.done()
    full = {cell.drawn: one for cell, one in done.items() if cell.policy == repr(grid.FULL)}
    drawn: dict[Any, Samples] = {}
    attention: dict[Any, list[Params]] = {}
    for cell, policy in cells:
        if cell in done:
            continue
        task = tasks.tasks()[cell.task]
        if cell.drawn not in drawn:
            how: dict[str, Any] = {"length": cell.length, "seed": cell.seed, "count": cell.samples}
            drawn = {cell.drawn: runner.draw(task, model, data, **how, chat=cell.prompt == CHAT)}
        rows, parts = runner.batched(drawn[cell.drawn], cell.length)
        context = decode.bucket(cell.length, model.network.max_positions)
        key = (cell.drawn, cell.protocol)
        if policy.learned and key not in attention:
            attention = {key: [future(model, part, cell.protocol, rows) for part in parts]}
        batches = []
        for at, part in enumerate(parts):
            make: dict[str, Any] = {"protocol": cell.protocol, "context": context, "rows": rows}
            weights = attention[key][at] if policy.learned else None
            reference = batch.reference(model, part, **make) if task.compares else None
            batches.append(batch.run(model, policy, part, weights=weights, reference=reference, **make))
        finished = row(
            cell, task, policy, model, drawn[cell.drawn], batches, full.get(cell.drawn), data.source
        )
        store.append(finished)
        if policy == grid.FULL:
            full[cell.drawn] = finished
        value = finished.perplexity if finished.score is None else 100 * finished.score
        print(f"{cell.task} {cell.length} {cell.protocol} {cell.policy}: {value:.1f}", flush=True)


def main(words: Sequence[str] | None = None) -> int:
    """Measures the cells; the exit code."""
    return cli.run(_run, words)


def _run(words: Sequence[str]) -> None:
    parser = cli.Parser(prog="python -m studies.kvp.oracle", description=(__doc__ or "").splitlines()[0])
    add_model(parser)
    parser.add_argument("--task", type=cli.words, required=True, metavar="NAMES")
    parser.add_argument("--length", type=cli.whole(256), default=1024, help="default: 1024")
    parser.add_argument("--slots", type=cli.numbers(SINKS + RECENT), default=[32, 64, 128, 256, 512])
    parser.add_argument("--samples", type=cli.whole(1), default=25, help="default: 25")
    parser.add_argument("--seed", type=cli.whole(0), default=0, help="default: 0")
    parser.add_argument("--protocol", type=cli.words, default=list(PROTOCOLS), help="default: both")
    cli.add(parser, "--out", default=Path("results/kvp/oracle"), help="default: results/kvp/oracle")
    parser.add_argument("--raw", action="store_true", help="ask a model that chats in bare words")
    values = vars(parser.parse_args(words))
    model, data = model_of(values), find()
    cells = []
    for task in tasks.named(values["task"], data)[0]:
        protocols = values["protocol"] if task.asks else ["agnostic"]
        policies = [("either", grid.FULL)]
        policies += [(how, policy_of(slots)) for how in protocols for slots in values["slots"]]
        for how, policy in policies:
            cell = Cell(
                task=task.name, length=values["length"], policy=repr(policy), protocol=how,
                seed=values["seed"], samples=values["samples"], weights="future" * bool(policy.learned),
                prompt=CHAT if task.asks and takes_turns(model, values) else RAW,
            )  # fmt: skip
            cells.append((cell, policy))
    measure(model, Store.open(values["out"], about(model, data)), cells, data)


if __name__ == "__main__":
    cli.start(main)
