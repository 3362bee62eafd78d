"""A byte-level tokenizer: a byte is its own id, and a few ids above 255 mark who speaks."""

from __future__ import annotations

from enum import IntEnum


class Mark(IntEnum):
    SESSION = 256
    USER = 257
    TOOL = 258
    ASSISTANT = 259
    END = 260


VOCABULARY = 320
"""Ids that a model needs to have at least; the few above the marks are spare."""


def encode(text: str) -> list[int]:
    """Any text, file names that are not UTF-8 included."""
    return list(text.encode("utf-8", "surrogateescape"))


def decode(tokens: list[int]) -> str:
    """Readable whatever the model said: bytes that are no text, and marks, show as escapes."""
    parts = []
    for token in tokens:
        if token < 256:
            char = chr(token)
            parts.append(char if char.isprintable() and token < 127 else f"\\x{token:02x}")
        else:
            parts.append(f"<{token}>")
    return "".join(parts)
