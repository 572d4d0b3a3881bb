"""Tools that nobody here wrote run clean against the server: schemathesis, lm-eval, guidellm.

Each is found by its command on PATH, so it may live in an environment of its own:

  pipx install schemathesis
  pipx install 'lm_eval[api]' --preinstall transformers
  pipx install guidellm

OpenAI's client, which is installed with the tests, has its own file.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from serving_client import Running, generated

pytestmark = pytest.mark.slow

WORDS = ["The quick brown fox", "jumps over", "the lazy dog, and nobody", "minds at all."]


def run(folder: Path, *words: str, seconds: float = 540) -> str:
    """What a tool printed, which must end well; skips where it is not installed."""
    if shutil.which(words[0]) is None:
        pytest.skip(f"no {words[0]} on PATH: pipx install it")
    # In a folder of its own, offline, and without what the tests set for this process.
    own = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OPENAI_API_KEY")}
    own |= {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1", "NO_COLOR": "1", "OPENAI_API_KEY": "none"}
    done = subprocess.run(
        words, cwd=folder, env=own, capture_output=True, text=True, timeout=seconds, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout


@pytest.fixture
def tokenizer(tiny_folder: Path, tmp_path: Path) -> str:
    """A folder from which transformers reads the tokenizer, with BOS before a text as we have it."""
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    folder = tmp_path / "tokenizer"
    folder.mkdir()
    tokenizer = Tokenizer.from_file(str(tiny_folder / "tokenizer.json"))
    tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 256)])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return str(folder)


def test_schemathesis_finds_nothing(server: Running, tmp_path):
    """Every operation of the schema, with what is allowed, what is on the edge and what is not.

    What is allowed by the schema may still be too long or name a policy that does not exist: a 4xx.
    """
    words = ["schemathesis", "run", f"{server.url}/openapi.json", "--phases", "coverage,fuzzing"]
    words += ["--exclude-checks", "positive_data_acceptance", "--max-examples", "5", "--seed", "1"]
    run(tmp_path, *words, "--request-timeout", "120", "--suppress-health-check", "all")
    assert server.ask.get("/health").status_code == 200
    assert server.idle()


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


@pytest.mark.parametrize(
    ("kind", "metric", "more"),
    [
        (
            "generate_until",
            "exact_match",
            "generation_kwargs: {until: ['nothing that is written'], max_gen_toks: 8, do_sample: false}",
        ),
        ("loglikelihood", "perplexity", ""),
    ],
)
def test_lm_eval_is_answered_as_the_library_answers(
    server: Running, tiny_folder, tokenizer, tmp_path, kind, metric, more
):
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps({"question": text, "answer": " fox"}) + "\n" for text in WORDS))
    task = TASK.format(name="local", file=file, kind=kind, metric=metric, more=more)
    (tmp_path / "local.yaml").write_text(task)
    arguments = {
        "base_url": f"{server.url}/v1/completions",
        "model": "tiny",
        "tokenizer": tokenizer,
        "tokenizer_backend": "huggingface",
        "add_bos_token": "True",
        "num_concurrent": "2",
        "max_length": "512",
        "max_retries": "1",
    }
    words = ["lm_eval", "run", "--model", "local-completions", "--tasks", "local", "--log_samples"]
    words += ["--include_path", str(tmp_path), "--output_path", str(tmp_path / "out")]
    run(tmp_path, *words, "--model_args", ",".join(f"{name}={value}" for name, value in arguments.items()))
    (samples,) = (tmp_path / "out").rglob("samples_local_*.jsonl")
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    answers = {row["doc"]["question"]: row["resps"][0][0] for row in rows}
    assert set(answers) == set(WORDS)
    for question, answer in answers.items():
        if kind == "generate_until":
            assert answer == generated(tiny_folder, "full", question, 8)[0]
        else:
            assert float(answer[0]) == pytest.approx(log_likelihood(tiny_folder, question, " fox"), abs=1e-3)


def log_likelihood(folder: Path, context: str, continuation: str) -> float:
    """By one pass of the network over the whole text."""
    import jax

    import kvjax

    model = kvjax.load(folder)
    ids = model.text.encode(context + continuation)
    total, known = 0.0, len(model.text.encode(context))
    for at in range(known, len(ids)):
        _, logits = kvjax.prefill(model, "full", [ids[:at]])
        total += float(jax.nn.log_softmax(logits[0])[ids[at]])
    return total


def test_guidellm_completes_requests(server: Running, tokenizer, tmp_path):
    out = tmp_path / "out.json"
    run(
        tmp_path,
        *("guidellm", "run", "--backend"),
        f"kind=openai_http,target={server.url},request_format=/v1/completions",
        *("--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_duration,seconds=20"),
        *("--tokenizer", f"kind=hf_auto,model={tokenizer}"),
        *("--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16"),
        *("--output", f"kind=json,path={out}"),
    )
    (benchmark,) = json.loads(out.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert totals["successful"] >= 2
    assert totals["errored"] == 0
    assert server.idle()
