"""A long context whose keys and values stay in a file, asked for facts: memory, time and hits, on a CPU.

python -m studies.from_file --out results/from_file

A constructed model reads 262,144 tokens of noise with eight facts in it, and the state is saved once. Two
fresh processes open it, one with ``host="file"``, one in memory, and ask for every fact. Resident memory is
anonymous (``RssAnon`` of Linux): the system may drop what it keeps of a mapped file at any time.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import kvjax
from kvjax import cli, decode
from kvjax.eval.measure.store import versions
from kvjax.eval.report.table import markdown
from kvjax.models.decoder import Decoder, shapes
from kvjax.models.layout import inputs_last
from kvjax.models.spec import ModelSpec, Rope
from kvjax.types import Params

TOKENS, CHUNK = 262_144, 2048
POLICY = "quest(chunks=32, chunk=64, dense=0, recent=64) + host(cache=0.01)"
NOISE, NAMES = 40, 8
"""Tokens that say nothing; the names of facts. What a name is followed by says the fact."""

WORDS = 64
"""Of the vocabulary: noise, names, facts."""

SHARP = 56.0
"""Length of layer 0's keys and queries: the token before gets e^13 times the attention of any other."""

SURE = 40.0
"""Score of the one match in layer 1; a token that does not match has 0."""

OPENED = {"file": "file", "memory": None}
"""How the state is opened: ``host`` by the name of the row."""

LATER = 32
"""Tokens of noise that are fed one by one after the questions, to be timed."""


@dataclasses.dataclass(frozen=True)
class Lookup:
    """A network of two layers that says what followed a token the last time, and its weights.

    One head a layer, 64 channels; the residual stream has three parts of 64: the token, the one before it,
    and what was found. Layer 0 looks at the token before (a query is its key turned by one position) and
    writes it into the second part. Layer 1, which does not turn, looks for the token whose second part is the
    current token, and copies that token into the third part, which the logits read.
    """

    network: Decoder
    params: Params

    @property
    def spec(self) -> ModelSpec:
        return self.network.spec


def lookup(positions: int) -> Lookup:
    """The model, for so many positions."""
    spec = ModelSpec(
        family="qwen2",
        vocab_size=WORDS,
        num_layers=2,
        num_heads=1,
        num_kv_heads=1,
        head_dim=WORDS,
        model_dim=3 * WORDS,
        mlp_dim=8,
        max_positions=positions,
        rope=Rope(theta=1e4),
        unturned=(1,),
        qkv_bias=True,
        tied=False,
    )
    params = jax.tree.map(lambda shape: np.zeros(shape, np.float32), shapes(spec), is_leaf=_is_shape)
    one = np.eye(WORDS, dtype=np.float32)
    token, before, found = np.split(np.eye(3 * WORDS, dtype=np.float32), 3)
    params |= {"embed": one @ token, "head": one @ found, "final_norm": np.ones(3 * WORDS, np.float32)}
    # Inputs are normalised: one part of length 1 among 192 channels, then two.
    scale = np.sqrt(3 * WORDS, dtype=np.float32), np.sqrt(1.5 * WORDS, dtype=np.float32)
    freq, half = spec.rope.frequencies(WORDS), np.ones(WORDS // 2, np.float32)
    first = {
        "bk": SHARP / np.sqrt(WORDS / 2) * np.concatenate([half, 0 * half])[None],
        "bq": SHARP / np.sqrt(WORDS / 2) * np.concatenate([np.cos(freq), -np.sin(freq)])[None],
        "wv": (token.T / scale[0])[:, None],
        "wo": before[None],
    }
    second = {
        "wk": (before.T / scale[1])[:, None],
        "wq": (SURE * WORDS**0.5 * token.T / scale[1])[:, None],
        "wv": (token.T / scale[1])[:, None],
        "wo": found[None],
    }
    for layer, weights in zip(params["layers"], (first, second)):
        layer |= {name: x.astype(np.float32) for name, x in inputs_last(weights).items()}
        layer |= {name: np.ones(3 * WORDS, np.float32) for name in ("attn_norm", "mlp_norm")}
    return Lookup(Decoder(spec), jax.tree.map(jnp.asarray, params))


def _is_shape(x: Any) -> bool:
    return isinstance(x, tuple)


def prompt(tokens: int, seed: int = 0) -> tuple[np.ndarray, dict[int, int]]:
    """Noise in which every name occurs once, followed by its fact; and which fact that is."""
    random = np.random.default_rng(seed)
    ids = random.integers(NOISE, size=tokens, dtype=np.int32)
    names = NOISE + random.permutation(NAMES)
    facts = random.choice(np.arange(NOISE + NAMES, WORDS), NAMES, replace=False)
    places = np.linspace(2, tokens - 64, NAMES, dtype=int)
    ids[places], ids[places + 1] = names, facts
    return ids, {int(name): int(fact) for name, fact in zip(names, facts)}


def resident() -> int:
    """Anonymous resident bytes of this process."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    [line] = [line for line in lines if line.startswith("RssAnon")]
    return 1024 * int(line.split()[1])


def written(file: Path, tokens: int) -> dict[str, float]:
    """Reads the prompt and saves the state; seconds of both, and bytes of the file."""
    model, (ids, _) = lookup(tokens + 1024), prompt(tokens)
    begin = time.perf_counter()
    with tqdm(total=tokens, unit=" token", desc="reading") as bar:

        def show(done: int, _: int) -> None:
            bar.update(done - bar.n)

        state, _ = kvjax.prefill(
            model,
            POLICY,
            [ids],
            context=tokens + 1024,
            chunk_size=CHUNK,
            progress=show,
        )
    jax.block_until_ready(state)
    read = time.perf_counter()
    kvjax.save(state, file, model=model, policy=POLICY)
    return {"reading": read - begin, "saving": time.perf_counter() - read, "bytes": file.stat().st_size}


def asked(file: Path, tokens: int, host: str | None) -> dict[str, Any]:
    """Opens the state and asks for every fact, one token each; then feeds noise."""
    model, (_, facts) = lookup(tokens + 1024), prompt(tokens)
    policy, before, begin = kvjax.policy(POLICY), resident(), time.perf_counter()
    state = kvjax.open(file, model=model, policy=policy, host=host).state
    jax.block_until_ready(state)
    opened, held, times, right = time.perf_counter() - begin, resident() - before, [], 0
    noise = np.random.default_rng(1).integers(NOISE, size=LATER)
    state = decode.reserve(policy, state, len(facts) + LATER + 1, 1)
    active = jnp.ones(1, bool)
    for token in [0, *facts, *noise.tolist()]:
        start = time.perf_counter()
        state, logits = decode.step_program(
            model.network, policy.after_prompt, model.params, {}, state, jnp.asarray([token]), active
        )
        best = int(np.argmax(logits))
        times.append(time.perf_counter() - start)
        right += facts.get(token) == best
    cached = [layer.hosted.cached for layer in state.layers if layer.hosted is not None]
    asked, hits = (sum(int(getattr(x, name).sum()) for x in cached) for name in ("asked", "hits"))
    return {
        "opening": opened,
        "opened": held,
        "resident": resident() - before,
        "right": right,
        "facts": float(np.median(times[1 : 1 + len(facts)])),
        "noise": float(np.median(times[1 + len(facts) :])),
        "asked": asked,
        "hits": hits,
    }


def page(results: dict[str, Any]) -> str:
    """The results as a text."""
    made, tokens = results["made"], results["tokens"]

    def row(name: str, one: dict[str, Any]) -> list[str]:
        return [
            name,
            f"{one['opening']:.2f}",
            f"{one['opened'] / 2**20:.0f}",
            f"{one['resident'] / 2**20:.0f}",
            f"{one['right']} of {NAMES}",
            f"{1000 * one['facts']:.1f}",
            f"{1000 * one['noise']:.1f}",
            f"{100 * one['hits'] / one['asked']:.0f} %",
        ]

    columns = (
        *("pages in", "seconds to open", "MiB resident, opened", "after the questions"),
        *("facts", "ms a fact", "ms a token of noise", "hits"),
    )
    return (
        f"# {tokens:,} tokens in a file\n\n"
        f"`python -m studies.from_file --tokens {tokens} --out FOLDER`, `{POLICY}`, the constructed model of "
        f"two layers in `studies/from_file.py`, float32. The prompt was read in {made['reading']:.0f} s and "
        f"saved in {made['saving']:.1f} s; the file has {made['bytes'] / 2**20:.0f} MiB.\n\n"
        + markdown(columns, [row(name, results[name]) for name in OPENED])
        + "\n\nResident bytes are anonymous, and what opening, and then compiling a step and asking, added "
        "to a process that had the model. A fact is asked with one token. Noise is drawn from 40 words, and "
        "every page has nearly all of them, so Quest chooses the same pages for each: hits say how the cache "
        "works, not how often a text finds its pages there.\n"
    )


def measured(tokens: int) -> dict[str, Any]:
    """The results; each part in a process of its own, since memory that was used once stays resident."""
    results: dict[str, Any] = {"tokens": tokens, "policy": POLICY, "versions": versions()}
    with tempfile.TemporaryDirectory() as folder:
        for part in ("made", *OPENED):
            command = [sys.executable, "-m", "studies.from_file", "--tokens", str(tokens)]
            done = subprocess.run(
                [*command, "--part", part, "--out", folder], check=True, stdout=subprocess.PIPE, text=True
            )
            results[part] = json.loads(done.stdout.splitlines()[-1])
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the page; the exit code."""
    return cli.run(_run, argv)


def _run(words: Sequence[str]) -> None:
    parser = cli.Parser(prog="python -m studies.from_file", description=(__doc__ or "").splitlines()[0])
    cli.add(parser, "--out", required=True)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="tokens of the context")
    parser.add_argument("--part", choices=["made", *OPENED], help="one part alone, of a state in --out")
    options = parser.parse_args(words)
    file = options.out / "state"
    if options.part:
        made = options.part == "made"
        part = written(file, options.tokens) if made else asked(file, options.tokens, OPENED[options.part])
        print(json.dumps(part))
        return
    results = measured(options.tokens)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (options.out / "README.md").write_text(page(results), encoding="utf-8")
    print(page(results))


if __name__ == "__main__":
    cli.start(main)
