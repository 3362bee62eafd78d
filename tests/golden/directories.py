"""Directories of every format, as a service of it has left them, with what they hold: today's code opens them, or refuses them by name.

`python ops/dev.py golden` writes those of today's format, for a format that has none yet, and overwrites nothing.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvstore.prefix.identity import NamespaceIdentity
from kvstore.prefix.opaque import OpaqueKey, store_key
from kvstore.profile.keyed import KeyedProfile
from kvstore.profile.registry import get_profile
from kvstore.store.catalog import CATALOG_VERSION
from kvstore.store.format import FORMAT_VERSION
from kvstore.types import ItemKind
from kvstore_client import CacheClient, KeyedStore, OpenedNamespace, ReserveItem
from tests.support.chains import Chain
from tests.support.service import ServiceProcess

FOLDER = Path(__file__).parent / "directories"
TODAY = f"format-{FORMAT_VERSION}.{CATALOG_VERSION}"
ENDINGS = ("clean", "killed")
"""How the service that wrote it ended."""

OPTIONS = {"disk": 16 << 20, "segment": 1 << 20, "prompt_tokens": 4096}
"""Of the service, then and now."""

KEPT = {**OPTIONS, "retention": 100.0 * 365 * 86_400}
"""Of a service that reads them: they were written long ago."""

MTIME = 1_700_000_000


def payload_of(key: bytes, kind: ItemKind, length: int) -> bytes:
    """Of an item; it compresses well."""
    return (hashlib.sha256(bytes([kind]) + key).digest() * (length // 32 + 1))[:length]


@dataclass(slots=True)
class Manifest:
    """`items`: [namespace, kind, key, position, length, SHA-256 of the payload] of all that is held; `absent`: [namespace, kind, key] of
    what was held and has left; `policies` by namespace; `prompts`: [name, blocks, seed, state edges in blocks] that hold."""

    items: list[list[Any]] = field(default_factory=list)
    absent: list[list[Any]] = field(default_factory=list)
    policies: dict[str, str] = field(default_factory=dict)
    prompts: list[list[Any]] = field(default_factory=list)


def identities() -> dict[str, NamespaceIdentity]:
    """Of all namespaces, by name. Never changed: their digests are in directories of every format."""
    tiny, flash = get_profile("tiny"), get_profile("deepseek-v4-flash")
    rows = KeyedProfile(name="m", payload_bytes=70_000, dtype="bf16", layout="l", part="p")
    return {
        "prompts": NamespaceIdentity(tiny, weights_revision="w1", numerics="n1"),
        "rows": NamespaceIdentity(tiny, weights_revision="w1", numerics="n1", tenant_salt="rows ü"),
        "large": NamespaceIdentity(flash, weights_revision="w2", numerics="n1"),
        "cleared": NamespaceIdentity(tiny, weights_revision="w3", numerics="n1"),
        "dropped": NamespaceIdentity(tiny, weights_revision="w4", numerics="n1", adapter="lora"),
        "emptied": NamespaceIdentity(flash, weights_revision="w5", numerics="n1"),
        "keyed": NamespaceIdentity(rows, weights_revision="r", numerics=""),
    }


OPAQUE = [OpaqueKey(b"engine key %d" % number, number % 2) for number in range(4)]


class Writing:
    """A directory in the making, through the client of a real service."""

    def __init__(self, client: CacheClient) -> None:
        self.client = client
        self.manifest = Manifest()

    def open(self, name: str, policy: str | None = None) -> OpenedNamespace:
        return self.client.open_namespace(identities()[name], name=name, policy=policy)

    def store(self, space: OpenedNamespace, items: Sequence[ReserveItem], *, stays: bool = True) -> None:
        with self.client.reserve(space.digest, items) as reservation:
            assert len(reservation.granted) == len(items)
            payloads = {at: payload_of(item.key, item.kind, item.length) for at, item in enumerate(items)}
            reservation.write(payloads)
            reservation.commit()
        for at, item in enumerate(items):
            name = [space.digest.hex(), int(item.kind), item.key.hex()]
            if stays:
                digest = hashlib.sha256(payloads[at]).hexdigest()
                self.manifest.items.append([*name, item.position, item.length, digest])
            else:
                self.manifest.absent.append(name)

    def prompt(
        self,
        name: str,
        blocks: int,
        seed: int,
        *,
        states: Sequence[int] = (),
        first: int = 0,
        stays: bool = True,
    ) -> Chain:
        """A prompt's blocks from `first` on, and states at the ends of those in `states`."""
        space = self.open(name)
        chain = Chain.of(space, blocks, seed=seed)
        items = [chain.block_item(number) for number in range(first, blocks)]
        self.store(space, [*items, *map(chain.state_item, states)], stays=stays)
        if stays:
            self.manifest.prompts.append([name, blocks, seed, [number + 1 for number in states]])
        return chain


def rows_of(chain: Chain, numbers: Sequence[int], length: int) -> list[ReserveItem]:
    return [
        ReserveItem(
            kind=ItemKind.ROWS,
            key=chain.keys[number],
            position=(number + 1) * chain.namespace.block_tokens,
            length=length,
        )
        for number in numbers
    ]


def fill(client: CacheClient) -> Manifest:
    """One of everything that a directory may hold."""
    writing = Writing(client)
    tiny = get_profile("tiny")
    # Their segments are empty after it, and are used again: what an earlier life left in them is no record.
    writing.open("emptied", "zero")
    emptied = writing.prompt("emptied", 8, 8, stays=False)
    client.clear(emptied.namespace.digest)
    writing.open("prompts", "periodic:256")
    writing.prompt("prompts", 30, 1, states=[9, 29])
    writing.prompt("prompts", 3, 2)
    writing.open("rows", "full")
    chain = writing.prompt("rows", 12, 3)
    writing.store(chain.namespace, rows_of(chain, range(6), tiny.rows_block_bytes))
    writing.store(chain.namespace, rows_of(chain, range(6, 12), tiny.rows_overlap_block_bytes))
    writing.open("large", "zero")
    # Large records have a table of slices; three of them fill more than a segment.
    writing.prompt("large", 3, 4)
    gone = writing.prompt("cleared", 5, 5, states=[4], stays=False)
    client.clear(gone.namespace.digest)
    writing.prompt("cleared", 4, 6, states=[3])
    dropped = writing.prompt("dropped", 4, 7)
    writing.store(dropped.namespace, [dropped.state_item(3)], stays=False)
    client.drop_states(dropped.namespace.digest)
    client.set_policy(dropped.namespace.digest, "zero")
    keyed = KeyedStore(client, identities()["keyed"], name="keyed")
    length = keyed.payload_bytes
    names = [store_key(keyed.digest, key) for key in OPAQUE]
    payloads = [payload_of(name, ItemKind.BLOCK, length) for name in names]
    assert all(keyed.put(list(zip(OPAQUE, payloads, strict=True))))
    for name, payload in zip(names, payloads, strict=True):
        digest = hashlib.sha256(payload).hexdigest()
        writing.manifest.items.append(
            [keyed.digest.hex(), int(ItemKind.BLOCK), name.hex(), 1, length, digest]
        )
    for space in client.namespaces():
        writing.manifest.policies[space.digest.hex()] = space.policy
    return writing.manifest


def pack(directory: Path, archive: Path) -> None:
    """All files but sockets. The same bytes for the same files."""
    with tarfile.open(archive, "x:xz", preset=9) as tar:
        for path in sorted(directory.iterdir()):
            if path.is_file():
                info = tarfile.TarInfo(path.name)
                data = path.read_bytes()
                info.size, info.mode, info.mtime = len(data), 0o600, MTIME
                tar.addfile(info, io.BytesIO(data))


def unpack(archive: Path, directory: Path) -> None:
    directory.mkdir(mode=0o700)
    with tarfile.open(archive, "r:xz") as tar:
        tar.extractall(directory, filter="data")


def write(folder: Path = FOLDER) -> list[Path]:
    """The manifest and the archives of today's format. FileExistsError where there are any."""
    listing = folder / f"{TODAY}.json"
    archives = {ending: folder / f"{TODAY}-{ending}.tar.xz" for ending in ENDINGS}
    for path in (listing, *archives.values()):
        if path.exists():
            raise FileExistsError(
                f"{path.name} is there; directories of a format are written once: raise the version"
            )
    folder.mkdir(exist_ok=True)
    for ending, archive in archives.items():
        with tempfile.TemporaryDirectory(prefix="kv-") as place:
            directory = Path(place) / "s"
            with ServiceProcess(directory, **OPTIONS) as service:
                with CacheClient(directory, owner="golden") as client:
                    manifest = fill(client)
                service.kill() if ending == "killed" else service.stop()
            pack(directory, archive)
    listing.write_text(json.dumps(asdict(manifest), indent=0) + "\n")
    return [listing, *archives.values()]


def manifest_of(name: str) -> Manifest:
    return Manifest(**json.loads((FOLDER / f"{name}.json").read_text()))


def contents(directory: Path) -> dict[str, str]:
    """A digest of each file but the lock, which says who looked last."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in directory.iterdir()
        if path.is_file() and path.name != "lock"
    }


if __name__ == "__main__":
    try:
        for path in write():
            print(path)
    except FileExistsError as error:
        sys.exit(str(error))
