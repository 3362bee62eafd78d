"""What the options say about TCP: where to listen, how it is encrypted, and who may call. Refused by name where it is not
safe and nobody said that it may be unsafe."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.config import ServiceConfig
from kvstore.errors import ConfigError
from kvstore.service.certificates import Pair, read_pair
from kvstore.service.metrics import split_address
from kvstore.service.tokens import Tokens, read_tokens


@dataclass(frozen=True, slots=True)
class TcpEnd:
    """`pair` None: in plaintext. `tokens` None: for everybody."""

    host: str
    port: int
    pair: Pair | None
    tokens: Tokens | None

    def address(self, port: int | None = None) -> str:
        """HOST:PORT as gRPC takes it, with brackets around an IPv6 host."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port if port is None else port}"

    @property
    def about(self) -> str:
        encrypted = "TLS" if self.pair else "PLAINTEXT"
        allowed = f"tokens: {len(self.tokens)}" if self.tokens else "NO TOKEN"
        return f"{encrypted}, {allowed}"


def tcp_end(config: ServiceConfig) -> TcpEnd | None:
    """None where nothing is to be on TCP. ConfigError for what is unsafe, cannot be read, or does not go together."""
    if not config.listen:
        _refuse_leftovers(config)
        return None
    host, port = split_address(config.listen, field="listen")
    _check_encryption(config)
    _check_tokens(config)
    return TcpEnd(
        host,
        port,
        read_pair(config.tls_cert, config.tls_key) if config.tls_cert else None,
        read_tokens(config.token_file) if config.token_file else None,
    )


def _refuse_leftovers(config: ServiceConfig) -> None:
    for field in ("tls_cert", "tls_key", "token_file", "unsafe_plaintext_tcp", "unsafe_no_token"):
        if value := getattr(config, field):
            raise ConfigError(
                "an option for TCP, and nothing listens there",
                field=field,
                value=value,
                allowed="with --listen",
            )


def _check_encryption(config: ServiceConfig) -> None:
    if bool(config.tls_cert) != bool(config.tls_key):
        given, missing = ("tls_cert", "tls_key") if config.tls_cert else ("tls_key", "tls_cert")
        raise ConfigError(
            f"{given} without {missing}", field=missing, value="", allowed="both, or neither of them"
        )
    if config.tls_cert and config.unsafe_plaintext_tcp:
        raise ConfigError(
            "a certificate, and plaintext",
            field="unsafe_plaintext_tcp",
            value="yes",
            allowed="without --tls-cert and --tls-key",
        )
    if not config.tls_cert and not config.unsafe_plaintext_tcp:
        raise ConfigError(
            "TCP without TLS: prompts and tokens could be read on the way",
            field="listen",
            value=config.listen,
            allowed="with --tls-cert and --tls-key, or with --unsafe-plaintext-tcp where nobody else is on the network",
        )


def _check_tokens(config: ServiceConfig) -> None:
    if config.token_file and config.unsafe_no_token:
        raise ConfigError(
            "tokens, and no need of them",
            field="unsafe_no_token",
            value="yes",
            allowed="without --token-file",
        )
    if not config.token_file and not config.unsafe_no_token:
        raise ConfigError(
            "TCP without a token: whoever reaches the port could read and write",
            field="listen",
            value=config.listen,
            allowed="with --token-file, or with --unsafe-no-token where nobody else is on the network",
        )
