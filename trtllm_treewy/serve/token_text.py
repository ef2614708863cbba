"""Text and bytes of single tokens, some of which are only part of a character."""

from __future__ import annotations

from typing import Any

REPLACEMENT = "�"


def _byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in the pieces of byte-level tokenizers.

    Printable characters of Latin-1 stand for themselves; all others, in order, for those from
    U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + place): byte for place, byte in enumerate(others)
    }


_BYTES = _byte_alphabet()


class TokenText:
    """What tokens are by themselves.

    Args:
        tokenizer: of transformers.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def of(self, token: int) -> tuple[str, bytes]:
        r"""Text and bytes of a token; where the bytes are no text, they are written as `\xf0\x9f`.

        So tokens that are parts of characters differ in text, and their bytes can be joined.
        """
        text = str(self._tokenizer.decode([token]))
        if REPLACEMENT not in text:
            return text, text.encode("utf-8")
        piece = self._tokenizer.convert_ids_to_tokens(token)
        found = [_BYTES.get(character) for character in piece]
        data = bytes(byte for byte in found if byte is not None)
        byte_level = len(data) == len(found) and data.decode("utf-8", "replace") == text
        if not byte_level or data == text.encode("utf-8"):
            return text, text.encode("utf-8")
        return "".join(f"\\x{byte:02x}" for byte in data), data
