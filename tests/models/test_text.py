"""Text to ids and back with small real tokenizers, trained or spelt out here."""

from __future__ import annotations

import json
import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from kvjax.models import hf
from kvjax.text import Text

LINES = ["the cat sat on the mat and the dog sat too", "naïve café 日本語 😀", "one two three four five"]
SAMPLE = "the naïve cat 😀👩‍🚀 sat on 日本語 mats – in 2024!\n\tdone"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'clown' %}{{ raise_exception('no clowns') }}"
    "{% endif %}[{{ m.role }}] {{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture
def byte_level():
    """A byte-level BPE whose post-processor adds BOS and whose file asks for truncation and padding."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(LINES, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64, pad_id=0, pad_token="<pad>")
    return tokenizer


@pytest.fixture
def byte_fallback():
    """A SentencePiece-like tokenizer: words it lacks are spelt in <0x..> bytes."""
    pieces = [*(f"<0x{byte:02X}>" for byte in range(256)), "<s>", "</s>", "▁", "a", "b", "é", "▁a", "▁b"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [("▁", "a"), ("▁", "b")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


@pytest.fixture
def folder(byte_level, golden_folder, tmp_path):
    """Saves the tokenizer with a tokenizer_config of the given keys and gives the folder."""

    def make(**config):
        byte_level.save(str(tmp_path / "tokenizer.json"))
        if config:
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        return tmp_path

    return make


@pytest.fixture
def spec(golden_folder):
    return hf.load(golden_folder("llama3")).spec


def streamed(text, ids):
    stream = text.stream()
    return "".join(stream.step(i) for i in ids) + stream.finish()


def test_round_trip_with_bos_exactly_once(folder, spec):
    text = Text.load(folder(), spec)
    ids = text.encode(SAMPLE)
    assert ids.count(1) == 1
    assert ids[0] == 1
    assert len(ids) > 20  # neither truncated to 4 nor padded to 64
    assert 0 not in ids
    assert text.decode(ids) == SAMPLE
    assert text.encode(SAMPLE, bos=False) == ids[1:]
    assert text.encode("<s>" + SAMPLE) == ids
    assert text.encode("") == [1]
    assert text.eos == (2,)


@pytest.mark.parametrize("denial", [{"add_bos_token": False}, {"bos_token": None}])
def test_a_tokenizer_that_denies_bos_gets_none(denial, folder, spec):
    text = Text.load(folder(**denial), spec)
    assert text.bos is None
    assert text.encode("the cat") == Text.load(folder(bos_token="<s>"), spec).encode("the cat", bos=False)


def test_a_stream_gives_whole_characters_only(folder, spec):
    text = Text.load(folder(), spec)
    stream, shown = text.stream(), ""
    pieces = [stream.step(i) for i in text.encode("😀 é 日")]
    assert pieces.count("") >= 3
    assert not any("\ufffd" in piece for piece in pieces)
    for piece in pieces:
        shown += piece
        assert "😀 é 日".startswith(shown)
    assert shown == "😀 é 日"
    assert streamed(text, text.encode(SAMPLE)) == SAMPLE


def test_a_stream_cut_inside_a_character_shows_it_at_the_end(folder, spec):
    text = Text.load(folder(), spec)
    ids = text.encode("the 👩")[:-1]
    stream = text.stream()
    shown = "".join(stream.step(i) for i in ids)
    assert shown.rstrip() == "the"
    assert shown + stream.finish() == "the \ufffd"
    assert stream.finish() == ""


def test_any_ids_stream_as_they_decode(byte_level):
    text, rng = Text(byte_level, bos=1), random.Random(0)
    for _ in range(200):
        ids = [rng.randrange(byte_level.get_vocab_size()) for _ in range(30)]
        assert streamed(text, ids) == text.decode(ids)


def test_bytes_that_form_no_character_do_not_break_a_stream(byte_fallback):
    text, rng = Text(byte_fallback, bos=None), random.Random(0)
    assert streamed(text, text.encode("a b 😀 日a é b")) == "a b 😀 日a é b"
    # "3", then half a character, then " a b": the decoder alone raises here.
    assert streamed(text, [0x33, 0xF0, *text.encode("a b")]).endswith(" a b")
    for _ in range(300):
        ids = [rng.randrange(byte_fallback.get_vocab_size()) for _ in range(12)]
        shown = streamed(text, ids)
        for piece, id in (("a", byte_fallback.token_to_id("▁a")), ("é", byte_fallback.token_to_id("é"))):
            assert shown.count(piece) >= ids.count(id)


def test_chat_without_a_template_joins_the_turns(folder, spec):
    text = Text.load(folder(), spec)
    turns = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]
    assert text.chat(turns) == text.encode("the cat\nsat")


@pytest.mark.parametrize("as_file", [True, False])
def test_chat_renders_the_folder_s_template(as_file, folder, spec):
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    home = folder(**config, **({} if as_file else {"chat_template": TEMPLATE}))
    if as_file:
        (home / "chat_template.jinja").write_text(TEMPLATE)
    text = Text.load(home, spec)
    ids = text.chat([{"role": "user", "content": "the cat"}])
    assert ids == [1, *text.encode("[user] the cat</s>[assistant]", bos=False)]
    assert ids.count(2) == 1
    with pytest.raises(ValueError, match="no clowns"):
        text.chat([{"role": "clown", "content": "boo"}])


def test_what_is_no_text_is_refused(folder, spec, tmp_path):
    text = Text.load(folder(), spec)
    with pytest.raises(ValueError, match="surrogate at character 3"):
        text.encode("abc\ud800")
    for messages in ([], [{"role": "user"}], [{"role": "user", "content": None}], "hello", ["hello"]):
        with pytest.raises(ValueError, match="'role' and 'content'"):
            text.chat(messages)
    with pytest.raises(ValueError, match=r"finds no tokenizer.json"):
        Text.load(tmp_path / "nowhere", spec)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="not a readable tokenizer"):
        Text.load(tmp_path, spec)


def test_an_export_carries_the_tokenizer(folder, golden_folder, tmp_path):
    model = hf.load(golden_folder("qwen2_window"))
    small = Tokenizer(models.WordLevel({"the": 0, "<s>": 1, "</s>": 2, "cat": 3}, unk_token="the"))
    small.pre_tokenizer = pre_tokenizers.Whitespace()
    small.save(str(tmp_path / "words.json"))
    out = tmp_path / "out"
    hf.save(out, model.spec, model.params, tokenizer=tmp_path / "words.json")
    written = json.loads((out / "tokenizer_config.json").read_text())
    assert (written["bos_token"], written["eos_token"]) == ("<s>", "</s>")
    assert Text.load(out, hf.load(out).spec).encode("the cat") == [1, 0, 3]
    (out / "chat_template.jinja").write_text(TEMPLATE)
    (out / "tokenizer_config.json").write_text('{"bos_token": null}')
    hf.save(tmp_path / "again", model.spec, model.params, tokenizer=out)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "again" / name).read_bytes() == (out / name).read_bytes()
