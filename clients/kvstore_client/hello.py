"""The hello of a session, as it is said on either way. No I/O."""

from __future__ import annotations

import json
from typing import NamedTuple, TypeGuard

from kvstore.errors import ALL_ERRORS, KvstoreError, Unavailable

PROTOCOL = 1
"""The one that this client speaks."""
HELLO_BYTES_MAX = 4096
NUMBER_DIGITS = 32


class Hello(NamedTuple):
    number: str
    boot: str


class HelloLine:
    """One line of JSON, as it arrives."""

    def __init__(self) -> None:
        self._line = b""

    @property
    def room(self) -> int:
        """How many bytes may be read at once."""
        return HELLO_BYTES_MAX + 1 - len(self._line)

    def feed(self, chunk: bytes) -> Hello | None:
        """None until the line is whole. Unavailable for what is no hello, the service's own refusal where it says one."""
        self._line += chunk
        if not chunk or len(self._line) > HELLO_BYTES_MAX:
            raise Unavailable(
                "the service gave no session",
                field="hello",
                value=self._line[:60],
                allowed="one line of JSON, at most 4 KiB",
            )
        return _parse(self._line) if self._line.endswith(b"\n") else None


def check_hello(oldest: object, newest: object, number: object, boot: object, *, said: object) -> Hello:
    """`oldest`, `newest`: the protocols that the service speaks; `newest` None or 0: the same. `said`: all of it, for the error."""
    if not is_spoken(oldest, newest):
        raise Unavailable(
            f"the service does not speak this client's protocol; {_what_to_do(oldest, newest)}",
            field="hello",
            value=said,
            allowed=f"protocol {PROTOCOL}",
        )
    if not (_is_number(number) and _is_number(boot)):
        raise Unavailable(
            "the service's hello names no session",
            field="hello",
            value=said,
            allowed=f"protocol {PROTOCOL} with session and boot",
        )
    return Hello(number, boot)


def is_spoken(oldest: object, newest: object) -> bool:
    """Whether the service speaks this client's protocol."""
    return _is_protocol(oldest) and oldest <= PROTOCOL <= (newest if _is_protocol(newest) else oldest)


def _what_to_do(oldest: object, newest: object) -> str:
    if _is_protocol(oldest) and oldest > PROTOCOL:
        return "it is newer and no longer serves it: use a client of its release"
    if _is_protocol(oldest):
        return "it is older: upgrade the service before its clients"
    return "use a client and a service of one version"


def _is_protocol(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _parse(line: bytes) -> Hello:
    try:
        hello = json.loads(line)
    except (ValueError, RecursionError):
        hello = None
    if not isinstance(hello, dict):
        hello = {}
    if is_spoken(hello.get("protocol"), hello.get("newest")) and "error" in hello:
        raise ALL_ERRORS.get(str(hello["error"]), KvstoreError)(
            str(hello.get("message", "the service refused a session"))
        )
    return check_hello(
        hello.get("protocol"), hello.get("newest"), hello.get("session"), hello.get("boot"), said=line[:60]
    )


def _is_number(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and len(value) == NUMBER_DIGITS and set(value) <= set("0123456789abcdef")
