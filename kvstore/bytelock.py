"""A lock on one byte of a shared file: two processes that have the file open agree by it, and the kernel gives it back when a holder
is gone. The byte need not exist."""

from __future__ import annotations

import errno
import fcntl
import os
import struct

BYTE_MAX = (1 << 62) - 1

_FLOCK = "hhqqi0q"
"""struct flock of fcntl.h: kind, whence, begin, length, and a pid that is 0 for locks of an open file description."""


def lock_byte(descriptor: int, byte: int, *, alone: bool) -> bool:
    """Whether it is held now, `alone` or beside others who do not want it alone. Waits for nobody. The lock belongs to what
    os.open made, not to the process: who opened the file once locks nothing out by doing it twice. OSError where the file cannot
    be locked."""
    return _set(descriptor, byte, fcntl.F_WRLCK if alone else fcntl.F_RDLCK)


def unlock_byte(descriptor: int, byte: int) -> None:
    _set(descriptor, byte, fcntl.F_UNLCK)


def _set(descriptor: int, byte: int, kind: int) -> bool:
    assert 0 <= byte <= BYTE_MAX
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, kind, os.SEEK_SET, byte, 1, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True
