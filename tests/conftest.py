"""What every test may use: a tiny model with a tokenizer on disk."""

from __future__ import annotations

import os
import time
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
from kvjax.models.layout import drawn
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
    *("test_conformance", "test_engine_compiling", "test_engine_limits", "test_engine_prompts"),
    *("test_engine_methods", "test_quantised", "test_eval_batches", "test_http_life"),
    *("test_train_gates", "test_engine_drafts", "test_ranker_rankings", "test_causal_lm"),
    *("test_ranker", "test_http_page", "test_gvote_families", "test_own_model"),
    *("test_ranks_held", "test_serve", "test_kivi", "test_kvzap"),
    *("test_mesh", "test_suite_run", "test_magicpig", "test_devices"),
    *("test_bench", "test_engine_grammar", "test_wheel", "test_engine_texts"),
    *("test_exactness", "test_train_phi", "test_chat_rows", "test_readme"),
    *("test_engine_shared", "test_hf_golden", "test_kernel_vertical_slash", "test_wg_kv"),
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

    def leaf(name: str, shape: tuple[int, ...]) -> np.ndarray:
        ones = name.endswith("norm")
        return np.ones(shape, np.float32) if ones else draw.normal(0, 0.3, shape).astype(np.float32)

    params = {
        name: [{k: drawn(leaf, k, s) for k, s in layer.items()} for layer in value]
        if name == "layers"
        else drawn(leaf, name, value)
        for name, value in shapes(TINY).items()
    }
    _byte_tokenizer().save(str(home / "tokenizer.json"))
    folder = home / "model"
    hf.save(folder, TINY, params, tokenizer=home / "tokenizer.json", dtype="float32")
    return folder


def _byte_tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    return tokenizer


IN_FULL = ("test_aot_plan", "test_bench", "test_in_place", "test_mesh", "test_planning")
"""Files that look at compiled programs or time them."""


@pytest.fixture(scope="module", autouse=True)
def quick_compiles(request: pytest.FixtureRequest) -> None:
    """LLVM in a hurry whatever the marks; a default run has it everywhere (``compiler``).

    What was compiled the other way (as modules were imported, say) is dropped: it may differ in the last bit.
    """
    hurry = compiler.in_a_hurry() or request.module.__name__.rpartition(".")[2] not in IN_FULL
    if jax.config.values["jax_disable_most_optimizations"] != hurry:
        jax.config.update("jax_disable_most_optimizations", hurry)
        jax.clear_caches()


looked = 0.0


@pytest.fixture(autouse=True)
def forget_programs() -> Iterator[None]:
    """Drops compiled programs where there are many.

    Each holds several memory maps, a process may have 65530, and the compiler crashes beyond that. Tests
    leave up to 350 a second; counting 30,000 takes 30 ms.
    """
    global looked
    yield
    if time.monotonic() - looked < 5:
        return
    looked = time.monotonic()
    if maps_taken() > 0.5:
        jax.clear_caches()
