"""How a single token is written where tokens are named one by one (log-probabilities, the page)."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvjax.text import Text


class Spelling:
    """Spells tokens of one tokenizer; different tokens are spelt differently wherever that is possible."""

    def __init__(self, text: Text) -> None:
        self._tokenizer = text.tokenizer
        # Of a tokenizer of bytes every character of a token stands for one byte.
        self._bytes = _alphabet() if "ByteLevel" in str(text.tokenizer.decoder) else {}

    @functools.lru_cache(maxsize=65536)  # noqa: B019  (one a server)
    def bytes(self, token: int) -> bytes:
        """What the token adds to a text; of a special token its name."""
        raw = self._tokenizer.id_to_token(token)
        if raw is None:
            return b""
        if self._bytes:
            known = all(letter in self._bytes for letter in raw)
            return bytes(self._bytes[letter] for letter in raw) if known else raw.encode()
        if one := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", raw):
            return bytes([int(one[1], 16)])
        return raw.replace("\u2581", " ").encode()  # SentencePiece writes blanks so

    def __call__(self, token: int) -> str:
        r"""As text; a token that is a part of a character as ``bytes:\xe2\x82``, as OpenAI writes it."""
        found = self.bytes(token)
        try:
            return found.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)


@functools.cache
def _alphabet() -> dict[str, int]:
    """GPT-2's letters for bytes: printable ones stand for themselves, others for what follows U+0100."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}
