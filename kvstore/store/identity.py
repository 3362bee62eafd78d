"""Whose directory it is: decided before anything in it is touched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from kvstore.errors import DeviceError, FormatTooNew, KvstoreError, StoreDamaged
from kvstore.store.catalog import LmdbCatalog
from kvstore.store.device import LOCK_NAME, PROBE_NAME, Device, read_fully, write_all
from kvstore.store.format import IDENTITY_BYTES, decode_identity, encode_identity
from kvstore.store.segment import TEMPORARY_SUFFIX

IDENTITY_NAME = "identity"
_BEFORE_IDENTITY = frozenset({LOCK_NAME, PROBE_NAME, IDENTITY_NAME + TEMPORARY_SUFFIX, "lost+found"})
"""What a directory may hold that we have only begun to use, or that a new file system holds."""

Randomness = Callable[[int], bytes]


def read_identity(device: Device) -> bytes | None:
    """The uuid of the store in the directory; None when the directory is empty. Changes nothing.

    Raises StoreDamaged for a directory of something else, FormatTooNew, DeviceError.
    """
    names = device.names()
    if IDENTITY_NAME not in names:
        refuse_foreign(names, where=device.where)
        return None
    file = device.open(IDENTITY_NAME)
    if file is None:
        raise DeviceError(f"the identity file of {device.where} went away while it was opened; start again")
    try:
        data = read_fully(file, 0, IDENTITY_BYTES + 1)
        with suppress(StoreDamaged, FormatTooNew):
            return decode_identity(data, directory=device.where)
        # It may have been bent on its way.
        file.forget_cached(0, 0)
        data = read_fully(file, 0, IDENTITY_BYTES + 1)
    finally:
        file.close()
    return decode_identity(data, directory=device.where)


def refuse_foreign(names: Sequence[str], *, where: str) -> None:
    """Raise StoreDamaged when a directory without an identity holds what is not ours."""
    foreign = [name for name in names if name not in _BEFORE_IDENTITY]
    if not foreign:
        return
    ours = any(name.startswith("segment-") or name == LmdbCatalog.DATA_NAME for name in foreign)
    raise StoreDamaged(
        f"the directory holds {foreign[0]!r} but no identity file; nothing was touched: "
        + ("restore the identity file, or " if ours else "")
        + "use an empty directory",
        field="directory",
        value=where,
    )


def create_identity(device: Device, randomness: Randomness) -> bytes:
    """Make an empty directory ours. Durable on return; a crash before leaves a directory that counts as empty."""
    uuid = randomness(16)
    temporary = IDENTITY_NAME + TEMPORARY_SUFFIX
    device.unlink(temporary)
    file = device.create(temporary)
    try:
        write_all(file, 0, [encode_identity(uuid)])
        file.sync()
        device.rename(temporary, IDENTITY_NAME)
        device.sync_names()
    except KvstoreError:
        with suppress(KvstoreError):
            device.unlink(temporary)
        raise
    finally:
        with suppress(KvstoreError):
            file.close()
    return uuid
