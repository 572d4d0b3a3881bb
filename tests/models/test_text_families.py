"""Streams of the families' kinds of tokenizers: pieces joined are the whole text, blanks included.

The tokenizers are small, their pipelines (normaliser, pre-tokenizer, decoder) those of the families' files.
"""

from __future__ import annotations

import dataclasses
import json
import random

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from kvjax.models import hf
from kvjax.text import Text

SPECIAL = ["<pad>", "<s>", "</s>"]
WORDS = ["a", "b", "é", "the", "▁", "▁▁", "▁a", "▁b", "▁the", "\n", "t", "h", "e", "th", "▁th", "."]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
MERGES = [("▁", "a"), ("▁", "b"), ("▁", "▁"), ("t", "h"), ("th", "e"), ("▁", "th"), ("▁", "the")]
SPOKEN = ["Once upon a time", "the a b", "  a  b ", "é 😀日 the\n\nthe.", " a", "\tb"]


def sentencepiece(kind: str) -> Tokenizer:
    """As Llama 2, Mistral and Phi-3 ("prepend"), newer Mistral ("metaspace") and Gemma ("bare") have it."""
    vocab = {piece: i for i, piece in enumerate([*SPECIAL, *BYTES, *WORDS])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=MERGES, byte_fallback=True, fuse_unk=True))
    tokenizer.add_special_tokens(SPECIAL)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if kind == "prepend":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    elif kind == "metaspace":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(steps if kind == "bare" else [*steps, decoders.Strip(" ", 1, 0)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def byte_level(kind: str) -> Tokenizer:
    """As GPT-2 and Llama 3 ("gpt2") and Qwen ("qwen": NFC, its own splitting) have it; bytes are letters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: i for i, piece in enumerate([*SPECIAL, *alphabet, "Ġt", "th"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("Ġ", "t"), ("t", "h")]))
    tokenizer.add_special_tokens(SPECIAL)
    if kind == "qwen":
        tokenizer.normalizer = normalizers.NFC()
        words = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+(?!\S)|\s+")
        split = pre_tokenizers.Split(words, "isolated")
        bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


KINDS = {
    **{kind: sentencepiece for kind in ("prepend", "metaspace", "bare")},
    **{kind: byte_level for kind in ("gpt2", "qwen")},
}


@pytest.fixture(params=KINDS)
def text(request):
    """A tokenizer of each kind."""
    return Text(KINDS[request.param](request.param), bos=1, eos=(2,))


def streamed(text: Text, ids: list[int], after: tuple[int, ...] | list[int] = ()) -> str:
    stream = text.stream(after)
    return "".join(stream.step(i) for i in ids) + stream.finish()


def test_texts_stream_as_they_decode(text):
    for spoken in SPOKEN:
        ids = text.encode(spoken)
        assert ids[0] == 1
        assert streamed(text, ids) == text.decode(ids)
        assert text.decode(ids).lstrip() == spoken.lstrip()  # Metaspace itself loses a leading blank


def test_texts_go_on_where_they_were_cut(text):
    """Wherever a whole text is cut between two characters, what follows streams with its blanks."""
    for spoken in SPOKEN:
        ids = text.encode(spoken)
        for cut in range(len(ids)):
            if "\ufffd" not in text.decode(ids[:cut]):
                assert text.decode(ids[:cut]) + streamed(text, ids[cut:], ids[:cut]) == text.decode(ids)


def test_the_first_word_of_a_continuation_keeps_its_blank():
    text = Text(sentencepiece("prepend"), bos=1)
    start, more = text.encode("the a"), text.tokenizer.token_to_id("▁the")
    assert streamed(text, [more], start) == " the"
    assert streamed(text, [more]) == "the"
    assert streamed(text, [more], [1]) == "the"  # a text that only begins


def test_drawn_tokens_stream_as_they_decode(text):
    """Any order of words, blanks, special tokens and whole characters, cut anywhere between characters."""
    draw = random.Random(0)
    pieces = [[i] for i in range(text.tokenizer.get_vocab_size()) if "\ufffd" not in text.decode([i])]
    pieces += [text.encode(character, bos=False) for character in "é日😀"]
    for _ in range(300):
        chosen = [draw.choice(pieces) for _ in range(draw.randrange(1, 12))]
        cut = draw.randrange(len(chosen))
        before, after = sum(chosen[:cut], []), sum(chosen[cut:], [])
        assert streamed(text, before + after) == text.decode(before + after)
        assert text.decode(before) + streamed(text, after, before) == text.decode(before + after)


@pytest.mark.parametrize(
    ("config", "bos", "eos", "read"),
    [
        ({}, 1, (2,), 1),  # Llama 3: config.json names it, nothing denies it
        ({"add_bos_token": True, "bos_token": "<s>"}, 1, (2,), 1),  # Llama 2, Mistral, Gemma
        ({"add_bos_token": False, "bos_token": "<s>"}, 1, (2,), None),  # Phi-3
        ({"bos_token": None}, 1, (2, 0), None),  # Qwen
        ({}, 2, (2,), None),  # GPT-2 and Phi-4: one id begins and ends texts, the tokenizer adds none
        ({"add_bos_token": True}, 2, (2,), 2),
        ({}, None, (2,), None),
    ],
)
def test_bos_of_each_family(config, bos, eos, read, golden_folder, tmp_path):
    sentencepiece("prepend").save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    spec = dataclasses.replace(hf.load(golden_folder("gpt2")).spec, bos=bos, eos=eos)
    text = Text.load(tmp_path, spec)
    assert text.bos == read
    ids = text.encode("the")
    assert (ids[0] == read) == (read is not None)
    assert len(ids) == 1 + (read is not None)
