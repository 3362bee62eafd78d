"""Reading every row of the catalogue's file. Runs as a program of its own: a page that is damaged in an unforeseen way
can kill the process that maps it.

    python catalog_rows.py FILE FOLDER...    rows on stdout; FOLDERs: where the packages are that it needs

The standard library aside it imports two packages, late: it must start fast, and be told where they are.
"""

from __future__ import annotations

import errno
import os
import struct
import sys
from collections.abc import Iterator
from typing import Any

LENGTHS = struct.Struct("<II")
"""Ahead of each row on stdout: bytes of its key and of its value. Two zeros say that these were all rows."""

WHOLE, DAMAGED, REFUSED = 0, 10, 11
"""Exit codes. REFUSED: the system's error of the moment; its number is on stderr."""

_OF_THE_MOMENT = frozenset(
    {
        errno.EACCES,
        errno.EAGAIN,
        errno.EIO,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
        errno.EPERM,
        errno.EINTR,
        errno.ESTALE,
    }
)
_PAGE = 4096
_META_LAST_PAGE = (136, _PAGE + 136)
"""Where the map's two header pages say which page is the last one in use (data format 1)."""
_CRC = struct.Struct("<I")


class CatalogDamaged(Exception):
    """The file is not a whole catalogue of ours."""


def rows(path: str) -> Iterator[tuple[bytes, memoryview]]:
    """Key and value of every row, once the file's structure and the row's own checksum hold. A value is good until the
    next one.

    Raises CatalogDamaged, or OSError for what the system refuses just now, which says nothing about the file.
    """
    import lmdb
    import lmdb.verify
    from crc32c import crc32c

    _refuse_short(path)
    try:
        problems: list[str] = lmdb.verify.verify(path, subdir=False)  # type: ignore[no-untyped-call]
    except (lmdb.verify.VerifyError, struct.error, IndexError, ValueError, RecursionError) as error:
        raise CatalogDamaged(str(error)) from error
    if problems:
        raise CatalogDamaged(problems[0])
    try:
        with (
            lmdb.open(
                path, subdir=False, readonly=True, create=False, lock=False, lib_version=0
            ) as environment,
            environment.begin(buffers=True) as transaction,
        ):
            for key, data in transaction.cursor():
                name, value = bytes(key), data[_CRC.size :]
                if len(data) < _CRC.size or _CRC.unpack_from(data)[0] != crc32c(value, crc32c(name)):
                    raise CatalogDamaged("a row's checksum is wrong")
                yield name, value
    except lmdb.Error as error:
        code: Any = getattr(error, "code", None)
        if code in _OF_THE_MOMENT:
            raise OSError(code, os.strerror(code)) from error
        raise CatalogDamaged(str(error)) from error


def _refuse_short(path: str) -> None:
    """A page that the file is too short for would be met by the processor, not by an error."""
    with open(path, "rb") as file:
        head = file.read(_META_LAST_PAGE[1] + 8)
        size = os.fstat(file.fileno()).st_size
    if len(head) < _META_LAST_PAGE[1] + 8 or size < max(
        (struct.unpack_from("<Q", head, at)[0] + 1) * _PAGE for at in _META_LAST_PAGE
    ):
        raise CatalogDamaged("the file is shorter than it says")


def main(path: str, folders: list[str]) -> int:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.path.extend(folders)
    out = sys.stdout.buffer
    try:
        for key, value in rows(path):
            out.write(LENGTHS.pack(len(key), len(value)))
            out.write(key)
            out.write(value)
        out.write(LENGTHS.pack(0, 0))
        out.flush()
    except CatalogDamaged:
        return DAMAGED
    except MemoryError:
        sys.stderr.write(str(errno.ENOMEM))
        return REFUSED
    except OSError as error:
        sys.stderr.write(str(error.errno or errno.EIO))
        return REFUSED
    return WHOLE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
