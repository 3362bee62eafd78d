"""Files of one directory, as the log needs them: every effect on the disk passes through here.

A fault test replaces the device and nothing else.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Protocol

from kvstore.errors import DeviceError, DirectoryInUse, KvstoreError, NoSpace
from kvstore.types import BytesLike

_NO_SPACE = {
    errno.ENOSPC: "the file system is full",
    errno.EDQUOT: "the user's disk quota is used up",
    errno.EFBIG: "a file size limit was reached",
    errno.EROFS: "the file system is mounted read-only",
}
_NO_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE})

NOT_FOR_WANT_OF_ROOM = frozenset({"EFBIG", "EROFS"})
"""Values of a NoSpace: no removal would help."""

_PARTS_PER_WRITE = 512
"""Below the kernel's limit on the vector of one call (1,024)."""

LOCK_NAME = "lock"
PROBE_NAME = "probe.tmp"
_PAGE = 4096

_CANNOT_LOCK_DIRECTORY = frozenset(
    {errno.EBADF, errno.EINVAL, errno.EISDIR, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}
)
"""Of a file system that locks files alone: over a network a lock may want a descriptor for writing."""


class DeviceFile(Protocol):
    """An open file. Calls raise DeviceError or NoSpace. Any number of threads may read, and write to places of their own.

    A bulk file takes whole pages of 4,096 bytes, at multiples of them, from and into memory at page boundaries.
    """

    def pwritev(self, offset: int, parts: Sequence[BytesLike]) -> int:
        """Write from the beginning of `parts`; the number of bytes written, at least 1 and perhaps not all."""

    def read_into(self, offset: int, target: memoryview) -> int:
        """Read to the beginning of `target`; fewer bytes than it holds only at the end of the file or when interrupted,
        none only at the end."""

    def pread(self, offset: int, length: int) -> bytes:
        """As `read_into`, for a few bytes anywhere, bulk file or not."""

    def allocate(self, size: int) -> None:
        """Reserve space for `size` bytes from offset 0; the file then has that size and reads as zeros."""

    def truncate(self, size: int) -> None:
        """Cut the file to `size` bytes and give the space back; on return this and all written survive a power
        cut. Fails as `sync` does."""

    def size(self) -> int: ...

    def sync(self) -> None:
        """All written so far survives a power cut. After a failure nothing is known of what was written since the
        last success, and a later success says nothing about it."""

    def forget_cached(self, offset: int, length: int) -> None:
        """Drop what memory holds of synced bytes, so that the next read asks the device. Length 0: to the end. Nothing
        to do where reads ask the device anyway."""

    def close(self) -> None: ...


class Device(Protocol):
    """One directory. Names are plain file names chosen by the store."""

    @property
    def where(self) -> str:
        """For messages."""

    @property
    def buffered_because(self) -> str:
        """Why bulk files pass through the page cache; empty where they do not. Known once the directory is locked."""

    def lock(self) -> None:
        """Hold the directory until `close`. Raises DirectoryInUse."""

    def names(self) -> list[str]:
        """Everything in the directory, in order. A directory that does not exist is made first, until it is locked: one
        that was removed or replaced since then raises DeviceError, so that nothing is kept where nobody looks for it."""

    def create(self, name: str, *, bulk: bool = False) -> DeviceFile:
        """A new empty file. Raises DeviceError when the name exists."""

    def open(self, name: str, *, bulk: bool = False) -> DeviceFile | None:
        """An existing file for reading and writing; None when there is none."""

    def rename(self, old: str, new: str) -> None: ...

    def unlink(self, name: str) -> None:
        """Remove a name; nothing happens when there is none."""

    def sync_names(self) -> None:
        """Names created, renamed and removed so far survive a power cut."""

    def allocated(self, name: str) -> int:
        """Bytes of disk that a name takes; 0 when there is none."""

    def free_bytes(self) -> int:
        """What the file system has left for us."""

    def close(self) -> None:
        """Give the lock back. Idempotent."""


def write_all(file: DeviceFile, offset: int, parts: Sequence[BytesLike]) -> int:
    """Write all parts one after another from `offset`, whatever single calls manage. Bytes written."""
    at = offset
    for first in range(0, len(parts), _PARTS_PER_WRITE):
        group = list(parts[first : first + _PARTS_PER_WRITE])
        while group:
            written = file.pwritev(at, group)
            assert written > 0, "pwritev writes at least one byte or raises"
            at += written
            group = _without_prefix(group, written)
    return at - offset


def write_pages(file: DeviceFile, offset: int, parts: Sequence[memoryview]) -> None:
    """Write parts of whole pages, one behind the other, to a bulk file, whatever single calls manage. A page that was
    written in part is written again."""
    at, rest = offset, list(parts)
    while rest:
        written = file.pwritev(at, rest)
        assert written > 0, "pwritev writes at least one byte or raises"
        if written < sum(map(len, rest)):
            written -= written % _PAGE
        at += written
        while rest and written >= len(rest[0]):
            written -= len(rest.pop(0))
        if rest:
            rest[0] = rest[0][written:]


def read_pages(file: DeviceFile, offset: int, target: memoryview) -> int:
    """Fill `target` with whole pages of a bulk file; the number of bytes read, fewer only where the file ends."""
    done = file.read_into(offset, target)
    while done < len(target):
        # From the last whole page on: unbuffered reads begin at one.
        at = done // _PAGE * _PAGE
        read = file.read_into(offset + at, target[at:])
        if at + read <= done:
            break
        done = at + read
    return done


def read_fully(file: DeviceFile, offset: int, length: int) -> bytes:
    """`length` bytes, fewer only where the file ends."""
    data = file.pread(offset, length)
    while len(data) < length:
        more = file.pread(offset + len(data), length - len(data))
        if not more:
            break
        data += more
    return data


def _without_prefix(parts: list[BytesLike], count: int) -> list[BytesLike]:
    for index, part in enumerate(parts):
        size = memoryview(part).nbytes
        if count < size:
            return [memoryview(part).cast("B")[count:], *parts[index + 1 :]]
        count -= size
    return []


def device_error(error: OSError, *, action: str, path: str) -> KvstoreError:
    """The error of ours that says what the system's error means."""
    reason = _NO_SPACE.get(error.errno or 0)
    if reason is not None:
        name = errno.errorcode[error.errno or 0]
        return NoSpace(f"cannot {action} {path}: {reason} ({name})", value=name)
    kind = OutOfDescriptors if error.errno in _NO_DESCRIPTORS else DeviceError
    return kind(f"cannot {action} {path}: {error.strerror or error}")


class OutOfDescriptors(DeviceError):
    """The process, or the system, may open no more files now: that says nothing about what lies in them."""


@contextmanager
def translated(action: str, path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise device_error(error, action=action, path=path) from error


class PosixFile:
    """A DeviceFile over a descriptor that it owns. `direct`: it was opened O_DIRECT."""

    def __init__(self, descriptor: int, path: str, *, direct: bool = False) -> None:
        self._fd = descriptor
        self._path = path
        self._direct = direct

    @property
    def is_direct(self) -> bool:
        return self._direct

    def fileno(self) -> int:
        return self._fd

    def error(self, action: str, code: int) -> KvstoreError:
        """What an error number of the system means for this file."""
        return device_error(OSError(code, os.strerror(code)), action=action, path=self._path)

    def pwritev(self, offset: int, parts: Sequence[BytesLike]) -> int:
        with translated("write", self._path):
            return os.pwritev(self._fd, parts, offset)

    def read_into(self, offset: int, target: memoryview) -> int:
        with translated("read", self._path):
            return os.preadv(self._fd, [target], offset)

    def pread(self, offset: int, length: int) -> bytes:
        with translated("read", self._path):
            if not self._direct:
                return os.pread(self._fd, length, offset)
            before = offset % _PAGE
            room = mmap.mmap(-1, -(-(before + max(length, 1)) // _PAGE) * _PAGE)
            read = os.preadv(self._fd, [room], offset - before)
            return room[before : max(before, min(read, before + length))]

    def allocate(self, size: int) -> None:
        with translated(f"allocate {size} bytes for", self._path):
            os.posix_fallocate(self._fd, 0, size)

    def truncate(self, size: int) -> None:
        with translated("truncate", self._path):
            os.ftruncate(self._fd, size)
            os.fsync(self._fd)

    def size(self) -> int:
        with translated("examine", self._path):
            return os.fstat(self._fd).st_size

    def sync(self) -> None:
        with translated("sync", self._path):
            os.fdatasync(self._fd)

    def forget_cached(self, offset: int, length: int) -> None:
        if self._direct:
            return
        with translated("advise", self._path):
            os.posix_fadvise(self._fd, offset, length, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        if self._fd >= 0:
            descriptor, self._fd = self._fd, -1
            with translated("close", self._path):
                os.close(descriptor)


class PosixDevice:
    """A directory of a file system. Files get mode 0600 and a directory that is made here 0700.

    direct False: bulk files pass through the page cache although the file system may take O_DIRECT.
    """

    def __init__(self, directory: str | os.PathLike[str], *, direct: bool = True) -> None:
        self._path = Path(directory)
        self._lock_fd = self._directory_fd = -1
        self._buffered_because = "" if direct else "it was asked for"

    @property
    def buffered_because(self) -> str:
        return self._buffered_because

    @property
    def where(self) -> str:
        return str(self._path)

    @property
    def path(self) -> Path:
        return self._path

    def lock(self) -> None:
        path = self._path / LOCK_NAME
        with ExitStack() as undo, translated("lock", self.where):
            # The file says who holds it, and may be removed; the directory itself may not.
            directory = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            undo.callback(os.close, directory)
            try:
                self._lock_or_say_who(directory, path)
            except OSError as error:
                if error.errno not in _CANNOT_LOCK_DIRECTORY:
                    raise
            with translated("open", str(path)):
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            undo.callback(os.close, descriptor)
            with translated("lock", str(path)):
                self._lock_or_say_who(descriptor, path)
            undo.pop_all()
        self._lock_fd, self._directory_fd = descriptor, directory
        with suppress(OSError):  # the pid only helps the message above; a full disk must not stop a start
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        if not self._buffered_because:
            self._buffered_because = why_not_direct(self._path / PROBE_NAME)

    def _lock_or_say_who(self, descriptor: int, file: Path) -> None:
        """Raises DirectoryInUse, or the system's error."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = ""
            with suppress(OSError):  # the file may be gone, and the directory is held all the same
                holder = file.read_bytes()[:32].decode("ascii", "replace").strip()
            raise DirectoryInUse(
                f"another process (pid {holder or 'unknown'}) holds the store; stop it or use another directory",
                field="directory",
                value=self.where,
            ) from error

    def names(self) -> list[str]:
        self._refuse_another_directory()
        with translated("list", self.where):
            try:
                return sorted(os.listdir(self._path))  # noqa: PTH208
            except FileNotFoundError:
                self._path.mkdir(mode=0o700, parents=True)
                self._sync_directory(self._path.parent)
                return []

    def _refuse_another_directory(self) -> None:
        """DeviceError when the path no longer leads to the directory that is locked."""
        if self._lock_fd < 0:
            return
        try:
            here = (self._path / LOCK_NAME).stat()
        except OSError:
            here = None
        if here is None or not os.path.samestat(here, os.fstat(self._lock_fd)):
            raise DeviceError(
                "the directory, or the lock file in it, was removed, renamed or replaced while it is in use; put it back, "
                "or start again",
                field="directory",
                value=self.where,
            )

    def create(self, name: str, *, bulk: bool = False) -> DeviceFile:
        path = str(self._path / name)
        direct = bulk and not self._buffered_because
        with translated("create", path):
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
            return PosixFile(os.open(path, flags, 0o600), path, direct=direct)

    def open(self, name: str, *, bulk: bool = False) -> DeviceFile | None:
        path = str(self._path / name)
        direct = bulk and not self._buffered_because
        with translated("open", path):
            try:
                flags = os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
                return PosixFile(os.open(path, flags), path, direct=direct)
            except FileNotFoundError:
                return None

    def rename(self, old: str, new: str) -> None:
        with translated("rename", str(self._path / old)):
            (self._path / old).rename(self._path / new)

    def unlink(self, name: str) -> None:
        with translated("remove", str(self._path / name)):
            (self._path / name).unlink(missing_ok=True)

    def sync_names(self) -> None:
        with translated("sync", self.where):
            self._sync_directory(self._path)

    def allocated(self, name: str) -> int:
        path = self._path / name
        with translated("examine", str(path)):
            try:
                status = path.lstat()
            except FileNotFoundError:
                return 0
            total = status.st_blocks * 512
            if path.is_dir() and not path.is_symlink():
                for folder, _, files in os.walk(path):
                    total += sum(Path(folder, file).lstat().st_blocks * 512 for file in files)
            return total

    def free_bytes(self) -> int:
        with translated("examine", self.where):
            system = os.statvfs(self._path)
        return system.f_bavail * system.f_frsize

    def close(self) -> None:
        descriptors = [self._lock_fd, self._directory_fd]
        self._lock_fd = self._directory_fd = -1
        with translated("close", self.where), ExitStack() as last:
            for descriptor in descriptors:
                if descriptor >= 0:
                    last.callback(os.close, descriptor)

    @staticmethod
    def _sync_directory(path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


_PROBES = 5


def why_not_direct(probe: Path) -> str:
    """Why O_DIRECT is not in effect for a file of that name, which is made and removed; empty when it is.

    A file system may refuse the flag, or take it and pass through the page cache all the same: so a page is written and
    looked for there.
    """
    page = mmap.mmap(-1, _PAGE)
    opened: list[int] = []
    try:
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_DIRECT
            opened.append(os.open(probe, flags, 0o600))
            os.pwrite(opened[0], page, 0)
        except OSError as error:
            # What the device lacks for a moment says nothing about the flag.
            return "the file system refuses O_DIRECT" if error.errno in (errno.EINVAL, errno.ENOTSUP) else ""
        try:
            opened.append(os.open(probe, os.O_RDONLY | os.O_CLOEXEC))
            for number in range(_PROBES):
                # Asking for a page may fetch it, and on a fast disk it can be there before the answer: only what is
                # found each time was there.
                os.pwrite(opened[0], page, number * _PAGE)
                os.preadv(opened[1], [bytearray(_PAGE)], number * _PAGE, os.RWF_NOWAIT)
        except OSError:
            # Nothing of it in the page cache, or no way to ask.
            return ""
        return "the file system takes O_DIRECT and caches pages all the same"
    finally:
        for descriptor in opened:
            os.close(descriptor)
        with suppress(OSError):
            probe.unlink(missing_ok=True)
