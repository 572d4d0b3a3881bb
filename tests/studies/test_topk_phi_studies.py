"""The studies of Top-K and φ: numbers worked out by hand, configs that hold what the tables ask for."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import yaml

from kvjax import catalogue, reads
from studies.topk_phi import even, heads, sweep, tables
from train.phi import maps, objective, settings

ROOT = Path(__file__).resolve().parents[2]


def flat(alone, completed, entropy):
    """Two sequences of four heads with these errors by count, the same in both sequences."""
    both = {"alone": alone, "completed": completed}
    values = {n: np.tile(np.asarray(x, float)[None], (2, 1, 1)) for n, x in both.items()}
    return values | {"entropy": np.tile(np.asarray(entropy, float), (2, 1))}


def test_quarters_are_by_entropy_and_gain_is_what_phi_takes_off_the_error():
    alone = [[0.1, 0.2, 0.3, 0.4]] * len(heads.COUNTS)
    completed = [[0.1, 0.25, 0.1, 0.3]] * len(heads.COUNTS)
    quarters = heads.quartiles(flat(alone, completed, [0.9, 0.1, 0.5, 0.3]))
    assert [one["entropy"][0] for one in quarters] == [0.1, 0.3, 0.5, 0.9]
    assert [one["gain"][0][0] for one in quarters] == pytest.approx([-0.05, 0.1, 0.2, 0.0])
    assert [one["helped"][0] for one in quarters] == [0, 1, 1, 0]


def test_fewer_tokens_for_the_same_error_are_read_off_between_the_counts():
    steps = np.arange(len(heads.COUNTS))
    alone, completed = 0.9 - 0.1 * steps, 0.775 - 0.1 * steps
    entries = heads.fewer(flat(*(np.tile(x[:, None], (1, 4)) for x in (alone, completed)), [0, 1, 2, 3]))
    # Selection alone errs 0.8 at the second count; φ errs 0.775 with no token at all.
    assert (entries[0]["alone"], entries[0]["completed"]) == (heads.COUNTS[1], 0.0)
    # 0.6 lies three quarters of the way from φ's 0.675 to 0.575, those of its second and third count.
    assert entries[2]["completed"] == pytest.approx(0.25 * heads.COUNTS[1] + 0.75 * heads.COUNTS[2])
    worse = heads.fewer(flat(*(np.tile(x[:, None], (1, 4)) for x in (alone - 1, completed)), [0, 1, 2, 3]))
    assert worse[0]["completed"] is None


def test_cells_are_those_of_the_newest_maps():
    """Rows of maps that were silenced stand behind those before; maps of another name are counted apart."""

    def row(task: str, weights: str) -> SimpleNamespace:
        return SimpleNamespace(cell=SimpleNamespace(policy="topk(1) + phi(64)", task=task, weights=weights))

    old, books, new = row("vt", "default@1"), row("books", "prompt-512@1"), row("vt", "default@2")
    rows = [row("niah", "default@1"), old, books, new]
    assert tables._of(rows, "topk(1) + phi(64)", "vt") == [new]
    assert tables._of(rows, "topk(1) + phi(64)", "books") == [books]
    assert tables._of(rows, "topk(1) + phi(64)", "niah") == []


def test_heads_without_phi_are_named_and_leave_no_scores():
    quiet = np.where([[True], [False], [True]], -np.inf, np.zeros((3, 5)))
    layers = [{"last_q": np.zeros((3, 5))}, {"last_q": quiet}]
    assert np.flatnonzero(heads._silent(layers)).tolist() == [3, 5]
    assert heads._silent([{"last_k": quiet}]).tolist() == []
    seen = [
        {
            "scores": np.ones((1, 3, 4)),
            "guess": np.where([[[True], [False], [True]]], -np.inf, np.ones((1, 3, 4))),
        }
    ]
    assert [len(one["pairs"]) for one in heads._dots(np.arange(3.0), seen)] == [0, 4, 0]


def test_budgets_over_the_answers_length_are_the_papers():
    rows = {"prompt": 16384, "summary": reads.summary(128, 128), "counts": [0, 1000]}
    rows["by_head"] = {"alone": [[1.0], [0.0]], "completed": [[0.5], [0.0]]}
    row = sweep.rows(rows, shares=(0.01,), steps=(1, 65, 10**6))[0]
    assert (row["alone"], row["completed"]) == (144, [79, 143, 143])
    assert row["alone_error"] == pytest.approx(1 - 0.144)
    assert row["completed_error"][0] == pytest.approx(0.5 * (1 - 0.079))
    small = sweep.rows(rows | {"prompt": 1024}, shares=(0.04,), steps=(1,))[0]
    assert (small["alone"], small["completed"], small["completed_error"]) == (21, [None], [None])


def test_a_break_even_is_the_time_of_what_is_moved_and_computed():
    chip = even.Chip(memory=1e6, link=1e3, products=1e6)
    # A map is 2 x 3, 2 x 1, 1 x 3, biases 1 and 3: 15 numbers; of a query and of a key head.
    moved = 4 * 15 * 2 / 5 + 4 * 3 * (2 + 2)
    products = 2 * (15 * (7 + 1) + 3 * 2 * (7 + 1))
    right = 7 + (moved / 1e6 + products / 1e6) * 1e3 / 8
    assert even.on_paper(chip, 7, 5, head_dim=2, groups=1, features=3, hidden=1) == pytest.approx(right)


def test_nats_by_task_are_paired_and_every_file_of_maps_has_its_row():
    def row(policy: str, weights: str, nll: list[float], task: str = "vt") -> SimpleNamespace:
        cell = SimpleNamespace(policy=policy, weights=weights, task=task, drawn=task)
        return SimpleNamespace(cell=cell, each=SimpleNamespace(nll=nll, tokens=[2, 1]))

    rows = [
        row("full", "", [1.0, 4.0]),
        row("topk(1)", "", [1.5, 6.0]),
        row("topk(1) + phi(64)", "default@1", [1.0, 4.0]),
        row("topk(1) + phi(64)", "default@2", [0.7, 3.7]),
    ]
    lines = list(tables._nats_by_task(rows, ["vt", "niah"]))[0].splitlines()[2:]
    assert [line.split(" | ")[1] for line in lines] == ["–", "default@1", "default@2"]
    # A token more on the first sample: (2 * 0.5 + 1 * 2.0) / 3.
    assert "+1.0000 (" in lines[0]
    assert "+0.0000 (" in lines[1]
    assert "-0.3000 (" in lines[2]
    assert all(line.endswith("| – |") for line in lines)


def test_the_tables_policies_read_no_more_than_their_share_and_are_evaluated():
    configs = ROOT / "configs" / "eval"
    jobs = yaml.safe_load((configs / "topk_phi.yaml").read_text())["jobs"]
    specs = {repr(catalogue.policy(spec)) for job in jobs for spec in job["policies"]}
    for share in tables.SHARES[1024]:
        read = tables.specs(share, 1024)
        budget = math.ceil(share * 1024)
        chosen = {n: catalogue.policy(s).selection for n, s in read.items() if s and "Top" in n}
        assert chosen["Top-K"].k + 20 == budget
        if share == 0.04:
            assert read["Top-K + φ"] is None
            assert read["Quest + φ"] is None
        else:
            assert chosen["Top-K + φ"].k + 20 + 33 == budget
        assert {repr(catalogue.policy(s)) for s in (read["Top-K"], read["Top-K + φ"]) if s} <= specs
    assert {repr(catalogue.policy(s)) for s in tables.specs(0.08, 1024).values() if s} <= specs
    for share in tables.SHARES[2048]:  # the same tokens a step
        half = tables.specs(share, 2048)
        assert half == tables.specs(2 * share, 1024)


def test_lengths_and_numbers_of_samples_are_told_apart():
    """A mean over cells of two lengths would be nobody's."""
    lines = list(tables.text([ROOT / "results" / "topk_phi" / "quality"]))
    heads = [at for at, line in enumerate(lines) if line.startswith("## ")]
    assert {"## Quality, 1024 tokens, n = 25", "## Quality, 2048 tokens, n = 25"} <= {
        lines[at] for at in heads
    }
    for at, after in zip(heads, [*heads[1:], len(lines)]):
        length = int(lines[at].split()[2])
        text = "\n".join(lines[at:after])
        read = [int(line.split("|")[4]) for line in text.splitlines() if "| `full` |" in line]
        assert len(read) == 2
        assert all(0.9 * length < x <= length for x in read)


def test_what_a_head_looks_at_is_numpys():
    """Entropy over the log of the middle, the mass of the best tokens, errors before and after W_o."""
    random, (agents, groups, length, prompt, h) = np.random.default_rng(5), (2, 2, 26, 20, 8)
    target = settings.Target(prompts=(prompt,), sinks=2, tail=4, queries=3, reach=6, retrieved=0.1)
    task = objective.Task(loss=settings.Loss(), target=target, prompt=prompt)
    shape = (1, agents, length, h)
    k, v = (random.standard_normal(shape).astype(np.float32) for _ in range(2))
    q = 2 * random.standard_normal((1, agents, groups, 3, h)).astype(np.float32)
    wo = random.standard_normal((agents, groups, h, 5)).astype(np.float32)
    batch = {"k": k, "v": v, "q": q, "at": np.asarray([[20, 22, 25]], np.int32), "wo": wo}
    maps_ = maps.folded(maps.initial(jax.random.key(0), agents, groups, h, settings.Maps(features=4)))
    seen = heads.look(task, maps_, batch)
    middle = (np.arange(length) >= 2) & (np.arange(length) < prompt - 4)
    for a, g in np.ndindex(agents, groups):
        entropy, mass, error, after = [], [], [], []
        for i, at in enumerate((20, 22, 25)):
            s = np.einsum("gh,th->gt", q[0, a, :, i].astype(float), k[0, a]) / np.sqrt(h)
            p = np.exp(s[g, middle]) / np.exp(s[g, middle]).sum()
            entropy.append(-(p * np.log(p)).sum() / np.log(middle.sum()))
            order = np.argsort(-s[:, middle].max(axis=0))
            mass.append([p[order[:c]].sum() for c in heads.COUNTS])
            w, row = np.exp(s[g]) * (np.arange(length) <= at), []
            for c in heads.COUNTS:
                left = np.isin(np.arange(length), np.flatnonzero(middle)[order[c:]])
                row.append(
                    np.where(left, 0, w) @ v[0, a] / np.where(left, 0, w).sum() - w @ v[0, a] / w.sum()
                )
            error.append([np.abs(x).sum() / np.abs(w @ v[0, a] / w.sum()).sum() for x in row])
            after.append([np.linalg.norm(x @ wo[a, g]) for x in row])
        np.testing.assert_allclose(seen["entropy"][a, g], np.mean(entropy), rtol=1e-4)
        np.testing.assert_allclose(seen["mass"][:, a, g], np.mean(mass, axis=0), rtol=1e-4)
        np.testing.assert_allclose(seen["alone"][:, a, g], np.mean(error, axis=0), rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(seen["alone_wo"][:, a, g], np.mean(after, axis=0), rtol=1e-3, atol=1e-5)


def test_errors_of_all_heads_together_are_the_root_of_summed_squares():
    errors = np.asarray([[[3.0, 0.0], [1.0, 1.0]], [[3.0, 8.0], [1.0, 1.0]]])  # [sequence, count, head]
    assert heads.together(errors) == pytest.approx([5.0, 2**0.5])


def test_correlation_is_of_ranks():
    errors = np.asarray([[0.5, 0.5, 0.5, 0.5]] * len(heads.COUNTS))
    gains = np.asarray([[0.4, 0.1, 0.2, 0.3]] * len(heads.COUNTS))
    rising = heads._correlation(flat(errors, errors - gains, [9.0, 0.1, 0.2, 0.3]))
    assert rising == pytest.approx([1.0] * len(heads.COUNTS)), "by rank, not by value"
    falling = heads._correlation(flat(errors, errors - gains, [0.1, 0.4, 0.3, 0.2]))
    assert falling == pytest.approx([-1.0] * len(heads.COUNTS))
