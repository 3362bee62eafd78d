"""What a worker can be told, checked before anything that takes long is begun. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvstore.errors import ConfigError
from kvstore.policy.window import WindowPolicy
from kvstore.profile.base import Profile
from kvstore.profile.registry import get_profile
from kvstore_client.address import Address, parse_address
from kvstore_workers.runtime.address import claim, socket_path

ROLES = ("prefill", "decode")
DTYPES = ("float32", "bfloat16")
THREADS_MAX = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """role: prefill or decode. checkpoint: a folder, else random weights from `seed` for `profile`. cache: the service's
    directory, or tcp://host:port with the file of a token and the PEM file of the issuers; empty for none. threads 0:
    torch's choice. namespace: a label, empty for one made from the identity. requests: that may run or wait at once.
    grace: seconds that they may go on once the worker is told to end."""

    role: str
    listen: str
    cache: str = ""
    cache_token_file: str | None = None
    cache_ca: str | None = None
    cache_cert: str | None = None
    cache_key: str | None = None
    cache_insecure: bool = False
    profile: str = "tiny"
    seed: int = 0
    checkpoint: str = ""
    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 0
    namespace: str = ""
    tenant_salt: str = ""
    policy: str = ""
    requests: int = 64
    grace: float = 10.0


def check_options(options: WorkerOptions) -> Path:
    """The socket's path, free to listen on. KvstoreError naming the first option that does not do."""
    path = socket_path(options.listen, name="--listen")
    _one_of("role", options.role, ROLES)
    _one_of("--dtype", options.dtype, DTYPES)
    if not 0 <= options.threads <= THREADS_MAX:
        raise ConfigError(
            "bad number of threads", field="--threads", value=options.threads, allowed=f"0 to {THREADS_MAX}"
        )
    if options.cache:
        cache_address(options)
    if not options.checkpoint:
        check_policy(options.policy, get_profile(options.profile))
    claim(path, name="--listen")
    return path


def cache_address(options: WorkerOptions) -> Address:
    """Where the store is; InvalidArgument for what is no address, or files that say nothing."""
    return parse_address(
        options.cache,
        token=Path(options.cache_token_file) if options.cache_token_file else None,
        ca=options.cache_ca,
        insecure=options.cache_insecure,
        cert=options.cache_cert,
        key=options.cache_key,
    )


def check_policy(policy: str, profile: Profile) -> None:
    """InvalidArgument unless `policy` is empty or a window-state policy of `profile`."""
    if policy:
        WindowPolicy.parse(policy, profile)


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"unknown {name.lstrip('-')}", field=name, value=value, allowed=", ".join(allowed))
