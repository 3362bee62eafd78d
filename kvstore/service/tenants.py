"""The tenants' file: what each tenant may take, and which tokens and certificates are good for whom. TOML, read whole and
refused by name and line where it is wrong."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvstore.errors import ConfigError
from kvstore.policy.limits import UNLIMITED, TenantLimits
from kvstore.service.tokens import TOKEN_ALLOWED, is_token, read_secrets
from kvstore.units import parse_count, parse_size

FILE_BYTES_MAX = 4 << 20
TENANTS_MAX = 4096
TENANT_BYTES_MAX = 256
NAMES_MAX = 64
NAME_CHARS_MAX = 256
RATE_MAX = 1e9

TENANT_ALLOWED = f"1 to {TENANT_BYTES_MAX} bytes of printable text"


@dataclass(frozen=True, slots=True)
class TenantsFile:
    """`default` is of each tenant without a table of its own. `tokens`, `certificates`: for whom each is good; None: for all."""

    default: TenantLimits = UNLIMITED
    limits: Mapping[str, TenantLimits] = field(default_factory=dict)
    tokens: Mapping[str, frozenset[str]] = field(default_factory=dict, repr=False)
    certificates: Mapping[str, frozenset[str] | None] = field(default_factory=dict)

    def of(self, tenant: str) -> TenantLimits:
        return self.limits.get(tenant, self.default)


NO_TENANTS_FILE = TenantsFile()


def read_tenants(file: str) -> TenantsFile:
    """ConfigError where the file cannot be read, others may read it (it may hold tokens), or something in it is wrong."""
    return parse_tenants(read_secrets(file, field="tenants", bytes_max=FILE_BYTES_MAX), file=file)


def parse_tenants(text: str, *, file: str) -> TenantsFile:
    """ConfigError names what is wrong and its line, and never shows a token."""
    try:
        found = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        # A number of thousands of digits, or brackets as deep, are no syntax errors to the parser.
        raise ConfigError(f"not TOML: {error}", field="tenants", value=file) from error
    return _Reading(file, text).file_of(found)


def check_tenant(name: str, *, field: str) -> None:
    """ConfigError for what cannot be a tenant's name here. It is compared, and never becomes a path."""
    if not 0 < len(name.encode()) <= TENANT_BYTES_MAX or not name.isprintable():
        raise ConfigError("not a tenant's name", field=field, value=name, allowed=TENANT_ALLOWED)


@dataclass(frozen=True, slots=True)
class _Reading:
    file: str
    text: str

    def file_of(self, found: Mapping[str, Any]) -> TenantsFile:
        self._known(found, ("default", "tenant", "all_tenants"), table="")
        tables = self._table(found.get("tenant", {}), "tenant", table="")
        if len(tables) > TENANTS_MAX:
            raise ConfigError(
                "too many tenants",
                field="tenants",
                value=len(tables),
                allowed=f"{TENANTS_MAX} in {self.file}",
            )
        limits: dict[str, TenantLimits] = {}
        tokens: dict[str, frozenset[str]] = {}
        certificates: dict[str, frozenset[str] | None] = {}
        for name, given in tables.items():
            check_tenant(name, field=f"tenant of {self.file}")
            where = f"tenant.{name}"
            values = self._table(given, name, table="tenant")
            self._known(values, (*_LIMITS, "tokens", "certificates"), table=where)
            limits[name] = self._limits(values, where)
            for token in self._texts(values, "tokens", where, is_token, TOKEN_ALLOWED, secret=True):
                tokens[token] = tokens.get(token, frozenset()) | {name}
            for shown in self._texts(values, "certificates", where, _is_name, _NAME_ALLOWED):
                certificates[shown] = (certificates.get(shown) or frozenset()) | {name}
        for shown in self._texts(found, "all_tenants", "", _is_name, _NAME_ALLOWED):
            certificates[shown] = None
        default = self._table(found.get("default", {}), "default", table="")
        self._known(default, _LIMITS, table="default")
        return TenantsFile(self._limits(default, "default"), limits, tokens, certificates)

    def _limits(self, values: Mapping[str, Any], table: str) -> TenantLimits:
        read = {key: self._limit(key, value, table) for key, value in values.items() if key in _LIMITS}
        return TenantLimits(**read)

    def _limit(self, key: str, value: Any, table: str) -> Any:
        parse, low, allowed = _LIMITS[key]
        try:
            number = parse(value, name=key)
        except ConfigError as error:
            raise self._wrong(str(error.args[0]).partition(";")[0], key, value, allowed, table) from error
        if not low <= number <= RATE_MAX * 1e9:
            raise self._wrong("out of range", key, value, allowed, table)
        return number

    def _texts(
        self,
        values: Mapping[str, Any],
        key: str,
        table: str,
        is_good: Callable[[str], bool],
        allowed: str,
        *,
        secret: bool = False,
    ) -> list[str]:
        given = values.get(key, [])
        is_list = isinstance(given, list) and len(given) <= NAMES_MAX
        if not is_list or not all(isinstance(each, str) and is_good(each) for each in given):
            shown = "(not shown)" if secret else given
            raise self._wrong(
                f"not a list of {key}", key, shown, f"at most {NAMES_MAX}, each {allowed}", table
            )
        return list(given)

    def _table(self, value: Any, key: str, *, table: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            # What stands there may be a list of tables, or of tokens.
            raise self._wrong("not a table", key, "(not shown)", f"[{key}] with keys of its own", table)
        return value

    def _known(
        self, values: Mapping[str, Any], known: tuple[str, ...] | Mapping[str, Any], *, table: str
    ) -> None:
        for key in values:
            if key not in known:
                raise self._wrong("unknown key", key, "(not shown)", ", ".join(known), table)

    def _wrong(self, what: str, key: str, value: object, allowed: str, table: str) -> ConfigError:
        line = line_of(self.text, table, key)
        where = f"{self.file}{f', line {line}' if line else ''}{f', table [{table}]' if table else ''}"
        return ConfigError(f"{what} in {where}", field=key, value=value, allowed=allowed)


def line_of(text: str, table: str, key: str) -> int | None:
    """The line that gives `key` in `table`, or that begins the table of that name, as far as the text says it plainly."""
    wanted = _plain(f"{table}.{key}" if table else key)
    now = ""
    for number, line in enumerate(text.splitlines(), 1):
        if (header := re.match(r"\s*\[+\s*(.+?)\s*\]+", line)) is not None:
            now = _plain(header[1])
            if now == wanted:
                return number
        elif (given := re.match(r"\s*([^=#]+?)\s*=", line)) is not None:
            here = _plain(given[1])
            if (f"{now}.{here}" if now else here) == wanted:
                return number
    return None


def _plain(key: str) -> str:
    return re.sub(r"""["'\s]""", "", key)


def _parse_rate(value: Any, *, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError("not a number", field=name, value=value)
    # A whole number may have more digits than a float has room for.
    return float(value) if value <= RATE_MAX else math.inf


def _parse_byte_rate(value: Any, *, name: str) -> float:
    return float(parse_size(value, name=name))


_SIZE = "a size as in 64GiB"
_LIMITS: dict[str, tuple[Callable[..., Any], float, str]] = {
    "namespaces": (parse_count, 1, "a whole number, 1 or more; `quota = 0` keeps a tenant out"),
    "quota": (parse_size, 0, f"{_SIZE}; 0 keeps the tenant out"),
    "in_flight": (parse_size, 1, f"{_SIZE}, 1 byte or more; `quota = 0` keeps a tenant out"),
    "calls_per_second": (
        _parse_rate,
        0.001,
        f"a number from 0.001 to {RATE_MAX:g}; `quota = 0` keeps a tenant out",
    ),
    "bytes_per_second": (_parse_byte_rate, 1, f"{_SIZE} for each second; `quota = 0` keeps a tenant out"),
}


_NAME_ALLOWED = f"1 to {NAME_CHARS_MAX} printable characters, as a certificate has them"


def _is_name(name: str) -> bool:
    return 0 < len(name) <= NAME_CHARS_MAX and name.isprintable()
