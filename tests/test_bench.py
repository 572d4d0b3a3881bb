"""The benchmarks: what is refused, one small table really measured; ratios, pages, pictures of known rows."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import tiny

import kvjax
from benchmarks import (
    ablate,
    arguments,
    decode,
    fill,
    host,
    machine,
    plot,
    profile,
    random_model,
    ratios,
    results,
    serve,
    summary,
)
from benchmarks import compile as compiling
from benchmarks.__main__ import main
from benchmarks.journal import Journal
from benchmarks.serving import Serving
from benchmarks.sides import NO_PEERS, PER_HEAD
from kvjax import catalogue, metrics
from kvjax.algebra import Admission, Policy, PolicyError
from kvjax.models import decoder, published


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["decode", "--policy", "fulll"], "Did you mean 'full'?"),
        (["decode", "--batch", "0"], "--batch 0 is out of range. Give a whole number, 1 or more."),
        (["decode", "--threads", "4096"], "Ask for fewer."),
        (["decode", "--context", "65536"], "exceeds the 32768 positions of base. Ask for less."),
        (["decode", "--context", "100"], "leaves no prompt before 113 new tokens"),
        (["decode", "--peers", "/nowhere"], "Make it with: python -m benchmarks peers --make /nowhere"),
        (["serve", "--peers", "/nowhere"], "Make it with: python -m benchmarks peers --make /nowhere"),
        (["decode", "--dtype", "int4"], "--dtype"),
        (["decode", "--mesh", "rows=2"], "'rows' is not an axis. The axes are data, tensor, context."),
        (["decode", "--mesh", "data=2"], "--mesh data=2 --batch 1: data=2 does not divide 1 rows."),
        (["prefill", "--mesh", "tensor=4"], "tensor=4 does not divide the model's 2 KV heads."),
        (["decode", "--model", "/nowhere"], "--model /nowhere: "),
        (["host", "--layers", "-1"], "--layers -1 is out of range"),
        (["plot", "--out", "/nowhere"], "Run those first."),
        (["nonsense"], "nonsense"),
        ([], "required"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence_and_exit_code_2(words, message, capsys):
    assert main(words) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ")
    assert message in error
    assert "\n" not in error


def test_a_result_that_is_not_ours_is_refused_before_anything_is_measured(tmp_path, capsys):
    (tmp_path / "decode.json").write_text("[]")
    assert main(["decode", "--quick", "--out", str(tmp_path)]) == 2
    assert "is not a result of benchmarks" in capsys.readouterr().err


# --- one table, measured -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """``decode --quick`` with one policy, in processes of their own as always."""
    folder = tmp_path_factory.mktemp("bench")
    patch = pytest.MonkeyPatch()
    patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # compiling is most of what it costs
    patch.setenv("JAX_COMPILATION_CACHE_DIR", str(folder / "kept"))
    patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    words = ["decode", "--quick", "--policy", PER_HEAD, "--batch", "2", "--out", str(folder)]
    assert main(words) == 0
    patch.undo()
    return folder, results.read(folder / "decode.json")


@pytest.mark.slow
def test_rows_of_ours_are_measured_and_peers_skipped_with_the_reason(table):
    folder, (run,) = table
    rows = {(row["system"], row["config"]): row for row in run["rows"]}
    assert set(rows) == {
        ("kvjax", PER_HEAD),
        ("kvjax", "quarter"),
        ("transformers", "full"),
        ("kvpress", "snapkv 75 %"),
        ("kvpress", "adakv 75 %"),
    }
    assert {row["skipped"] for row in rows.values() if row["system"] != "kvjax"} == {NO_PEERS}
    for row in (rows["kvjax", PER_HEAD], rows["kvjax", "quarter"]):
        assert row["tokens_timed"] == 2 * 4 * len(row["piece_s"])  # batch, tokens, pieces
        middle = sorted(row["piece_s"])[len(row["piece_s"]) // 2]
        assert 8 / row["tokens_per_s"] <= middle * 1.01
        assert 0 < row["live_bytes"] <= row["allocated_bytes"]
        assert row["compile_s"] > 0  # in the pieces before the timed ones
    # A quarter of 256 - 17 tokens, 2 rows, 2 layers, 2 heads, keys and values of 16 floats and a bit.
    assert rows["kvjax", "quarter"]["live_bytes"] == 59 * 2 * 2 * 2 * (2 * 16 * 4 + 1)
    assert rows["kvjax", PER_HEAD]["prompt"] == 239


@pytest.mark.slow
def test_our_side_is_measured_on_a_mesh(tmp_path):
    words = ["decode", "--quick", "--policy", PER_HEAD, "--batch", "2", "--mesh", "data=2,tensor=2"]
    assert main([*words, "--out", str(tmp_path)]) == 0
    (run,) = results.read(tmp_path / "decode.json")
    ours = [row for row in run["rows"] if row["system"] == "kvjax"]
    assert {row["mesh"] for row in ours} == {"data=2,tensor=2"}
    assert all(row["tokens_per_s"] > 0 and 0 < row["live_bytes"] <= row["allocated_bytes"] for row in ours)
    assert all("mesh" not in row for row in run["rows"] if row["system"] != "kvjax")


def test_a_command_hides_where_a_model_lies():
    shown = results.written_command(["decode", "--model", "/somewhere/mine", "--fill", "--out", "x"])
    assert shown == "python -m benchmarks decode --model DIR --fill"


@pytest.mark.slow
def test_a_folders_model_is_read_without_attention_and_decodes_from_a_filled_cache(tiny_folder, capsys):
    words = ["--quick", "--model", str(tiny_folder), "--policy", "full", "--batch", "1", "--json"]
    assert main(["prefill", *words, "--products"]) == 0
    row = json.loads(capsys.readouterr().out.splitlines()[0])
    assert row["products_s"] > 0
    assert main(["decode", *words, "--fill"]) == 0
    row = json.loads(capsys.readouterr().out.splitlines()[0])
    assert row["tokens_per_s"] > 0
    assert row["live_bytes"] > row["prompt"]


def test_a_run_in_a_checkout_names_its_commit():
    if not (Path(__file__).parents[1] / ".git").exists():
        pytest.skip("this is no checkout")
    assert machine.commit()


@pytest.mark.parametrize("word", ["--shape", "--static"])
def test_the_kernels_have_a_command_line_of_their_own(word, capsys):
    with pytest.raises(SystemExit):
        main(["kernels", word, "nonsense"])
    assert "python -m benchmarks kernels" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_says_command_machine_and_model_but_not_where(table):
    folder, (run,) = table
    assert run["command"] == f"python -m benchmarks decode --quick --policy '{PER_HEAD}' --batch 2"
    assert run["model"] == {"size": "tiny", "seed": 0, "parameters": random_model.count(random_model.TINY)}
    assert run["machine"]["jax"] == jax.__version__
    assert str(folder) not in json.dumps(run)
    assert not list(folder.glob("*.jsonl")), "the journal of a finished run is removed"
    by_name = {ratio["what"]: ratio for ratio in run["ratios"]}
    assert by_name["per-head 75 %, speed over our dense quarter"]["aim"] == 0.8


@pytest.mark.slow
def test_seconds_of_compiling_are_the_compilers_own(table):
    folder, _ = table
    assert not (folder / "kept").exists(), "a measured process keeps programs, and may fetch them"


def test_the_plot_is_drawn(table):
    pytest.importorskip("matplotlib")
    folder, _ = table
    (file,) = plot.draw(folder)
    assert file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_the_page_names_the_command_and_marks_what_was_missed(tmp_path):
    about = {"command": "python -m benchmarks decode", "date": "2026-01-01", "seconds": 60}
    about["machine"] = {"cpu": "some", "threads": 1, "jax": jax.__version__, "commit": "abc"}
    about["model"] = {"size": "base", "seed": 0, "parameters": 7}
    results.save(tmp_path, "decode", about | {"rows": _rows()})
    text = summary.write(tmp_path).read_text()
    assert "`python -m benchmarks decode`, 2026-01-01, 1 minutes" in text
    assert "| per-head 75 %, speed over our dense quarter | ≥ 0.8 | 0.80 |" in text
    assert "| allocated bytes over full, after the prompt | ≤ 0.32 | **0.33** |" in text
    assert "adakv" not in text, "a row that was skipped has no figures"


# --- what is done with rows ----------------------------------------------------------------------


def _rows(**changed: float) -> list[dict]:
    place = {"context": 8192, "batch": 1, "dtype": "float32"}
    speeds = {
        ("kvjax", "full"): 150.0,
        ("kvjax", PER_HEAD): 400.0,
        ("kvjax", "quarter"): 500.0,
        ("transformers", "full"): 75.0,
    }
    rows = [place | {"system": s, "config": c, "tokens_per_s": v} for (s, c), v in speeds.items()]
    rows = [row | dict.fromkeys(("live_bytes", "allocated_bytes", "allocated_bytes_end")) for row in rows]
    rows[0] |= {"live_bytes": 100, "allocated_bytes": 100, "allocated_bytes_end": 100}
    rows[1] |= {"live_bytes": 26, "allocated_bytes": 33, "allocated_bytes_end": 40} | changed
    rows.append(place | {"system": "kvpress", "config": "adakv 75 %", "skipped": "absent"})
    return rows


def test_ratios_of_known_rows_meet_or_miss_their_aims():
    by_name = {ratio["what"]: ratio for ratio in ratios.answer(ratios.DECODE, _rows())}
    verdicts = {what: (ratio["ratio"], ratio.get("met")) for what, ratio in by_name.items()}
    assert verdicts == {
        "full cache, speed over transformers": (2.0, True),
        "per-head 75 %, speed over our dense quarter": (0.8, True),
        "per-head 75 %, speed over our full cache": (2.667, None),
        "live bytes over full, after the prompt": (0.26, True),
        "allocated bytes over full, after the prompt": (0.33, False),
        "allocated bytes over full, while decoding": (0.4, False),
    }
    slower = ratios.answer(ratios.DECODE, _rows(tokens_per_s=399.0))
    assert [r["met"] for r in slower if "dense quarter" in r["what"]] == [False]


def test_aims_of_a_published_size_are_higher_at_a_long_context():
    rows = [row | {"context": context} for context in (2048, 8192) for row in _rows()]
    decode = ratios.answer(ratios.questions("decode", rows, "0.5b"), rows)
    assert [row["aim"] for row in decode if row["what"].endswith("transformers")] == [1.0, 1.3]


def test_a_further_policy_of_ours_is_asked_about_our_full_cache():
    rows = _rows()
    rows.append(rows[1] | {"config": "wg-kv", "tokens_per_s": 300.0, "live_bytes": 27})
    answers = ratios.answer(ratios.questions("decode", rows), rows)
    ratio_of = {r["what"].split(", ", 1)[1]: r["ratio"] for r in answers if r["what"].startswith("`wg-kv`")}
    assert ratio_of["speed over our full cache"] == 2.0
    assert ratio_of["live bytes over full, after the prompt"] == 0.27
    assert len(ratios.questions("decode", _rows())) == len(ratios.DECODE)


def test_the_newest_row_of_a_kind_is_drawn_and_other_models_are_not():
    run = {"command": "a", "model": "base", "rows": _rows()}
    again = {"command": "b", "model": "base", "rows": _rows(tokens_per_s=1.0)[1:2]}
    tiny = [row | {"tokens_per_s": 9.0} for row in _rows() if "skipped" not in row]
    other = {"command": "c", "model": "tiny", "rows": tiny}
    drawn = {(row["system"], row["config"]): row["tokens_per_s"] for row in plot.newest([run, other, again])}
    assert drawn == {
        ("kvjax", "full"): 150.0,
        ("kvjax", PER_HEAD): 1.0,
        ("kvjax", "quarter"): 500.0,
        ("transformers", "full"): 75.0,
    }


def test_a_piece_that_compiled_is_not_timed():
    pieces = [{"seconds": s, "compile_seconds": c, "tokens": 16} for s, c in ((9, 8), (1, 0), (5, 4), (2, 0))]
    side = decode.Side(config=None, row={})  # type: ignore[arg-type]
    size = {"live": 1, "allocated": 2}
    row = decode._row(side, 1, size, [pieces[0], pieces[0], *pieces[1:]], size)
    assert row["piece_s"] == [1, 2]
    assert row["tokens_per_s"] == round(16 / 1.5, 2)
    assert (row["step_ms_p50"], row["step_ms_p95"]) == (93.75, 121.875)  # of 1/16 and 2/16 s
    row = decode._row(side, 1, size, pieces[:1] * 4, size)
    assert "compiled" in row["skipped"]


def test_an_interrupted_run_goes_on_and_another_command_begins_anew(tmp_path):
    file, about = tmp_path / "decode.part.jsonl", {"command": "a", "machine": {"jax": "1"}}
    Journal(file, about).add([{"batch": 1}, {"batch": 1}], seconds=2.0)
    again = Journal(file, about)
    assert (again.groups, again.seconds) == ([[{"batch": 1}, {"batch": 1}]], 2.0)
    again.add([{"batch": 8}], seconds=3.0)
    with file.open("a") as broken:
        broken.write('{"seconds": 9, "ro')  # killed while it wrote
    last = Journal(file, about)
    assert [len(group) for group in last.groups] == [2, 1]
    assert last.seconds == 5.0
    assert Journal(file, about | {"machine": {"jax": "2"}}).groups == []
    assert not file.exists()


def test_measured_cells_are_not_measured_again():
    _, settings = arguments.parse(["decode", "--batch", "1", "8", "--dtype", "float32"])
    assert decode.todo(settings, {("float32", 2048, 1), ("float32", 8192, 1), ("float32", 8192, 8)}) == [
        ("float32", 2048, [8])
    ]
    whole, rest = (decode.work(settings, have) for have in ((), {("float32", 8192, 8)}))
    assert 0 < rest < whole


# --- profile -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_profile_adds_up_and_its_page_names_who_is_above_the_limit(tmp_path):
    """One policy of a tiny model through the whole ladder, in this process."""
    random_model.write(tmp_path / "model", random_model.TINY, 0)
    ladder = ablate.Ladder()
    ladder.load(str(tmp_path / "model"), "float32")
    measured = ladder.profile("knorm + uniform(32, every_step)", 128, tokens=2, warm=1, rounds=2, seed=0)
    assert set(measured["seconds"]) == {"weights", "ring", "read", "all", "alone"}
    assert all(seconds > 0 for seconds in measured["seconds"].values())
    row = profile.parts(measured)
    assert sum(row["parts_us"].values()) == pytest.approx(row["step_us"], abs=0.5)
    assert set(row["parts_us"]) == set(profile.PARTS.values())
    assert row["policy_share"] == pytest.approx(row["parts_us"]["policy"] / row["step_us"], abs=1e-3)

    named = {"config": measured["policy"], "context": 128, "dtype": "float32", "segment": 2}
    lost = {"config": "learned", "context": 128, "dtype": "float32", "segment": 2, "skipped": "no weights"}
    run = {"command": "python -m benchmarks profile", "date": "2026-01-01"}
    run |= {"machine": {"cpu": "C", "threads": 1, "jax": "1", "commit": "a"}}
    run |= {"model": {"parameters": 1, "seed": 0}, "rows": [row | named | {"policy_share": 0.11}, lost]}
    page = profile.page([run])
    assert "| `learned` | skipped: no weights |" in page
    assert f"Above it: `{measured['policy']}` at 128 tokens, float32 (11%)." in page
    later = run | {"rows": [run["rows"][0] | {"policy_share": 0.1}]}
    assert "No policy is above it." in profile.page([run, later]), "the newest row of a cell counts"
    assert f"`{measured['policy']}`" in profile.page([later, run]).split("Above it:")[1]


@pytest.mark.parametrize("spec", ["h2o + uniform(48)", "conf_kv(recent=8) + confidence(24, 48)"])
def test_a_filled_state_ranks_by_attention_that_is_drawn(spec):
    chosen, network = catalogue.policy(spec), decoder.Decoder(random_model.TINY)
    state = fill.filled(network, chosen, {}, 100, 128, jnp.float32, 0, 8)
    assert int(state.length[0]) == 100
    assert metrics.live_slots(state).max() == 48
    for cache in state.layers if chosen.tracks_mass else ():
        assert float(cache.ring.meta["eviction.mass"].min()) > 0


def test_every_shipped_policy_is_profiled_at_every_context():
    _, settings = arguments.parse(["profile"])
    cells = profile.cells(settings)
    for context in (2048, 32768):
        profiled = {catalogue.policy(spec) for _, at, spec in cells if at == context}
        assert {catalogue.policy(spec) for spec in catalogue.PRESETS} <= profiled
    assert profile.work(settings, set(cells[:3])) == len(cells) - 3


def test_a_part_that_no_preset_uses_is_profiled_too(monkeypatch):
    """Discovery decides: a method's own file is enough."""
    shown = profile.shipped()
    kinds = {type(part) for spec in shown for part in catalogue.policy(spec).chain}
    assert kinds >= set(catalogue.parts().values())
    assert len(shown) == len(set(shown))
    assert set(catalogue.PRESETS) <= set(shown)
    monkeypatch.setattr(catalogue, "PRESETS", {"full": "full"})
    kinds = {type(part) for spec in profile.shipped() for part in catalogue.policy(spec).chain}
    assert kinds >= set(catalogue.parts().values())


def test_parts_bring_their_own_untrained_weights():
    """The benchmark asks every learned part, and knows none."""

    @dataclasses.dataclass(frozen=True, repr=False)
    class Learner(Admission):
        name = "learner"
        learns = "learner"

        def untrained(self, model, seed):
            return [{"seed": seed}] * model.network.num_layers

    assert fill.untrained(tiny.model(), Policy(admission=Learner()), 7) == {"admission": [{"seed": 7}] * 2}


def test_the_host_pays_for_a_multi_step_decode_at_least_what_a_call_costs():
    cost = host.host(2, "window(16) + sinks(4)", 3)
    assert 0 < cost["host_us_per_call"] <= cost["host_us_per_token"] * 64 * 1.01
    assert cost["leaves"] > 2 * 8


def test_the_peers_script_needs_nothing_of_ours():
    source = (Path(decode.__file__).parent / "peer_script.py").read_text()
    assert "kvjax" not in {
        line.split()[1].split(".")[0] for line in source.splitlines() if "import" in line.split()[:1]
    }
    assert sys.executable


@pytest.mark.slow
def test_a_start_is_measured_by_depth_and_layers_share_their_programs():
    """Depth beyond ``DEEP`` adds no program; a second start compiles nothing new and takes less time."""
    rows = list(compiling.rows([9, 10], ["full"], threads=1, prompt=20, new=3))
    programs = [row["first"]["prefill"]["programs"] + row["first"]["decode"]["programs"] for row in rows]
    assert programs[0] == programs[1] > 0
    assert all(compiling.seconds(row["second"]) < compiling.seconds(row["first"]) for row in rows)
    message = compiling.page(
        [
            {
                "command": "c",
                "date": "d",
                "machine": {"cpu": "x", "threads": 1, "jax": "0", "commit": "c"},
                "rows": rows,
            }
        ]
    )
    assert "| `full` | 10 |" in message
    assert "over 9 layers" in message


@pytest.mark.slow
def test_loading_is_measured_from_one_file_and_from_shards(tmp_path):
    assert (
        main(["load", "--size", "tiny", "--dtype", "float32", "--rounds", "1", "--out", str(tmp_path)]) == 0
    )
    (run,) = results.read(tmp_path / "load.json")
    ours = [row for row in run["rows"] if row["system"] == "kvjax"]
    assert ours[0]["files"] == 1 < ours[1]["files"]
    assert all(row["peak_bytes"] > 0 and row["seconds"][0] > 0 for row in ours)
    assert {row["skipped"] for row in run["rows"] if row["system"] != "kvjax"} == {NO_PEERS}
    assert f"{ours[0]['over_weights']:.2f} ×" in (tmp_path / "load.md").read_text()


def test_the_full_cache_alone_is_compared_with_that_of_transformers_alone():
    words = ["decode", "--size", "0.5b", "--context", "2048", "--policy", "full", "--fill"]
    _, options = arguments.parse(words)
    assert [config.system for config in options.configs(quarter=True)] == ["kvjax", "transformers"]
    assert options.spec == published.spec("qwen2.5-0.5b")


def test_serve_takes_what_it_measures_from_the_command_line():
    _, options = arguments.parse(
        ["serve", "--batch", "2", "4", "--long", "640", "--policy", "full", "knorm + uniform(0.25)"]
        + ["--part", "price", "memory"]
    )
    assert (options.batches, options.long) == ((2, 4), 640)
    assert options.policies == ("full", "knorm + uniform(0.25)")
    assert options.parts == ("price", "memory")
    assert arguments.parse(["serve", "--quick"])[1].prompt == 96
    with pytest.raises(PolicyError):
        arguments.parse(["serve", "--policy", "snapkw"])


def test_a_request_that_begins_like_one_that_is_held_reads_the_rest(tiny_folder):
    settings = Serving(prefix=300, segment=4)
    rows = serve.prefix(kvjax.load(tiny_folder), settings, "full")
    assert [row["asked"] for row in rows] == [1, 2, 3]
    assert [row["cached_tokens"] for row in rows] == [0, 256, 256]  # of 300, up to a border of chunks
    assert {row["prompt"] for row in rows} == {336}
    assert all(row["first_token_s"] > 0 < row["first_token_cpu_s"] for row in rows)


def test_a_quarter_is_one_of_what_full_holds_in_the_end():
    settings = Serving(prompt=2048, new=384)
    assert kvjax.policy(settings.quarter).budget.most == (2048 + 384) // 4
