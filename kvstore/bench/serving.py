"""A service of a bench's own, in a process of its own, and blocks of random bytes to put there."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from kvstore.errors import ConfigError, InvalidArgument, KvstoreError, Unavailable
from kvstore.prefix.identity import NamespaceIdentity
from kvstore.profile.base import Profile
from kvstore.service.process import Places
from kvstore.types import ItemKind
from kvstore_client import CacheClient, Costs, Lookup, OpenedNamespace, ReserveItem

COMMIT_BLOCKS = 32
EAGER = Costs(seconds_per_layer_token=1.0)
"""A price of computing at which every plan restores all that it can."""

LOG = "service.log"
"""Beside the service's folder."""

_MIB = 1 << 20
_READY_SECONDS = 60.0
_POLL_SECONDS = 0.02


def service_directory(directory: Path) -> Path:
    return directory.absolute() / "s"


def options_for(size: int) -> dict[str, object]:
    """Flags of a service that keeps `size` bytes of blocks in memory, and half as many again."""
    return {
        "--disk": size * 2 + (1 << 30),
        "--cache": size * 3 // 2,
        "--pool": 16 * _MIB,
        "--handoff": 16 * _MIB,
        "--staging": 256 * _MIB,
        "--lease": "1h",
    }


@contextmanager
def serving(directory: Path, options: Mapping[str, object], *switches: str) -> Iterator[Path]:
    """`kvstore serve` with these options and switches on `service_directory(directory)`, which this yields. Killed on leaving."""
    place = service_directory(directory)
    try:
        Places(place, place).check()
    except ConfigError as error:
        raise InvalidArgument(
            "the paths of a service's sockets would be too long",
            field="--dir",
            value=directory.parent,
            allowed="a folder with a shorter path",
        ) from error
    flags = [*switches, *(str(word) for option in {"--dir": place, **options}.items() for word in option)]
    output = directory / LOG
    with output.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvstore.cli.main", "serve", *flags],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        yield place
    except Unavailable as error:
        last = output.read_text(errors="replace").strip().splitlines()[-1:] or ["without a word"]
        raise KvstoreError(f"the service does not answer: {error}; it said: {last[0]}") from error
    finally:
        # Its directory goes too, so that there is nothing to be put in order.
        process.kill()
        process.wait()


def opened(
    client: CacheClient, profile: Profile, check: Callable[[], None], *, policy: str = ""
) -> OpenedNamespace:
    """The bench's namespace, as soon as the service answers."""
    identity = NamespaceIdentity(profile, weights_revision="bench", numerics="bench")
    limit = time.monotonic() + _READY_SECONDS
    while True:
        check()
        try:
            return client.open_namespace(identity, name="bench", policy=policy)
        except Unavailable:
            if time.monotonic() > limit:
                raise
        threading.Event().wait(_POLL_SECONDS)


class Chain:
    """Blocks of random bytes, one after another."""

    def __init__(self, namespace: OpenedNamespace, blocks: int, seed: int) -> None:
        self.namespace = namespace
        self._chance = random.Random(seed)
        self.keys = [self._chance.randbytes(32) for _ in range(blocks)]

    def store(self, client: CacheClient, check: Callable[[], None]) -> None:
        space = self.namespace
        for first in range(0, len(self.keys), COMMIT_BLOCKS):
            check()
            items = [
                ReserveItem(
                    kind=ItemKind.BLOCK,
                    key=key,
                    parent=self.keys[number - 1] if number else space.digest,
                    position=(number + 1) * space.block_tokens,
                    length=space.block_bytes,
                )
                for number, key in enumerate(self.keys[first : first + COMMIT_BLOCKS], first)
            ]
            with client.reserve(space.digest, items) as reservation:
                reservation.write(
                    {number: self._chance.randbytes(space.block_bytes) for number in reservation.granted}
                )
                reservation.commit()

    @contextmanager
    def leased(self, client: CacheClient) -> Iterator[Lookup]:
        """All blocks under a lease of their own."""
        space = self.namespace
        tokens = len(self.keys) * space.block_tokens
        found = client.lookup(space.digest, self.keys, prompt_tokens=tokens + 1, costs=EAGER)
        if found.lease is None or found.plan.compute_from != tokens:
            raise KvstoreError(
                "not all that was stored is held",
                field="tokens",
                value=found.plan.compute_from,
                allowed=f"{tokens}",
            )
        with found.lease:
            yield found
