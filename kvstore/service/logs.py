"""The service's log on stderr: lines for people, or one JSON object a line with the call that it is about."""

from __future__ import annotations

import json
import logging
import re
import secrets
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

from kvstore.errors import ConfigError
from kvstore.service.slowcalls import Handler
from kvstore.service.status import Context

JSON = "json"
LOG_FORMATS = ("text", JSON)
REQUEST_METADATA = "x-request-id"
_TRACE = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")
_REQUEST_ID = re.compile(r"[!-~]{1,128}")


class LoggedCall:
    """The call that a task serves. Its number is the caller's own where it sent one that can be shown, else a new one, made
    when it is first asked for: most calls are never mentioned."""

    __slots__ = ("_context", "_request_id", "name")

    def __init__(self, name: str, context: Context) -> None:
        self.name = name
        self._context = context
        self._request_id = ""

    @property
    def request_id(self) -> str:
        if not self._request_id:
            sent = self._sent(REQUEST_METADATA)
            self._request_id = sent if _REQUEST_ID.fullmatch(sent) else secrets.token_hex(8)
        return self._request_id

    @property
    def trace_id(self) -> str:
        """Empty where the caller has no trace."""
        found = _TRACE.fullmatch(self._sent("traceparent"))
        return found[1] if found else ""

    def _sent(self, name: str) -> str:
        value = dict(self._context.invocation_metadata() or ()).get(name, "")
        return value if isinstance(value, str) else ""


CURRENT_CALL: ContextVar[LoggedCall | None] = ContextVar("kvstore_call", default=None)


def naming(name: str, handler: Handler) -> Handler:
    """The same handler; lines of the log that it writes say that they are about this call."""

    async def call(request: Any, context: Any) -> Any:
        CURRENT_CALL.set(LoggedCall(name, context))
        return await handler(request, context)

    return call


class JsonLines(logging.Formatter):
    """Keys: time (UTC), level, logger, message; call, request_id and trace_id where a call is served;
    error, a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {
            "time": at.replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (call := CURRENT_CALL.get()) is not None:
            line |= {"call": call.name, "request_id": call.request_id}
            if call.trace_id:
                line["trace_id"] = call.trace_id
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def log_to_stderr(log_format: str) -> None:
    """Unless the caller has sent the log elsewhere. ConfigError for a format that is none of LOG_FORMATS."""
    if log_format not in LOG_FORMATS:
        raise ConfigError(
            "unknown form of log lines",
            field="log_format",
            value=log_format,
            allowed=" or ".join(LOG_FORMATS),
        )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        JsonLines()
        if log_format == JSON
        else logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    )
    logging.basicConfig(level=logging.INFO, handlers=[handler])
