"""What every test may use: a tiny model with a tokenizer on disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Compilation is most of the suite: processes share compiled programs, and so do runs. Before jax is imported.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import compiler
import covering
import jax
import numpy as np
import pytest

from kvjax.models import hf
from kvjax.models.decoder import shapes
from kvjax.models.spec import ModelSpec
from kvjax.programs import maps_taken

TINY = ModelSpec(
    family="qwen2",
    vocab_size=260,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    model_dim=16,
    mlp_dim=24,
    max_positions=512,
    qkv_bias=True,
    bos=256,
    eos=(257,),
)


def pytest_configure(config: pytest.Config) -> None:
    """The compiler's short way, unless programs for real chips may be compiled or run."""
    if all(f"not {mark}" in config.option.markexpr for mark in ("aot", "device")):
        compiler.take_the_short_way()


LONGEST = (
    *("test_conformance", "test_random_sums", "test_compose", "test_traced", "test_pretrain", "test_ageing"),
    *("test_exactness", "test_decode", "test_notebooks", "test_state_machine", "test_conf_kv", "test_ranker"),
    *("test_readme", "test_train_gates", "test_eval_run", "test_eval_memory", "test_family_policies"),
    *("test_serve", "test_one_file", "test_bench", "test_in_place", "test_wg_kv"),
    *("test_two_learned_parts", "test_weights", "test_eval_walk", "test_train_duo", "test_kvp"),
    *("test_phi", "test_gvote", "test_engine_limits", "test_engine_texts", "test_parts", "test_recipe"),
    *("test_train_phi", "test_mesh", "test_eval_report", "test_traces"),
)
"""Files that take longest, longest first: one that begins last leaves a core with nothing to do."""


@pytest.hookimpl(tryfirst=True)  # before cases are deselected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Cases beyond the covering set are slow; the longest files are handed out first."""
    for index in covering.left_out([covering.identity(item) for item in items]):
        items[index].add_marker(pytest.mark.slow)
    place = {name: at for at, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(LONGEST)))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The run ends with its ten slowest files."""
    seconds: dict[str, float] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            if hasattr(report, "duration"):
                file = report.nodeid.split("::")[0]
                seconds[file] = seconds.get(file, 0.0) + report.duration
    slowest = sorted(seconds.items(), key=lambda item: -item[1])[:10]
    if len(seconds) > 1:
        terminalreporter.write_line("slowest files: " + ", ".join(f"{file} {s:.0f} s" for file, s in slowest))


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> Path:
    """A random two-layer model in HF format whose tokens are bytes; 512 positions."""
    home = tmp_path_factory.mktemp("tiny")
    draw = np.random.default_rng(0)
    params = {
        name: [{k: _leaf(draw, k, s) for k, s in layer.items()} for layer in value]
        if name == "layers"
        else _leaf(draw, name, value)
        for name, value in shapes(TINY).items()
    }
    _byte_tokenizer().save(str(home / "tokenizer.json"))
    folder = home / "model"
    hf.save(folder, TINY, params, tokenizer=home / "tokenizer.json", dtype="float32")
    return folder


def _leaf(draw: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    if name.endswith("norm"):
        return np.ones(shape, np.float32)
    return draw.normal(0, 0.3, shape).astype(np.float32)


def _byte_tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    return tokenizer


@pytest.fixture(scope="module", autouse=True)
def forget_programs() -> Iterator[None]:
    """Drops compiled programs after a module that left many.

    Each holds several memory maps, a process may have 65530, and the compiler crashes beyond that.
    """
    yield
    if maps_taken() > 0.5:
        jax.clear_caches()
