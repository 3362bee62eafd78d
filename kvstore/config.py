"""The one reader of flags, environment and file: flags > environment KVSTORE_* > one TOML file > defaults.

A frozen value, read once and refused when wrong; nothing is corrected in silence.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from kvstore.budget import Available, Parts, available, share_out
from kvstore.errors import ConfigError
from kvstore.units import MAX_BYTES, parse_count, parse_size, parse_time, rounded, size_text, time_text


def parse_fraction(text: str | float, *, name: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 <= value <= 1.0:
        raise ConfigError("not a share", field=name, value=text, allowed="a number from 0 to 1")
    return value


def parse_text(text: str, *, name: str) -> str:
    if not isinstance(text, str):
        raise ConfigError("not a text", field=name, value=text, allowed="a text")
    return text


def parse_flag(text: str | bool, *, name: str) -> bool:
    value = {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}.get(
        str(text).strip().lower()
    )
    if value is None:
        raise ConfigError("neither yes nor no", field=name, value=text, allowed="yes or no")
    return value


def _option(
    default: Any, parse: Callable[..., Any], about: str, *, low: float = 0, high: float = math.inf
) -> Any:
    if default is MISSING:
        return field(metadata={"parse": parse, "about": about, "low": low, "high": high})
    return field(default=default, metadata={"parse": parse, "about": about, "low": low, "high": high})


@dataclass(frozen=True, kw_only=True)
class ServiceConfig:
    """Everything that `kvstore serve` can be told. Sizes in bytes, times in seconds."""

    dir: str = _option(MISSING, parse_text, "directory that holds everything; made if missing")
    sockets: str = _option("", parse_text, "directory of the sockets for clients; empty: that of --dir")
    disk: int = _option(32 << 30, parse_size, "disk budget, never exceeded", low=4 << 20, high=MAX_BYTES)
    segment: int = _option(
        0, parse_size, "bytes of one segment file; 0: a sixteenth of the budget, 1MiB to 256MiB", high=1 << 32
    )
    memory: int = _option(
        0,
        parse_size,
        "host memory for all of the following together; the index comes on top; 0: a quarter of what the cgroup, or the machine, has",
        high=MAX_BYTES,
    )
    pool: int = _option(0, parse_size, "host memory for window states; 0: 36 % of --memory", high=MAX_BYTES)
    pool_ttl: float = _option(600.0, parse_time, "how long an unused state stays in the pool", low=1)
    handoff: int = _option(0, parse_size, "host memory for handoffs; 0: 4 % of --memory", high=MAX_BYTES)
    handoff_ttl: float = _option(60.0, parse_time, "how long a handoff waits to be taken", low=1)
    take: float = _option(
        600.0, parse_time, "how long a handoff that was taken may stay unconfirmed, decoding included", low=1
    )
    staging: int = _option(
        0, parse_size, "host memory for bytes on their way to disk; 0: 8 % of --memory", high=MAX_BYTES
    )
    arenas: int = _option(
        0,
        parse_size,
        "host memory that clients on this machine write to; 0: 8 % of --memory",
        high=MAX_BYTES,
    )
    cache: int = _option(
        0,
        parse_size,
        "host memory for recent blocks, which clients may map; 0: 40 % of --memory",
        high=MAX_BYTES,
    )
    retention: float = _option(72 * 3600.0, parse_time, "how long a block lives since its last use", low=1)
    states_share: float = _option(0.3, parse_fraction, "largest share of the disk budget for window states")
    policy: str = _option(
        "endpoints",
        parse_text,
        "window-state policy of new namespaces: zero, endpoints, periodic:N, full or full+overlap",
    )
    eviction: str = _option(
        "lru",
        parse_text,
        "which blocks go first where room is wanted: lru, fifo, s3fifo, sieve, slru, arc, lfu, gdsf, 2q or density",
    )
    prompt_tokens: int = _option(
        1 << 20,
        parse_count,
        "tokens of the longest prompt; its states must fit the states' share",
        low=1,
        high=1 << 27,
    )
    lease: float = _option(60.0, parse_time, "how long a lease or a reservation lasts", low=0.1, high=3600)
    sessions: int = _option(1000, parse_count, "open sessions at most", low=1, high=100_000)
    leases: int = _option(10_000, parse_count, "open leases at most", low=1, high=1_000_000)
    keys: int = _option(65_536, parse_count, "block keys in one call at most", low=1, high=1_000_000)
    commit_bytes: int = _option(
        32 << 20, parse_size, "bytes that one sync gathers at most", low=4096, high=1 << 30
    )
    commit_wait: float = _option(
        0.002, parse_time, "how long a commit waits for others to share its sync", high=1
    )
    wear: int = _option(
        0,
        parse_size,
        "bytes that the drive may take in a day, from 4GiB; copies count, reads go on; 0: no limit",
        high=MAX_BYTES,
    )
    metrics: str = _option(
        "", parse_text, "HOST:PORT for the Prometheus page and a status page for people; empty: none"
    )
    metrics_hosts: str = _option(
        "",
        parse_text,
        "public host names by which that page may be asked, with commas; addresses and private names always may",
    )
    health: str = _option(
        "", parse_text, "HOST:PORT for gRPC health checks in plaintext, and nothing else; empty: none"
    )
    log_format: str = _option("text", parse_text, "lines of the log: text or json")
    otlp: str = _option(
        "",
        parse_text,
        "URL of a collector that takes spans of calls, as in http://collector:4318; empty: none",
    )
    listen: str = _option(
        "",
        parse_text,
        "HOST:PORT for clients on other machines, with TLS and a token; port 0: any; empty: none",
    )
    tls_cert: str = _option("", parse_text, "PEM file of the certificate for --listen, with its chain")
    tls_key: str = _option("", parse_text, "PEM file of the certificate's key")
    token_file: str = _option(
        "", parse_text, "file of the tokens that clients on other machines may show, one a line"
    )
    tls_client_ca: str = _option(
        "", parse_text, "PEM file of the issuers of client certificates; then each connection shows one"
    )
    tenants: str = _option(
        "", parse_text, "TOML file of what each tenant may take, and of its tokens and certificates"
    )
    admin_token_file: str = _option(
        "", parse_text, "file of tokens for administration over --listen; empty: none is served there"
    )
    events: str = _option(
        "",
        parse_text,
        "tcp://HOST:PORT or ipc:///PATH to tell routers from what is held (ZMQ PUB, KV events as vLLM's); empty: none",
    )
    events_replay: str = _option(
        "", parse_text, "the same for readers that ask again for what they have missed; empty: none"
    )
    events_topic: str = _option(
        "", parse_text, "topic of all events; empty: the namespace's digest in hexadecimal"
    )
    events_buffer: int = _option(
        32 << 20,
        parse_size,
        "host memory for events since the last snapshot, which is kept beside them, about 45 bytes a block",
        low=1 << 16,
        high=MAX_BYTES,
    )
    events_blocks_only: bool = _option(
        False, parse_flag, "tell of blocks only: for indexers that stumble over events of window states"
    )
    unsafe_plaintext_tcp: bool = _option(
        False, parse_flag, "listen without TLS: whoever is on the way reads prompts and tokens"
    )
    unsafe_no_token: bool = _option(
        False, parse_flag, "listen without tokens: whoever reaches the port reads and writes"
    )
    unsafe_public_events: bool = _option(
        False,
        parse_flag,
        "send events where other machines can read them: whoever reaches the port sees what is held",
    )

    @property
    def states_share_bytes(self) -> int:
        """What states and rows may take of the disk budget."""
        return int(self.states_share * self.disk)

    @cached_property
    def available(self) -> Available:
        return available()

    @cached_property
    def parts(self) -> Parts:
        """What each part of memory has. ConfigError where that is more than the budget, or than there is."""
        given = {name: getattr(self, name) for name in ("pool", "handoff", "cache", "arenas", "staging")}
        return share_out(self.memory, given, self.available)

    @property
    def pool_bytes(self) -> int:
        return self.parts.pool

    @property
    def handoff_bytes(self) -> int:
        return self.parts.handoff

    @property
    def staging_bytes(self) -> int:
        return self.parts.staging

    @property
    def arenas_bytes(self) -> int:
        return self.parts.arenas

    @property
    def cache_bytes(self) -> int:
        return self.parts.cache

    def memory_text(self) -> str:
        """For people: what each part of memory has, and why."""
        parts = self.parts
        return (
            f"memory {rounded(parts.memory)} of {rounded(self.available.bytes)} ({self.available.because}): "
            f"pool {rounded(parts.pool)}, handoffs {rounded(parts.handoff)}, block cache {rounded(parts.cache)}, "
            f"arenas {rounded(parts.arenas)}, staging {rounded(parts.staging)}, fetches {rounded(parts.fetch)}; "
            "block cache and arenas are memfds: shmem of this cgroup, and nothing in /dev/shm"
        )


_KINDS: dict[Callable[..., Any], str] = {
    parse_size: "SIZE",
    parse_time: "TIME",
    parse_count: "COUNT",
    parse_fraction: "SHARE",
    parse_text: "TEXT",
    parse_flag: "FLAG",
}
_TEXTS: dict[Callable[..., Any], Callable[[Any], str]] = {
    parse_size: size_text,
    parse_time: time_text,
    parse_count: str,
    parse_fraction: str,
    parse_text: str,
    parse_flag: str,
}


@dataclass(frozen=True, slots=True)
class Option:
    """`kind` is SIZE (64GiB), TIME (72h), COUNT, SHARE (0 to 1), TEXT or FLAG (yes or no); `default` is its text, empty for none."""

    name: str
    kind: str
    about: str
    default: str


def options() -> list[Option]:
    """Every option of the service, in the order of the class."""
    found = []
    for f in fields(ServiceConfig):
        parse = f.metadata["parse"]
        # 0 stands for a share of memory or of the budget, which the option's own words explain.
        default = "" if f.default is MISSING or f.default in ("", 0) else _TEXTS[parse](f.default)
        found.append(Option(f.name, _KINDS[parse], f.metadata["about"], default))
    return found


def load_service_config(
    flags: Mapping[str, str | None],
    *,
    file: str | None = None,
    environ: Mapping[str, str] | None = None,
    checks: Mapping[str, Callable[[Any, str], object]] | None = None,
) -> ServiceConfig:
    """Build the configuration; ConfigError names the key, the value, where it came from, and what is allowed. `checks`: of
    options whose values others know, called with a value and where it came from; they raise as they like."""
    environ = os.environ if environ is None else environ
    known = {f.name: f for f in fields(ServiceConfig)}
    chosen: dict[str, tuple[Any, str]] = {}
    file = file if file is not None else environ.get("KVSTORE_CONFIG")
    if file:
        for key, value in _read_toml(file).items():
            if key not in known:
                raise ConfigError(f"unknown key in {file}", field=key, value=value, allowed=", ".join(known))
            chosen[key] = (value, file)
    for key in known:
        name = f"KVSTORE_{key.upper()}"
        if name in environ:
            chosen[key] = (environ[name], name)
    for key, flag in flags.items():
        if flag is not None:
            chosen[key] = (flag, f"--{key.replace('_', '-')}")
    values: dict[str, Any] = {}
    for key, (raw, source) in chosen.items():
        meta = known[key].metadata
        value = meta["parse"](raw, name=source)
        if isinstance(value, (int, float)) and not meta["low"] <= value <= meta["high"]:
            show = _TEXTS[meta["parse"]]
            high = " or more" if meta["high"] == math.inf else f" to {show(meta['high'])}"
            raise ConfigError("out of range", field=source, value=raw, allowed=f"{show(meta['low'])}{high}")
        if checks and key in checks:
            checks[key](value, source)
        values[key] = value
    if not values.get("dir"):
        raise ConfigError(
            "no directory given", field="--dir", value="", allowed="--dir D, KVSTORE_DIR or `dir` in the file"
        )
    return ServiceConfig(**values)


_OTHER_VARIABLES = ("KVSTORE_CONFIG", "KVSTORE_TRACES", "KVSTORE_REQUIRE", "KVSTORE_MACHINE_EXAMPLES")
_NOT_OURS = re.compile(r"KVSTORE_(ENGINE_.*|(.*_)?SERVICE_(HOST|PORT).*|(.*_)?PORT(_[0-9]+_(TCP|UDP).*)?)")
"""Of tests with engines; and what Kubernetes tells each pod of a Service whose name begins with kvstore."""


def unknown_variables(environ: Mapping[str, str] | None = None) -> list[str]:
    """Variables that look like options and are none, each with the option that may have been meant."""
    environ = os.environ if environ is None else environ
    known = [*(f"KVSTORE_{f.name.upper()}" for f in fields(ServiceConfig)), *_OTHER_VARIABLES]
    found = []
    for name in sorted(environ):
        if name.startswith("KVSTORE_") and name not in known and not _NOT_OURS.fullmatch(name):
            close = difflib.get_close_matches(name[8:], [option[8:] for option in known], 1)
            found.append(f"{name} (KVSTORE_{close[0]}?)" if close else name)
    return found


def _read_toml(file: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read the configuration file: {error.strerror}", field="--config", value=file
        ) from error
    except (ValueError, RecursionError) as error:
        # A number of thousands of digits, or brackets as deep, are no syntax errors to the parser.
        raise ConfigError(
            f"the configuration file is not TOML: {error}", field="--config", value=file
        ) from error


def environment(name: str) -> str | None:
    """One variable of the environment, for those who have no other reason to read it."""
    return os.environ.get(name)


def prefer_environment(name: str, value: str) -> None:
    """Set one variable for the libraries that read it later, unless the user has set it."""
    os.environ.setdefault(name, value)
