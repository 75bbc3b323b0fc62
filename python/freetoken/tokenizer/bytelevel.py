"""GPT-2's way of writing bytes as printable characters inside a vocabulary."""

from __future__ import annotations


def _printable_bytes() -> dict[int, str]:
    """Byte -> character: printable Latin-1 bytes stand for themselves, the others follow U+0100."""
    themselves = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in themselves]
    table = {byte: chr(byte) for byte in themselves}
    table.update({byte: chr(0x100 + index) for index, byte in enumerate(others)})
    return table


BYTE_TO_CHAR = _printable_bytes()
# str.translate wants code points; the values are Latin-1, so that one encode gives the bytes.
# Characters that are themselves Latin-1 but stand for no byte must not pass for one.
_DECODE = {ord(char): chr(byte) for byte, char in BYTE_TO_CHAR.items()}
_NO_BYTE = {code: "\uffff" for code in range(256) if code not in _DECODE}
_TRANSLATE = {**_DECODE, **_NO_BYTE}


def token_bytes(token: str) -> bytes:
    """The bytes that a vocabulary entry stands for. An entry with a character that stands for no
    byte is literal text."""
    latin1 = token.translate(_TRANSLATE)
    try:
        return latin1.encode("latin-1")
    except UnicodeEncodeError:
        return token.encode("utf-8")
