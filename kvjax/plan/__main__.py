"""``python -m kvjax.plan``: prints a plan; exit code 0 if a step fits, 2 if it does not."""

from __future__ import annotations

import json
from collections.abc import Sequence

import jax

from kvjax import cli
from kvjax.plan import _arguments as arguments


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    return cli.run(_run, argv)


def _run(argv: Sequence[str]) -> int:
    from kvjax.plan import _plan, _report

    question = arguments.parse(argv)
    if question.out is not None and not question.out.parent.is_dir():
        raise cli.InputError(
            f"--out {question.out}: there is no folder {question.out.parent}. Make it first."
        )
    plan = _plan.answer(question)
    answer = _report.as_json(question, plan)
    if question.out is not None:
        question.out.write_text(json.dumps(answer, indent=2) + "\n", encoding="utf-8")
    if question.json:
        print(json.dumps(answer))
    else:
        print("\n".join(_report.lines(question, plan)))
    return 0 if answer["fits"]["step"] else 2


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # devices of this machine are left alone
    jax.config.update("jax_enable_compilation_cache", False)  # it cannot give back what is for other devices
    cli.start(main)
