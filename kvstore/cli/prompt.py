"""A prompt given to a command: token ids in a file, or the keys of its blocks."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstore.errors import ConfigError, InvalidArgument
from kvstore.prefix.keys import KeyChain
from kvstore.types import KEY_BYTES

STDIN = "-"


@dataclass(frozen=True, slots=True)
class Prompt:
    """`keys`: of its whole blocks as far as they are known, first block first. `tokens`: its length."""

    keys: Sequence[bytes]
    tokens: int


def read_text(path: str, *, option: str) -> str:
    """A file's text, or that of standard input for `-`; ConfigError names `option`."""
    try:
        data = sys.stdin.buffer.read() if path == STDIN else Path(path).read_bytes()
        return data.decode()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(
            f"cannot read the file: {why}", field=option, value=path, allowed="a readable text file, or -"
        ) from error


def parse_tokens(text: str) -> list[int]:
    """Token ids from a JSON list, from a JSON object's `tokens`, or from numbers apart by white space or commas."""
    if text.lstrip()[:1] in ("[", "{"):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidArgument(
                f"the tokens are not JSON: {error}",
                field="--tokens",
                value=text.strip()[:40],
                allowed=_TOKENS,
            ) from error
        if isinstance(value, dict):
            value = value.get("tokens")
        if not isinstance(value, list):
            raise InvalidArgument(
                "no list of tokens", field="--tokens", value=text.strip()[:40], allowed=_TOKENS
            )
        for index, token in enumerate(value):
            if type(token) is not int:
                raise InvalidArgument(
                    "not a token id",
                    field=f"tokens[{index}]",
                    value=json.dumps(token),
                    allowed="a whole number",
                )
        return value
    words = re.split(r"[\s,]+", text.strip(" \t\r\n,"))
    if words == [""]:
        return []
    for index, word in enumerate(words):
        if not (word.isascii() and word.isdecimal() and len(word) <= 10):
            raise InvalidArgument(
                "not a token id", field=f"tokens[{index}]", value=word, allowed="a whole number"
            )
    return [int(word) for word in words]


def prompt_of_tokens(tokens: Sequence[int], *, root: bytes, block_tokens: int) -> Prompt:
    """InvalidArgument names the token that is none."""
    chain = KeyChain(root, block_tokens=block_tokens)
    chain.extend(tokens)
    return Prompt(chain.keys, len(tokens))


def parse_keys(text: str) -> list[bytes]:
    """Block keys in hex, apart by white space or commas."""
    words = re.split(r"[\s,]+", text.strip(" \t\r\n,"))
    keys = []
    for index, word in enumerate(words if words != [""] else []):
        if not re.fullmatch(f"[0-9a-fA-F]{{{2 * KEY_BYTES}}}", word):
            raise InvalidArgument(
                "not a block key", field=f"keys[{index}]", value=word, allowed=f"{2 * KEY_BYTES} hex digits"
            )
        keys.append(bytes.fromhex(word))
    return keys


_TOKENS = 'a JSON list, a JSON object with "tokens", or numbers apart by white space or commas'
