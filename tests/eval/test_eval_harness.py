"""Our model inside EleutherAI's harness: a local task, RULER's needles, and the same numbers as by hand."""

from __future__ import annotations

import socket
import types
from pathlib import Path

import numpy as np
import pytest

from kvjax import decode
from kvjax.models import decoder

lm_eval = pytest.importorskip("lm_eval", reason="pip install 'kvjax[eval]' brings lm_eval")

TASK = """
task: local_sums
dataset_path: json
dataset_kwargs:
  data_files: {file}
test_split: train
output_type: {kind}
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - metric: {metric}
"""


@pytest.fixture(scope="module")
def harness(tiny_folder):
    from kvjax.eval.harness import KVJax

    return KVJax(pretrained=str(tiny_folder), policy="full", batch_size=2)


def asked(*args):
    return types.SimpleNamespace(args=args)


def dense(harness, ids: list[int]) -> np.ndarray:
    """Log-probabilities [T, V] of one text by dense attention."""
    spec, tokens = harness.model.spec, np.asarray([ids])
    where = np.arange(len(ids))[None]
    x, _ = decoder.forward(spec, harness.model.params, tokens, where, decoder.dense_attend(spec), None)
    logits = np.asarray(decoder.logits(spec, harness.model.params, x)[0], np.float64)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def test_log_likelihoods_are_the_dense_model_s(harness):
    pairs = [("The sky is", " blue"), ("", "Once"), ("2 + 2 =", " 4")]
    results = harness.loglikelihood([asked(*pair) for pair in pairs], disable_tqdm=True)
    for (context, answer), (total, greedy) in zip(pairs, results):
        ids = harness.model.text.encode(context + answer)
        logs = dense(harness, ids)
        at = range(len(ids) - len(answer), len(ids))
        assert total == pytest.approx(sum(logs[i - 1, ids[i]] for i in at), abs=1e-3)
        assert greedy == all(logs[i - 1].argmax() == ids[i] for i in at)


def test_blanks_before_an_answer_are_the_answer_s(harness):
    """As the harness cuts, so that over HTTP, where it cuts itself, the same tokens count."""
    pairs = [("2 + 2 = ", "4"), ("2 + 2 =", " 4"), ("2 + 2 =  \n", "4"), ("2 + 2 =", "  \n4")]
    one, same, many, again = harness.loglikelihood([asked(*pair) for pair in pairs], disable_tqdm=True)
    assert one == pytest.approx(same)
    assert many == pytest.approx(again)


def test_a_rolling_likelihood_covers_every_token_once(harness):
    text = "A short text of some forty characters, or so."
    ids = harness.model.text.encode(text)
    logs = dense(harness, ids)
    whole = sum(logs[i - 1, ids[i]] for i in range(1, len(ids)))
    (total,) = harness.loglikelihood_rolling([asked(text)], disable_tqdm=True)
    assert total == pytest.approx(whole, abs=1e-3)


def test_generation_stops_where_it_is_told_to(harness):
    prompt = "Once upon a time"
    how = {"max_gen_toks": 8, "until": []}
    (text,) = harness.generate_until([asked(prompt, how)], disable_tqdm=True)
    ids = harness.model.text.encode(prompt)
    by_hand = decode.generate(
        harness.model, harness.policy, [ids], max_new_tokens=8, stops=harness.model.spec.eos
    )
    assert text == harness.model.text.decode(t for t in by_hand.tokens[0] if t not in harness.model.spec.eos)
    middle = text[3:4]
    (cut,) = harness.generate_until([asked(prompt, how | {"until": [middle]})], disable_tqdm=True)
    assert cut == text.split(middle)[0]


def test_a_run_that_was_stopped_asks_for_what_is_missing(harness, tmp_path, monkeypatch):
    from lm_eval.api.model import CachingLM

    prompts = [
        asked(f"{word} upon a time", {"until": [], "max_gen_toks": 4}) for word in ("Once", "Then", "Now")
    ]
    whole = harness.generate_until(prompts, disable_tqdm=True)
    run, batches = harness._batch, []

    def counted(part):
        batches.append(len(part))
        if len(batches) == 2:
            raise KeyboardInterrupt
        return run(part)

    monkeypatch.setattr(harness, "_batch", counted)
    with pytest.raises(KeyboardInterrupt):
        CachingLM(harness, str(tmp_path / "answers.db")).generate_until(prompts)
    again = CachingLM(harness, str(tmp_path / "answers.db"))
    assert again.generate_until(prompts) == whole
    assert batches == [2, 1, 1]  # two were kept


def test_a_local_task_runs_by_name(harness, tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"question": "{a} + 1 =", "answer": " {a + 1}"}}\n' for a in range(3)))
    (tmp_path / "local_sums.yaml").write_text(TASK.format(file=rows, kind="loglikelihood", metric="acc"))
    tasks = TaskManager(include_path=str(tmp_path))
    output = lm_eval.simple_evaluate(
        model=harness, tasks=["local_sums"], task_manager=tasks, bootstrap_iters=0
    )
    assert output["results"]["local_sums"]["acc,none"] == 0  # a random model knows no sums
    assert len(output["samples"]["local_sums"]) == 3


@pytest.mark.slow
def test_ruler_needles_run_without_network(tmp_path, monkeypatch):
    """The embedded model finds the harness's own RULER needle behind 900 tokens of noise."""
    pytest.importorskip("wonderwords")
    pytest.importorskip("transformers")
    from kvjax.eval.harness import KVJax

    # RULER looks for NLTK's sentence model and would download it; an empty one cuts at full stops, too.
    folder = Path(tmp_path) / "nltk" / "tokenizers" / "punkt_tab" / "english"
    folder.mkdir(parents=True)
    for name in ("collocations.tab", "sent_starters.txt", "abbrev_types.txt", "ortho_context.tab"):
        (folder / name).write_text("")
    monkeypatch.setenv("NLTK_DATA", str(tmp_path / "nltk"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    import nltk

    def refuse(*_):
        raise OSError("no network in this test")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path / "nltk")])
    model = KVJax(policy="int8", batch_size=4)
    output = lm_eval.simple_evaluate(
        model=model, tasks=["niah_single_1"], limit=4, bootstrap_iters=0,
        metadata={"max_seq_lengths": [1024], "tokenizer": model.tokenizer_name},
    )  # fmt: skip
    samples = output["samples"]["niah_single_1"]
    assert len(samples) == 4
    assert all("special magic numbers" in sample["arguments"][0][0] for sample in samples)
    assert output["results"]["niah_single_1"]["1024,none"] == 1
