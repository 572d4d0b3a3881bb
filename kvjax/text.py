"""Text to token ids and back, for a model folder's tokenizer.json.

text = Text.load(model.folder, model.spec)
ids = text.encode("Once upon a time")          # BOS first, exactly once
show = text.stream(after=ids)
for token in generated:
    print(show.step(token), end="")            # whole characters only
print(show.finish())

ids = text.chat([{"role": "user", "content": "Name three large cities."}])  # in the model's chat template
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from kvjax.chat_template import ChatTemplate
    from kvjax.models.spec import ModelSpec

_CONTEXT = 16
"""Tokens before a continuation that may change its text; a character has at most 4 bytes."""


class Ends(NamedTuple):
    """What a model says of its texts where there is no ``ModelSpec``: ids that begin and end them."""

    bos: int | None
    eos: tuple[int, ...]


class Text:
    """A tokenizer with the ids its model begins and ends texts with, and the form of its conversations.

    Attributes:
      tokenizer: of the ``tokenizers`` package.
      bos: id put before every text, or None.
      eos: ids that end a text.
      folder: where it was read from, or None.
      template: the chat template's text, or None.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        bos: int | None,
        eos: tuple[int, ...] = (),
        folder: Path | None = None,
        template: str | Mapping[str, str] | None = None,
        special_tokens: Mapping[str, str] | None = None,
        place: str = "the chat template",
    ) -> None:
        """
        Args:
          tokenizer, bos, eos, folder: see the attributes.
          template: a chat template, or several by name: "default", and "tool_use" where tools are given.
          special_tokens: what the template knows by a name, such as "bos_token"; by default the tokens of
            ``bos`` and ``eos``.
          place: what messages call the template.
        """
        self.tokenizer = tokenizer
        self.bos = bos
        self.eos = eos
        self.folder = folder
        self._sources = {"default": template} if isinstance(template, str) else dict(template or {})
        self._place = place
        self._templates: dict[str, ChatTemplate] = {}
        if special_tokens is None:
            ids = {"bos_token": bos, "eos_token": eos[0] if eos else None}
            names = {name: tokenizer.id_to_token(id) for name, id in ids.items() if id is not None}
            special_tokens = {name: token for name, token in names.items() if token is not None}
        self._special_tokens = dict(special_tokens)
        # A tokenizer.json may carry the lengths its training used; prompts must not be cut silently.
        tokenizer.no_truncation()
        tokenizer.no_padding()

    @property
    def template(self) -> str | None:
        """The chat template's text, or None."""
        return self._sources.get("default")

    @property
    def tool_template(self) -> str | None:
        """The template of conversations with tools, or None."""
        return self._sources.get("tool_use", self.template)

    @classmethod
    def load(cls, folder: str | Path, spec: ModelSpec | Ends) -> Text:
        """Reads a folder's tokenizer.json, and the chat template beside it.

        That is chat_template.jinja, else chat_template.json, else what tokenizer_config.json has.

        BOS is ``spec.bos``, unless tokenizer_config.json says that texts get none (``add_bos_token``
        false or ``bos_token`` null, as Qwen2's does although its config.json names an id), or unless it
        is an id that ends texts and nothing asks for it (GPT-2's <|endoftext|>).

        Raises:
          ValueError: no tokenizer.json, or one of these files is damaged.
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
            raise ValueError(f"{file} is not a readable tokenizer ({error}). Download it again.") from error
        config = _read_object(folder / "tokenizer_config.json")
        wants_bos = config.get("add_bos_token")
        denied = (
            wants_bos is False
            or config.get("bos_token", "") is None
            or (spec.bos in spec.eos and not wants_bos)
        )
        template, file = _read_template(folder, config)
        names = _read_object(folder / "special_tokens_map.json") | config
        return cls(
            tokenizer,
            bos=None if denied else spec.bos,
            eos=spec.eos,
            folder=folder,
            template=template,
            special_tokens=_special_tokens(names) if names else None,
            place=f"the chat template in {file}",
        )

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
        # As a batch of one, because only batches let other threads run meanwhile.
        ids: list[int] = self.tokenizer.encode_batch([text], add_special_tokens=False)[0].ids
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

    def chat(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        """Token ids of a conversation, ready for the model's next turn.

        A chat template alone decides about BOS; without one it comes first. Arguments and errors are those
        of ``render``.
        """
        return self.encode(self.render(messages, **options), bos=self.template is None)

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """A conversation as the chat template writes it: the text of transformers' ``apply_chat_template``.

        Without a template (base models): the contents joined by newlines; roles and tools are not shown to
        the model.

        Args:
          messages: each with "role" and "content"; a content is text, or what else the template takes.
          tools: JSON schemas of functions that the model may call.
          add_generation_prompt: ends with the beginning of the model's next turn.
          continue_final_message: ends inside the last message, which the model goes on with;
            ``add_generation_prompt`` has no effect then.
          variables: more of the template's own, such as ``documents`` or ``enable_thinking=False``.

        Raises:
          ValueError: messages of another form, or that the template refuses; a template that is malformed,
            fails, leaves the sandbox or does not end.
        """
        self._check(messages)
        if self.template is None:
            return "\n".join(message["content"] for message in messages)
        name = "tool_use" if tools is not None and "tool_use" in self._sources else "default"
        if name not in self._templates:
            from kvjax.chat_template import ChatTemplate

            self._templates[name] = ChatTemplate(self._sources[name], self._place)
        return self._templates[name].render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            continue_final_message=continue_final_message,
            variables=self._special_tokens | variables,
        )

    @functools.cached_property
    def answer_begin(self) -> str:
        """What the chat template writes between a user's message and the model's answer; else a newline."""
        if self.template is None:
            return "\n"
        mark = "kvjax-message"
        asked = [{"role": "user", "content": mark}]
        return self.render(asked, enable_thinking=False).rpartition(mark)[2]

    def _check(self, messages: list[dict[str, Any]]) -> None:
        """Templates take more than text, as lists of parts, and calls of tools in its place."""
        sound = isinstance(messages, list) and messages and all(isinstance(m, dict) for m in messages)
        kinds = (str,) if self.template is None else (str, list)
        if not sound or not all(
            isinstance(m.get("role"), str)
            and (isinstance(m.get("content"), kinds) or (self.template is not None and m.get("tool_calls")))
            for m in messages
        ):
            raise ValueError(
                "chat(messages) needs a list of one or more dicts, each with 'role' and 'content' as text. "
                "Give, for example, [{'role': 'user', 'content': 'Hello'}]."
            )


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


def _read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file; {} if the file does not exist."""
    if not file.is_file():
        return {}
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file} is not a readable JSON object ({error}). Download it again.") from error


def _read_template(folder: Path, config: dict[str, Any]) -> tuple[str | dict[str, str] | None, Path]:
    """The chat template of a folder, or several by name, or None; and its file."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8") or None, file
        except ValueError as error:
            raise ValueError(f"{file} is not UTF-8 text ({error}). Download it again.") from error
    file = folder / "chat_template.json"
    if not file.is_file():
        file = folder / "tokenizer_config.json"
    else:
        config = _read_object(file)
    stated = config.get("chat_template")
    if stated is None or isinstance(stated, str):
        return stated or None, file
    try:
        templates = {entry["name"]: entry["template"] for entry in stated}
        if "default" in templates and all(isinstance(template, str) for template in templates.values()):
            return templates, file
    except (KeyError, TypeError):
        pass
    raise ValueError(
        f"chat_template in {file} must be text, or a list of 'name' and 'template' with one of the name "
        "'default'. Download it again."
    )


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """The tokens that a tokenizer_config.json names, as text."""
    extra = config.get("extra_special_tokens")
    named = {name: token for name, token in config.items() if name.endswith("_token")}
    named |= extra if isinstance(extra, dict) else {}
    texts = {
        name: token.get("content") if isinstance(token, dict) else token for name, token in named.items()
    }
    return {name: token for name, token in texts.items() if isinstance(token, str)}
