"""Grids are measured batch by batch: one reading for all that cut, and a stopped run keeps its batches."""

from __future__ import annotations

import dataclasses
import weakref

import numpy as np
import pytest
from eval_rows import words

from kvjax import decode
from kvjax.eval.__main__ import main
from kvjax.eval.measure import forced, runner, store
from kvjax.eval.measure.batch import Batch, Outcome
from kvjax.eval.measure.row import Cell

pytestmark = pytest.mark.usefixtures("no_pack")


def test_every_batch_is_read_once_for_all_that_cut_and_no_two_are_held(tiny_folder, tmp_path, monkeypatch):
    alive: list[weakref.ref] = []
    real = decode.read_full

    def read(*args, **options):
        assert not any(reading() is not None for reading in alive), "a reading is held beside the next one"
        reading = real(*args, **options)
        alive.append(weakref.ref(reading))
        return reading

    monkeypatch.setattr(decode, "read_full", read)
    monkeypatch.setattr(runner, "TOKENS", 256 * 25)
    command = ["run", "--task", "niah", "--model", str(tiny_folder), "--lengths", "256", "--samples", "100"]
    policies = ("knorm + uniform(80)", "knorm + uniform(40)", "knorm + uniform(90)")
    command += [word for policy in policies for word in ("--policy", policy)]
    programs = forced._steps._cache_size()
    assert main([*command, "--out", str(tmp_path)]) == 0
    assert forced._steps._cache_size() - programs <= 2, "budgets do not share a program"
    assert len(alive) == 4, "100 samples are four batches of 25"
    assert [row.cell.policy for row in store.read(tmp_path)] == ["full", *policies]
    assert not list((tmp_path / store.UNFINISHED).iterdir())


def test_a_run_stopped_between_batches_ends_in_the_same_file(tiny_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "TOKENS", 384 * 2)  # five samples are three batches
    more = ("--policy", "knorm + uniform(0.25)")
    assert main(words(tiny_folder, tmp_path / "whole", *more)) == 0
    measured: list[tuple[str, str]] = []
    real = runner._measured

    def until(most: int):
        def measure(cell, *rest):
            if len(measured) == most:
                raise KeyboardInterrupt
            batch = real(cell, *rest)
            measured.append((cell.policy, cell.protocol))
            return batch

        return measure

    out = tmp_path / "out"
    for most in (2, 7, 11, 100):
        monkeypatch.setattr(runner, "_measured", until(most))
        main(words(tiny_folder, out, *more))
        assert len(measured) == min(most, 18)
    # Two cells that cut nothing and two by two that cut, three batches each, and none of them twice.
    file = store.RESULTS
    assert (out / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


def test_batches_come_back_to_the_last_bit(tmp_path):
    rng = np.random.default_rng(0)
    outcome = Outcome(
        output="ä\n",
        nll=float(rng.random()),
        tokens=3,
        recalled=np.asarray([True, False]),
        label=None,
        kept=1 / 3,
        heads=rng.random((2, 2)),
        peak=0.1,
        mean=0.2,
        reads=rng.random(3).astype(np.float32),
        retention=None,
        live=1e9 / 7,
        peak_live=2e9 / 7,
        held=np.arange(5),
        kl=1 / 7,
    )
    batch = Batch(outcomes=[outcome], allocated=1 / 3, peak_allocated=2.5, peak_bytes=3.0, summary=0)
    cell = Cell(task="niah", length=128, policy="full", protocol="either", seed=0, samples=3)
    folder = store.Store(tmp_path)
    assert folder.unfinished(cell, 2, 0) is None
    folder.keep(cell, 2, 0, batch)
    back = folder.unfinished(cell, 2, 0)
    assert back is not None
    assert folder.unfinished(dataclasses.replace(cell, seed=1), 2, 0) is None
    for name, value in vars(outcome).items():
        read = getattr(back.outcomes[0], name)
        assert type(read) is type(value), name
        if isinstance(value, np.ndarray):
            assert read.dtype == value.dtype, name
            np.testing.assert_array_equal(read, value)
        else:
            assert read == value, name
    assert dataclasses.replace(back, outcomes=[]) == dataclasses.replace(batch, outcomes=[])
