"""What storages cost and save: perplexity of books, and bytes allocated for a prompt of 2,048 tokens.

python -m studies.storage --out results/storage

Half a text is read, the other half is fed token by token. A loss is in nats a token, against the full cache
on the same texts, with its 95 % interval. Bytes are those of rings, pages, scales, positions and page
tables after the prompt, over keys and values in bfloat16.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp

import kvjax
from kvjax import cli, decode
from kvjax.algebra import Policy
from kvjax.catalogue import policy as parse_policy
from kvjax.eval import tasks
from kvjax.eval.arguments import add_model
from kvjax.eval.commands import model_of, single
from kvjax.eval.measure import grid, runner
from kvjax.eval.measure.store import Store, about, read
from kvjax.eval.report import table
from kvjax.eval.tasks.data import Data, find
from kvjax.loading import LanguageModel

RESULTS = Path("results/storage")
TOKENS = 2048
"""Of the prompt whose bytes are counted."""

STORAGES = (
    "int8(32)",
    "int8(32, hadamard=True)",
    "fp8(32)",
    "int4(32)",
    "int4(32, hadamard=True)",
    "kivi(4)",
    "kivi(4, recent=32)",
    "kivi(2)",
    "kivi(2, recent=32)",
    "kivi(2, recent=32, group=64)",
)


@dataclasses.dataclass(frozen=True)
class Cost:
    """Of one storage.

    Attributes:
      policy: as a user writes it.
      perplexity: of the texts.
      loss: nats a token more than the full cache, and its interval.
      share: allocated bytes over those of bfloat16.
    """

    policy: str
    perplexity: float
    loss: tuple[float, float, float]
    share: float


def share(model: LanguageModel, policy: Policy, tokens: list[int]) -> float:
    """Bytes allocated after these tokens over keys and values at 16 bits; the model is in bfloat16."""
    network = model.network
    state, _ = decode.prefill(
        model, policy, [tokens], context=decode.bucket(len(tokens), network.max_positions)
    )
    exact = 4 * network.num_layers * network.num_kv_heads * network.head_dim * len(tokens)
    return float(kvjax.nbytes(state).allocated.sum() / exact)


def measured(values: dict[str, Any], data: Data) -> list[Cost]:
    """Every storage; cells that are in ``--out`` already are not measured again."""
    task = single(tasks.named(values["task"], data)[0], "--task")
    length = single(values["lengths"], "--lengths")
    policies = [parse_policy(spec) for spec in values["policy"] or STORAGES]
    cells = grid.build(
        [task], policies, lengths=[length], seeds=[0], samples=values["samples"], protocol=("agnostic",)
    )
    model = model_of(values)
    store = Store.open(values["out"], about(model, data))
    runner.run(cells, model, data, store, say=print)
    rows = {row.cell.policy: row for row in read(values["out"]) if row.cell in cells.cells}
    narrow = model_of(values | {"dtype": str(jnp.dtype(jnp.bfloat16))})
    [(_, text)] = runner.draw(task, narrow, data, length=TOKENS, seed=0, count=1)
    tokens = [*text.context, *text.question, *text.prefix, *text.answer][:TOKENS]
    costs = []
    for policy in (grid.FULL, *policies):
        row = rows[repr(policy)]
        loss = tuple(-x for x in table.loss(row, rows[repr(grid.FULL)]))
        of_bytes = share(narrow, policy, tokens)
        costs.append(Cost(repr(policy), table.value(row), (loss[0], loss[2], loss[1]), of_bytes))
    return costs


def markdown(costs: Sequence[Cost]) -> str:
    """A line a storage."""
    lines = [
        (
            f"`{c.policy}`",
            f"{c.perplexity:.3f}",
            f"{c.loss[0]:+.4f} [{c.loss[1]:+.4f}, {c.loss[2]:+.4f}]",
            f"{c.share:.3f}",
        )
        for c in costs
    ]
    head = ("storage", "perplexity", "loss, nats a token", f"bytes at {TOKENS:,} tokens / bfloat16")
    return table.markdown(head, lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, writes and prints the table; the exit code."""
    return cli.run(_run, argv)


def _run(words: Sequence[str]) -> None:
    parser = cli.Parser(prog="python -m studies.storage", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--task",
        type=cli.words,
        default=["ppl_books"],
        metavar="NAME",
        help="whose texts (default: ppl_books)",
    )
    cli.add(parser, "--policy", action="append", help="several times (default: ten storages)")
    add_model(parser)
    parser.add_argument("--lengths", type=cli.numbers(256), default=[1024], help="default: 1024")
    parser.add_argument("--samples", type=cli.whole(1), default=16, help="texts (default: 16)")
    cli.add(parser, "--out", default=RESULTS, help=f"folder of results (default: {RESULTS})")
    values = vars(parser.parse_args(words))
    text = markdown(measured(values, find()))
    (values["out"] / "table.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    cli.start(main)
