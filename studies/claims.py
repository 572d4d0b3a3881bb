"""The seed papers' claims, each with the paper's number and the rule that judges ours from results.

python -m studies.claims results/claims results/wg_kv ...

Rules name methods by their presets. A claim whose method is in no row reads "not run". Claims about
quantities that are in no row are judged from the JSON files of studies in the same folders, or say where they
are measured. Comparisons are paired on the same samples; "at matched memory" means live bytes within 2 %. A
comparison holds when its whole 95 % interval does, a bound on a loss when the interval stays inside it.

Papers: WG-KV https://arxiv.org/abs/2512.17452, Top-K with completion https://arxiv.org/abs/2604.05438;
CONF-KV, KVP and GVote by their titles.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kvjax import cli
from kvjax.eval.measure.store import RESULTS, read
from kvjax.eval.report import table
from kvjax.eval.report.table import Results
from studies import judges
from studies.judges import (
    Evidence,
    Judge,
    attention_free,
    both,
    like,
    on,
    only,
    same_reads,
    same_slots,
    swapped,
)


def _times_fewer(entry: dict[str, Any]) -> float:
    """How many times fewer tokens φ reads; infinite where it needs none."""
    if not entry["completed"]:
        return 0.0 if entry["completed"] is None else math.inf
    return float(entry["alone"] / max(1.0, entry["completed"]))


UNSEEN = on("babilong", "icl", "gsm", "rerank", "mqar")
"""Groups that no ranker is trained on."""
FIXED = only("streaming-llm", "snapkv", "adakv")
BENCH = judges.elsewhere("needs weights of 8B parameters and a GPU; ours at its own scale: benchmarks")
PREMISE = judges.study(
    "premise",
    lambda tree: max(shift["r"]["confidence"][2] for shift in tree["shifts"].values()),
    lambda r: r < 0,
    "python -m studies.conf_kv --study premise",
)
OVERLAP = judges.study(
    "proxy",
    lambda tree: float(tree["overlap"]),
    lambda overlap: overlap >= 0.9,
    "python -m studies.gvote --study proxy",
)
ROUND_TRIP = judges.study(
    "roundtrip",
    lambda tree: 100 * next(e["mean"] for e in tree["errors"] if e["storage"] == "int8"),
    lambda percent: percent <= 0.38,
    "python -m studies.roundtrip --json",
)
NEAREST = judges.study(
    "costs",
    lambda tree: min(
        judges.cheaper(kind["areas"], "default", tree["attention_free"]) for kind in tree["kinds"].values()
    ),
    lambda times: times > 1,
    "python -m studies.kvp costs",
)
FEWER = judges.study(
    "heads",
    lambda tree: min(map(_times_fewer, tree["fewer"])),
    lambda times: times >= 1.8,
    "python -m studies.topk_phi heads",
)
ENTROPY = judges.study(
    "heads",
    lambda tree: min(tree["correlation"]),
    lambda r: r > 0,
    "python -m studies.topk_phi heads",
)
CONF, GATE = like("conf-kv"), like("wg-kv")


@dataclasses.dataclass(frozen=True)
class Claim:
    """One sentence of a paper.

    Attributes:
      id: short name, paper first.
      says: what is claimed.
      number: the paper's own.
      judge: from results to ours.
    """

    id: str
    says: str
    number: str
    judge: Judge


CLAIMS = (
    Claim(
        "wg-kv/quality",
        "Learned admission loses little long-context quality at a quarter of the cache",
        "negligible loss at 20–25 % kept (14 HELMET tasks)",
        judges.within(both(only("wg-kv"), lambda r: 0.15 <= r.kept_fraction <= 0.3), 1.0),
    ),
    Claim(
        "wg-kv/local",
        "Better than a window with sinks at matched memory",
        "higher on 14 HELMET tasks",
        judges.better(only("wg-kv"), only("streaming-llm")),
    ),
    Claim(
        "wg-kv/duo",
        "Better than DuoAttention at matched memory",
        "higher on 14 HELMET tasks",
        judges.better(only("wg-kv"), only("duo-attention")),
    ),
    Claim(
        "wg-kv/quest",
        "Composes with Quest at no loss: within 1 point of Quest alone at the same reads",
        "curves overlap",
        judges.better(both(GATE, like("quest")), only("quest"), same_reads, margin=-1.0),
    ),
    Claim(
        "wg-kv/memory",
        "Peak memory at 75 % sparsity, 200k to 500k tokens (benchmarks)",
        "−46 … −57 %",
        BENCH,
    ),
    Claim("wg-kv/prefill", "Prefill time at 75 % sparsity (benchmarks)", "3.03–3.45× faster", BENCH),
    Claim("wg-kv/decode", "Decode time at 75 % sparsity (benchmarks)", "1.89–2.56× faster", BENCH),
    Claim(
        "conf-kv/ppl",
        "Perplexity near the full cache at the footprint of a 512-token window",
        "+1.5 … +2.1 PPL",
        judges.ppl_gap(CONF, 2.1),
    ),
    Claim(
        "conf-kv/gap",
        "Closes most of the gap between window and full at matched memory",
        "60 % (INT8), 74 % (-L)",
        judges.gap_closed(CONF, only("streaming-llm"), 0.60),
    ),
    Claim(
        "conf-kv/pyramid",
        "PyramidKV, the best static baseline, closes less of that gap",
        "63 %",
        judges.better(CONF, like("pyramidkv"), text=True),
    ),
    Claim(
        "conf-kv/niah-h2o",
        "Needles: better than H2O at matched memory",
        "91.4 vs 80.6 %",
        judges.better(both(CONF, on("niah")), both(only("h2o"), on("niah"))),
    ),
    Claim(
        "conf-kv/niah-window",
        "Needles: better than a window at matched memory",
        "91.4 vs 53.8 %",
        judges.better(both(CONF, on("niah")), both(only("streaming-llm"), on("niah"))),
    ),
    Claim(
        "conf-kv/agent",
        "Keeps the full cache's success over many turns (here: dialogue retrieval, within 5 points)",
        "95.3 % of full at 1/2.8 of the memory",
        judges.within(both(CONF, on("dialogue_recall")), 5.0),
    ),
    Claim(
        "conf-kv/int8",
        "INT8 storage costs little perplexity",
        "+0.34 PPL",
        judges.ppl_gap(only("int8"), 0.34),
    ),
    Claim(
        "conf-kv/round-trip",
        "Round-trip error of INT8 per head and channel, %",
        "0.38 %",
        ROUND_TRIP,
    ),
    Claim(
        "conf-kv/random",
        "At the same rate of eviction the ranking beats random",
        "30.92 vs 36.54 PPL (0.167 nats a token)",
        judges.better(only("conf-kv"), swapped("conf-kv", "random"), text=True),
    ),
    Claim(
        "conf-kv/premise", "Confidence falls as the lost past matters more (r's upper end)", "r < 0", PREMISE
    ),
    Claim(
        "kvp/ruler",
        "RULER: better than attention-free rankings at matched memory",
        "highest at most sizes",
        judges.better(both(only("kvp"), on("ruler")), both(attention_free, on("ruler"))),
    ),
    Claim(
        "kvp/dialogue",
        "Dialogue: lower perplexity than attention-free rankings at matched memory",
        "lowest at most sizes",
        judges.better(
            both(only("kvp"), on("dialogue_ppl")), both(attention_free, on("dialogue_ppl")), text=True
        ),
    ),
    Claim(
        "kvp/transfer",
        "Tasks not trained on: better than attention-free rankings at matched memory",
        "better than most, close to full",
        judges.better(both(only("kvp"), UNSEEN), both(attention_free, UNSEEN)),
    ),
    Claim(
        "kvp/cost",
        "Eviction cost below that of attention-free rankings (here: their best area over its)",
        "lowest curve",
        NEAREST,
    ),
    Claim(
        "topk-phi/ruler",
        "RULER at the same retrieved tokens (1 %): completion adds to exact Top-K",
        "+4.0 / +2.7 / +2.9 points (4k / 8k / 16k, Llama), about 0 (Qwen3)",
        judges.better(both(only("topk-phi"), on("ruler")), both(only("topk"), on("ruler")), same_slots),
    ),
    Claim(
        "topk-phi/matched",
        "RULER at the same reads, φ counted",
        "+2.4 points (16k, 1 %) … −0.1 (8k, 5 %), Llama; at most 0.2 (Qwen3)",
        judges.better(both(only("topk-phi"), on("ruler")), both(only("topk"), on("ruler")), same_reads),
    ),
    Claim(
        "topk-phi/babilong",
        "BABILong at the same retrieved tokens (1 %): completion adds to exact Top-K",
        "+1.7 / +1.8 / +2.6 points (Llama), −1.6 / +0.9 / 0 (Qwen3)",
        judges.better(both(only("topk-phi"), on("babilong")), both(only("topk"), on("babilong")), same_slots),
    ),
    Claim(
        "topk-phi/tokens",
        "Fewer retrieved tokens at equal quality (here: at the same error of attention's output, times)",
        "1.8×",
        FEWER,
    ),
    Claim(
        "topk-phi/entropy",
        "Gains concentrate in high-entropy heads (here: rank correlation over heads)",
        "rising by quartile",
        ENTROPY,
    ),
    Claim(
        "gvote/memory",
        "Half the memory of a fixed budget at no lower accuracy",
        "2×",
        judges.smaller(only("gvote"), FIXED, 2.0),
    ),
    Claim(
        "gvote/quality",
        "Accuracy stays with the full cache's (within 2 points), no budget set",
        "higher than or comparable to the baselines",
        judges.within(only("gvote"), 2.0),
    ),
    Claim("gvote/overlap", "Synthetic queries attend where true ones do", "0.929 of the mass", OVERLAP),
)


def lines(results: Results) -> list[dict[str, str]]:
    """One object a claim."""
    verdicts = [claim.judge(results) for claim in CLAIMS]
    return [
        {
            "id": claim.id,
            "claim": claim.says,
            "paper": claim.number,
            "ours": verdict.ours,
            "verdict": verdict.verdict,
        }
        for claim, verdict in zip(CLAIMS, verdicts)
    ]


def markdown(results: Results) -> str:
    """The table."""
    objects = lines(results)
    return table.markdown(list(objects[0]), [list(line.values()) for line in objects])


def json_lines(results: Results) -> str:
    """The same for programs."""
    return "\n".join(json.dumps(line, ensure_ascii=False) for line in lines(results))


def read_folders(folders: Iterable[Path]) -> Evidence:
    """Rows and studies' files; a folder may have either.

    Raises:
      EvalError: a folder that has neither.
    """
    rows, studies = [], []
    for folder in folders:
        trees = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.json"))]
        own = [tree for tree in trees if isinstance(tree, dict) and "study" in tree]
        studies += own
        if not own or (folder / RESULTS).exists():
            rows += read(folder)
    return Evidence(tuple(rows), tuple(studies))


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the claims; the exit code."""
    return cli.run(_run, argv)


def _run(words: Sequence[str]) -> None:
    parser = cli.Parser(
        prog="python -m studies.claims", description="The seed papers' claims against results."
    )
    parser.add_argument("folder", type=Path, nargs="*", help="of results")
    cli.add(parser, "--json")
    values = parser.parse_args(words)
    results = read_folders(values.folder)
    print(json_lines(results) if values.json else markdown(results))


if __name__ == "__main__":
    cli.start(main)
