"""A service of a bench's own: started on a folder, opened for one namespace, ended with the bench."""

from __future__ import annotations

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
from kvstore_client import CacheClient, OpenedNamespace

_READY_SECONDS = 60.0
_POLL_SECONDS = 0.02


@contextmanager
def serving(directory: Path, options: Mapping[str, object]) -> Iterator[Path]:
    """`kvstore serve` on the folder `s` of `directory`, which this yields; `options` are its flags but for `--dir`."""
    place = directory.absolute() / "s"
    try:
        Places(place).check()
    except ConfigError as error:
        raise InvalidArgument(
            "the paths of a service's sockets would be too long",
            field="--dir",
            value=directory.parent,
            allowed="a folder with a shorter path",
        ) from error
    flags = [str(word) for option in {"--dir": place, **options}.items() for word in option]
    output = directory / "service.log"
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


def opened(client: CacheClient, profile: Profile, check: Callable[[], None]) -> OpenedNamespace:
    """The bench's namespace, as soon as the service answers."""
    identity = NamespaceIdentity(profile, weights_revision="bench", numerics="bench")
    limit = time.monotonic() + _READY_SECONDS
    while True:
        check()
        try:
            return client.open_namespace(identity, name="bench")
        except Unavailable:
            if time.monotonic() > limit:
                raise
        threading.Event().wait(_POLL_SECONDS)
