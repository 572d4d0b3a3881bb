"""The seed papers' claims, each with the paper's number and the rule that judges ours from results.

Parts that are not there yet match no row, so their claims read "not run". Comparisons are paired on the
same samples; "at matched memory" means live bytes within 2 %; a comparison holds when its whole 95 %
interval does, a bound on a loss when the interval stays inside it.
"""

from __future__ import annotations

import dataclasses
import json

from kvjax.eval import judges, table
from kvjax.eval.judges import Judge, both, either, on, uses
from kvjax.eval.table import Results

CONF = either(uses("conf-kv"), uses("confkv"), uses("conf_kv"))
KVP = either(uses("kvp"), uses("ranker"))
PHI = either(uses("phi"), uses("topk-phi"))
TOPK = either(uses("topk"), uses("top_k"))
GVOTE = uses("gvote")
GATE = either(uses("wg-kv"), uses("wgkv"), uses("write_gate"))
WINDOW, SNAP, ADA, PYRAMID, QUEST, INT8 = (
    uses("window"),
    uses("snapkv", "uniform"),
    uses("snapkv", "ada"),
    uses("snapkv", "pyramid"),
    uses("quest", without=("wg-kv", "wgkv", "write_gate")),
    uses("int8", without=("uniform", "ada", "pyramid", "window")),
)
RANDOM, KNORM, H2O = uses("random"), uses("knorm"), uses("h2o")


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
        "Learned admission keeps long-context quality at a quarter of the cache",
        "25 % kept, within 1 point of full (HELMET, read off)",
        judges.within(both(GATE, lambda r: r["kept_fraction"] <= 0.3), 1.0),
    ),
    Claim(
        "wg-kv/static",
        "Better than a static window with sinks at the same cache size",
        "highest of three on 14 HELMET tasks",
        judges.better(GATE, WINDOW),
    ),
    Claim(
        "wg-kv/quest",
        "Composes with Quest without loss",
        "curves overlap",
        judges.better(both(GATE, uses("quest")), QUEST, matched=False, margin=-1.0),
    ),
    Claim("wg-kv/memory", "Peak memory at 75 % sparsity", "−46 … −57 %", judges.never),
    Claim(
        "conf-kv/ppl",
        "Perplexity near the full cache at the memory of a 512-token window",
        "+1.5 … +2.1 PPL",
        judges.ppl_gap(CONF, 2.1),
    ),
    Claim(
        "conf-kv/gap",
        "Closes most of the gap between window and full at matched memory",
        "60 % (INT8), 74 % (-L)",
        judges.gap_closed(CONF, WINDOW, 0.60),
    ),
    Claim(
        "conf-kv/pyramid",
        "PyramidKV closes less of it",
        "63 %",
        judges.gap_closed(PYRAMID, WINDOW, 0.63),
    ),
    Claim(
        "conf-kv/niah-h2o",
        "Needles: better than H2O at matched memory",
        "91.4 vs 80.6 %",
        judges.better(both(CONF, on("niah")), both(H2O, on("niah"))),
    ),
    Claim(
        "conf-kv/niah-window",
        "Needles: better than a window at matched memory",
        "91.4 vs 53.8 %",
        judges.better(both(CONF, on("niah")), both(WINDOW, on("niah"))),
    ),
    Claim(
        "conf-kv/int8",
        "INT8 storage costs little perplexity",
        "+0.34 PPL",
        judges.ppl_gap(INT8, 0.34),
    ),
    Claim(
        "conf-kv/random",
        "At the same rate of eviction a ranking beats random (attention 31.47, random 36.54 PPL)",
        "−5.07 PPL (−0.149 nats a token)",
        judges.better(SNAP, RANDOM, text=True),
    ),
    Claim("conf-kv/premise", "Confidence falls as the lost past matters more", "r < 0", judges.never),
    Claim(
        "kvp/ruler",
        "RULER: better than attention-free rankings at the same cache size",
        "highest at most sizes",
        judges.better(both(KVP, on("ruler")), both(either(RANDOM, KNORM, WINDOW), on("ruler"))),
    ),
    Claim(
        "kvp/transfer",
        "Tasks not trained on: better than attention-free rankings",
        "highest at most sizes",
        judges.better(
            both(KVP, on("babilong", "icl", "dialogue_recall")),
            both(either(RANDOM, KNORM, WINDOW), on("babilong", "icl", "dialogue_recall")),
        ),
    ),
    Claim("kvp/cost", "Eviction cost nearest to the oracle's on every budget", "lowest curve", judges.never),
    Claim(
        "topk-phi/ruler",
        "RULER at 1 % reads: completion adds to exact Top-K",
        "+0.040 / +0.027 / +0.029 (4k / 8k / 16k, Llama), about 0 (Qwen3)",
        judges.better(both(PHI, on("ruler")), both(TOPK, on("ruler")), matched=False),
    ),
    Claim(
        "topk-phi/babilong",
        "BABILong at 1 % reads: completion adds to exact Top-K",
        "+0.017 / +0.018 / +0.026 (Llama)",
        judges.better(both(PHI, on("babilong")), both(TOPK, on("babilong")), matched=False),
    ),
    Claim("topk-phi/tokens", "Fewer retrieved tokens at equal quality", "1.8×", judges.never),
    Claim("topk-phi/entropy", "Gains concentrate in high-entropy heads", "rising by quartile", judges.never),
    Claim(
        "gvote/memory",
        "Half the memory of a fixed budget at equal accuracy",
        "2×",
        judges.smaller(GVOTE, either(SNAP, ADA, WINDOW), 2.0),
    ),
    Claim(
        "gvote/quality",
        "Accuracy stays with the full cache's, no budget set",
        "higher than or comparable to the baselines",
        judges.within(GVOTE, 2.0),
    ),
    Claim("gvote/overlap", "Synthetic queries attend where true ones do", "0.929", judges.never),
)


def lines(results: Results) -> list[dict[str, str]]:
    """One object a claim."""
    found = []
    for claim in CLAIMS:
        verdict = claim.judge(results)
        found.append(
            {
                "id": claim.id,
                "claim": claim.says,
                "paper": claim.number,
                "ours": verdict.ours,
                "verdict": verdict.verdict,
            }
        )
    return found


def markdown(results: Results) -> str:
    """The table."""
    told = lines(results)
    return table.markdown(list(told[0]), [list(line.values()) for line in told])


def json_lines(results: Results) -> str:
    """The same for programs."""
    return "\n".join(json.dumps(line, ensure_ascii=False) for line in lines(results))
