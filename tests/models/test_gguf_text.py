"""Tokenizers out of GGUF metadata: pieces written out by hand, and those of the sentencepiece package."""

from __future__ import annotations

import json
from pathlib import Path

import gguf_files as files
import pytest

from kvjax.models import gguf_file, gguf_text

SENTENCEPIECE = json.loads((Path(__file__).parents[1] / "golden" / "sentencepiece.json").read_text("utf-8"))


@pytest.fixture
def read(tmp_path):
    """The text of a file with these keys, and no tensors."""

    def text(keys, arch="qwen2"):
        file = files.write(tmp_path / "text.gguf", arch, keys, {})
        return gguf_text.read_text(gguf_file.read_header(file))

    return text


LINE = "It's 2024, I'LL  go\n\n x"
PIECES = {
    "gpt-2": ["It", "'s", " 2024", ",", " I", "'", "LL", " ", " go", "\n\n", " x"],
    "smollm": ["It", "'s", " ", "2", "0", "2", "4", ",", " I", "'", "LL", " ", " go", "\n\n", " x"],
    "llama-bpe": ["It", "'s", " ", "202", "4", ",", " I", "'LL", " ", " go", "\n\n", " x"],
    "qwen2": ["It", "'s", " ", "2", "0", "2", "4", ",", " I", "'LL", " ", " go", "\n\n", " x"],
    "default": ["It", "'", "s", " ", "202", "4", ",", " I", "'", "LL", " ", " go", "\n\n", " x"],
    "gpt-4o": ["It's", " ", "202", "4", ",", " I'LL", " ", " go", "\n\n", " x"],
    "tekken": ["It", "'s", " ", "2", "0", "2", "4", ",", " I", "'LL", " ", " go", "\n\n", " x"],
}


def pieces(text, line):
    """Where a tokenizer splits a line before it merges."""
    table = {token: byte for byte, token in enumerate(files.byte_tokens())}
    split = text.tokenizer.pre_tokenizer.pre_tokenize_str(line)
    return [bytes(table[char] for char in piece).decode() for piece, _ in split]


@pytest.mark.parametrize("pre", [*PIECES, None])
def test_text_is_split_by_the_rule_that_the_file_names(pre, read):
    """Without a name, by llama.cpp's default."""
    assert pieces(read(files.byte_level(pre)), LINE) == PIECES[pre or "default"]


def test_words_of_both_cases_are_split_where_case_changes(read):
    for pre in ("gpt-4o", "tekken"):
        assert pieces(read(files.byte_level(pre)), "camelCase XMLFile/\n") == [
            "camel",
            "Case",
            " XMLFile",
            "/\n",
        ]


@pytest.mark.parametrize("pre", gguf_text.SPLITS)
def test_every_rule_keeps_every_byte(pre, read):
    text = read(files.byte_level(pre))
    line = "the cat, the Ünïcödé 日本語 🙂\t\r\n  12345 <|x|> ®™"
    ids = text.tokenizer.encode(line).ids
    assert text.tokenizer.decode(ids) == line
    assert "".join(pieces(text, line)) == line
    assert ids.count(2 + 256 + 1) == 2


def test_control_tokens_are_found_and_left_out_and_others_are_found_and_kept(read):
    keys = files.byte_level("qwen2")
    tokens, types = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"]
    keys |= {"tokenizer.ggml.tokens": [*tokens, "<tool>"], "tokenizer.ggml.token_type": [*types, 4]}
    text = read(keys).tokenizer
    ids = text.encode("<s>a<tool>b</s>").ids
    assert (ids[0], ids[2], ids[4]) == (0, 260, 1)
    assert text.decode(ids, skip_special_tokens=True) == "a<tool>b"


def test_a_piece_that_is_a_token_stays_one_where_the_rule_says_so(read):
    """Llama 3's merges do not make all of its tokens."""
    for pre, wanted in (("llama-bpe", 1), ("qwen2", 2)):
        keys = files.byte_level(pre, ("a b", "c d"))
        tokens = keys["tokenizer.ggml.tokens"] = [*keys["tokenizer.ggml.tokens"], "abcd"]
        keys["tokenizer.ggml.token_type"] = [3, 3] + [1] * (len(tokens) - 2)
        assert len(read(keys).tokenizer.encode("abcd").ids) == wanted


def test_canonical_forms_are_joined_for_qwen2_alone(read):
    for pre, length in (("qwen2", 2), ("deepseek-r1-qwen", 3)):
        assert len(read(files.byte_level(pre)).tokenizer.encode("e\u0301").ids) == length


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        (files.byte_level("gpt-2"), False),
        (files.byte_level("llama-bpe"), True),
        (files.byte_level("llama-bpe", add_bos_token=False), False),
        (files.byte_level("gpt-2", add_bos_token=True), True),
    ],
)
def test_bos_is_added_where_the_file_or_its_rule_says_so(keys, wanted, read):
    assert read(keys).add_bos is wanted


def test_special_tokens_and_the_template_come_from_the_metadata(read):
    text = read(files.byte_level("gpt-2", padding_token_id=1, unknown_token_id=10**6))
    assert text.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    assert text.template is None
    assert read(files.byte_level("gpt-2") | {"tokenizer.chat_template": "{{ x }}"}).template == "{{ x }}"


# --- SentencePiece ---------------------------------------------------------------------------------


def sentencepiece(which, **more):
    keys = {"model": "llama", "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    keys |= {key: SENTENCEPIECE[which][key] for key in ("tokens", "scores", "token_type")}
    keys["add_space_prefix"] = which == "prefix"
    return {f"tokenizer.ggml.{key}": value for key, value in {**keys, **more}.items()}


@pytest.mark.parametrize("which", SENTENCEPIECE)
def test_pieces_are_those_of_sentencepiece(which, read):
    text = read(sentencepiece(which), "llama")
    assert text.add_bos
    for line, ids in zip(SENTENCEPIECE[which]["lines"], SENTENCEPIECE[which]["ids"], strict=True):
        assert text.tokenizer.encode(line).ids == ids, line
        assert text.tokenizer.decode(ids) == line


def test_the_turns_of_phi_3_swallow_the_blanks_behind_their_marks(read):
    keys = sentencepiece("prefix")
    tokens, types = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"]
    more = {"tokens": [*tokens, "<|user|>"], "token_type": [*types, 3], "scores": [0.0] * (len(tokens) + 1)}
    keys |= {f"tokenizer.ggml.{key}": value for key, value in more.items()}
    for arch, alike in (("phi3", True), ("llama", False)):
        text = read(keys, arch).tokenizer
        assert (text.encode("<|user|>\nHi").ids == text.encode("<|user|>Hi").ids) is alike
        assert text.encode("<s>\nHi").ids != text.encode("<s>Hi").ids
