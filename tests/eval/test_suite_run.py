"""A public benchmark from rows made here: prompts as kvpress makes them, cells, both layouts, refusals."""

from __future__ import annotations

import csv
import json
import re
import shutil

import numpy as np
import pytest

from kvjax import metrics
from kvjax.cli import InputError
from kvjax.eval.__main__ import main
from kvjax.eval.measure import store
from kvjax.eval.suites import cost, kvpress, measure, prompt, rows
from kvjax.eval.suites.suite import SUITES, named
from kvjax.loading import load, outline

pytestmark = pytest.mark.usefixtures("no_pack")

SUITE = SUITES["kvpress-ruler-4k"]
POLICIES = ("snapkv(8) + uniform({})",)


def made(task: str, number: int, size: int = 150) -> dict:
    """A row in the form of the hub's data set."""
    filler = "the road goes on and on. " * 40
    return {
        "context": f"{filler[:size]} The number is {number}.",
        "question": " What is it?",
        "answer_prefix": " It is",
        "answer": [str(number), "48"],
        "task": task,
        "max_new_tokens": 6,
    }


ROWS = [made("qa_1", 41), made("vt", 42), made("qa_1", 43, 200), made("vt", 44), made("vt", 45)]


def lines(file, made_rows) -> object:
    file.write_text("".join(json.dumps(row) + "\n" for row in made_rows))
    return file


def words(model, file, out, *more: str) -> list[str]:
    command = ["run", "--suite", SUITE.name, "--model", str(model), "--rows", str(file), "--out", str(out)]
    command += [word for policy in POLICIES for word in ("--policy", policy)]
    return [*command, "--ratios", "0.5,0.75", *more]


@pytest.fixture(scope="module")
def measured(tiny_folder, tmp_path_factory):
    home = tmp_path_factory.mktemp("suite")
    file = lines(home / "4096.jsonl", ROWS)
    assert main(words(tiny_folder, file, home / "out", "--by", "a test", "--price", "2")) == 0
    return home


def test_cells_are_tasks_by_size_class_under_every_ratio(measured):
    done = store.read(measured / "out")
    cells = {(row.cell.task, row.cell.policy, row.cell.length, row.cell.samples) for row in done}
    policies = ["full", "snapkv(8) + uniform(0.5)", "snapkv(8) + uniform(0.25)"]
    sizes = {("vt", 256, 3), ("qa_1", 256, 2)}
    assert cells == {(task, policy, size, n) for task, size, n in sizes for policy in policies}
    for row in done:
        assert row.group == SUITE.name
        assert row.metric == "accuracy"
        assert len(row.each.output) == row.cell.samples
        kept = {"full": 1, policies[1]: 0.5, policies[2]: 0.25}.get(row.cell.policy)
        if kept:  # of the context; what is asked comes after it and stays
            asked = len(" What is it?\n It is") - 1
            for index, share in zip(row.each.tags["row"], row.each.kept):
                context = len(ROWS[int(index)]["context"])
                exact = (np.floor(kept * context) + asked) / (context + asked)
                assert share == pytest.approx(exact, abs=0.01)
    facts = json.loads((measured / "out" / "suite.json").read_text())
    assert facts["by"] == "a test"
    assert facts["rows"] == "4096.jsonl"
    assert "cpu" in facts["device"]


def test_the_layout_of_kvpress_holds_the_same_answers_and_their_scores(measured):
    folders = {folder.name: folder for folder in (measured / "out" / "kvpress").iterdir()}
    start = "ruler__4096__model"
    assert set(folders) == {
        f"{start}__no_press__0.00",
        f"{start}__snapkv__0.50",
        f"{start}__snapkv__0.75",
    }
    done = store.read(measured / "out")
    with (folders[f"{start}__snapkv__0.50"] / "predictions.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [line["task"] for line in table] == [row["task"] for row in ROWS]
    said = {
        int(index): output
        for row in done
        if row.cell.policy == "snapkv(8) + uniform(0.5)"
        for index, output in zip(row.each.tags["row"], row.each.output)
    }
    assert [line["predicted_answer"] for line in table] == [said[i] for i in range(len(ROWS))]
    scores = json.loads((folders[f"{start}__snapkv__0.50"] / "metrics.json").read_text())
    clean = [re.sub(r"[\x00-\x1f]", "", line["predicted_answer"].strip()).strip().lower() for line in table]
    for task in ("qa_1", "vt"):
        found = [
            [ref in text for ref in row["answer"]] for row, text in zip(ROWS, clean) if row["task"] == task
        ]
        own = [any(x) if task == "qa_1" else sum(x) / len(x) for x in found]
        assert scores[task] == {"string_match": round(100 * float(np.mean(own)), 2)}
    config = (folders[f"{start}__snapkv__0.75"] / "config.yaml").read_text()
    assert "compression_ratio: 0.75" in config
    assert "fraction: 1.0" in config


def test_a_finished_run_measures_nothing_again(measured, tiny_folder, capsys):
    before = (measured / "out" / store.RESULTS).read_bytes()
    assert main(words(tiny_folder, measured / "4096.jsonl", measured / "out")) == 0
    assert (measured / "out" / store.RESULTS).read_bytes() == before
    assert json.loads((measured / "out" / "suite.json").read_text())["by"] == "a test"


def test_a_dry_run_needs_no_weights(tiny_folder, measured, tmp_path, capsys):
    folder = tmp_path / "bare"
    shutil.copytree(tiny_folder, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    assert main(words(folder, measured / "4096.jsonl", tmp_path / "out", "--dry-run", "--price", "3")) == 0
    told = capsys.readouterr().err
    assert "6 cells" in told
    assert "rows of 256 tokens: 64 at once" in told
    assert re.search(r"about [\d.]+ hours: 3,840 tokens read", told)
    assert "at 3 an hour" in told
    assert not (tmp_path / "out").exists()


# --- prompts -------------------------------------------------------------------------------------


class Template:
    """A tokenizer of bytes with a chat template like Qwen3's, which trims nothing."""

    def __init__(self, text):
        self.encode, self.bos = text.encode, None

    def render(self, messages, *, enable_thinking):
        (message,) = messages
        thought = "" if enable_thinking else "<think></think>"
        return f"<user>{message['content']}</user><assistant>{thought}"


@pytest.mark.parametrize("aware", [False, True])
@pytest.mark.parametrize("chat", [False, True])
def test_a_prompt_is_put_together_and_cut_as_kvpress_does(tiny_folder, chat, aware):
    text, row = load(tiny_folder).text, ROWS[0]
    reader = Template(text) if chat else text
    sample, ids = prompt.encoded(SUITE, row, 3, reader, chat=chat, aware=aware, most=512)
    head, tail = ("<user>", "</user><assistant><think></think>") if chat else ("", "\n")
    context = head + row["context"] + (row["question"] if aware else "")
    after = ("" if aware else row["question"]) + tail + row["answer_prefix"]
    assert ids.context == text.encode(context, bos=not chat)
    assert ids.question + ids.prefix == text.encode(after, bos=False)
    assert (ids.question == []) is aware
    assert sample.max_new == 6
    assert sample.tags == {"row": 3.0}
    # A context that is too long loses its end.
    _, short = prompt.encoded(SUITE, row, 3, reader, chat=chat, aware=aware, most=100)
    assert short.context == ids.context[: 100 - len(ids.question + ids.prefix) - len(" 41, 48")]


def test_a_share_that_is_removed_is_written_as_what_stays():
    assert measure.spelled(["a({})", "b"], (0.25, 0.875)) == ["a(0.75)", "a(0.125)", "b"]


def test_policies_have_the_names_of_presses():
    from kvjax import policy

    names = {
        "full": "no_press",
        "snapkv + uniform(0.5)": "snapkv",
        "snapkv + ada(0.5)": "adakv_snapkv",
        "snapkv + pyramid(0.5)": "pyramidkv",
        "h2o + uniform(0.5)": "observed_attention",
        "h2o + uniform(0.5) + sinks(4)": "h2o(None)+uniform(0.5)+sinks(4)",
        "int8": "int8(128)",
    }
    assert {words: kvpress.press(policy(words)) for words in names} == names


# --- rows and refusals ---------------------------------------------------------------------------


def test_parquet_files_lie_where_the_hub_has_them(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    (tmp_path / "4096").mkdir()
    table = pyarrow.Table.from_pylist(ROWS)
    parquet.write_table(table, tmp_path / "4096" / "test-00000-of-00001.parquet")
    assert rows.read(SUITE, tmp_path) == (ROWS, tmp_path.name)


def test_longbench_rows_carry_their_classes(tmp_path):
    row = made("trec", 1) | {"answers": ["City"], "all_classes": ["City", "Date"], "length": 10}
    suite = named("longbench-trec")
    (read,), _ = rows.read(suite, lines(tmp_path / "trec.jsonl", [row]))
    assert (suite.refs(read), suite.labels(read)) == (("City",), ("City", "Date"))
    assert suite.score("trec", "City or Date", *[("City",), suite.labels(read)]) == 0.5
    assert suite.totals({"trec": [0.5, 1.0]}) == 75
    two = named("longbench-v2")
    assert two.refs(made("0shot", 1) | {"answer": "B"}) == ("B",)
    assert two.totals({"0shot": [1.0, 0.0]}) == 0.5


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"answer_prefix": None}, "its 'answer_prefix' is None, where str is expected"),
        ({"max_new_tokens": "6"}, "its 'max_new_tokens' is '6', where int is expected"),
        ({"answer": 5}, "where str or list is expected"),
    ],
)
def test_a_data_set_of_another_form_is_refused(tmp_path, change, told):
    with pytest.raises(InputError, match=re.escape(told)):
        rows.read(SUITE, lines(tmp_path / "4096.jsonl", [ROWS[0], ROWS[1] | change]))


def test_a_column_that_is_gone_is_named_beside_those_that_are_there(tmp_path):
    row = {name: value for name, value in ROWS[0].items() if name != "task"}
    with pytest.raises(
        InputError, match=r"no column 'task', .* its columns are context, question, .*--revision"
    ):
        rows.read(SUITE, lines(tmp_path / "4096.jsonl", [row]))


def test_without_a_network_the_way_out_is_a_download(monkeypatch):
    import huggingface_hub

    def none(*args, **how):
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", none)
    with pytest.raises(InputError, match=r"'hf download simonjegou/ruler --repo-type dataset .*--rows DIR"):
        rows.read(SUITE)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--suite", "nothing"], "Give one of kvpress-ruler-4k"),
        (["--task", "niah"], "a run of its own"),
        (["--protocol", "both"], "Run it twice"),
        (["--ratios", "1.5"], "a number above 0, below 1"),
        (["--rows", "nowhere"], "nowhere has no 4096/test-*.parquet"),
    ],
)
def test_a_run_that_cannot_be_says_so_in_a_sentence(tiny_folder, measured, tmp_path, capsys, more, told):
    assert main(words(tiny_folder, measured / "4096.jsonl", tmp_path / "out", *more)) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


def test_what_only_a_suite_reads_is_refused_without_one(tmp_path, capsys):
    """``--dry-run`` above all: nobody who gives it wants the run."""
    out = tmp_path / "out"
    assert main(["run", "--task", "niah", "--policy", "full", "--out", str(out), "--dry-run"]) == 2
    assert "--dry-run is for a public benchmark" in capsys.readouterr().err
    assert not out.exists()


# --- memory and time -----------------------------------------------------------------------------


def test_a_model_that_is_too_large_is_refused_with_the_numbers(
    tiny_folder, measured, tmp_path, capsys, monkeypatch
):
    model, dtype = outline(str(tiny_folder))
    weights = metrics.size(load(tiny_folder).params)
    nothing = cost.Device(kind="a card", count=1, memory=0)
    quantised = {"on": nothing, "dtype": dtype, "weight_dtype": "int8"}
    policies = [load_policy(spec) for spec in ("full", "snapkv(8) + uniform(0.5)")]
    needed = [
        cost.sizes.need(case, cost.COPIES) for case in cost.cases(model.spec, policies, 256, **quantised)
    ]
    memory = max(need.total for need in needed)
    monkeypatch.setattr(cost, "device", lambda n: cost.Device(kind="a card", count=n, memory=memory))
    assert main(words(tiny_folder, measured / "4096.jsonl", tmp_path / "out")) == 2
    told = capsys.readouterr().err
    assert f"{weights / 2**30:.2f} GiB of weights" in told
    assert "does not fit a card with one row of 256 tokens" in told
    assert "Give --weight-dtype int8 or" in told


def test_rows_are_as_many_as_the_device_holds(tiny_folder):
    model, dtype = outline(str(tiny_folder))
    assert dtype == "float32"
    on = cost.Device(kind="a card", count=1, memory=0)
    (case,) = cost.cases(model.spec, [load_policy("full")], 256, on=on, dtype=dtype, weight_dtype=None)
    needs = [cost.sizes.need(cost.dataclasses.replace(case, rows=n), cost.COPIES) for n in (1, 2, 8)]
    assert needs[0].weights == metrics.size(load(tiny_folder).params)
    assert needs[0].total < needs[1].total < needs[2].total
    for n, needed in zip((1, 2, 8), needs):
        assert cost.sizes.most_rows(case, needed.total, cost.COPIES) >= n
        assert cost.sizes.most_rows(case, needed.total - 1, cost.COPIES) < max(n, 8)
    # The cache of a row is at least its keys and values.
    assert (
        needs[0].answering
        > cost.COPIES * 2 * 4 * 256 * model.spec.num_layers * model.spec.num_kv_heads * model.spec.head_dim
    )


def load_policy(words: str):
    from kvjax import policy

    return policy(words)


def test_work_counts_products_by_hand(tiny_folder):
    model, dtype = outline(str(tiny_folder))
    spec, on = model.spec, cost.Device(kind="a card", count=1, memory=0)
    (case,) = cost.cases(spec, [load_policy("full")], 256, on=on, dtype=dtype, weight_dtype=None)
    work = cost.sizes.work(case)
    heads = spec.head_dim * (2 * spec.num_heads + 2 * spec.num_kv_heads)
    layer = spec.model_dim * heads + 3 * spec.model_dim * spec.mlp_dim + 2 * spec.model_dim
    matrices = spec.num_layers * layer + spec.model_dim
    attention = 4 * spec.num_layers * spec.num_heads * spec.head_dim * 256**2 / 2
    assert work.read_flops == pytest.approx(2 * 256 * matrices + attention, rel=0.02)
    read, wrote = work.seconds(10, flops=1e9, bandwidth=1e9)
    assert read == work.read_flops / 1e9
    assert wrote == pytest.approx(10 * max(work.step_bytes, work.step_flops) / 1e9)
