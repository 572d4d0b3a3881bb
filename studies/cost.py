"""What methods cost beside SnapKV: seconds of a prompt of 8,192 tokens, and milliseconds of a step after it.

python -m studies.cost --out results/relatives

The random model of the benchmarks (11 M parameters, float32), one row, random learned weights: time does not
depend on what was learned, nor on how good a choice is. Second calls are timed; SnapKV stands first and last.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from benchmarks import random_model
from kvjax import cli
from kvjax.eval.measure.store import versions
from kvjax.eval.report.table import markdown
from kvjax.models.decoder import Decoder

TOKENS, NEW, CALLS = 8192, 32, 3
BESIDE = "snapkv + uniform(0.25)"
POLICIES = (
    BESIDE,
    "snapkv + critical + uniform(0.25)",
    "snapkv + chunks(20) + uniform(0.25)",
    "snapkv + entropy_chunks + uniform(0.25)",
    "keydiff + uniform(0.25)",
    "leverage + uniform(0.25)",
    "compactor + uniform(0.25)",
    "cur + uniform(0.25)",
    "cap + uniform(0.25)",
    "qfilter + uniform(0.25)",
    "trim_kv + uniform(0.25)",
    "kvzap(-5.5, window=128)",
    "kvzap_scores + uniform(0.25)",
    "fast_kvzip + uniform(0.25)",
    "kvzip(instruction=(5, 7)) + uniform(0.25)",
    "kvzip(output=True, instruction=(5, 7)) + overall(0.25)",
)


@dataclasses.dataclass(frozen=True)
class Model:
    """A network and its weights."""

    network: Decoder
    params: Any


def cost(model: Model, spec: str, tokens: int) -> dict[str, float]:
    """Seconds of the prompt and milliseconds of a step, the second time each is done, and the bytes held."""
    policy = kvjax.policy(spec)
    key, network = jax.random.key(0), model.network
    weights = {part.place: part.example_weights(key, network) for part in policy.learned}
    prompt = np.random.default_rng(0).integers(4, network.spec.vocab_size, tokens)
    context = tokens + CALLS * NEW
    for _ in range(2):
        begin = time.perf_counter()
        state, logits = kvjax.prefill(model, policy, [prompt], context=context, weights=weights)
        jax.block_until_ready(logits)
        read = time.perf_counter() - begin
    held, steps = kvjax.nbytes(state).total["allocated"], []
    for _ in range(CALLS):
        begin = time.perf_counter()
        for piece, now in kvjax.stream(model, policy, state, logits, max_new_tokens=NEW, weights=weights):
            state, written = now, piece.shape[1]
        steps.append((time.perf_counter() - begin) / NEW)
        logits = jnp.zeros_like(logits)
    assert written, "nothing was written"
    return {"prompt": read, "step": min(steps), "held": float(held)}


def page(rows: Sequence[tuple[str, dict[str, float]]], tokens: int) -> str:
    """The costs as a table."""
    beside = {name: min(one[name] for spec, one in rows if spec == BESIDE) for name in ("prompt", "step")}
    lines = [
        (
            f"`{spec}`",
            f"{one['prompt']:.2f}",
            f"{one['prompt'] / beside['prompt']:.2f}",
            f"{1000 * one['step']:.2f}",
            f"{one['step'] / beside['step']:.2f}",
            f"{one['held'] / 2**20:.1f}",
        )
        for spec, one in rows
    ]
    head = ("policy", "prompt, s", "of SnapKV's", "step, ms", "of SnapKV's", "MiB allocated")
    facts = ", ".join(f"{name} {version}" for name, version in versions().items())
    return (
        f"# Cost at {tokens:,} tokens\n\n`python -m studies.cost --out results/relatives`, one row, the "
        f"random model of 11 M parameters in float32, one thread; {facts}. The prompt's second call, the "
        f"fastest of {CALLS} times {NEW} tokens. `kvzip` feeds the prompt twice.\n\n"
        f"{markdown(head, lines)}\n"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, writes and prints the table; the exit code."""
    return cli.run(_run, argv)


def _run(words: Sequence[str]) -> None:
    parser = cli.Parser(prog="python -m studies.cost", description=(__doc__ or "").splitlines()[0])
    cli.add(parser, "--out", required=True)
    parser.add_argument("--tokens", type=cli.whole(64), default=TOKENS, help="of the prompt (default: 8192)")
    cli.add(parser, "--policy", action="append", help="several times (default: sixteen methods)")
    options = parser.parse_args(words)
    out: Path = options.out
    spec = random_model.BASE
    model = Model(Decoder(spec), jax.tree.map(jnp.asarray, random_model.draw(spec, 0)))
    rows = []
    for policy in (*(options.policy or POLICIES), BESIDE):
        rows.append((policy, cost(model, policy, options.tokens)))
        print(json.dumps(rows[-1]), flush=True)
    out.mkdir(parents=True, exist_ok=True)
    (out / "cost.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    (out / "cost.md").write_text(page(rows, options.tokens), encoding="utf-8")


if __name__ == "__main__":
    cli.start(main)
