"""Who may call over TCP: the tokens of a file, and the check before each call."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import stat
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from kvstore.errors import ConfigError, Unauthenticated
from kvstore.service.process import others_may_read
from kvstore.service.status import Context, refuse

log = logging.getLogger(__name__)

TOKEN_CHARS_MIN, TOKEN_CHARS_MAX = 16, 512
TOKENS_MAX = 64
FILE_BYTES_MAX = 64 << 10

TOLD_EVERY_SECONDS = 10.0
"""Refusals are logged no more often than this."""

AUTHORIZATION = "authorization"
SCHEME = "Bearer "
GRPC_LOG = "grpc._cython.cygrpc"
NOT_TEXT = "Invalid encoding on"
"""How the log of gRPC begins about metadata that is not text."""

OPEN_METHODS = frozenset({"/grpc.health.v1.Health/Check"})
"""Asked by whoever watches over machines. Health's Watch would let a stranger keep calls open."""


class Tokens:
    """The tokens that are good. Which of them one is like, and how far, does not show in how long the answer takes."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self._digests = [hashlib.sha256(token.encode()).digest() for token in tokens]

    def __len__(self) -> int:
        return len(self._digests)

    def allow(self, authorization: str | bytes) -> bool:
        """Of a metadata value as it came."""
        shown = authorization if isinstance(authorization, bytes) else authorization.encode()
        scheme = SCHEME.encode()
        digest = hashlib.sha256(shown[len(scheme) :]).digest()
        found = [hmac.compare_digest(digest, known) for known in self._digests]
        return any(found) and shown[: len(scheme)].lower() == scheme.lower()


def parse_tokens(text: str, *, file: str) -> Tokens:
    """One token a line; empty lines do not count. ConfigError names the line, and never what is in it."""
    tokens = []
    for number, line in enumerate(text.splitlines(), 1):
        token = line.strip()
        if not token:
            continue
        is_plain = token.isascii() and token.isprintable() and " " not in token
        if not is_plain or not TOKEN_CHARS_MIN <= len(token) <= TOKEN_CHARS_MAX:
            raise ConfigError(
                f"line {number} is not a token",
                field="token_file",
                value=file,
                allowed=f"one token a line, each {TOKEN_CHARS_MIN} to {TOKEN_CHARS_MAX} printable ASCII characters "
                "without spaces",
            )
        tokens.append(token)
    if not 1 <= len(tokens) <= TOKENS_MAX:
        raise ConfigError(
            f"{len(tokens)} tokens", field="token_file", value=file, allowed=f"1 to {TOKENS_MAX} tokens"
        )
    return Tokens(tokens)


def read_tokens(file: str) -> Tokens:
    """ConfigError where the file cannot be read, others may read it, or it holds something else."""
    try:
        # Without waiting where it is a pipe.
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", field="token_file", value=file) from error
    with open(descriptor, "rb") as opened:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError("not a file", field="token_file", value=file)
        if others_may_read(status):
            raise ConfigError(
                f"others may read the tokens (mode {stat.S_IMODE(status.st_mode):o})",
                field="token_file",
                value=file,
                allowed="a file for this user alone: chmod 600",
            )
        data = opened.read(FILE_BYTES_MAX + 1)
    if len(data) > FILE_BYTES_MAX:
        raise ConfigError(
            "too large for tokens", field="token_file", value=file, allowed=f"{FILE_BYTES_MAX} bytes"
        )
    return parse_tokens(data.decode("utf-8", "replace"), file=file)


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


class TokenCheck(grpc.aio.ServerInterceptor):
    """Refuses each call that shows no token that is good, before its handler and its request are looked at. Counts them
    as `unauthenticated_total`; `monotonic` tells the time for the log."""

    def __init__(self, tokens: Tokens, *, counts: Counter[str], monotonic: Callable[[], float]) -> None:
        self._tokens = tokens
        self._counts = counts
        self._monotonic = monotonic
        self._untold = 0
        self._told_at: float | None = None
        # Takes no message before it answers, whatever kind of call it stands for.
        self._refusing: Any = grpc.stream_stream_rpc_method_handler(self._refuse)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        details: Any = handler_call_details
        shown = [value for key, value in details.invocation_metadata or () if key == AUTHORIZATION]
        is_good = len(shown) == 1 and self._tokens.allow(shown[0])
        if is_good or details.method in OPEN_METHODS:
            return await continuation(handler_call_details)
        return self._refusing

    async def _refuse(self, requests: Any, context: Context) -> None:
        self._count(str(context.peer()))
        await refuse(
            context,
            Unauthenticated(
                "no token that this service knows came with the call",
                field=AUTHORIZATION,
                value="(not shown)",
                allowed=f"one entry `{SCHEME}TOKEN` in the call's metadata",
            ),
        )

    def _count(self, peer: str) -> None:
        self._counts["unauthenticated_total"] += 1
        self._untold += 1
        now = self._monotonic()
        if self._told_at is None or now >= self._told_at + TOLD_EVERY_SECONDS:
            log.warning("refused %d calls without a good token, the last one from %s", self._untold, peer)
            self._told_at, self._untold = now, 0
