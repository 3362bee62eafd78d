"""What a service needs to listen on TCP, and raw calls to it from there."""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
import trustme

from kvstore.v1 import cache_pb2 as pb
from kvstore.v1 import cache_pb2_grpc
from tests.e2e.service_raw import MESSAGE_BYTES, Raw
from tests.support.service import ServiceProcess

TOKENS = ("token-number-one-of-two", "token-number-two-of-two")


@dataclass(frozen=True, slots=True)
class Secrets:
    """Files of one folder: a certificate for localhost, its key, its issuer, and two tokens."""

    folder: Path

    @property
    def options(self) -> dict[str, str]:
        """For a service that listens on a port of the system's choice."""
        return {
            "listen": "127.0.0.1:0",
            "tls_cert": str(self.folder / "cert.pem"),
            "tls_key": str(self.folder / "key.pem"),
            "token_file": str(self.folder / "tokens"),
        }

    @property
    def issuer(self) -> bytes:
        return (self.folder / "issuer.pem").read_bytes()


def make_secrets(folder: Path, *more: str, **dates: Any) -> Secrets:
    """`more`: names that the certificate is for as well; `dates`: of the certificate, as trustme takes them."""
    folder.mkdir(exist_ok=True)
    issuer = trustme.CA()
    issued = issuer.issue_cert("localhost", "127.0.0.1", "::1", *more, **dates)
    (folder / "cert.pem").write_bytes(b"".join(part.bytes() for part in issued.cert_chain_pems))
    write_private(folder / "key.pem", issued.private_key_pem.bytes())
    write_private(folder / "tokens", "\n".join(TOKENS).encode())
    issuer.cert_pem.write_to_path(folder / "issuer.pem")
    return Secrets(folder)


def write_private(file: Path, data: bytes) -> None:
    file.touch(mode=0o600)
    file.write_bytes(data)


def port_of(service: ServiceProcess) -> int:
    """Where it listens, as it said when it started last."""
    said = re.findall(r"listening on tcp://\S+:([0-9]+) ", service.log)
    assert said, service.log
    return int(said[-1])


class Held:
    """A request stream that stays open until it is let go."""

    def __init__(self) -> None:
        self._over = threading.Event()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> pb.SessionRequest:
        self._over.wait()
        raise StopIteration

    def end(self) -> None:
        self._over.set()


class Remote(Raw):
    """A session over a Session call, and both stubs, over TCP. `issuer` None: plaintext; `token` empty: none is shown."""

    def __init__(
        self, port: int, *, issuer: bytes | None = None, token: str = "", host: str = "localhost"
    ) -> None:
        options = [
            ("grpc.max_receive_message_length", MESSAGE_BYTES),
            ("grpc.max_send_message_length", MESSAGE_BYTES),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_http_proxy", 0),
        ]
        target = f"{host}:{port}"
        if issuer is None:
            self.channel = grpc.insecure_channel(target, options=options)
        else:
            self.channel = grpc.secure_channel(target, grpc.ssl_channel_credentials(issuer), options=options)
        self.cache = cache_pb2_grpc.CacheStub(self.channel)
        self.admin = cache_pb2_grpc.AdminStub(self.channel)
        self.authorization = (("authorization", f"Bearer {token}"),) if token else ()
        self._stream = Held()
        self.session = self.cache.Session(self._stream, metadata=self.authorization)
        try:
            self.hello = next(self.session)
        except grpc.RpcError:
            self.close()
            raise
        self.metadata = (*self.authorization, ("kvstore-session", self.hello.session))

    def end(self) -> None:
        """Close the stream from this side."""
        self._stream.end()

    def close(self) -> None:
        self._stream.end()
        self.session.cancel()
        self.channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
