"""Text to token ids and back, for a model folder's tokenizer.json.

text = Text.load(model.folder, model.spec)
ids = text.encode("Once upon a time")          # BOS first, exactly once
show = text.stream(after=ids)
for token in generated:
    print(show.step(token), end="")            # whole characters only
print(show.finish())
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from kvjax.models.spec import ModelSpec

_CONTEXT = 16
"""Tokens before a continuation that may change its text; a character has at most 4 bytes."""

_TEMPLATES = ("chat_template.jinja", "chat_template.json")


class Text:
    """A tokenizer with the ids its model begins and ends texts with.

    Attributes:
      tokenizer: of the ``tokenizers`` package.
      bos: id put before every text, or None.
      eos: ids that end a text.
      folder: where a chat template may lie, or None.
      template: the chat template, where it does not lie in a folder.
      special_tokens: what the template knows by a name, such as "bos_token".
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        bos: int | None,
        eos: tuple[int, ...] = (),
        folder: Path | None = None,
        template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.bos = bos
        self.eos = eos
        self.folder = folder
        self.template = template
        self.special_tokens = special_tokens or {}
        self._templated: Any = None
        # A tokenizer.json may carry the lengths its training used; prompts must not be cut silently.
        tokenizer.no_truncation()
        tokenizer.no_padding()

    @classmethod
    def load(cls, folder: str | Path, spec: ModelSpec) -> Text:
        """Reads a folder's tokenizer.json.

        BOS is ``spec.bos``, unless tokenizer_config.json says that texts get none (``add_bos_token``
        false or ``bos_token`` null, as Qwen2's does although its config.json names an id), or unless it
        is an id that ends texts and nothing asks for it (GPT-2's <|endoftext|>).

        Raises:
          ValueError: no tokenizer.json, or one that is damaged.
        """
        from tokenizers import Tokenizer

        folder = Path(folder)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ValueError(
                f"Text.load({str(folder)!r}) finds no tokenizer.json. Save the tokenizer there with "
                "transformers' save_pretrained, or give another folder."
            )
        try:
            tokenizer = Tokenizer.from_str(file.read_text(encoding="utf-8"))
        except Exception as error:  # the tokenizers package raises Exception itself
            raise ValueError(f"{file} is no readable tokenizer ({error}). Download it again.") from error
        config = _tokenizer_config(folder)
        wants_bos = config.get("add_bos_token")
        denied = (
            wants_bos is False
            or config.get("bos_token", "") is None
            or (spec.bos in spec.eos and not wants_bos)
        )
        return cls(tokenizer, bos=None if denied else spec.bos, eos=spec.eos, folder=folder)

    def encode(self, text: str, *, bos: bool = True) -> list[int]:
        """Token ids of a text, with BOS before them exactly once (if the model has one and ``bos``).

        Special tokens spelled out in the text become their ids; the tokenizer's own post-processor
        is not run, so it can add neither a second BOS nor an EOS.

        Raises:
          ValueError: text that is not valid Unicode (a lone surrogate).
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"encode(...) is given a lone surrogate at character {error.start}, which is no text. "
                "Decode the input with errors='replace' first."
            ) from error
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        if not bos or self.bos is None or ids[:1] == [self.bos]:
            return ids
        return [self.bos, *ids]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids, special tokens left out."""
        return self.tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)

    def stream(self, after: Sequence[int] = ()) -> TextStream:
        """A decoder for tokens that come one at a time; its pieces joined are what ``decode`` gives at once.

        Args:
          after: the tokens before them, if the pieces continue a text. SentencePiece tokenizers keep the
            space before a word in the word and drop it at the beginning of a text, so that "Once upon" would
            otherwise go on as "a time".
        """
        return TextStream(self.tokenizer, after)

    def chat(self, messages: list[dict[str, Any]]) -> list[int]:
        """Token ids of a conversation, ready for the model's next turn.

        With a chat template in the folder: rendered by transformers, which then must be installed;
        the template alone decides about BOS. Without one (base models): the contents joined by
        newlines, BOS first; roles are not shown to the model.

        Args:
          messages: each with "role" and "content", both strings.

        Raises:
          ValueError: messages of another form, or that the template refuses.
          ImportError: a template, but no transformers.
        """
        sound = isinstance(messages, list) and messages and all(isinstance(m, dict) for m in messages)
        if not sound or not all(isinstance(m.get(key), str) for m in messages for key in ("role", "content")):
            raise ValueError(
                "chat(messages) needs a list of one or more dicts, each with 'role' and 'content' as text. "
                "Give, for example, [{'role': 'user', 'content': 'Hello'}]."
            )
        folder = self.folder
        if folder is not None and (
            any((folder / name).is_file() for name in _TEMPLATES)
            or _tokenizer_config(folder).get("chat_template")
        ):
            return self.encode(self._render(messages), bos=False)
        return self.encode("\n".join(message["content"] for message in messages))

    def _render(self, messages: list[dict[str, Any]]) -> str:
        try:
            import jinja2
            from transformers import AutoTokenizer
        except ImportError as error:
            raise ImportError(
                f"chat(...) needs transformers and jinja2 for the chat template in {self.folder}. "
                "Run: pip install 'kvjax[hf]'"
            ) from error
        if self._templated is None:
            self._templated = AutoTokenizer.from_pretrained(str(self.folder), local_files_only=True)
        try:
            return self._templated.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except jinja2.TemplateError as error:
            raise ValueError(
                f"chat(...) is refused by the chat template in {self.folder}: {error}. Change the messages."
            ) from error


class TextStream:
    """Incremental decoding: returned text never changes, and no character is returned in parts."""

    def __init__(self, tokenizer: Tokenizer, after: Sequence[int] = ()) -> None:
        from tokenizers.decoders import DecodeStream

        self._fresh = DecodeStream
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._held: list[int] = []
        for token in after[-_CONTEXT:]:
            self.step(token)
        self._held.clear()

    def step(self, token: int) -> str:
        """The text this token completes; "" while a character is unfinished."""
        self._held.append(int(token))
        try:
            piece = self._stream.step(self._tokenizer, int(token))
        except Exception as error:
            # Byte-fallback tokenizers decode bytes that form no character again when more arrive, and
            # the stream gives up. Its tokens are decoded here, and a new stream goes on after them.
            if not str(error).startswith("Invalid prefix"):
                raise
            piece = self._tokenizer.decode(self._held, skip_special_tokens=True)
            self._stream = self._fresh(skip_special_tokens=True)
            self._stream.step(self._tokenizer, int(token))
        if piece is None:
            return ""
        self._held.clear()
        return piece

    def finish(self) -> str:
        """The rest when no token follows: an unfinished character becomes U+FFFD."""
        held, self._held = self._held, []
        return self._tokenizer.decode(held, skip_special_tokens=True)


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    file = folder / "tokenizer_config.json"
    if not file.is_file():
        return {}
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file} is no readable JSON object ({error}). Download it again.") from error
