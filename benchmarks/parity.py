"""Do evictions keep what kvpress's presses keep? Tiny models of seven families, and a trained one.

Both sides read the same folders and tokens in float32. Ours decides as ``kvjax.decode.cut`` does. Where a
press draws random numbers or fetches weights, it gets ours.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from benchmarks import peers
from benchmarks.results import Row
from kvjax import decode, layer, metrics
from kvjax.algebra import Policy
from kvjax.budgets.lu_kv import LUKV
from kvjax.cli import InputError
from kvjax.policies import compactor, kvzap
from kvjax.policies.expected_attention import ExpectedAttention
from kvjax.policies.fast_kvzip import FastKVzip
from kvjax.policies.qfilter import QFilter
from kvjax.types import EMPTY, Heads, Network, Params

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden"
SCRIPT = Path(__file__).with_name("parity_peer.py")

TOKENS = 524
"""Of the prompt: 12 that Compactor protects and 4 chunks of 128."""

FED = 8
"""Tokens that are fed after the prompt, for logits."""

RATIOS = (0.25, 0.5, 0.75)
"""Shares that are removed."""

SKETCH = 48
ROUNDING = 1e-5
"""Largest difference of scores, over their deviation in the head, that counts as rounding."""

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama3", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "mistral": ("mistral", {"sliding_window": None}),
    "phi3": ("phi3", {"sliding_window": None}),
    "granite": ("granite", {"attention_multiplier": 8**-0.5}),
    "gemma3": ("gemma3", {"query_pre_attn_scalar": 16}),
}
"""Golden models, and what is changed in their configs: kvpress knows neither windows nor other scales."""

POSITIONS = {"max_position_embeddings": 3 * TOKENS}
"""Of every golden model: KVzip feeds a prompt twice, with an instruction between."""

RECORDED = ("llama", "qwen3")
"""Families whose answers are kept for tests."""


@dataclasses.dataclass(frozen=True)
class Case:
    """An eviction of ours and kvpress's press.

    Attributes:
      policy: everything but the budget; {ratio} is the share that is removed.
      press: its class.
      arguments: of the press.
      of_ratio: arguments of the press that are the ratio.
      reason: why sets differ, where they do.
      mended: the press is run with a mask of minus infinity in place of -1e-9.
      wrapper: kvpress's class around the press, or "".
      budget: of the policy; {slots} is the mean of a KV head.
      counted: the press counts runs of tokens, so each layer is given as many slots as it keeps.
    """

    policy: str
    press: str
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    of_ratio: tuple[str, ...] = ()
    reason: str = ""
    mended: bool = False
    wrapper: str = ""
    budget: str = "uniform({slots})"
    counted: bool = False


NO_RANGE = (
    "a channel is equal in all tokens of a partition; kvpress divides 0 by 0 there and ranks NaN, ours "
    "counts the channel as 0"
)


SNAPKV: dict[str, Any] = {"window_size": 64, "kernel_size": 5}

ASK = (5, 7)
"""What stands for KVzip's instruction: most of these models have no tokenizer."""


def _compactor(chunk: int, **more: Any) -> Case:
    policy = f"compactor({{ratio}}, chunk={chunk})"
    return Case(policy, "CompactorPress", {"chunk_size": chunk}, of_ratio=("blending",), **more)


CASES = {
    "knorm": Case("knorm", "KnormPress"),
    "keydiff": Case("keydiff", "KeyDiffPress"),
    "snapkv": Case("snapkv(64)", "SnapKVPress", {"window_size": 64, "kernel_size": 5}),
    "tova": Case("tova + recent(1)", "TOVAPress"),
    "lagkv": Case("lagkv(64)", "LagKVPress", {"lag_size": 64}, reason=NO_RANGE),
    "lagkv, cross": Case(
        "lagkv(64, cross=True)", "LagKVPress", {"lag_size": 64, "cross_scoring": True}, reason=NO_RANGE
    ),
    "expected": Case("expected_attention", "ExpectedAttentionPress"),
    "expected, floor": Case("expected_attention(floor=0.01)", "ExpectedAttentionPress", {"epsilon": 0.01}),
    "expected, mean": Case(
        "expected_attention(covariance=False)", "ExpectedAttentionPress", {"use_covariance": False}
    ),
    "expected, stored": Case("expected_attention(stored=True)", "ExpectedAttentionStatsPress"),
    "leverage": Case(f"leverage({SKETCH})", "LeverageScorePress", {"sketch_dimension": SKETCH}),
    "compactor": _compactor(128),
    "compactor, last chunk cut": _compactor(
        100,
        reason="kvpress pads the last chunk and masks the padding with -1e-9, so that it takes part in the "
        "softmax; the next row has the mask corrected and nothing else",
    ),
    "compactor, mask corrected": _compactor(100, mended=True),
    "cur": Case("cur", "CURPress"),
    "cap": Case("cap", "CapPress"),
    "qfilter": Case("qfilter", "QFilterPress"),
    "kvzap": Case("kvzap_scores", "KVzapPress"),
    "critical": Case("snapkv(64) + critical", "SnapKVPress", SNAPKV, wrapper="CriticalKVPress"),
    "critical, heads compete": Case(
        "snapkv(64) + critical",
        "SnapKVPress",
        SNAPKV,
        wrapper="CriticalAdaKVPress",
        budget="ada({slots})",
    ),
    "critical, keydiff": Case("keydiff + critical", "KeyDiffPress", wrapper="CriticalKVPress"),
    "lu_kv": Case(
        "keydiff + sinks(4) + recent(1)", "KeyDiffPress", wrapper="LUKVPress", budget="lu_kv({slots})"
    ),
    "lu_kv, expected": Case(
        "expected_attention(floor=0.02) + sinks(4) + recent(1)",
        "ExpectedAttentionPress",
        {"epsilon": 0.02},
        wrapper="LUKVPress",
        budget="lu_kv({slots})",
    ),
    "chunks": Case("snapkv(64) + chunks(20)", "SnapKVPress", SNAPKV, wrapper="ChunkKVPress", counted=True),
    "kvzip": Case(f"kvzip(instruction={ASK})", "KVzipPress", budget="overall({slots})"),
    "kvzip, layer by layer": Case(
        f"kvzip(instruction={ASK})", "KVzipPress", {"layerwise": True}, budget="ada({slots}, floor=0)"
    ),
    "kvzip, output": Case(
        f"kvzip(output=True, instruction={ASK})",
        "KVzipPress",
        {"kvzip_plus_normalization": True},
        budget="overall({slots})",
    ),
    "fast_kvzip": Case(
        "fast_kvzip",
        "FastKVzipPress",
        budget="overall({slots})",
        reason="kvpress counts scores of layers with a window of their own towards the one threshold, unless "
        "the model takes pictures; here such layers keep their window and take no part",
    ),
    "fast_kvzip, layer by layer": Case(
        "fast_kvzip", "FastKVzipPress", {"layerwise": True}, budget="ada({slots}, floor=0)"
    ),
}


# --- ours ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model, its prompt, and the weights of learned parts.

    Attributes:
      name: of the row.
      folder: in Hugging Face's format.
      model: the same, loaded.
      prompt: its tokens.
      fed: tokens that follow.
      weights: by the part's name, a dict a layer.
    """

    name: str
    folder: Path
    model: kvjax.LanguageModel
    prompt: Int[np.ndarray, " T"]
    fed: Int[np.ndarray, " F"]
    weights: dict[str, list[Params]]


def subject(name: str, home: Path) -> Subject:
    """A family's golden model, its changed config below ``home``; or the embedded one."""
    if name == "embedded":
        model = kvjax.load()
        assert model.folder is not None
        ids = model.text.encode((ROOT / "LICENSE").read_text(encoding="utf-8"))
        return _with_weights(name, Path(model.folder), np.asarray(ids))
    source, changes = FAMILIES[name]
    folder = Path(shutil.copytree(GOLDEN / source, home / name))
    config = json.loads((folder / "config.json").read_text()) | POSITIONS | changes
    (folder / "config.json").write_text(json.dumps(config))
    tokens = np.random.default_rng(len(name)).integers(4, 96, TOKENS + FED)
    return _with_weights(name, folder, tokens)


def _with_weights(name: str, folder: Path, tokens: Int[np.ndarray, " T"]) -> Subject:
    model = kvjax.load(folder, dtype="float32")
    key = jax.random.key(0)
    parts = QFilter(), ExpectedAttention(stored=True), FastKVzip(), LUKV()
    weights = {part.name: part.example_weights(key, model.network) for part in parts}
    sizes = (model.spec.model_dim, model.network.num_kv_heads, model.network.num_layers)
    weights["kvzap_scores"] = kvzap.initial(key, *sizes, hidden=8)
    return Subject(name, folder, model, tokens[:TOKENS], tokens[TOKENS : TOKENS + FED], weights)


@functools.partial(jax.jit, static_argnames=("network", "window"))
def _layer_keeps(
    network: Network,
    window: int,
    policy: Policy,
    weights: Params,
    index: Int[Array, ""],
    block: Params,
    x: Float[Array, "B T D"],
    total: Int[Array, " B"],
    lse: Float[Array, "B N T"],
) -> Bool[Array, "B K T"]:
    at = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
    pos = jnp.where(at < total[:, None], at, EMPTY)

    def attend(_: int, heads: Heads, carry: Any) -> tuple[Array, Any]:
        info = layer.LayerInfo(policy, weights, index, network.num_layers, None, total, kind=window)
        return heads.q, layer.judge(info, heads, pos, lse).admit

    return network.layer(block, window, x, at, attend, None)[1]


def judged_layers(network: Network) -> list[int]:
    """Layers without a window of their own."""
    return [index for index, window in enumerate(network.windows) if window is None]


def policy_of(case: Case, ratio: float, slots: int) -> Policy:
    """Ours, with so many slots."""
    return kvjax.policy(f"{case.policy.format(ratio=ratio)} + {case.budget.format(slots=slots)}")


def kept(
    of: Subject,
    reading: decode.PromptActivations,
    case: Case,
    ratio: float,
    theirs: Bool[np.ndarray, "L K T"] | None = None,
) -> Bool[np.ndarray, "L K T"]:
    """What our policy keeps in the layers without a window; ``theirs`` is for counted cases."""
    layers = judged_layers(of.model.network)
    if case.counted:
        assert theirs is not None
        slots = theirs[:, 0].sum(axis=-1)
        found = {n: _kept(of, reading, policy_of(case, ratio, int(n)), layers) for n in np.unique(slots)}
        return np.stack([found[n][index] for index, n in enumerate(slots)])
    slots = max(1, int(len(of.prompt) * (1 - ratio)))  # as kvpress rounds
    policy = policy_of(case, ratio, slots)
    return (_held if policy.holds_prompt else _kept)(of, reading, policy, layers)


def _held(
    of: Subject, reading: decode.PromptActivations, policy: Policy, layers: Sequence[int]
) -> Bool[np.ndarray, "L K T"]:
    """What is in the pages and the ring once all layers were cut."""
    weights = {part.place: of.weights[part.name] for part in policy.learned}
    state, _ = decode.cut(of.model, policy, reading, weights=weights)
    length, bits = len(of.prompt), np.array(metrics.present(state))[:, 0]
    for index, cache in enumerate(state.layers):  # the ring holds the newest, kept or not
        newest = np.arange(length)[-cache.ring.window :]
        admitted = np.asarray(cache.ring.admit)[0]
        bits[index][:, newest] = admitted[:, newest % cache.ring.window]
    return bits[list(layers), :, :length]


def _kept(
    of: Subject, reading: decode.PromptActivations, policy: Policy, layers: Sequence[int]
) -> Bool[np.ndarray, "L K T"]:
    """What the layers judge."""
    network, result = of.model.network.at(reading.context), []
    for index in layers:
        weights = {part.place: of.weights[part.name][index] for part in policy.learned}
        bits = _layer_keeps(
            network,
            layers[0],
            policy,
            weights,
            jnp.asarray(index),
            of.model.params["layers"][index],
            reading.inputs[index],
            jnp.asarray([len(of.prompt)]),
            reading.lse[index],
        )
        result.append(np.asarray(bits)[0, :, : len(of.prompt)])
    return np.stack(result)


def read(of: Subject) -> decode.PromptActivations:
    """The prompt under full attention."""
    return decode.read_full(of.model, [of.prompt.tolist()])


# --- theirs --------------------------------------------------------------------------------------


def inputs(of: Subject) -> dict[str, np.ndarray]:
    """What a press gets of us: the tokens, sketches [L, K, H, S] and learned weights."""
    network = of.model.network
    shape = (1, network.num_kv_heads, 1, network.head_dim)
    sketches = [
        compactor.gaussian(
            kvjax.algebra.Observation(
                pos=jnp.zeros((1, 1), jnp.int32),
                total=jnp.ones(1, jnp.int32),
                layer=index,
                layers=network.num_layers,
                values={"k_pre": jnp.zeros(shape)},
            ),
            SKETCH,
            0,
        )
        for index in range(network.num_layers)
    ]
    stacked = {
        name: np.stack([np.asarray(layer_[name]) for layer_ in layers])
        for layers in of.weights.values()
        for name in layers[0]
    }
    return {
        "tokens": of.prompt,
        "fed": of.fed,
        "sketch": np.stack([np.asarray(x) for x in sketches]),
    } | stacked


def ask(
    folder: Path,
    subjects: Sequence[Subject],
    home: Path,
    only: Sequence[str] = tuple(CASES),
    ratios: Sequence[float] = RATIOS,
) -> Mapping[str, np.ndarray]:
    """kvpress's answers, to these cases.

    Raises:
      InputError: no environment in ``folder``, or a process that failed.
    """
    request = {
        "models": {of.name: str(of.folder) for of in subjects},
        "cases": [dataclasses.asdict(CASES[name]) | {"name": name} for name in only],
        "ratios": ratios,
    }
    (home / "request.json").write_text(json.dumps(request))
    arrays: dict[str, Any] = {f"{of.name}:{k}": x for of in subjects for k, x in inputs(of).items()}
    np.savez(home / "inputs.npz", **arrays)
    words = [*peers.command(folder)[:-1], str(SCRIPT), str(home)]
    code = subprocess.run(words, check=False, stdout=sys.stderr).returncode
    if code:
        raise InputError(
            f"parity --peers {folder}: kvpress's process ended with {code}. See its message above."
        )
    return np.load(home / "answers.npz")


# --- the comparison ------------------------------------------------------------------------------


def compared(ours: Bool[np.ndarray, "L K T"], theirs: Bool[np.ndarray, "L K T"], score: np.ndarray) -> Row:
    """Tokens that they keep and we do not, heads concerned, and how far apart such tokens' scores are.

    The distance is between the highest and the lowest score of the tokens that only one side keeps, over the
    deviation of all scores of the head; the largest of all heads. Scores that are not numbers have none.
    """
    differ = ours != theirs
    heads, gap, broken = differ.any(axis=-1), 0.0, 0
    for at in zip(*np.nonzero(heads)):
        some, every = score[at][differ[at]], score[at]
        if np.isnan(some).any():
            broken += 1
            continue
        spread = float(np.std(every[np.abs(every) < 1e30])) or 1.0
        gap = max(gap, float(some.max() - some.min()) / spread)
    rounding = gap <= ROUNDING and not broken
    return {
        "verdict": "equal" if not heads.any() else "rounding" if rounding else "differs",
        "missing": int((theirs & ~ours).sum()),
        "kept": int(theirs.sum()),
        "heads": f"{int(heads.sum())} of {heads.size}",
        "nan_heads": broken,
        "gap": float(f"{gap:.2g}"),
    }


def rows(
    subjects: Sequence[Subject], answers: Mapping[str, np.ndarray], only: Sequence[str] = tuple(CASES)
) -> Iterator[Row]:
    """One for each model, case and ratio."""
    for of in subjects:
        reading, network = read(of), of.model.network
        layers = judged_layers(network)
        for name in only:
            case = CASES[name]
            for ratio in RATIOS:
                key = f"{of.name}_{name}_{ratio}"
                row = {"model": of.name, "method": name, "press": case.press, "ratio": ratio}
                row["policy"] = case.policy.format(ratio=ratio)
                if f"error_{key}" in answers:
                    yield row | {"verdict": "error", "error": str(answers[f"error_{key}"]).splitlines()[0]}
                    continue
                shape = network.num_layers, network.num_kv_heads, len(of.prompt)
                theirs = np.unpackbits(answers[f"kept_{key}"])[: np.prod(shape)].reshape(shape).astype(bool)
                ours = kept(of, reading, case, ratio, theirs[layers])
                yield row | compared(ours, theirs[layers], answers[f"score_{key}"][layers])


def ordered(every: Sequence[Row]) -> list[Row]:
    """By model, then by method, whenever they were compared."""
    models, methods = [*FAMILIES, "embedded"], list(CASES)
    return sorted(
        every, key=lambda row: (models.index(row["model"]), methods.index(row["method"]), row["ratio"])
    )


def record(answers: Mapping[str, np.ndarray], only: Sequence[str] = tuple(CASES)) -> dict[str, Any]:
    """What tests compare with, by ``family/case``: kept tokens, packed bits [ratios, bytes]; logits [F, V].

    Logits are those of the first family with half the tokens removed, where kvpress's cache is smaller then.
    """
    kept = {
        f"{family}/{name}": np.stack([answers[f"kept_{family}_{name}_{ratio}"] for ratio in RATIOS])
        for family in RECORDED
        for name in only
    }
    logits = {name: f"logits_{RECORDED[0]}_{name}_0.5" for name in only}
    here = {name: answers[key] for name, key in logits.items() if key in answers}
    return kept | {f"{RECORDED[0]}/{name}/logits": x for name, x in here.items()}


def page(every: Sequence[Row], command: str) -> str:
    """The table by method, and what explains each disagreement; Markdown."""
    about = (
        f"Each method removes the shares {', '.join(map(str, RATIOS))} of {TOKENS} tokens, on tiny models of "
        f"{len(FAMILIES)} families and on the embedded model, in float32, beside kvpress 0.5.5 with "
        "transformers 5.2.0. A case is a model and a share. It is *equal* if every head of every layer keeps "
        "the same tokens. It is equal *but for rounding* if the scores of all tokens that only one side "
        f"keeps differ by at most {ROUNDING:g} of the head's deviation. Presses that draw random numbers or "
        "fetch weights get ours. In the first layer equal tokens have equal norms and leverages, and LagKV's "
        "ranks recur in every partition: such ties are most of what rounding decides. A press that counts "
        "runs of tokens says how many a layer keeps. Two ids stand for KVzip's instruction on both sides. "
        "Cases, with gaps and errors: `parity.jsonl`; two families' kept tokens and one's logits, for tests: "
        "`kvpress.npz`."
    )
    lines = [
        "# The same tokens as kvpress",
        "",
        textwrap.fill(about, 120),
        "",
        f"    {command}",
        "",
        "| method | policy | press | cases | equal | but for rounding | differ | press fails |",
        "|---|---|---|---|---|---|---|---|",
    ]
    reasons: list[str] = []
    for name, case in CASES.items():
        own = [row for row in every if row["method"] == name]
        count = {kind: sum(row["verdict"] == kind for row in own) for kind in VERDICTS}
        numbers = " | ".join(str(count[kind]) for kind in VERDICTS)
        policy = case.policy.format(ratio="r")
        if "uniform" not in case.budget:
            policy += f" + {case.budget.format(slots='n')}"
        press = f"{case.wrapper} of {case.press}" if case.wrapper else case.press
        lines.append(f"| {name} | `{policy}` | {press} | {len(own)} | {numbers} |")
        reasons += _reasons(name, case, own)
    return "\n".join([*lines, "", "## Where they do not agree", "", *(reasons or ["Nowhere."]), ""])


VERDICTS = ("equal", "rounding", "differs", "error")


def _reasons(name: str, case: Case, own: Sequence[Row]) -> Iterator[str]:
    differ = [row for row in own if row["verdict"] == "differs"]
    if differ:
        where = ", ".join(sorted({row["model"] for row in differ}))
        yield f"* {name} ({where}): {case.reason or 'no reason is known'}."
    for error in sorted({row["error"] for row in own if row["verdict"] == "error"}):
        where = ", ".join(sorted({row["model"] for row in own if row.get("error") == error}))
        yield f"* {name} ({where}): kvpress raises `{error}`."
