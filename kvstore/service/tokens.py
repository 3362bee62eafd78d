"""Tokens: their files, and whether one is good."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import stat
from collections.abc import Sequence

from kvstore.errors import ConfigError
from kvstore.service.process import others_may_read

TOKEN_CHARS_MIN, TOKEN_CHARS_MAX = 16, 512
TOKENS_MAX = 64
FILE_BYTES_MAX = 64 << 10

SCHEME = "Bearer "
GRPC_LOG = "grpc._cython.cygrpc"
NOT_TEXT = "Invalid encoding on"
"""How the log of gRPC begins about metadata that is not text."""


class Tokens:
    """The tokens that are good. Which of them one is like, and how far, does not show in how long the answer takes."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self._digests = [hashlib.sha256(token.encode()).digest() for token in tokens]

    def __len__(self) -> int:
        return len(self._digests)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tokens) and other._digests == self._digests

    def __hash__(self) -> int:
        return hash(tuple(self._digests))

    def allow(self, authorization: str | bytes) -> bool:
        """Of a metadata value as it came."""
        return self.found(authorization) is not None

    def found(self, authorization: str | bytes) -> int | None:
        """The number of the token that a metadata value, as it came, shows; None for one that is not good."""
        shown = authorization if isinstance(authorization, bytes) else authorization.encode()
        scheme = SCHEME.encode()
        number = self.known(hashlib.sha256(shown[len(scheme) :]).digest())
        return number if shown[: len(scheme)].lower() == scheme.lower() else None

    def known(self, digest: bytes) -> int | None:
        """The number of the token with this digest; None for one that is not good."""
        same = [hmac.compare_digest(digest, known) for known in self._digests]
        return same.index(True) if any(same) else None

    def digest(self, number: int) -> bytes:
        """Of the token with this number."""
        return self._digests[number]


def is_token(token: str) -> bool:
    is_plain = token.isascii() and token.isprintable() and " " not in token
    return is_plain and TOKEN_CHARS_MIN <= len(token) <= TOKEN_CHARS_MAX


TOKEN_ALLOWED = f"{TOKEN_CHARS_MIN} to {TOKEN_CHARS_MAX} printable ASCII characters without spaces"


def parse_tokens(text: str, *, file: str, field: str = "token_file") -> list[str]:
    """One token a line; empty lines do not count. ConfigError names the line, and never what is in it."""
    tokens = []
    for number, line in enumerate(text.splitlines(), 1):
        token = line.strip()
        if not token:
            continue
        if not is_token(token):
            raise ConfigError(
                f"line {number} is not a token",
                field=field,
                value=file,
                allowed=f"one token a line, each {TOKEN_ALLOWED}",
            )
        tokens.append(token)
    if not 1 <= len(tokens) <= TOKENS_MAX:
        raise ConfigError(
            f"{len(tokens)} tokens", field=field, value=file, allowed=f"1 to {TOKENS_MAX} tokens"
        )
    return tokens


def read_tokens(file: str, *, field: str = "token_file") -> list[str]:
    """ConfigError where the file cannot be read, others may read it, or it holds something else."""
    return parse_tokens(read_secrets(file, field=field), file=file, field=field)


def read_secrets(file: str, *, field: str, bytes_max: int = FILE_BYTES_MAX) -> str:
    """The text of a file for this user alone. ConfigError where it cannot be read, others may read it, or it is too large."""
    try:
        # Without waiting where it is a pipe.
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", field=field, value=file) from error
    with open(descriptor, "rb") as opened:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError("not a file", field=field, value=file)
        if others_may_read(status):
            raise ConfigError(
                f"others may read the tokens (mode {stat.S_IMODE(status.st_mode):o})",
                field=field,
                value=file,
                allowed="a file for this user alone: chmod 600",
            )
        data = opened.read(bytes_max + 1)
    if len(data) > bytes_max:
        raise ConfigError("too large for tokens", field=field, value=file, allowed=f"{bytes_max} bytes")
    return data.decode("utf-8", "replace")


class _Shown(logging.Filter):
    """Of what gRPC says, what shows nothing of a call's metadata."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(NOT_TEXT)


def keep_metadata_out_of_the_log() -> None:
    """gRPC logs metadata that is not text as it came, with whatever token is in it, for each call of whoever it is. Calling
    again does nothing."""
    logger = logging.getLogger(GRPC_LOG)
    if not any(isinstance(each, _Shown) for each in logger.filters):
        logger.addFilter(_Shown())
