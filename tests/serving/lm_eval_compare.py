"""lm-eval over HTTP beside lm-eval on the library: the same tasks, the same policy, the same numbers.

python tests/serving/lm_eval_compare.py --out results/serve/lm_eval.json

``local-completions`` asks a server in this process, ``kvjax.eval.harness`` computes by itself. A local task
of log-likelihoods (token-id prompts, echo), one of generated text, and RULER's needles that need no network.
Policies are those that decide on arrival. One that judges a prompt at its end judges another prompt here than
there: of an echoed one the continuation is part, and the harness holds the last token of a prompt back and
feeds it in a step. In float32: in the model's bfloat16 an echoed chunk and forced steps differ by a hundredth
of a nat.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {file}
test_split: train
output_type: {kind}
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
{more}
metric_list:
  - metric: {metric}
"""

GENERATE = "generation_kwargs: {until: ['.'], max_gen_toks: 8, do_sample: false, temperature: 0}"

TASKS = ("local_next", "local_number", "niah_single_1", "niah_multikey_2", "niah_multikey_3")
POLICIES = ("full", "window(24) + sinks(4)")


def tasks(folder: Path, count: int, tokenizer: str) -> Any:
    """Two local tasks: likelihoods of the next words, and needles to be written. RULER's need a tokenizer."""
    from lm_eval.tasks import TaskManager

    numbers = random.Random(0).sample(range(10_000, 100_000), count)
    needle = "The secret number for apple-river is {}. The old man walked slowly to the harbour. "
    question = "What is the secret number for apple-river? The secret number for apple-river is"
    needles = [{"question": needle.format(n) + question, "answer": f" {n}"} for n in numbers]
    nexts = [{"question": needle.format(n), "answer": f"What is the secret number {n}"} for n in numbers]
    for name, rows, kind, metric, more in (
        ("local_next", nexts, "loglikelihood", "perplexity", ""),
        ("local_number", needles, "generate_until", "exact_match", GENERATE),
    ):
        file = folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        text = TASK.format(name=name, file=file, kind=kind, metric=metric, more=more)
        (folder / f"{name}.yaml").write_text(text)
    metadata = {"max_seq_lengths": [1024], "tokenizer": tokenizer}
    return TaskManager(include_path=str(folder), metadata=metadata)


def with_bos(folder: Path, source: Path) -> Path:
    """A copy of a model's tokenizer that begins texts with BOS, as the model was trained and as we do.

    Without ``config.json``: of a model of type ``qwen2`` transformers 5 takes the vocabulary alone and cuts
    words as Qwen does, whatever ``tokenizer.json`` says.
    """
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    shutil.copy(source / "tokenizer_config.json", folder)
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    bos = tokenizer.token_to_id("<bos>")
    tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", bos)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def numbers(model: Any, task: str, manager: Any, count: int) -> dict[str, Any]:
    """What lm-eval finds, and what every sample was answered."""
    import lm_eval

    evaluated = lm_eval.simple_evaluate(
        model=model,
        tasks=[task],
        task_manager=manager,
        limit=count,
        bootstrap_iters=0,
    )
    metrics = {k: v for k, v in evaluated["results"][task].items() if "," in k and "stderr" not in k}
    answers = [sample["resps"][0][0] for sample in evaluated["samples"][task]]
    return {"metrics": metrics, "answers": answers}


def same(ours: Any, theirs: Any) -> bool:
    """Equal texts; log-likelihoods to a thousandth."""
    if isinstance(ours, str):
        return ours == theirs
    return abs(float(ours[0]) - float(theirs[0])) < 1e-3 and bool(ours[1]) == bool(theirs[1])


def compare(home: Path, count: int, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Of each pair in turn."""
    from lm_eval.models.openai_completions import LocalCompletionsAPI
    from serving_client import running

    import kvjax
    from kvjax.eval.harness import KVJax

    source = Path(kvjax.load().folder)
    (home / "tokenizer").mkdir()
    tokenizer = str(with_bos(home / "tokenizer", source))
    manager = tasks(home, count, tokenizer)
    with running(source, "--context", "1536", "--dtype", "float32") as server:
        for task, policy in itertools.product(names, POLICIES):

            class Asked(LocalCompletionsAPI):
                """lm-eval's own client, which says which policy it wants."""

                def _create_payload(self, *args: Any, **more: Any) -> dict:
                    return super()._create_payload(*args, **more) | {"kv_policy": policy}  # noqa: B023

            client = Asked(
                base_url=f"{server.url}/v1/completions",
                model="tiny",
                tokenizer=tokenizer,
                tokenizer_backend="huggingface",
                add_bos_token=True,
                num_concurrent=4,
                max_length=1536,
                max_retries=1,
            )
            http = numbers(client, task, manager, count)
            alone = KVJax(policy=policy, dtype="float32", max_length=1536, batch_size=5)
            library = numbers(alone, task, manager, count)
            pairs = list(zip(http["answers"], library["answers"]))
            row = {"policy": policy, "task": task, "http": http["metrics"], "library": library["metrics"]}
            yield row | {"samples": len(pairs), "same": sum(same(a, b) for a, b in pairs)}


def main() -> int:
    """Runs it; 1 unless all samples agree."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=20, help="samples of a task")
    parser.add_argument("--task", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        # RULER looks for NLTK's sentence model and would download it; an empty one cuts at full stops, too.
        punkt = home / "nltk" / "tokenizers" / "punkt_tab" / "english"
        punkt.mkdir(parents=True)
        for name in ("collocations.tab", "sent_starters.txt", "abbrev_types.txt", "ortho_context.tab"):
            (punkt / name).write_text("")
        os.environ |= {"NLTK_DATA": str(home / "nltk"), "HF_HOME": str(home / "hf"), "HF_HUB_OFFLINE": "1"}
        sys.path.insert(0, str(Path(__file__).parent))
        run: dict[str, Any] = {"command": shlex.join(["python", *sys.argv]), "rows": []}
        for row in compare(home, arguments.count, arguments.task):
            run["rows"].append(row)
            print(json.dumps(row), flush=True)
            if arguments.out:
                arguments.out.parent.mkdir(parents=True, exist_ok=True)
                arguments.out.write_text(json.dumps(run, indent=1) + "\n")
    return 0 if all(row["same"] == row["samples"] for row in run["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
