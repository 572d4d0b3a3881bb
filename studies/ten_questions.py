"""Ten questions about one passage, answered with the full cache and with a part of it.

python -m studies.ten_questions --model FOLDER --policy "snapkv(64) + uniform(0.3)" \\
    --out results/smollm2/ten_questions

The passage is the user's; a policy cuts the cache after it, before any question is seen. Each question then
ends the turn, and the model answers greedily: no seed matters.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import kvjax
from kvjax import cli, metrics
from kvjax.eval.arguments import add_model
from kvjax.eval.commands import model_of
from kvjax.eval.errors import EvalError
from kvjax.eval.measure.store import named, versions
from kvjax.eval.report.table import markdown
from kvjax.eval.tasks.sample import Encoded, Sample, encode
from kvjax.loading import LanguageModel
from kvjax.types import EMPTY

PASSAGE = Path(__file__).parents[1] / "tests" / "real" / "dracula.txt"
"""The beginning of Bram Stoker's Dracula, of which the first paragraphs are read."""
PARAGRAPHS = 3

QUESTIONS = {
    "Which city did the traveller leave on 1st May?": "Munich",
    "How late was the train?": "an hour",
    "Which river do the splendid bridges cross?": "the Danube",
    "At which hotel did the traveller stop for the night?": "Hotel Royale",
    "What is the chicken dish with red pepper called?": "paprika hendl",
    "For whom does the traveller want to get the recipe?": "Mina",
    "Which language was very useful to the traveller?": "German",
    "Which museum did the traveller visit in London?": "the British Museum",
    "On the borders of which three states is the district?": "Transylvania, Moldavia and Bukovina",
    "Which post town did Count Dracula name?": "Bistritz",
}
ASK = "\n\nAnswer in a few words: "
NEW = 24


def answers(model: LanguageModel, policy: str, asked: Sequence[Encoded]) -> tuple[list[str], float]:
    """What the model writes under a policy, and the share of the passage's tokens that its cache held."""
    context = 64 + max(len(one.context) + len(one.question) + len(one.prefix) for one in asked) + NEW
    read, _ = kvjax.prefill(model, policy, [asked[0].context], context=context)
    kept = float(np.mean(np.asarray(metrics.live_slots(read)))) / len(asked[0].context)
    state = kvjax.fork(read, 0, len(asked))
    state, logits = kvjax.extend(model, policy, state, [one.question + one.prefix for one in asked])
    write = functools.partial(kvjax.stream, max_new_tokens=NEW, stops=model.spec.eos)
    written = np.concatenate([piece for piece, _ in write(model, policy, state, logits)], axis=1)
    ends = {*model.spec.eos, EMPTY}
    rows = [[token for token in row if token not in ends] for row in written.tolist()]
    return [" ".join(model.text.decode(row).split()) for row in rows], kept


def page(model: LanguageModel, policy: str) -> str:
    """The answers as Markdown."""
    passage = "\n\n".join(PASSAGE.read_text(encoding="utf-8").split("\n\n")[:PARAGRAPHS])
    samples = [Sample(context=passage, question=ASK + question, answer="") for question in QUESTIONS]
    asked = [encode(model.text, sample, chat=True) for sample in samples]
    whole, _ = answers(model, "full", asked)
    some, kept = answers(model, policy, asked)
    right = [sum(map(_holds, written, QUESTIONS.values())) for written in (whole, some)]
    table = markdown(
        ["question", "the passage says", "full cache", f"`{policy}`"],
        zip(QUESTIONS, QUESTIONS.values(), whole, some),
    )
    facts = ", ".join(f"{name} {version}" for name, version in versions().items())
    dtype = model.params["embed"].dtype
    options = (
        f'--model {named(model)} --dtype {dtype} --policy "{policy}" --out results/smollm2/ten_questions'
    )
    return (
        f"# Ten questions to {named(model)}\n\n"
        f"The passage is the beginning of *Dracula*, {len(asked[0].context)} tokens with the chat template. "
        f"Its cache is cut to {100 * kept:.0f} % before a question is seen. Answers are greedy (no seed "
        f"matters), at most {NEW} tokens. Of ten, {right[0]} hold the passage's words with the full cache "
        f"and {right[1]} with the cut one. {dtype}; {facts}.\n\n"
        f"```bash\npython -m studies.ten_questions {options}\n```\n\n{table}\n"
    )


def _holds(written: str, wanted: str) -> bool:
    """Without regard to capitals, commas and an article."""
    written, wanted = (text.lower().replace(",", "") for text in (written, wanted))
    return wanted.removeprefix("the ") in written


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the page; the exit code."""
    return cli.run(_run, argv)


def _run(words: Sequence[str]) -> None:
    parser = cli.Parser(prog="python -m studies.ten_questions", description=(__doc__ or "").splitlines()[0])
    add_model(parser)
    cli.add(parser, "--policy", default="snapkv(64) + uniform(0.3)")
    cli.add(parser, "--out", required=True)
    values = vars(parser.parse_args(words))
    model = model_of(values)
    if model.text.template is None:
        raise EvalError(f"--model {model.name} has no chat template. Name a model that answers questions.")
    text = page(model, values["policy"])
    values["out"].mkdir(parents=True, exist_ok=True)
    (values["out"] / "README.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    cli.start(main)
