"""Calls as no gRPC client sends them: HTTP/2 by hand, in plaintext."""

from __future__ import annotations

import socket

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS = 0, 1, 4
_END_STREAM, _END_HEADERS = 1, 4
_READ_BYTES = 1 << 16


def status_of(port: int, method: str, *metadata: tuple[bytes, bytes], seconds: float = 5.0) -> int:
    """The gRPC status of a call with an empty request; `metadata` goes as it is."""
    headers = [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", method.encode()),
        (b":authority", b"localhost"),
        (b"content-type", b"application/grpc"),
        (b"te", b"trailers"),
        *metadata,
    ]
    block = b"".join(b"\x00" + _text(name) + _text(value) for name, value in headers)
    with socket.create_connection(("127.0.0.1", port), timeout=seconds) as connection:
        connection.sendall(
            _PREFACE
            + _frame(_SETTINGS, 0, 0, b"")
            + _frame(_HEADERS, _END_HEADERS, 1, block)
            + _frame(_DATA, _END_STREAM, 1, bytes(5))
        )
        got = b""
        while b"grpc-status" not in got or len(got.split(b"grpc-status", 1)[1]) < 3:
            data = connection.recv(_READ_BYTES)
            assert data, f"the connection ended without a status: {got!r}"
            got += data
    # Behind the name: the value's length, and its digits.
    value = got.split(b"grpc-status", 1)[1]
    return int(value[1 : 1 + value[0]])


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + payload


def _text(text: bytes) -> bytes:
    assert len(text) < 127, "longer ones take more than one byte of length"
    return bytes([len(text)]) + text
