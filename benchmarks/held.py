"""Bytes that a row's cache takes after its prompt and while it writes, beside those of kvpress's tensors.

Ours are device bytes: rings, pools with their free pages, tables, what parts keep. While a row writes, pools
have room for what comes next. kvpress's are the keys and values in its cache; where heads keep different
numbers it masks, and its cache stays whole. Both read the embedded model in float32.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np

import kvjax
from benchmarks import parity
from benchmarks.results import Row
from kvjax import decode, metrics

REMOVED = 0.75
"""The share that goes, where a policy has a budget."""

WRITTEN = 64
"""Tokens after the prompt."""

KEPT = "0.25"
METHODS: dict[str, str] = {
    "full": "",
    f"snapkv(64) + uniform({KEPT})": "snapkv",
    f"snapkv(64) + critical + uniform({KEPT})": "critical",
    f"snapkv(64) + critical + ada({KEPT})": "critical, heads compete",
    f"snapkv(64) + chunks(20) + uniform({KEPT})": "chunks",
    f"compactor(0.75, chunk=128) + uniform({KEPT})": "compactor",
    f"leverage(48) + uniform({KEPT})": "leverage",
    f"cur + uniform({KEPT})": "cur",
    f"cap + uniform({KEPT})": "cap",
    f"qfilter + uniform({KEPT})": "qfilter",
    f"trim_kv + uniform({KEPT})": "",
    f"kvzip(instruction={parity.ASK}) + ada({KEPT}, floor=0)": "kvzip, layer by layer",
    f"kvzip(instruction={parity.ASK}) + overall({KEPT})": "kvzip",
    f"kvzap_scores + uniform({KEPT})": "kvzap",
    f"fast_kvzip + overall({KEPT})": "fast_kvzip",
    f"keydiff + lu_kv({KEPT}) + sinks(4) + recent(1)": "lu_kv",
    "kivi(2)": "",
    "kivi(2, recent=32, group=64)": "",
    "fp8": "",
    "int8": "",
    "int4(hadamard=True)": "",
}
"""Policies, and the case of ``parity`` with kvpress's press."""


def subject(home: Path) -> parity.Subject:
    """The embedded model with a prompt of the parity's length, and more tokens behind it."""
    of = parity.subject("embedded", home)
    ids = of.model.text.encode((parity.ROOT / "LICENSE").read_text(encoding="utf-8"))
    return dataclasses.replace(of, fed=np.asarray(ids[parity.TOKENS : parity.TOKENS + WRITTEN]))


def ours(of: parity.Subject, spec: str) -> tuple[int, int]:
    """Bytes of a row after the prompt, and with room for what it writes."""
    policy, network = kvjax.policy(spec), of.model.network
    weights = {
        part.place: of.weights[part.name]
        if part.name in of.weights
        else part.example_weights(jax.random.key(0), network)
        for part in policy.learned
    }
    state, _ = kvjax.prefill(of.model, policy, [of.prompt.tolist()], context=768, weights=weights)
    after = metrics.nbytes(state).total["allocated"]
    state = decode.reserve(policy, state, WRITTEN, 1, ahead=WRITTEN)
    return after, metrics.allocated(state.layers)


def rows(of: parity.Subject, answers: Mapping[str, np.ndarray]) -> Iterator[Row]:
    """One for each policy; kvpress's bytes are None where it has no such method or was not asked."""
    for spec, case in METHODS.items():
        after, writing = ours(of, spec)
        theirs = answers.get(f"bytes_{of.name}_{case}_{REMOVED}")
        first, then = (None, None) if theirs is None else map(int, theirs)
        yield {
            "policy": spec,
            "after": after,
            "writing": writing,
            "press_after": first,
            "press_writing": then,
        }


def page(every: Sequence[Row], command: str) -> str:
    """The table; Markdown."""
    about = (
        f"KiB of one row of {parity.TOKENS} tokens on the embedded model in float32: after the prompt, and "
        f"while {WRITTEN} tokens are written. Ours are what the device has given: pages in size classes, "
        "tables, positions, room for the tokens to come. kvpress 0.5.5's are its cache's tensors. Where "
        "heads keep different numbers (ada, overall) it masks, and nothing is returned. Learned weights are "
        "random."
    )
    lines = ["# What a row takes", "", textwrap.fill(about, 120), "", f"    {command}", ""]
    lines += [
        "| policy | after the prompt | while writing | kvpress, after | kvpress, writing |",
        "|---|---|---|---|---|",
    ]
    for row in every:
        numbers = [row[name] for name in ("after", "writing", "press_after", "press_writing")]
        cells = " | ".join("–" if n is None else f"{n / 1024:,.0f}" for n in numbers)
        lines.append(f"| `{row['policy']}` | {cells} |")
    return "\n".join([*lines, ""])
