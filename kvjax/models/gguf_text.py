"""The tokenizer and the chat template in a GGUF file's metadata.

Two kinds are read: byte-level BPE ("gpt2"), whose rule of splitting text goes by a name, and SentencePiece's
BPE with scores ("llama"). What the metadata leaves open is as in llama.cpp.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from kvjax.models.gguf_file import Header
from kvjax.models.hf_values import ModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6
"""Types of tokens; 1 is a normal one, 5 an unused one."""

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_GPT2 = (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",)
_DIGITS = (r"\p{N}", *_GPT2)
_LLAMA3 = (rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_MARKS}|{_SPACES}",)
_QWEN2 = (rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_MARKS}|{_SPACES}",)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = [rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"]
_REST = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_TEKKEN = (rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_REST}",)
_GPT4O = (rf"{_CASED[0]}{_CONTRACTIONS}?|{_CASED[1]}{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_REST}",)
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", *_GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")

SPLITS: dict[str, tuple[str, ...]] = {
    "default": _DEFAULT,
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt", "jais", "trillion", "exaone4"), _GPT2),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS
    ),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "dbrx", "smaug-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"), _QWEN2),
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
}
"""How text is split before byte-level BPE, by the word in ``tokenizer.ggml.pre``: regular expressions, each
of which splits the pieces that the one before it made."""

_WHOLE_FIRST = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken")
"""Of these a piece that is a token stays one, whatever the merges say; and texts begin with BOS."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class GgufText:
    """What text needs of a model.

    Attributes:
      tokenizer: of the ``tokenizers`` package.
      add_bos: texts begin with BOS.
      special_tokens: "bos_token" and the like to their text.
      template: the chat template, or None.
    """

    tokenizer: Tokenizer
    add_bos: bool
    special_tokens: dict[str, str]
    template: str | None


def read_text(header: Header) -> GgufText:
    """Builds the tokenizer of a GGUF file.

    Raises:
      ModelError: no tokenizer, one of another kind, an unknown rule of splitting, or damaged lists.
    """
    meta = {key.removeprefix("tokenizer.ggml."): value for key, value in header.metadata.items()}
    kind, pre = meta.get("model"), meta.get("pre", "default")
    if kind not in ("gpt2", "llama"):
        raise ModelError(
            f"{header.path} has a tokenizer of the kind {kind!r}; kvjax reads 'gpt2' (byte-level BPE) and "
            "'llama' (SentencePiece). Give the model as a folder with a tokenizer.json."
        )
    if kind == "gpt2" and pre not in SPLITS:
        raise ModelError(
            f"{header.path} splits text by the rule {pre!r} (tokenizer.ggml.pre); kvjax knows "
            f"{', '.join(SPLITS)}. Give the model as a folder with a tokenizer.json."
        )
    tokens = meta.get("tokens")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
        raise ModelError(f"{header.path} lacks tokenizer.ggml.tokens, a list of text. Download it again.")
    types = _numbers(header, meta, "token_type", len(tokens), 1)
    try:
        tokenizer = (
            _byte_level(header, meta, tokens, pre) if kind == "gpt2" else _sentencepiece(header, meta, types)
        )
        # phi3 is the only one whose turns swallow the blanks behind their marks.
        strips = kind == "llama" and header.metadata.get("general.architecture") == "phi3"
        _add_tokens(tokenizer, tokens, types, strips)
    except ModelError:
        raise
    except Exception as error:  # the tokenizers package raises Exception itself
        raise ModelError(
            f"{header.path} has tokens and merges that make no tokenizer ({error}). Download it again."
        ) from error
    named = {name: meta.get(f"{key}_token_id") for name, key in _NAMES.items()}
    template = header.metadata.get("tokenizer.chat_template")
    return GgufText(
        tokenizer=tokenizer,
        add_bos=bool(meta.get("add_bos_token", kind == "llama" or pre in _WHOLE_FIRST)),
        special_tokens={
            name: tokens[i] for name, i in named.items() if isinstance(i, int) and 0 <= i < len(tokens)
        },
        template=template if isinstance(template, str) else None,
    )


_NAMES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def _byte_level(header: Header, meta: dict[str, Any], tokens: list[str], pre: str) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    merges = meta.get("merges")
    pairs = [tuple(merge.split(" ")) for merge in merges] if isinstance(merges, list) else []
    if not pairs or any(len(pair) != 2 for pair in pairs):
        raise ModelError(f"{header.path} lacks tokenizer.ggml.merges, pairs of tokens. Download it again.")
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=pairs,
            ignore_merges=pre in _WHOLE_FIRST,
        )
    )
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in SPLITS[pre]]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(header: Header, meta: dict[str, Any], types: np.ndarray) -> Tokenizer:
    """SentencePiece joins the pair that makes the best token; ``tokenizers`` wants a list of all pairs."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens = meta["tokens"]
    scores = _numbers(header, meta, "scores", len(tokens), 0)
    vocab = {token: i for i, token in enumerate(tokens)}
    # Tokens of the other types are found in the text as they are, or never.
    joined = {token: i for token, i in vocab.items() if types[i] == 1}
    merges = [
        (left, right)
        for i in sorted(joined.values(), key=lambda i: -scores[i])
        for cut in range(1, len(tokens[i]))
        if (left := tokens[i][:cut]) in joined and (right := tokens[i][cut:]) in joined
    ]
    unknown = meta.get("unknown_token_id", 0)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=merges,
            unk_token=tokens[unknown] if isinstance(unknown, int) and unknown < len(tokens) else None,
            fuse_unk=True,
            byte_fallback=bool((types == _BYTE).any()),
        )
    )
    spaced = bool(meta.get("add_space_prefix", True))
    steps = [normalizers.Prepend("▁")] if spaced else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if spaced else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], types: np.ndarray, strips: bool) -> None:
    """Tokens that are found in a text before anything else; control tokens are left out of decoded text."""
    from tokenizers import AddedToken

    plain = ("<unk>", "<s>", "<|endoftext|>")
    added = [
        AddedToken(
            tokens[i],
            normalized=False,
            special=bool(types[i] != _USER_DEFINED),
            rstrip=strips and tokens[i] not in plain and bool(types[i] == _CONTROL),
        )
        for i in np.flatnonzero(np.isin(types, (_UNKNOWN, _CONTROL, _USER_DEFINED)))
        if tokens[i]
    ]
    tokenizer.add_tokens(added)


def _numbers(header: Header, meta: dict[str, Any], key: str, length: int, default: float) -> np.ndarray:
    """A number for each token."""
    value = meta.get(key, np.full(length, default))
    if not isinstance(value, np.ndarray) or value.shape != (length,):
        raise ModelError(
            f"{header.path} has tokenizer.ggml.{key} that is not a list of {length} numbers. "
            "Download it again."
        )
    return value
