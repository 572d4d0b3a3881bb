"""What the real model is asked, by tests and by the script that makes their goldens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

BOOK = Path(__file__).with_name("dracula.txt").read_text(encoding="utf-8")
"""The beginning of Bram Stoker's Dracula (1897, public domain)."""

PLAIN = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Zürich, naïve, 東京, 12345 + 678 =",
)
CHATS: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "Name three large cities in France."}],
    [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "What is a needle?"},
        {"role": "assistant", "content": "A thin pointed piece of metal for sewing."},
        {"role": "user", "content": "And a haystack?"},
    ],
)
LONG = 1000
"""Tokens of the book that are a prompt, too."""

NEW = 24
"""Greedy tokens of each prompt."""

PROBE = 768
"""Every so many-th token of the vocabulary is looked at where the answer begins."""

CONTEXT, FED = 768, 48
"""Tokens of the book that are compressed, and that are fed after them."""

RATIOS = (0.5, 0.75, 0.9)
"""Shares that a press removes."""

PRESSES: dict[str, tuple[str, dict[str, Any]]] = {
    "knorm": ("KnormPress", {}),
    "keydiff": ("KeyDiffPress", {}),
    "snapkv(64)": ("SnapKVPress", {"window_size": 64, "kernel_size": 5}),
    "tova": ("TOVAPress", {}),
    "expected_attention": ("ExpectedAttentionPress", {"n_future_positions": 512, "n_sink": 4}),
    "lagkv": ("LagKVPress", {"n_sink": 4, "lag_size": 128}),
}
"""kvpress's class and arguments for each eviction of ours, which has the same defaults."""

SNAPKV: dict[str, Any] = {"window_size": 64, "kernel_size": 5}
WRAPPED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "snapkv(64) + critical + uniform({})": ("CriticalKVPress", "SnapKVPress", SNAPKV),
    "keydiff + critical + uniform({})": ("CriticalKVPress", "KeyDiffPress", {}),
    "snapkv(64) + critical + ada({})": ("CriticalAdaKVPress", "SnapKVPress", SNAPKV),
    "snapkv(64) + chunks(20) + uniform({})": ("ChunkKVPress", "SnapKVPress", SNAPKV),
    "keydiff + chunks(20) + uniform({})": ("ChunkKVPress", "KeyDiffPress", {}),
    # Its window is whole runs: of a run that is partly in the window the press drops tokens of the window.
    "snapkv(68) + entropy_chunks + uniform({})": (
        "EntropyGatedChunkKVPress",
        "SnapKVPress",
        SNAPKV | {"window_size": 68},
    ),
    "keydiff + entropy_chunks + uniform({})": ("EntropyGatedChunkKVPress", "KeyDiffPress", {}),
    "kvzip + ada({}, floor=0)": ("", "KVzipPress", {"layerwise": True}),
    "kvzip(300) + ada({}, floor=0)": ("", "KVzipPress", {"layerwise": True, "chunk_size": 300}),
    "kvzip(output=True) + ada({}, floor=0)": (
        "",
        "KVzipPress",
        {"layerwise": True, "kvzip_plus_normalization": True},
    ),
}
"""Of each policy of ours kvpress's wrapper, the press in it and that one's arguments."""

WRAPPED_RATIOS = (0.25, 0.5, 0.75)
"""Shares that a wrapped press removes."""
