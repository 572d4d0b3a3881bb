"""Learning curves of trained parts, on held-out rows: how far each came, and whether it still moves.

python -m studies.curves results/smollm2/weights --out results/smollm2/weights/curves.png

A part is flat where its error changed by less than 2 % since the last check before the last quarter.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from kvjax import cli
from kvjax.eval.report.plotting import panels, pyplot, saved, style
from kvjax.eval.report.table import markdown

FLAT = 0.02
"""Most change of the error in the last quarter."""

ERRORS = {
    "hard_1024": "squared error, decided gates",
    "held_completed": "error over the output's norm",
    "area_learned": "attention evicted (area)",
    "distill": "squared error of the mixed heads",
}
"""What a trainer's check calls its error, and what that is."""


@dataclasses.dataclass(frozen=True)
class Curve:
    """A part's error on held-out rows.

    Attributes:
      part: name of the log.
      error: key of ``ERRORS``.
      steps, values: of each check; the first is the untrained part's.
    """

    part: str
    error: str
    steps: tuple[int, ...]
    values: tuple[float, ...]

    @property
    def change(self) -> float:
        """Relative change of the error since the last check in the first three quarters."""
        before = max(i for i, step in enumerate(self.steps) if 4 * step <= 3 * self.steps[-1])
        return self.values[-1] / self.values[before] - 1


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; its exit code."""
    return cli.run(_run, argv)


def _run(words: Sequence[str]) -> None:
    parser = cli.Parser(prog="python -m studies.curves", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="of logs, one JSON line a check")
    parser.add_argument("--out", type=Path, metavar="FILE", help="for the picture")
    args = parser.parse_args(words)
    curves = [read(file) for file in sorted(args.folder.glob("*.jsonl"))]
    if not curves:
        parser.error(f"{args.folder} has no logs (*.jsonl). Name the folder of a part's weights.")
    print(text(curves))
    if args.out is not None:
        draw(curves, args.out)


def read(file: Path) -> Curve:
    """The curve in a trainer's log, whose checks are the lines without a loss."""
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    checks = [line for line in lines if "step" in line and "loss" not in line]
    error = next(name for name in ERRORS if name in checks[-1])
    steps, values = zip(*((line["step"], line[error]) for line in checks))
    return Curve(file.stem, error, steps, values)


def text(curves: Sequence[Curve]) -> str:
    """A table: what the untrained part and the trained one miss, and what the last quarter changed."""
    lines = [
        [f"`{c.part}`", ERRORS[c.error], c.steps[-1], f"{c.values[0]:.4g}", f"{c.values[-1]:.4g}",
         f"{100 * c.change:+.1f}", "yes" if abs(c.change) < FLAT else "no"]
        for c in curves
    ]  # fmt: skip
    return markdown(["part", "on held-out rows", "updates", "untrained", "trained", "end, %", "flat"], lines)


def draw(curves: Sequence[Curve], file: Path) -> Path:
    """A panel a part; the untrained part is the first point."""
    plt = pyplot()
    figure, axes = panels(plt, len(curves), 3, (3.4, 2.6))
    for axis, curve in zip(axes, curves):
        axis.plot(curve.steps, curve.values, ms=4, lw=1, **style(0))
        axis.set_title(f"{curve.part}: {100 * curve.change:+.1f} % at the end", fontsize=9)
        axis.set_ylabel(ERRORS[curve.error], fontsize=8)
        axis.set_xlabel("updates", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.set_ylim(bottom=0)
    return saved(plt, figure, file)


if __name__ == "__main__":
    cli.start(main)
