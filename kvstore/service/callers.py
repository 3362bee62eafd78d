"""Who makes a call, and whose namespaces it may name: from what came with it to a Caller, and the check before each call."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import grpc
import grpc.aio

from kvstore.errors import Unauthenticated
from kvstore.service.status import Context, refuse
from kvstore.service.tokens import SCHEME, Tokens

log = logging.getLogger(__name__)

TOLD_EVERY_SECONDS = 10.0
"""Refusals are logged no more often than this."""

AUTHORIZATION = "authorization"

OPEN_METHODS = frozenset({"/grpc.health.v1.Health/Check"})
"""Asked by whoever watches over machines. Health's Watch would let a stranger keep calls open."""

ADMIN_PREFIX = "/kvstore.v1.Admin/"
SESSION_METHOD = "/kvstore.v1.Cache/Session"
"""All that who administers needs beside that: a client begins with it."""


@dataclass(frozen=True, slots=True)
class Caller:
    """`name`: for the audit log, never a secret. `tenants`: whose namespaces it may name, None for everybody's. `is_admin`: it may
    call Admin, and has no part in the cache. `token`, `certificate`: by what it is known, a token's digest and a certificate's names."""

    name: str
    tenants: frozenset[str] | None = None
    is_admin: bool = False
    token: bytes = field(default=b"", repr=False)
    certificate: tuple[str, ...] = ()

    def may_use(self, tenant: str) -> bool:
        return self.tenants is None or tenant in self.tenants


LOCAL = Caller("local")
"""Of the unix socket, which only this user can reach."""

_CALLER: ContextVar[Caller] = ContextVar("kvstore_caller", default=LOCAL)


def current_caller() -> Caller:
    """Of the call that this task answers."""
    return _CALLER.get()


@dataclass(frozen=True, slots=True)
class Access:
    """What lets callers in. `callers`: of `tokens`, each token's, in their order. `named`: callers by a name of their certificate;
    None: each certificate that the connection was let in with is good for everybody's namespaces. `needs_token`: a certificate alone does
    not let in. `is_open`: nothing is asked for. `admin`: tokens for Admin."""

    tokens: Tokens = field(default_factory=lambda: Tokens(()))
    callers: Sequence[Caller] = ()
    named: Mapping[str, Caller] | None = None
    has_certificates: bool = False
    needs_token: bool = True
    is_open: bool = False
    admin: Tokens | None = None

    def by_token(self, shown: Sequence[str | bytes]) -> Caller | None:
        """None for anything but one token that is good."""
        if len(shown) != 1:
            return None
        # Both are looked through, so that the time does not say which of them has it.
        number = self.tokens.found(shown[0])
        return self._of(number, None if self.admin is None else self.admin.found(shown[0]))

    def by_certificate(self, names: Sequence[str]) -> Caller | None:
        """None where it names nobody that may do anything."""
        if self.named is None:
            shown = f"certificate {names[0] if names else '(without a name)'}"
            return Caller(shown, certificate=tuple(names))
        found = [self.named[name] for name in names if name in self.named]
        return None if not found else replace(_joined(found), certificate=tuple(names))

    def is_good(self, caller: Caller) -> bool:
        """Whether who was let in as this caller would be let in now, for the same tenants."""
        if self.is_open:
            return True
        token = certificate = None
        if caller.token:
            admin = None if self.admin is None else self.admin.known(caller.token)
            token = self._of(self.tokens.known(caller.token), admin)
        if token is None and (caller.token or self.needs_token):
            return False
        if self.has_certificates:
            certificate = self.by_certificate(caller.certificate)
            if certificate is None:
                return False
        now = both(token, certificate)
        return now is not None and (now.tenants, now.is_admin) == (caller.tenants, caller.is_admin)

    def _of(self, number: int | None, admin: int | None) -> Caller | None:
        """Of the token with this number, or of the one for Admin."""
        if admin is not None:
            assert self.admin is not None
            digest = self.admin.digest(admin)
            return Caller(f"admin token {admin + 1}", frozenset(), is_admin=True, token=digest)
        return None if number is None else replace(self.callers[number], token=self.tokens.digest(number))


def _joined(callers: Sequence[Caller]) -> Caller:
    tenants: frozenset[str] = frozenset()
    for each in callers:
        if each.tenants is None:
            return each
        tenants |= each.tenants
    return Caller(callers[0].name, tenants)


def both(token: Caller | None, certificate: Caller | None) -> Caller | None:
    """Whose namespaces both are good for; a token for Admin is not narrowed by a certificate."""
    if token is None or certificate is None:
        return token or certificate
    if token.is_admin:
        return replace(token, certificate=certificate.certificate)
    if token.tenants is None or certificate.tenants is None:
        tenants = certificate.tenants if token.tenants is None else token.tenants
    else:
        tenants = token.tenants & certificate.tenants
    name = f"{token.name}, {certificate.name}"
    return Caller(name, tenants, token=token.token, certificate=certificate.certificate)


def names_of(context: Context) -> list[str]:
    """The common name of the peer's certificate, and the names that it is for."""
    shown = context.auth_context()
    keys = ("x509_common_name", "x509_subject_alternative_name")
    return [name.decode("utf-8", "replace") for key in keys for name in shown.get(key, ())]


class CallerCheck(grpc.aio.ServerInterceptor):
    """Refuses each call of nobody that is known, a wrong token before its handler and its request are looked at, and tells the
    others' handlers who calls. Counts refusals as `unauthenticated_total`; `monotonic` tells the time for the log; `access` is
    asked anew for each call."""

    def __init__(
        self,
        access: Callable[[], Access],
        *,
        counts: Counter[str],
        monotonic: Callable[[], float],
        on_admin: Callable[[str, Context], None] = lambda name, context: None,
    ) -> None:
        """`on_admin` is told of each admin call that was refused, by its name."""
        self._access = access
        self._counts = counts
        self._monotonic = monotonic
        self._untold = 0
        self._told_at: float | None = None
        self._on_admin = on_admin

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        details: Any = handler_call_details
        access, method = self._access(), details.method
        if access.is_open or method in OPEN_METHODS:
            _CALLER.set(Caller("anybody"))
            return await continuation(handler_call_details)
        shown = [value for key, value in details.invocation_metadata or () if key == AUTHORIZATION]
        token = access.by_token(shown)
        if token is None and (shown or access.needs_token):
            return self._refusing(method)
        if access.admin is None and method.startswith(ADMIN_PREFIX):
            # Not served: the answer is gRPC's own.
            return await continuation(handler_call_details)
        if token is not None and not _may_call(token, method):
            return self._refusing(method)
        if not access.has_certificates:
            _CALLER.set(token or LOCAL)
            return await continuation(handler_call_details)
        handler = await continuation(handler_call_details)
        return None if handler is None else self._with_certificate(handler, access, token, method)

    def _with_certificate(self, handler: Any, access: Access, token: Caller | None, method: str) -> Any:
        """The handler, once the connection's certificate has been looked at: only its call shows that."""
        kind = next(
            kind
            for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
            if getattr(handler, kind) is not None
        )
        answer = getattr(handler, kind)

        async def checked(request: Any, context: Context) -> Any:
            certificate = access.by_certificate(names_of(context))
            caller = both(token, certificate)
            if certificate is None or caller is None or not _may_call(caller, method):
                return await self._refuse(request, context, method)
            _CALLER.set(caller)
            return await answer(request, context)

        return handler._replace(**{kind: checked})

    def _refusing(self, method: str) -> Any:
        # Takes no message before it answers, whatever kind of call it stands for.
        return grpc.stream_stream_rpc_method_handler(partial(self._refuse, method=method))

    async def _refuse(self, requests: Any, context: Context, method: str) -> None:
        self._count(str(context.peer()))
        if method.startswith(ADMIN_PREFIX):
            self._on_admin(method.removeprefix(ADMIN_PREFIX), context)
        await refuse(
            context,
            Unauthenticated(
                "no token, or certificate, that this service knows came with the call",
                field=AUTHORIZATION,
                value="(not shown)",
                allowed=f"one entry `{SCHEME}TOKEN` in the call's metadata, of a token that is good for this call",
            ),
        )

    def _count(self, peer: str) -> None:
        self._counts["unauthenticated_total"] += 1
        self._untold += 1
        now = self._monotonic()
        if self._told_at is None or now >= self._told_at + TOLD_EVERY_SECONDS:
            log.warning("refused %d calls without a good token, the last one from %s", self._untold, peer)
            self._told_at, self._untold = now, 0


def _may_call(caller: Caller, method: str) -> bool:
    if caller.is_admin:
        return method == SESSION_METHOD or method.startswith(ADMIN_PREFIX)
    return not method.startswith(ADMIN_PREFIX)
