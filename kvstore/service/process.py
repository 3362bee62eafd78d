"""What the process is to the operating system: its directory, its sockets' places and who may look into it."""

from __future__ import annotations

import ctypes
import fcntl
import gc
import logging
import os
import resource
import stat
import sys
from collections.abc import Iterator, Set
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from kvstore.errors import ConfigError, DeviceError, DirectoryInUse, NoSpace
from kvstore.units import rounded, size_text

log = logging.getLogger(__name__)

# sockaddr_un.sun_path is 108 bytes on Linux with its ending zero byte.
MAX_SOCKET_PATH_BYTES = 107
_PR_SET_DUMPABLE = 4
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
KEPT_FREE_BYTES = 64 << 20
OWN_MAPPING_BYTES = 4 << 20
"""What is as large gets memory of its own, which goes back at once: several frames fit, whole staging areas do not."""

DESCRIPTORS_LEAST = 128
"""Segments and catalogue, sockets of calls, a few sessions, and some extents."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where a service lives: its bytes in `directory`, its sockets in `sockets`, which may be the same."""

    directory: Path
    sockets: Path

    @property
    def socket(self) -> Path:
        return self.sockets / "kvstore.sock"

    @property
    def session_socket(self) -> Path:
        return self.sockets / "session.sock"

    def check(self) -> None:
        """ConfigError for a directory whose socket paths the system could not hold."""
        for path in (self.socket, self.session_socket):
            size = len(os.fsencode(path))
            if size > MAX_SOCKET_PATH_BYTES:
                raise ConfigError(
                    f"the path of {path.name} is {size} bytes, too long for a unix socket; choose a shorter directory",
                    field="dir" if self.sockets == self.directory else "sockets",
                    value=self.sockets,
                    allowed=f"socket paths of at most {MAX_SOCKET_PATH_BYTES} bytes",
                )


def make_directory(directory: Path, *, field: str = "dir") -> None:
    """Make the directory for this user alone, if it is not there yet."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except FileExistsError as error:
        raise ConfigError(
            "not a directory", field=field, value=directory, allowed="a directory, or nothing yet"
        ) from error
    except OSError as error:
        raise DeviceError(
            f"cannot make the directory: {error.strerror}", field=field, value=directory
        ) from error


def close_directory_to_others(directory: Path) -> None:
    """Take group's and others' rights away from our own directory; call it once it is known to be a store's."""
    status = directory.stat()
    if stat.S_IMODE(status.st_mode) & 0o077:
        if status.st_uid != os.geteuid():
            log.warning(
                "%s is open to others and not ours to change: whoever may write there can replace the sockets",
                directory,
            )
            return
        log.warning("%s was open to others (mode %o): now 700", directory, stat.S_IMODE(status.st_mode))
        directory.chmod(0o700)


def check_space(directory: Path, *, need_bytes: int, budget_bytes: int) -> None:
    """NoSpace when the file system has less than `need_bytes` for us, counting what we hold there already; a warning
    when it has less than the budget, since it is then the file system that decides what is kept."""
    system = os.statvfs(directory)
    held = 0
    for entry in directory.rglob("*"):
        with suppress(FileNotFoundError):  # another service may run here, and be refused only by its lock
            held += entry.lstat().st_blocks * 512
    free = system.f_bavail * system.f_frsize
    if free + held < need_bytes:
        raise NoSpace(
            f"the file system of {directory} has too little room; free some, choose another directory, or a smaller --segment or --disk",
            field="free",
            value=rounded(free),
            allowed=f"{rounded(need_bytes)} or more, for two segments and the catalogue",
        )
    if free + held < budget_bytes:
        log.warning(
            "the disk budget of %s is more than the file system of %s has for us, %s: when it is full, "
            "states and blocks are evicted before their time; set --disk to what it can hold",
            size_text(budget_bytes),
            directory,
            rounded(free + held),
        )


def others_may_read(status: os.stat_result) -> bool:
    """Whether others than this user, and root, may read a file."""
    groups = {os.getegid(), *os.getgroups()}
    return is_open(
        stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid, user=os.geteuid(), groups=groups
    )


def is_open(mode: int, owner: int, group: int, *, user: int, groups: Set[int]) -> bool:
    """Whether others than `user` may use a file. One of root's that only a group of ours may read is how clusters hand
    over a secret to a process that is not root's."""
    if owner == 0 and user != 0 and group in groups:
        mode &= ~stat.S_IRGRP
    return bool(mode & 0o077)


@contextmanager
def holding_sockets(places: Places) -> Iterator[None]:
    """Inside, no other service has the sockets' directory, where that is one of its own; DirectoryInUse where one has it,
    DeviceError where it cannot be had. It is made for this user alone, if it is not there yet."""
    if places.sockets != places.directory:
        make_directory(places.sockets, field="sockets")
    # It may be the same one by another name, which this process holds already.
    if places.sockets.samefile(places.directory):
        yield
        return
    close_directory_to_others(places.sockets)
    descriptor = _held_directory(places.sockets)
    try:
        yield
    finally:
        os.close(descriptor)


def _held_directory(directory: Path) -> int:
    """A descriptor that holds it until it is closed."""
    with ExitStack() as undo:
        try:
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            undo.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DirectoryInUse(
                "another service has its sockets there; stop it or use another directory",
                field="sockets",
                value=directory,
            ) from error
        except OSError as error:
            raise DeviceError(
                f"cannot hold the directory: {error.strerror}", field="sockets", value=directory
            ) from error
        undo.pop_all()
    return descriptor


def remove_stale_sockets(places: Places) -> None:
    """Remove what a dead service left. Only the holder of the directories' locks may call this."""
    for path in (places.socket, places.session_socket):
        if path.is_socket():
            path.unlink()


def allow_descriptors(needed: int) -> None:
    """Raise this process's limit of open files to `needed`, as far as it may be raised; a warning where that is less, and
    ConfigError where it is less than a service can do anything with."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # some systems allow less than they say
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < min(DESCRIPTORS_LEAST, needed):
        raise ConfigError(
            "too few open files are allowed",
            field="RLIMIT_NOFILE",
            value=soft,
            allowed=f"{DESCRIPTORS_LEAST} or more, and {needed} for all that is configured (ulimit -n)",
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        log.warning(
            "open files are limited to %d, and %d may be needed: allow more, or fewer sessions", soft, needed
        )


def give_back_freed_memory() -> None:
    """Let the system have what was freed: the C library keeps it for later, and a start frees as much as it keeps."""
    with suppress(OSError, AttributeError):  # not every C library can
        ctypes.CDLL(None).malloc_trim(0)


def keep_freed_memory() -> None:
    """Have the C library keep what frames on their way out were made in: giving it back to the system and getting it again
    for each of them cost as much as sending it. At most KEPT_FREE_BYTES stay so."""
    with suppress(OSError, AttributeError):  # not every C library can
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, OWN_MAPPING_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, KEPT_FREE_BYTES)


def collect_seldom(young: int = 2_000) -> None:
    """The collector of cycles walks young objects often, whenever there are so many more, and all of them, which holds up everybody for
    tens of milliseconds where there are many, only after five thousand times that."""
    gc.set_threshold(young, 10, 500)


@contextmanager
def collector_resting() -> Iterator[None]:
    """Make a great many objects that all stay: the collector of cycles would walk them again and again meanwhile, and is
    not to walk them afterwards."""
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


def forbid_dumps() -> None:
    """No core dumps of, and no tracing into, a process that holds other people's prompts. Linux only."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
            log.warning("could not forbid core dumps: %s", os.strerror(ctypes.get_errno()))
