"""A page for each device: which models fit, at which dtype, context and batch, and how long a suite takes.

From shapes alone (``kvjax.plan.sizes``): nothing is compiled, nothing runs on these devices.

    python -m studies.devices --out results/plan/devices
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from kvjax import cli
from kvjax.eval.suites.cost import COPIES, REACHED, ROWS
from kvjax.models import published
from kvjax.plan import sizes
from kvjax.plan._deployment import Deployment
from pallas_kernels.measure.chips import CHIPS, GIB, Chip


@dataclasses.dataclass(frozen=True)
class Machine:
    """Devices that somebody has.

    Attributes:
      title, chip, count: their name on the page, in ``CHIPS``, and how many.
      where: one that is easily found.
      dtype: 16 bits that its units compute with.
    """

    title: str
    chip: str
    count: int
    where: str
    dtype: str = "bfloat16"


MACHINES = {
    "t4": Machine("NVIDIA T4", "t4", 1, "Colab without payment", "float16"),
    "l4": Machine("NVIDIA L4", "l4", 1, "Colab"),
    "a100": Machine("NVIDIA A100, 40 GB", "a100", 1, "Colab"),
    "h100": Machine("NVIDIA H100", "h100", 1, "clouds"),
    "h200": Machine("NVIDIA H200", "h200", 1, "clouds"),
    "v5e-1": Machine("TPU v5e, one chip", "v5e", 1, "Colab"),
    "v5e-8": Machine("TPU v5e, eight chips", "v5e", 8, "Kaggle; Cloud TPU"),
    "v6e-1": Machine("TPU v6e, one chip", "v6e", 1, "Colab; Cloud TPU"),
}

MODELS = ("qwen2.5-0.5b", "llama-3.2-1b", "qwen3-8b", "llama-3.1-8b")
WEIGHTS = (None, "int8", "int4")

SAMPLES = 13 * 500
"""Rows of kvpress's RULER."""
PROMPT, CLASS = 4096, 6144
"""Tokens of a row, and the size class that a program of a few more is compiled for."""
ANSWER = round((8 * 128 + 30 + 120 + 50 + 2 * 32) / 13)
"""New tokens of a row, mean over the tasks."""
POLICIES = ("full", *(f"snapkv(64) + uniform({kept:g})" for kept in (0.75, 0.5, 0.25, 0.125)))
"""One method of kvpress's leaderboard, and the full cache."""

HEAD = """\
# {title}

{count} device{s} of {memory:.2f} GiB{remark}, {bandwidth:,.0f} GB/s, {flops:,.0f} TFLOP/s (the maker's page).
Found in: {where}. On paper: added up from shapes, with half of these speeds; nothing was compiled or run.
{sent}Made by

    python -m studies.devices --out results/plan/devices

* **weights**: the first of {dtype}, int8 and int4 in which the model and one row fit;
* **rows**: of {prompt:,} tokens at once while a suite is measured (three caches, at most {rows});
* **longest**: tokens of one row that fit with the full cache, and with `snapkv + uniform(0.25)`, whose prompt
  is read layer by layer;
* **tokens a second**: a decode step of these rows, all together;
* **RULER-4k**: hours of kvpress's suite, {samples:,} rows under the full cache and SnapKV at four ratios.

{table}

"""

NONE = "Of the models here none fits.\n"

COMMAND = """\
    python -m kvjax.doctor --check --tune
    python -m kvjax.eval run --suite kvpress-ruler-4k --model {model} --dtype {dtype}{flags} \\
        --policy "snapkv(64) + uniform({{}})" --out results/leaderboard/{name} --dry-run

`doctor` says what this very device does; `--dry-run` counts with its measured speed, and refuses what does
not fit.
"""

HUB = {
    "qwen2.5-0.5b": "Qwen/Qwen2.5-0.5B-Instruct",
    "llama-3.2-1b": "meta-llama/Llama-3.2-1B-Instruct",
    "qwen2.5-7b": "Qwen/Qwen2.5-7B-Instruct",
    "qwen3-8b": "Qwen/Qwen3-8B",
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B-Instruct",
    "llama-3.1-70b": "meta-llama/Llama-3.1-70B-Instruct",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fit:
    """A model on a machine.

    Attributes:
      model, weight_dtype: its name, and what its weights are quantised to, or None.
      weights: bytes of them on one device.
      rows: of ``CLASS`` tokens at once, in a suite.
      longest: tokens of one row, with the full cache and with a quarter of it.
      tokens: a second, of a decode step of these rows.
      hours: of the suite.
    """

    model: str
    weight_dtype: str | None
    weights: int
    rows: int
    longest: tuple[int, int]
    tokens: float
    hours: float


def fit(machine: Machine, model: str) -> Fit | None:
    """The first weights in which a model fits, and what it does with them; None if it does not."""
    spec, chip = published.spec(model), CHIPS[machine.chip]
    for weight_dtype in WEIGHTS:

        def case(policy: str, rows: int = 1, context: int = CLASS) -> Deployment | None:
            return sizes.deployment(
                spec,
                policy,
                rows=rows,  # noqa: B023
                context=context,
                dtype=machine.dtype,
                weight_dtype=weight_dtype,  # noqa: B023
                devices=machine.count,
            )

        cases = {policy: case(policy) for policy in POLICIES}
        whole = [one for one in cases.values() if one is not None]
        if len(whole) < len(cases):
            return None
        # Of the policies the first two need the most: the larger cache, and whole prompts with a large one.
        rows = min(ROWS, *(sizes.most_rows(one, chip.memory, COPIES) for one in whole[:2]))
        if not rows:
            continue
        longest = [sizes.longest(one, chip.memory) for one in (whole[0], whole[3])]
        each = [dataclasses.replace(one, rows=rows, context=PROMPT) for one in whole]
        return Fit(
            model=model,
            weight_dtype=weight_dtype,
            weights=sizes.need(whole[0]).weights,
            rows=rows,
            longest=(longest[0], longest[1]),
            tokens=rows / _seconds(each[0], chip)[1],
            hours=sum(_hours(one, rows, chip) for one in each),
        )
    return None


def _seconds(case: Deployment, chip: Chip) -> tuple[float, float]:
    """(of reading all rows, of a step) at what a program reaches of the published speeds."""
    return sizes.work(case).seconds(1, REACHED * chip.flops, REACHED * chip.bandwidth)


def _hours(case: Deployment, rows: int, chip: Chip) -> float:
    read, step = _seconds(case, chip)
    return -(-SAMPLES // rows) * (read + ANSWER * step) / 3600


def page(name: str) -> str:
    """The page of a machine."""
    machine = MACHINES[name]
    chip = CHIPS[machine.chip]
    found = [(model, fit(machine, model)) for model in MODELS]
    lines = ["| model | weights | GiB a device | rows | longest | tokens a second | RULER-4k |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for model, one in found:
        if one is None:
            alone = sizes.deployment(
                published.spec(model),
                "full",
                rows=1,
                context=PROMPT,
                dtype=machine.dtype,
                devices=machine.count,
            )
            why = f"{machine.count} devices do not divide its heads" if alone is None else "does not fit"
            lines.append(f"| {HUB[model]} | {why} | | | | | |")
            continue
        lines.append(
            f"| {HUB[model]} | {one.weight_dtype or machine.dtype} | {one.weights / GIB:.2f} | {one.rows} "
            f"| {one.longest[0]:,}; {one.longest[1]:,} | {one.tokens:,.0f} | {one.hours:.1f} h |"
        )
    text = HEAD.format(
        title=machine.title,
        count=machine.count,
        s="s" if machine.count > 1 else "",
        memory=chip.memory / GIB,
        remark=f" ({chip.remark})" if chip.remark else "",
        bandwidth=chip.bandwidth / 1e9,
        flops=chip.flops / 1e12,
        where=machine.where,
        sent="What devices send each other is not counted. " if machine.count > 1 else "",
        dtype=machine.dtype,
        prompt=PROMPT,
        rows=ROWS,
        samples=SAMPLES,
        table="\n".join(lines),
    )
    fitting = [one for _, one in found if one is not None]
    if not fitting:
        return text + NONE
    # Of those of kvpress's leaderboard the first that fits, else the largest.
    known = [one for one in fitting if one.model in ("qwen3-8b", "llama-3.1-8b")]
    best = (known or fitting[-1:])[0]
    flags = f" --weight-dtype {best.weight_dtype}" if best.weight_dtype else ""
    flags += f" --mesh tensor={machine.count}" if machine.count > 1 else ""
    return text + COMMAND.format(model=HUB[best.model], dtype=machine.dtype, flags=flags, name=best.model)


def index() -> str:
    """The page that names the others."""
    lines = [f"* [{machine.title}]({name}.md): {machine.where}" for name, machine in MACHINES.items()]
    return "\n".join(
        [
            "# Which model fits which device",
            "",
            (__doc__ or "").split("\n\n")[1].replace("``", "`"),
            "",
            *lines,
            "",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    return cli.run(_run, argv)


def _run(argv: Sequence[str]) -> None:
    parser = cli.Parser(prog="python -m studies.devices", description=__doc__)
    cli.add(parser, "--out", required=True)
    parser.add_argument("--only", metavar="NAME", choices=MACHINES, help=f"one of {', '.join(MACHINES)}")
    values = parser.parse_args(argv)
    out: Path = values.out
    out.mkdir(parents=True, exist_ok=True)
    for name in [values.only] if values.only else MACHINES:
        (out / f"{name}.md").write_text(page(name), encoding="utf-8")
    (out / "README.md").write_text(index(), encoding="utf-8")
    print(out / "README.md")


if __name__ == "__main__":
    cli.start(main)
