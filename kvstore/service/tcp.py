"""What the options say about TCP: where to listen, how it is encrypted, and who may call. Refused by name where it is not
safe and nobody said that it may be unsafe."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.config import ServiceConfig
from kvstore.errors import ConfigError
from kvstore.service.callers import Access, Caller
from kvstore.service.certificates import Pair, read_client_ca, read_pair
from kvstore.service.metrics import split_address
from kvstore.service.tenants import NO_TENANTS_FILE, TenantsFile, read_tenants
from kvstore.service.tokens import Tokens, read_tokens


@dataclass(frozen=True, slots=True)
class Trust:
    """What the files say that may change while the service runs. `pair` None: in plaintext. `client_ca`: PEM of the issuers of
    clients' certificates, None: clients have none."""

    pair: Pair | None = None
    client_ca: bytes | None = None
    access: Access = field(default_factory=Access)
    tenants: TenantsFile = NO_TENANTS_FILE


@dataclass(frozen=True, slots=True)
class TcpEnd:
    """Where to listen. `trust` is what the files said at the start."""

    host: str
    port: int
    trust: Trust

    def address(self, port: int | None = None) -> str:
        """HOST:PORT as gRPC takes it, with brackets around an IPv6 host."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port if port is None else port}"

    @property
    def is_safe(self) -> bool:
        return self.trust.pair is not None and not self.trust.access.is_open

    @property
    def about(self) -> str:
        access = self.trust.access
        encrypted = "TLS" if self.trust.pair else "PLAINTEXT"
        parts = [encrypted]
        if access.has_certificates:
            parts.append("client certificates")
        if access.tokens:
            parts.append(f"tokens: {len(access.tokens)}")
        if access.is_open:
            parts.append("NO TOKEN")
        if access.admin is not None:
            parts.append("administration")
        return ", ".join(parts)


def read_trust(config: ServiceConfig, *, known: Pair | None = None) -> Trust:
    """All files as they are now. ConfigError for what cannot be read, is wrong, or does not go together. `known`: as read_pair has
    it: a certificate that expires while it is in use must not keep a token from being taken away."""
    tenants = read_tenants(config.tenants) if config.tenants else NO_TENANTS_FILE
    if not config.listen:
        return Trust(tenants=tenants)
    return Trust(
        read_pair(config.tls_cert, config.tls_key, known=known) if config.tls_cert else None,
        read_client_ca(config.tls_client_ca) if config.tls_client_ca else None,
        _access(config, tenants),
        tenants,
    )


def files_of(config: ServiceConfig) -> list[str]:
    """Those that `read_trust` reads."""
    tcp = (config.tls_cert, config.tls_key, config.tls_client_ca, config.token_file, config.admin_token_file)
    return [file for file in (config.tenants, *(tcp if config.listen else ())) if file]


def _access(config: ServiceConfig, tenants: TenantsFile) -> Access:
    common = read_tokens(config.token_file) if config.token_file else []
    admin = read_tokens(config.admin_token_file, field="admin_token_file") if config.admin_token_file else []
    for name, tokens in (("token_file", common), ("tenants", tenants.tokens)):
        if not set(admin).isdisjoint(tokens):
            raise ConfigError(
                f"a token for administration is one of {name}, too",
                field="admin_token_file",
                value=config.admin_token_file,
                allowed="tokens that are good for nothing else",
            )
    if not set(common).isdisjoint(tenants.tokens):
        raise ConfigError(
            "a tenant's token is one of token_file, which is good for all tenants",
            field="tenants",
            value=config.tenants,
            allowed="tokens that are not in the token file",
        )
    callers = [Caller(f"token {number}") for number, _ in enumerate(common, 1)]
    for of in tenants.tokens.values():
        callers.append(Caller(f"token of {', '.join(sorted(of))}", of))
    named = {name: Caller(f"certificate {name}", of) for name, of in tenants.certificates.items()}
    return Access(
        Tokens([*common, *tenants.tokens]),
        callers,
        # Where a tenants' file says for whom certificates are good, those that it does not name are good for nobody.
        named if config.tenants else None,
        has_certificates=bool(config.tls_client_ca),
        needs_token=bool(config.token_file) or not config.tls_client_ca,
        is_open=config.unsafe_no_token,
        admin=Tokens(admin) if admin else None,
    )


def tcp_end(config: ServiceConfig, *, known: Pair | None = None) -> TcpEnd | None:
    """None where nothing is to be on TCP. ConfigError for what is unsafe, cannot be read, or does not go together. `known`: as
    read_trust has it."""
    if not config.listen:
        _refuse_leftovers(config)
        return None
    host, port = split_address(config.listen, field="listen")
    _check_encryption(config)
    trust = read_trust(config, known=known)
    _check_tokens(config, trust)
    return TcpEnd(host, port, trust)


def _refuse_leftovers(config: ServiceConfig) -> None:
    for name in (
        "tls_cert",
        "tls_key",
        "tls_client_ca",
        "token_file",
        "admin_token_file",
        "unsafe_plaintext_tcp",
        "unsafe_no_token",
    ):
        if value := getattr(config, name):
            raise ConfigError(
                "an option for TCP, and nothing listens there",
                field=name,
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
    if config.tls_client_ca and not config.tls_cert:
        raise ConfigError(
            "clients show certificates with TLS only",
            field="tls_client_ca",
            value=config.tls_client_ca,
            allowed="with --tls-cert and --tls-key",
        )
    if not config.tls_cert and not config.unsafe_plaintext_tcp:
        raise ConfigError(
            "TCP without TLS: prompts and tokens could be read on the way",
            field="listen",
            value=config.listen,
            allowed="with --tls-cert and --tls-key, or with --unsafe-plaintext-tcp where nobody else is on the network",
        )


def _check_tokens(config: ServiceConfig, trust: Trust) -> None:
    asked = bool(trust.access.tokens) or trust.access.has_certificates
    if (asked or trust.access.admin is not None) and config.unsafe_no_token:
        raise ConfigError(
            "tokens, and no need of them",
            field="unsafe_no_token",
            value="yes",
            allowed="without --token-file, --tls-client-ca, --admin-token-file, and tokens in --tenants",
        )
    if not asked and not config.unsafe_no_token:
        raise ConfigError(
            "TCP without a token: whoever reaches the port could read and write",
            field="listen",
            value=config.listen,
            allowed="with --token-file, or --tls-client-ca, or tokens in --tenants, or with --unsafe-no-token where nobody else is on the network",
        )
